"""What tracing costs a turn: on the critical path, on the event loop, and in the writer's thread.

    python -m bench.voice.tracing_cost [TURNS]

The critical path is all that is noted before the caller hears the first sound. The rest runs when
the turn has ended: making the record on the event loop, and storing it, counting it and making its
spans in a thread. CPU time, so that other work on the machine does not count.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from app.config import Settings
from app.conversation.response.budget import BudgetedChunker, TurnBudget
from app.conversation.session_config import SessionConfig
from app.observe.metrics import Metrics
from app.observe.retention import Retention
from app.observe.spans import TurnSpans
from app.observe.store import TraceStore
from app.observe.trace import PATH_INSTANTS, TurnTrace
from app.observe.writer import TraceWriter, TurnSink
from audio.text.clauses import ClauseChunker

SETTINGS, CONFIG = Settings(), SessionConfig("")
REPLY = ["The ", "weather ", "is ", "usually ", "mild, ", "and ", "it ", "rains ", "a ", "little. "]


@dataclass(frozen=True)
class Cost:
    """CPU milliseconds a turn."""

    critical_ms: float
    loop_ms: float
    thread_ms: float

    def core_share(self, turns_per_s: float) -> float:
        """Share of one core at so many turns a second."""
        return (self.critical_ms + self.loop_ms + self.thread_ms) * turns_per_s / 1000


def notes_until_first_sound(number: int) -> TurnTrace:
    """What a turn notes while the caller waits: its instants, the engine's facts, its budget."""
    trace = TurnTrace(f"turn_{number:020}", "sess_1", f"resp_{number}", spoken=True)
    budget = TurnBudget.of(SETTINGS, CONFIG, trace)
    now_ns = time.monotonic_ns()
    for name in PATH_INSTANTS[:4]:
        trace.mark(name, now_ns)
    trace.facts |= {"asr_ms": 80.0, "asr_audio_s": 2.0, "asr_avg_logprob": -0.2, "asr_fallbacks": 0}
    trace.note_first_token(
        received_ns=now_ns,
        scheduled_ns=now_ns,
        first_token_ns=now_ns,
        prompt_tokens=60,
        cached_tokens=40,
    )
    chunker = BudgetedChunker(budget)
    for word in REPLY[:5]:
        chunker.feed(word, time.monotonic_ns())
    for name in PATH_INSTANTS[6:]:
        trace.mark(name, time.monotonic_ns())
    trace.note_clause_spoken(1_000_000)
    return trace


def chunker_alone() -> None:
    """The part of the above that is done without tracing too."""
    chunker = ClauseChunker()
    for word in REPLY[:5]:
        chunker.feed(word)


def cpu_ms(work: Callable[[], object], clock: Callable[[], float]) -> float:
    begun_s = clock()
    work()
    return (clock() - begun_s) * 1000


def measure(num_turns: int, sinks: list[TurnSink], folder: Path) -> Cost:
    """Run ``num_turns`` turns' worth of tracing."""
    store = TraceStore(folder / "traces.db", Retention())
    writer = TraceWriter(store, sinks=sinks)
    writer.start()
    traces: list[TurnTrace] = []

    def note() -> None:
        traces.extend(notes_until_first_sound(number) for number in range(num_turns))

    def chunk() -> None:
        for _ in range(num_turns):
            chunker_alone()

    def finish() -> None:
        for trace in traces:
            trace.note_generated(num_tokens=40, num_steps=40, finish_reason="stop", finished_ns=1)
            trace.end("answered", time.monotonic_ns())
            writer.add(trace.to_dict())

    thread_time, process_time = time.thread_time, time.process_time
    critical_ms = cpu_ms(note, thread_time) - cpu_ms(chunk, thread_time)
    whole_before_s = process_time()
    loop_ms = cpu_ms(finish, thread_time)
    writer.flush()
    whole_ms = (process_time() - whole_before_s) * 1000
    writer.close()
    assert writer.num_dropped == 0
    store.close()
    return Cost(critical_ms / num_turns, loop_ms / num_turns, (whole_ms - loop_ms) / num_turns)


def main() -> None:
    num_turns = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    spans = TurnSpans(SETTINGS, SimpleSpanProcessor(InMemorySpanExporter()))
    for name, sinks in (
        ("store", []),
        ("store, metrics", [Metrics().observe]),
        ("store, metrics, spans (not sent)", [Metrics().observe, spans]),
    ):
        with tempfile.TemporaryDirectory() as folder:
            cost = measure(num_turns, list(sinks), Path(folder))
        print(
            f"{name}: {cost.critical_ms * 1000:.0f} us before the first sound, "
            f"{cost.loop_ms * 1000:.0f} us on the loop after the turn, "
            f"{cost.thread_ms * 1000:.0f} us in the thread; "
            f"{cost.core_share(3.2):.2%} of a core with 16 callers who ask every 5 s"
        )


if __name__ == "__main__":
    main()
