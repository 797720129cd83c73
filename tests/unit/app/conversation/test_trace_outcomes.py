"""The records of whole turns: every outcome, every stage, against what a recording would show."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from app.conversation.events import OutputAudio, OutputStarted, ResponseStarted, SessionEvent
from app.conversation.session_config import TurnDetection
from app.observe.trace import FACTS, OUTCOMES, PATH_INSTANTS
from llm_core import EngineDiedError
from tests.support.fakes import ManualClock, PacedEngine, Recorder, recent, settle, silence, voice
from tests.support.session_call import Call, call

LONG = "One two three four five six seven. " * 6
SEMANTIC = TurnDetection(kind="semantic_vad", eagerness="high")
CALLER = {"speech_end", "endpoint", "asr_final", "ended"}


class Ear(Recorder):
    """Also notes when each piece of audio was sent."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock
        self.heard_ns: list[int] = []

    async def __call__(self, event: SessionEvent) -> None:
        await super().__call__(event)
        if isinstance(event, OutputAudio):
            assert np.abs(np.frombuffer(event.audio, "<i2")).max() > 1000
            self.heard_ns.append(self._clock.now_ns())


def paced_call(*replies: str, texts: tuple[str, ...] = ("How are you?",), **changes: Any) -> Any:
    return call(PacedEngine(ManualClock(), *replies), *texts, **changes)


def records(c: Call) -> list[dict[str, Any]]:
    return recent(c.services.traces.store, 1000)


async def nothing(c: Call) -> None:
    await c.clock.advance(60)


async def hit_the_voice(c: Call) -> None:
    await c.clock.advance(1)
    await c.hear(voice(0.2))


async def go_on(c: Call) -> None:
    await c.clock.advance(0.05)
    await c.hear(voice(0.2))


async def press_cancel(c: Call) -> None:
    await c.clock.advance(1)
    await c.session.cancel_response()


async def hang_up(c: Call) -> None:
    await c.clock.advance(0.2)
    await c.session.close()


def fail(c: Call) -> None:
    c.engine.error = EngineDiedError("the engine process ended")


def hang(c: Call) -> None:
    c.engine.gate.clear()


def no_change(c: Call) -> None:
    pass


Action = Callable[[Call], Awaitable[None]]


@pytest.mark.parametrize(
    ("outcome", "reason", "reply", "before", "after", "changes"),
    [
        ("answered", "", LONG, no_change, nothing, {}),
        ("silent", "", "", no_change, nothing, {}),
        ("interrupted", "turn_detected", LONG, no_change, hit_the_voice, {}),
        ("cancelled", "client_cancelled", LONG, no_change, press_cancel, {}),
        ("cancelled", "", LONG, no_change, hang_up, {}),
        ("withdrawn", "turn_detected", LONG, hang, go_on, {"turn_detection": SEMANTIC}),
        ("failed", "engine_died", LONG, fail, nothing, {}),
        ("timed_out", "timed_out", LONG, hang, nothing, {}),
        ("incomplete", "max_output_tokens", LONG, no_change, nothing, {"max_output_tokens": 9}),
    ],
)
async def test_each_outcome_leaves_one_whole_record(
    outcome: str,
    reason: str,
    reply: str,
    before: Callable[[Call], None],
    after: Action,
    changes: dict[str, Any],
) -> None:
    async with paced_call(reply, **changes) as c:
        before(c)
        await c.ask()
        await after(c)
        await settle()
        (turn,) = records(c)
        assert (turn["outcome"], turn["reason"]) == (outcome, reason)
        assert turn["session_id"] == c.session.id
        assert turn["response_id"] == c.out.of(ResponseStarted)[0].response.id
        assert turn["ended_at_ms"] > 1_700_000_000_000
        instants = turn["instants_ms"]
        assert set(instants) >= CALLER and min(instants.values()) == instants["speech_end"] == 0
        # What is known of the way is known up to a point, without a gap.
        known = [name in instants for name in PATH_INSTANTS]
        assert known == sorted(known, reverse=True)
        if outcome in ("answered", "incomplete"):
            assert all(known)
        assert turn["facts"].keys() <= FACTS.keys()


