"""CPU time of tracing in a turn: on the critical path, on the event loop, in the writer's thread.

    python -m bench.voice.tracing_cost [TURNS]

The critical path is everything recorded before the first sound of the answer. The rest runs after
the end of the turn: the record is made on the event loop; a thread stores it, updates metrics and
makes spans. Figures are CPU time, so other load on the machine does not count.
"""

from __future__ import annotations

import argparse
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
from bench.harness.results import Result, add_json_option, report

SETTINGS, CONFIG = Settings(), SessionConfig("")
REPLY = ["The ", "weather ", "is ", "usually ", "mild, ", "and ", "it ", "rains ", "a ", "little. "]


@dataclass(frozen=True)
class Cost:
    """CPU milliseconds a turn."""

    critical_ms: float
    loop_ms: float
    thread_ms: float

    def core_share(self, turns_per_s: float) -> float:
        """Share of one core at ``turns_per_s`` turns a second."""
        return (self.critical_ms + self.loop_ms + self.thread_ms) * turns_per_s / 1000


def notes_until_first_sound(number: int) -> TurnTrace:
    """A trace with everything recorded while the caller waits: instants, facts, budget."""
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
    """The part of the above that runs without tracing, too."""
    chunker = ClauseChunker()
    for word in REPLY[:5]:
        chunker.feed(word)


def cpu_ms(work: Callable[[], object], clock: Callable[[], float]) -> float:
    begun_s = clock()
    work()
    return (clock() - begun_s) * 1000


def measure(num_turns: int, sinks: list[TurnSink], folder: Path) -> Cost:
    """Cost a turn, over the traces of ``num_turns`` turns."""
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("turns", type=int, nargs="?", default=2000)
    add_json_option(parser)
    options = parser.parse_args()
    spans: TurnSink = TurnSpans(SETTINGS, SimpleSpanProcessor(InMemorySpanExporter()))
    metrics: TurnSink = Metrics().observe
    variants: dict[str, list[TurnSink]] = {
        "store": [],
        "store, metrics": [metrics],
        "store, metrics, spans (not sent)": [metrics, spans],
    }
    result = Result(("sinks", "before the first sound, us", "loop, us", "thread, us"))
    for name, sinks in variants.items():
        with tempfile.TemporaryDirectory() as folder:
            cost = measure(options.turns, sinks, Path(folder))
        times = (cost.critical_ms, cost.loop_ms, cost.thread_ms)
        result.add(name, *(round(ms * 1000, 1) for ms in times))
    share = cost.core_share(3.2)
    result.notes = f"{share:.2%} of a core with 16 callers who ask every 5 s, all sinks together."
    report(result, options)


if __name__ == "__main__":
    main()
