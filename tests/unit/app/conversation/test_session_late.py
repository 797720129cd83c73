"""What comes at the wrong moment: late requests, held answers nobody wants, full histories."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

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
from app.conversation.response.spec import ResponseRequest
from app.conversation.session_config import TurnDetection
from app.errors import ClientError
from llm_core import ChatMessage, GenerationEvent, SamplingParams
from tests.support.fake_engines import ShortContextEngine
from tests.support.fakes import ScriptedEngine, settle, silence, voice
from tests.support.session_call import call


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


async def test_thirty_turns_in_a_short_context() -> None:
    engine = ShortContextEngine(400, "A reply of some words.")
    async with call(engine) as c:
        for number in range(30):
            await c.session.add_item(said(f"Question number {number}"))
            await c.session.create_response()
            await c.clock.advance(3)
        assert [e.response.status for e in c.out.of(ResponseDone)] == ["completed"] * 30
        # No answer waits for a cut: room is made after the one before, seldom, and for good, so
        # that most prompts share their beginning.
        assert not any(engine.dropped)
        num_cuts = sum(num > 0 for num in engine.dropped_by_prefill)
        num_dropped = sum(engine.dropped_by_prefill)
        assert 3 <= num_cuts <= 10
        assert num_dropped + len(c.messages()) == 60, "what is dropped once is forgotten"
        shared = sum(
            later[: len(earlier)] == earlier
            for earlier, later in zip(engine.requests, engine.requests[1:], strict=False)
        )
        assert shared == 29 - num_cuts
        forgotten = [e.turn["facts"]["forgotten_items"] for e in c.out.of(TurnTraced)]
        assert forgotten == sorted(forgotten) and 0 < forgotten[-1] <= num_dropped


async def test_what_is_forgotten_is_summed_up_if_asked_for() -> None:
    engine = ShortContextEngine(400, "A reply of some words.")
    async with call(engine, settings={"summarise_forgotten": True}) as c:
        for number in range(30):
            await c.session.add_item(said(f"Question number {number}"))
            await c.session.create_response()
            await c.clock.advance(3)
        summaries = [r for r in engine.requests if r[0].content.startswith("Sum up")]
        answers = [r for r in engine.requests if not r[0].content.startswith("Sum up")]
        assert len(answers) == 30 and len(summaries) >= 3
        assert "user: Question number 0" in summaries[0][1].content
        assert "Earlier: A reply of some words." in summaries[1][1].content
        assert "Earlier in this conversation" not in answers[0][0].content
        assert answers[-1][0].content.endswith(
            "Earlier in this conversation: A reply of some words."
        )


async def test_no_answer_waits_for_the_room_that_is_made_for_later_ones() -> None:
    engine = ShortContextEngine(400, "A reply of some words.")
    async with call(engine) as c:
        engine.prefill_gate.clear()  # a model that reads for seconds
        for number in range(5):
            await c.session.add_item(said(f"Question number {number}"))
            await c.session.create_response()
            await c.clock.advance(3)
        assert [e.response.status for e in c.out.of(ResponseDone)] == ["completed"] * 5
        assert len(engine.prefills) == 5  # after each answer it is begun again
        engine.prefill_gate.set()
        await settle()
        assert len(engine.dropped_by_prefill) == 1


class SlowlySummingEngine(ShortContextEngine):
    """Sums up when the test says so."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_asked = 0
        self.may_sum = asyncio.Event()

    async def generate(
        self, messages: Sequence[ChatMessage], params: SamplingParams, **options: Any
    ) -> AsyncGenerator[GenerationEvent, None]:
        if messages[0].content.startswith("Sum up"):
            self.num_asked += 1
            await self.may_sum.wait()
        async with aclosing(super().generate(messages, params, **options)) as events:
            async for event in events:
                yield event


async def test_what_is_not_summed_up_yet_is_not_forgotten() -> None:
    engine = SlowlySummingEngine(400, "A reply of some words.")
    async with call(engine, settings={"summarise_forgotten": True}) as c:
        number = 0
        while engine.num_asked < 2:  # the second time because the caller spoke the first time
            await c.session.add_item(said(f"Question number {number}"))
            await c.session.create_response()
            await c.clock.advance(3)
            number += 1
        assert c.messages()[0].content == "Question number 0"
        engine.may_sum.set()
        await c.clock.advance(3)
        assert c.session.history.summary == "A reply of some words."
        assert "user: Question number 0" in engine.requests[-1][1].content
        assert "Question number 0" not in [m.content for m in c.messages()]


async def test_a_session_that_may_forget_nothing_is_not_cut_in_advance() -> None:
    async with call(ShortContextEngine(100, "Yes."), retention_ratio=0) as c:
        await c.session.add_item(said("Question"))
        await c.session.create_response()
        await c.clock.advance(1)
        assert c.engine.dropped_by_prefill == []


@pytest.mark.parametrize(
    ("ratio", "options"),
    [
        (None, {"overflow": "drop_oldest"}),
        (0.5, {"overflow": "drop_oldest", "retention_ratio": 0.5}),
        (0, {"overflow": "refuse"}),
    ],
)
async def test_what_becomes_of_the_oldest_is_the_sessions_choice(
    ratio: float | None, options: dict[str, Any]
) -> None:
    async with call(ShortContextEngine(100, "Yes."), retention_ratio=ratio) as c:
        for number in range(6):
            await c.session.add_item(said(f"Question number {number}"))
        await c.session.create_response()
        await c.clock.advance(1)
        (reply,) = c.engine.replies_opened
        assert options.items() <= reply.options.items()
        (done,) = c.out.of(ResponseDone)
        assert done.response.status == ("failed" if ratio == 0 else "completed")
        num_left = {None: 3, 0.5: 2, 0: 6}[ratio]
        assert len([m for m in c.messages() if m.role == "user"]) == num_left


async def test_items_of_a_response_are_not_the_conversations() -> None:
    async with call(ShortContextEngine(60, "Yes.")) as c:
        await c.session.add_item(said("Remember this"))
        before = c.messages()
        items = tuple(said(f"Another question {number}") for number in range(6))
        await c.session.create_response(ResponseRequest(items=items))
        await c.clock.advance(1)
        assert c.engine.dropped[-1] > 0
        assert c.messages()[: len(before)] == before


async def test_no_sample_leaves_after_stop_even_if_the_pacing_ends_just_then() -> None:
    async with call(ScriptedEngine("A long answer " * 8)) as c:
        await c.session.create_response()
        await c.clock.advance(1.05)
        turn = c.session._responses.running
        assert turn is not None
        num_sent = len(c.out.of(OutputAudio))
        # The sleeper is woken and the turn is stopped in the same round of the loop.
        for _, _, sleeper in c.clock._sleepers:
            if not sleeper.done():
                sleeper.set_result(None)
        turn.stop("client_cancelled")
        await settle()
        assert len(c.out.of(OutputAudio)) == num_sent
