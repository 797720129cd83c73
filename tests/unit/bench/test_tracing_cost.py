"""Tracing must not be felt: its cost is measured, with a bound that a busy machine still keeps."""

from __future__ import annotations

from pathlib import Path

from app.observe.metrics import Metrics
from bench.voice.tracing_cost import measure


def test_a_turn_pays_less_than_it_may(tmp_path: Path) -> None:
    cost = measure(300, [Metrics().observe], tmp_path)
    # About 0.04 ms, 0.02 ms and 0.1% of a core on the machine of docs/benchmarks.md.
    assert cost.critical_ms < 0.2
    assert cost.loop_ms < 0.5
    assert cost.core_share(turns_per_s=3.2) < 0.01
