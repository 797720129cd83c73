"""By when an answer's words are needed, as the engine is told it, and what it may give up."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from app.conversation.events import Item, OutputAudio, Part, TurnTraced
from app.conversation.response.budget import TurnBudget
from app.conversation.session_config import TurnDetection
from llm_core import (
    ChatMessage,
    Downgrade,
    FirstToken,
    GenerationEvent,
    SamplingParams,
)
from tests.support.fakes import ManualClock, PacedEngine, ScriptedEngine, settle, silence, voice
from tests.support.session_call import Call, call

LONG = "One two three four five six seven, eight nine ten eleven twelve. " * 12
MS = 1_000_000


def budget_of(c: Call) -> TurnBudget:
    assert c.session._responses.last is not None
    return c.session._responses.last._budget


async def test_an_early_answer_has_no_deadline_until_it_is_wanted() -> None:
    engine = PacedEngine(ManualClock(), LONG)
    engine.prefill_s = 2.0
    async with call(engine, "What is it?") as c:
        await c.hear(voice(0.6) + silence(0.3))
        (reply,) = engine.replies_opened
        assert reply.deadlines_ns == [None]
        await c.hear(silence(0.5))
        budget = budget_of(c)
        speech_end_ns = budget.start_ns
        assert speech_end_ns is not None
        # As the settings have it: 1,000 ms, of which decode, voice and sending need 280.
        assert reply.deadlines_ns == [None, speech_end_ns + 720 * MS]


async def test_while_it_is_spoken_the_next_words_are_needed_when_the_audio_runs_dry() -> None:
    engine = PacedEngine(ManualClock(), LONG)
    async with call(engine, "What is it?") as c:
        await c.ask()
        await c.clock.advance(1.0)
        (reply,) = engine.replies_opened
        turn = c.session._responses.running
        assert turn is not None
        made = sum(len(text.strip()) for text in c.synthesizer.spoken) * 1_000 / 24_000
        dry_ns = c.clock.now_ns() + turn._output.playout.remaining_s(c.clock.now_ns()) * 1e9
        unsent_s = made - turn._output.audio_s
        assert unsent_s > 0, "more is made than the client has"
        assert reply.deadlines_ns[-1] == pytest.approx(
            dry_ns + unsent_s * 1e9 - 280 * MS, abs=2 * MS
        )
        moves = [at for at in reply.deadlines_ns if at is not None]
        assert moves == sorted(moves) and len(moves) >= 3


async def test_a_held_answer_can_wait() -> None:
    engine = PacedEngine(ManualClock(), LONG)
    engine.token_s = 0.05
    detection = TurnDetection(kind="semantic_vad")
    async with call(engine, "What is it?", "Mhm.", turn_detection=detection) as c:
        await c.ask(pause_s=2.0)
        assert c.out.of(OutputAudio)
        (reply,) = engine.replies_opened
        engine.gate.clear()
        before_ns = reply.deadlines_ns[-1]
        await c.hear(voice(0.2))
        held_ns = reply.deadlines_ns[-1]
        assert before_ns is not None and held_ns is not None
        assert held_ns > before_ns + 1000 * MS
        await c.hear(silence(1.0))
        released_ns = reply.deadlines_ns[-1]
        assert released_ns is not None and released_ns < held_ns
        engine.gate.set()
        await settle()


async def test_a_typed_turn_has_no_deadline_before_its_first_sound() -> None:
    async with call(ScriptedEngine("Yes.")) as c:
        await c.session.create_response()
        await c.clock.advance(1)
        (reply,) = c.engine.replies_opened
        assert reply.deadlines_ns[0] is None


class _Downgrading(ScriptedEngine):
    """Takes all that it is allowed to take."""

    async def generate(
        self, messages: list[ChatMessage], params: SamplingParams, **options: Any
    ) -> AsyncGenerator[GenerationEvent, None]:
        taken: tuple[Downgrade, ...] = options.get("downgrades", ())
        num_dropped = 2 if "partial_context" in taken else 0
        async with aclosing(super().generate(messages, params, **options)) as events:
            async for event in events:
                if isinstance(event, FirstToken):
                    event = msgspec.structs.replace(
                        event, downgrades=taken, dropped_messages=num_dropped
                    )
                yield event


@pytest.mark.parametrize(
    ("policies", "taken"),
    [
        (("short_first_clause",), None),
        (("filler", "partial_context", "shorter_answer"), ["partial_context", "shorter_answer"]),
    ],
)
async def test_what_is_given_up_for_once_is_told_and_not_forgotten(
    policies: tuple[str, ...], taken: list[str] | None
) -> None:
    async with call(_Downgrading("Yes."), settings={"budget_policies": policies}) as c:
        for number in range(3):
            await c.session.add_item(Item(f"i{number}", "user", [Part("input_text", f"{number}")]))
        await c.session.create_response()
        await c.clock.advance(1)
        (traced,) = c.out.of(TurnTraced)
        assert traced.turn["facts"].get("downgrades") == taken
        assert [m.content for m in c.messages()] == ["0", "1", "2", "Yes."]
