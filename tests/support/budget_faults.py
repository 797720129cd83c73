"""Turns by a manual clock with a fault in one stage: what the budget's policies win back.

``python -m tests.support.budget_faults`` prints the table of docs/benchmarks.md: real sessions,
policies and traces; times of the models and of the network are the script's.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from typing import Any

import msgspec

from app.conversation.events import OutputStarted, OutputText, SessionEvent
from app.conversation.speech.filler import Filler
from tests.support.fakes import ManualClock, PacedEngine, Recorder, recent
from tests.support.session_call import Call, call

TEXT = "The weather there is usually rather mild in spring. It rains now and then, though not much."
FAULTS = ("none", "asr", "engine", "tts", "network")
POLICIES: tuple[tuple[str, ...], ...] = (
    (),
    ("short_first_clause",),
    ("smaller_model",),
    ("short_first_clause", "smaller_model"),
    ("filler",),
)


class StalledNetwork(Recorder):
    """A sink whose first message of an answer is held up."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.stall_s = 0.0
        self._clock = clock

    async def __call__(self, event: SessionEvent) -> None:
        if isinstance(event, OutputStarted):
            await self._clock.sleep(self.stall_s)
        await super().__call__(event)


def small_engine(clock: ManualClock) -> PacedEngine:
    """Says the same, sooner."""
    engine = PacedEngine(clock, TEXT)
    engine.info = msgspec.structs.replace(engine.info, name="small")
    engine.prefill_s, engine.token_s = 0.03, 0.01
    return engine


def inject(c: Call, network: StalledNetwork, fault: str, size: float) -> None:
    """The fault in the turn to come: size 1 is +500 ms of the recogniser or the network, an engine
    that does nothing for a second, a voice that takes 0.3 s a word."""
    assert isinstance(c.engine, PacedEngine) and c.paced is not None
    voice_s = 0.02 + (0.28 * size if fault == "tts" else 0.0)
    c.paced.delays_s["_synthesize_first"] = lambda job: voice_s * len(job.args[0].split())
    c.paced.delays_s["transcribe"] = 0.08 + (0.5 * size if fault == "asr" else 0.0)
    c.engine.queue_s = 1.0 * size if fault == "engine" else 0.002
    c.engine.token_s = 0.02
    network.stall_s = 0.5 * size if fault == "network" else 0.0


async def turns(
    fault: str,
    *policies: str,
    budget_ms: int = 1000,
    num_turns: int = 5,
    sizes: list[float] | None = None,
) -> list[dict[str, Any]]:
    """Records of turns with a fault of ``FAULTS``. ``sizes``: of each turn's; None: all are 1."""
    engine = PacedEngine(ManualClock(), TEXT)
    settings = {
        "budget_ms": budget_ms,
        "budget_policies": policies,
        "eager_silence_ms": 500,  # no work ahead: the fault is not hidden
    }
    async with call(engine, *["How is it there?"] * num_turns, settings=settings) as c:
        network = StalledNetwork(c.clock)
        c.sink = c.out = network
        if "filler" in policies:
            object.__setattr__(c.services, "filler", Filler("Let me see.", c.synthesizer))  # type: ignore[arg-type]
        if "smaller_model" in policies:
            object.__setattr__(c.services, "small_engine", small_engine(c.clock))
        for number in range(num_turns):
            inject(c, network, fault, 1.0 if sizes is None else sizes[number])
            await c.ask()
            await c.clock.advance(40)
        check_words(c)
        found = recent(c.services.traces.store, 100)
    assert len(found) == num_turns
    return found


def check_words(c: Call) -> None:
    """The policies change when words are said, and never which, the filler aside."""
    said = "".join(event.text for event in c.out.of(OutputText)).replace("Let me see.", "")
    assert said == TEXT * (len(said) // len(TEXT))


def waits_ms(found: list[dict[str, Any]]) -> list[float]:
    return [turn["voice_to_voice_ms"] for turn in found]


def misses(found: list[dict[str, Any]]) -> int:
    return sum("total" in turn["budget"]["misses_ms"] for turn in found)


async def table(num_turns: int, budget_ms: int) -> None:
    """Every fault with every choice of policies; sizes from 0 to 2, the same for all."""
    print("| fault | " + " | ".join(" + ".join(p) or "none" for p in POLICIES) + " |")
    print("|---" * (len(POLICIES) + 1) + "|")
    for fault in FAULTS:
        cells = []
        for policies in POLICIES:
            rng = random.Random(fault)
            sizes = [rng.uniform(0, 2) for _ in range(num_turns)]
            found = await turns(
                fault, *policies, budget_ms=budget_ms, num_turns=num_turns, sizes=sizes
            )
            cells.append(f"{misses(found)}, {statistics.median(waits_ms(found)):,.0f} ms")
        print(f"| {fault} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    asyncio.run(table(num_turns=40, budget_ms=1200))