async def test_the_outcomes_are_all_there_are() -> None:
    here = test_each_outcome_leaves_one_whole_record.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert {case[0] for case in here} == set(OUTCOMES)


async def test_200_turns_add_up_and_equal_the_silence_in_the_recording() -> None:
    rng = random.Random(9)
    num_turns = 200
    texts = tuple(f"Question {n}?" for n in range(num_turns))
    async with paced_call("Yes it is. And more of it.", texts=texts) as c:
        assert isinstance(c.engine, PacedEngine) and c.paced is not None
        ear = Ear(c.clock)
        c.sink = ear
        for number in range(num_turns):
            c.engine.queue_s = rng.choice((0.0, 0.01, 0.3))
            c.engine.prefill_s = rng.choice((0.01, 0.2))
            c.engine.token_s = rng.choice((0.005, 0.05))
            c.paced.delays_s["transcribe"] = rng.choice((0.02, 0.1, 0.7))
            c.paced.delays_s["_synthesize_first"] = rng.choice((0.02, 0.4))
            await c.hear(voice(0.3))
            last_voiced_ns = c.clock.now_ns()
            heard_before = len(ear.heard_ns)
            await c.hear(silence(0.7))
            await c.clock.advance(30)
            (turn,) = recent(c.services.traces.store, 1)
            assert turn["outcome"] == "answered" and turn["transcript"] == texts[number]
            whole_ms = turn["voice_to_voice_ms"]
            assert sum(turn["stages_ms"].values()) == pytest.approx(whole_ms, abs=1e-6)
            assert min(turn["stages_ms"].values()) >= 0
            gap_ms = (ear.heard_ns[heard_before] - last_voiced_ns) / 1e6
            assert abs(whole_ms - gap_ms) <= 20


BASE = {"transcribe": 0.08, "_synthesize_first": 0.05}


class Network(Recorder):
    """A sink whose first message of an answer is held up, as by a stalled network."""

    def __init__(self, clock: ManualClock, stall_s: float) -> None:
        super().__init__()
        self._clock = clock
        self._stall_s = stall_s

    async def __call__(self, event: SessionEvent) -> None:
        if isinstance(event, OutputStarted):
            await self._clock.sleep(self._stall_s)
        await super().__call__(event)


@pytest.mark.parametrize("stage", ["asr", "queue", "prefill", "decode", "tts", "send"])
async def test_a_slow_stage_shows_up_in_that_stage_and_nowhere_else(stage: str) -> None:
    async def stages_ms(fault_s: float) -> dict[str, float]:
        # Without eager work nothing overlaps, so that what one stage costs no other one hides.
        async with paced_call("Yes it is.", settings={"eager_silence_ms": 500}) as c:
            assert isinstance(c.engine, PacedEngine) and c.paced is not None
            c.engine.queue_s += fault_s * (stage == "queue")
            c.engine.prefill_s += fault_s * (stage == "prefill")
            c.engine.token_s += fault_s / 3 * (stage == "decode")  # three words to the clause
            c.paced.delays_s["transcribe"] += fault_s * (stage == "asr")
            c.paced.delays_s["_synthesize_first"] += fault_s * (stage == "tts")
            c.sink = Network(c.clock, fault_s * (stage == "send"))
            await c.ask()
            await c.clock.advance(20)
            (turn,) = records(c)
            assert turn["outcome"] == "answered"
            return dict(turn["stages_ms"])

    plain, slow = await stages_ms(0.0), await stages_ms(0.5)
    for name in plain:
        expected = 500.0 if name == stage else 0.0
        assert slow[name] - plain[name] == pytest.approx(expected, abs=1.0), name
