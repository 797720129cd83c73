"""What comes at the wrong moment: late requests, held answers nobody wants, full histories."""

from __future__ import annotations

import pytest

from app.conversation import history as history_module
from app.conversation.events import (
    Item,
    OutputAudio,
    Part,
    ResponseDone,
    ResponseStarted,
    SpeechStarted,
    TurnTraced,
)
from app.conversation.requests import ResponseRequest
from app.conversation.session_config import TurnDetection
from app.errors import ClientError
from llm_core import PromptTooLongError
from tests.fakes import ScriptedEngine, settle, silence, voice
from tests.session_call import call


def said(text: str) -> Item:
    return Item(f"item_{text}", "user", [Part("input_text", text)])


async def test_a_request_that_was_cancelled_leaves_nothing_behind() -> None:
    async with call(ScriptedEngine("One two three four."), "First", "Second") as c:
        await c.session.append_audio(voice(0.3), c.clock.now_ns())
        await c.session.commit_audio()
        await c.session.create_response(ResponseRequest("text", "PIRATE", 3, {"a": "b"}))
        await c.session.cancel_response()
        await c.clock.advance(1)
        assert c.out.of(ResponseStarted) == []
        await c.ask()
        await c.clock.advance(3)
        response = c.out.of(ResponseDone)[0].response
        assert (response.modality, response.metadata, response.status) == (
            "audio",
            None,
            "completed",
        )
        assert c.engine.requests[-1][0].content == "Be brief."


async def test_an_answer_held_when_the_client_commits_by_hand_is_discarded() -> None:
    engine = ScriptedEngine("Early.", "Later.")
    async with call(engine, "What?", "What?", "And now?") as c:
        await c.hear(voice(0.5) + silence(0.3))
        assert len(engine.requests) == 1
        await c.session.commit_audio()
        await settle()
        assert engine.num_running == 0
        assert c.out.of(ResponseStarted) == []
        await c.ask()
        await c.clock.advance(3)
        assert c.messages()[-1].content == "Later."


async def test_voice_between_the_end_and_the_words_discards_the_held_answer() -> None:
    engine = ScriptedEngine("Early.", "Later.")
    async with call(engine, "One", "Two") as c:
        await c.ask(pause_s=0.55)
        await c.ask()
        await c.clock.advance(3)
        assert engine.num_running == 0
        assert [m.content for m in c.messages() if m.role == "user"] == ["One", "Two"]


async def test_waiting_for_the_client_is_not_our_latency() -> None:
    detection = TurnDetection(create_response=False)
    async with call(ScriptedEngine("Yes."), "Hello?", turn_detection=detection) as c:
        await c.ask()
        await c.clock.advance(60)
        await c.session.create_response()
        await c.clock.advance(3)
        turn = c.out.of(TurnTraced)[0].turn
        assert turn["voice_to_voice_ms"] is None
        assert turn["time_to_first_audio_ms"] < 100


async def test_items_may_not_take_the_name_of_the_turn_in_progress() -> None:
    async with call(ScriptedEngine("Yes."), "Hello?") as c:
        await c.hear(voice(0.3))
        taken = c.out.of(SpeechStarted)[0].item_id
        for item_id in (taken, "root"):
            with pytest.raises(ClientError) as refused:
                await c.session.add_item(Item(item_id, "user", [Part("input_text", "x")]))
            assert refused.value.code == "item_create_duplicate_item_id"
        await c.hear(silence(0.7))
        await c.clock.advance(3)
        assert c.out.of(ResponseDone)[0].response.status == "completed"


async def test_a_full_history_refuses_the_client_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history_module, "MAX_ITEMS", 4)
    async with call(ScriptedEngine("Yes."), "One", "Two", "Three") as c:
        for number in range(4):
            await c.session.add_item(said(str(number)))
        with pytest.raises(ClientError) as refused:
            await c.session.add_item(said("4"))
        assert refused.value.code == "conversation_full"
        for _ in range(3):
            await c.ask()
            await c.clock.advance(3)
        assert [e.response.status for e in c.out.of(ResponseDone)] == ["completed"] * 3
        assert [m.content for m in c.messages()] == ["Two", "Yes.", "Three", "Yes."]


async def test_a_client_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MAX_CHARS", 1_000)
    async with call(ScriptedEngine("Yes.")) as c:
        await c.session.add_item(said("x" * 900))
        with pytest.raises(ClientError) as refused:
            await c.session.add_item(said("y" * 200))
        assert refused.value.code == "conversation_full"


class _ShortContext(ScriptedEngine):
    """Refuses prompts of more than 400 characters."""

    num_refused = 0

    async def generate(self, messages, params):  # type: ignore[no-untyped-def]
        if sum(len(m.content) for m in messages) > 400:
            self.num_refused += 1
            raise PromptTooLongError("the prompt has 5000 tokens, the context holds 4096")
        async for event in super().generate(messages, params):
            yield event


async def test_thirty_turns_in_a_short_context() -> None:
    engine = _ShortContext("A reply of some words.")
    async with call(engine) as c:
        for number in range(30):
            await c.session.add_item(said(f"Question number {number}"))
            await c.session.create_response()
            await c.clock.advance(3)
        assert [e.response.status for e in c.out.of(ResponseDone)] == ["completed"] * 30
        # The cut is made once and stays: most turns ask once, and share their beginning.
        assert engine.num_refused <= 8
        shared = sum(
            later[: len(earlier)] == earlier
            for earlier, later in zip(engine.requests, engine.requests[1:], strict=False)
        )
        assert shared >= 20


async def test_no_sample_leaves_after_stop_even_if_the_pacing_ends_just_then() -> None:
    async with call(ScriptedEngine("A long answer " * 8)) as c:
        await c.session.create_response()
        await c.clock.advance(1.05)
        turn = c.session._turn
        assert turn is not None
        num_sent = len(c.out.of(OutputAudio))
        # The sleeper is woken and the turn is stopped in the same round of the loop.
        for _, _, sleeper in c.clock._sleepers:
            if not sleeper.done():
                sleeper.set_result(None)
        turn.stop("client_cancelled")
        await settle()
        assert len(c.out.of(OutputAudio)) == num_sent
