"""Races and corners of a conversation, one small test each."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from app.conversation.events import (
    Item,
    OutputAudio,
    OutputDone,
    OutputStarted,
    OutputText,
    Part,
    ResponseDone,
    ResponseStarted,
    SessionEvent,
    TranscriptionFailed,
)
from app.conversation.response.spec import ResponseRequest
from app.transports.base import ChannelClosed
from app.transports.websocket import WebSocketChannel
from audio.errors import AudioError
from tests.support.fake_engines import ShortContextEngine
from tests.support.fakes import ScriptedEngine, settle, silence, voice
from tests.support.session_call import Call, call

LONG = "One two three four five six seven eight nine ten, eleven twelve thirteen fourteen fifteen."
T = TypeVar("T")


async def soon(work: Coroutine[Any, Any, T], rounds: int = 200) -> T:
    """The result of ``work``, which must not wait for the clock."""
    task = asyncio.create_task(work)
    for _ in range(rounds):
        if task.done():
            return task.result()
        await asyncio.sleep(0)
    task.cancel()
    await settle()
    raise AssertionError("it does not return")


@pytest.mark.parametrize("modality", ["audio", "text"])
async def test_cancelled_in_the_round_in_which_it_was_asked_for(modality: Any) -> None:
    async with call(ScriptedEngine(LONG)) as c:

        async def ask_and_cancel() -> None:  # two events in one packet
            await c.session.create_response(ResponseRequest(modality=modality))
            await c.session.cancel_response()

        await soon(ask_and_cancel())
        response = c.out.of(ResponseDone)[0].response
        assert (response.status, response.reason) == ("cancelled", "client_cancelled")
        assert c.messages() == []


async def test_closed_in_the_round_in_which_a_held_answer_is_taken() -> None:
    async with call(ScriptedEngine(LONG), "Hello?") as c:
        await c.hear(voice(0.6) + silence(0.3))
        assert c.session._ahead._answer is not None, "the answer is held"
        start, closing = c.session._tasks.start, []

        def start_and_close(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            task = start(work)
            if work.__qualname__ == "ResponseManager._run":  # before its first step
                closing.append(asyncio.ensure_future(c.session.close()))
                task.cancel()
            return task

        c.session._tasks.start = start_and_close  # type: ignore[method-assign]
        await c.hear(silence(0.4))
        assert closing
    # `call` checks that no task and no generation is left.


async def test_stopped_in_the_round_in_which_the_last_sample_left() -> None:
    for rounds in range(4, 30):
        async with call(ScriptedEngine("Twenty letters here."), "Stop.") as c:
            await c.session.create_response()
            await settle(rounds)
            if c.session._responses.running is None:
                return  # it has ended: all rounds have been tried
            await c.session.cancel_response()
            # No time has passed: not one word was heard, in whichever way the response ended.
            assert c.messages() == [], rounds


async def test_what_was_cut_does_not_grow_when_a_second_voice_comes() -> None:
    async with call(ScriptedEngine(LONG), "Count.", "", "") as c:
        await c.ask()
        await c.clock.advance(0.5)
        await c.hear(voice(0.2))
        item = c.out.of(OutputDone)[0].item
        kept = item.content[0].text
        assert kept and kept != LONG
        await c.hear(silence(0.56) + voice(0.2))
        assert item.content[0].text == kept
        await c.hear(silence(0.7))


async def test_what_the_client_truncated_does_not_grow_when_a_voice_comes() -> None:
    async with call(ScriptedEngine("Twenty letters here."), "") as c:
        await c.session.create_response()
        await c.clock.advance(0.3)
        item = c.out.of(OutputDone)[0].item
        await c.session.truncate_item(item.id, 0, 100)
        await c.clock.advance(0.2)
        await c.hear(voice(0.2))
        assert item.content[0].text == ""
        await c.hear(silence(0.7))


async def test_an_item_truncated_while_it_is_spoken_has_no_hole() -> None:
    async with call(ScriptedEngine(LONG)) as c:
        await c.session.create_response()
        await c.clock.advance(0.3)
        item = c.out.of(OutputStarted)[0].item
        await c.session.truncate_item(item.id, 0, 300)
        await c.clock.advance(10)
        assert LONG.startswith(item.content[0].text or "")


async def test_a_failed_answer_keeps_what_the_client_will_hear() -> None:
    async with call(ScriptedEngine("Twenty letters here, and more to come, maybe.")) as c:
        speak, clauses = c.synthesizer.synthesize, []

        def break_down(text: str, *, speed: float = 1.0) -> Any:
            clauses.append(text)
            if len(clauses) == 2:
                raise AudioError("no voice")
            return speak(text, speed=speed)

        c.synthesizer.synthesize = break_down  # type: ignore[method-assign]
        await c.session.create_response()
        await c.clock.advance(5)
        assert c.out.of(ResponseDone)[0].response.status == "failed" and c.out.of(OutputAudio)
        assert [m.content for m in c.messages()] == [clauses[0].strip()]


async def test_an_unknown_error_of_the_recogniser_is_told_and_survived() -> None:
    async with call(ScriptedEngine("Yes."), "Hello?") as c:
        c.recognizer.error = RuntimeError("out of memory")
        await c.ask()
        assert c.out.of(TranscriptionFailed)
        c.recognizer.error = None
        await c.session.create_response()
        await c.clock.advance(3)
        assert c.out.of(ResponseDone)[0].response.status == "completed"


async def test_a_cancelled_reply_is_not_owed_any_more() -> None:
    engine = ScriptedEngine("Yes.", "No.")
    async with call(engine, "Hello?", "") as c:
        engine.gate.clear()
        await c.ask()
        finish, may_hear = c.session._hearing._transcriber._finish, asyncio.Event()

        async def later(job: Any) -> Any:
            await may_hear.wait()
            return await finish(job)

        c.session._hearing._transcriber._finish = later  # type: ignore[method-assign]
        await c.hear(voice(0.2) + silence(0.7))  # a clap while it is thinking
        await c.session.cancel_response()
        may_hear.set()
        engine.gate.set()
        await c.clock.advance(3)
        assert len(c.out.of(ResponseStarted)) == 1


async def test_a_written_reply_that_was_read_in_part_is_not_owed() -> None:
    engine = ScriptedEngine(f"{LONG} {LONG} {LONG}", "Again.")
    async with call(engine, "Is it?", "", modality="text") as c:
        written: list[str] = []

        async def hold_after_one_word(event: SessionEvent) -> None:
            await c.out(event)
            if isinstance(event, OutputText):
                written.append(event.text)
                engine.gate.clear()

        c.sink = hold_after_one_word
        await c.ask()
        assert written and not c.out.of(ResponseDone), "some is written, not all"
        await c.hear(voice(0.2) + silence(0.7))  # a clap
        engine.gate.set()
        await c.clock.advance(3)
        assert len(c.out.of(ResponseStarted)) == 1


async def test_a_held_answer_that_is_thrown_away_has_made_nothing_forgotten() -> None:
    async with call(ShortContextEngine(40, "Yes."), "Is it?", instructions="") as c:
        for number in range(6):
            item = Item(f"item_{number}", "user", [Part("input_text", f"{number} is it")])
            await c.session.add_item(item)
        before = c.messages()
        await c.hear(voice(0.6) + silence(0.3))
        assert c.session._ahead._answer is not None
        await c.session.clear_audio()
        assert c.messages() == before


async def _break(c: Call) -> None:
    async def sink(event: SessionEvent) -> None:
        raise RuntimeError("a fault behind the sink")

    c.sink = sink


async def test_a_sink_that_fails_leaves_nothing() -> None:
    async with call(ScriptedEngine(LONG)) as c:
        await _break(c)
        await c.session.create_response()
        await c.clock.advance(1)
    # `call` checks that no task and no generation is left.


async def test_a_channel_that_fails_twice_in_one_round() -> None:
    class Silent:
        async def receive(self) -> Any:
            await asyncio.Event().wait()

        async def send_text(self, text: str) -> None:
            await asyncio.Event().wait()

        async def close(self, code: int, reason: str) -> None:
            pass

    async with WebSocketChannel(Silent(), max_queued_bytes=3) as channel:  # type: ignore[arg-type]
        receiving = asyncio.create_task(channel.receive())
        await settle(3)
        with pytest.raises(ChannelClosed):
            await channel.send("too long")
        for _ in range(5):
            channel._fail(ChannelClosed(1006, "the connection was lost"))
            await asyncio.sleep(0)
        with pytest.raises(ChannelClosed):
            await receiving
