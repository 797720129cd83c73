"""Where the time of a turn went, drawn for a terminal: one bar a stage, laid end to end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

# What each stage is to someone who waits for an answer.
STAGE_TITLES = {
    "endpoint": "end of turn",
    "asr": "transcription",
    "queue": "queue",
    "prefill": "first token",
    "decode": "first clause",
    "tts": "voice",
    "send": "sending",
}
BAR_CELLS = 40
# Bars end on eighths of a cell.
EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class Bar:
    """One stage: it occupies ``[start_ms, start_ms + ms)`` of the wait."""

    stage: str
    start_ms: float
    ms: float


def bars(stages_ms: Mapping[str, float]) -> list[Bar]:
    """The stages in the order in which they come, each where the one before ends."""
    laid = []
    start = 0.0
    for stage, ms in stages_ms.items():
        laid.append(Bar(stage, start, ms))
        start += ms
    return laid


def bar_text(bar: Bar, total_ms: float, num_cells: int = BAR_CELLS) -> str:
    """The bar as block characters in ``num_cells`` cells; a stage that took time is never empty."""
    if total_ms <= 0 or bar.ms <= 0:
        return " " * num_cells
    start = min(int(bar.start_ms / total_ms * num_cells), num_cells - 1)
    end = bar.start_ms + bar.ms
    eighths = max(round(end / total_ms * num_cells * 8) - start * 8, 1)
    full, rest = divmod(eighths, 8)
    cells = " " * start + EIGHTHS[-1] * full + (EIGHTHS[rest] if rest else "")
    return cells[:num_cells].ljust(num_cells)


def early_note(trace: Mapping[str, Any]) -> str:
    """Why stages took no time, for who has not met answers that are begun early; "" where none is
    needed."""
    stages_ms: Mapping[str, float] = trace.get("stages_ms") or {}
    thinking = [stages_ms.get(stage, 0.0) for stage in ("asr", "queue", "prefill", "decode")]
    if stages_ms.get("endpoint", 0.0) <= 0 or any(thinking):
        return ""
    return "0 ms: done before it was certain that the caller had finished"


def waterfall(trace: Mapping[str, Any]) -> Table | Text:
    """A table of the stages of a turn trace (``app.observe.trace``), the longest one standing out.

    A turn without audio has no stages; then it is a line that says so.
    """
    stages_ms: Mapping[str, float] = trace.get("stages_ms") or {}
    if not stages_ms:
        return Text("no stages: the turn had no audible reply", style="dim")
    total_ms = sum(stages_ms.values())
    longest = max(stages_ms.values())
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(no_wrap=True, width=BAR_CELLS)
    table.add_column(no_wrap=True, justify="right")
    for bar in bars(stages_ms):
        style = "bold cyan" if bar.ms == longest else "cyan"
        table.add_row(
            STAGE_TITLES.get(bar.stage, bar.stage),
            Text(bar_text(bar, total_ms), style=style),
            Text(f"{bar.ms:,.0f} ms", style="bold" if bar.ms == longest else ""),
        )
    title = "voice to voice" if trace.get("voice_to_voice_ms") is not None else "to the first sound"
    table.add_row(Text(title, style="bold"), "", Text(f"{total_ms:,.0f} ms", style="bold"))
    return table
