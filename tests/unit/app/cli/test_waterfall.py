"""The waterfall of a turn on a terminal."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console, RenderableType

from app.cli.waterfall import BAR_CELLS, STAGE_TITLES, Bar, bar_text, bars, early_note, waterfall
from app.observe.trace import STAGES

STAGES_MS = {
    "endpoint": 310.0,
    "asr": 95.0,
    "queue": 0.0,
    "prefill": 40.0,
    "decode": 80.0,
    "tts": 70.0,
    "send": 5.0,
}


def drawn(renderable: RenderableType) -> list[str]:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_every_stage_of_a_trace_has_a_title() -> None:
    assert set(STAGE_TITLES) == {stage for stage, _ in STAGES}


def test_each_bar_begins_where_the_one_before_ends() -> None:
    laid = bars(STAGES_MS)
    assert [bar.stage for bar in laid] == list(STAGES_MS)
    assert [bar.start_ms for bar in laid] == [0, 310, 405, 405, 445, 525, 595]


@pytest.mark.parametrize(
    ("bar", "text"),
    [
        (Bar("a", 0, 100), "██████████"),
        (Bar("a", 0, 50), "█████"),
        (Bar("a", 50, 50), "     █████"),
        (Bar("a", 0, 5), "▌"),
        (Bar("a", 0, 0), ""),
        (Bar("a", 99.9, 0.1), "         █"),
        (Bar("a", 30, 0.01), "   ▏"),
    ],
)
def test_bars(bar: Bar, text: str) -> None:
    assert bar_text(bar, 100, num_cells=10) == text.ljust(10)


def test_a_wait_of_no_length() -> None:
    assert bar_text(Bar("a", 0, 0), 0, num_cells=3) == "   "


def test_all_numbers_and_the_sum_are_shown() -> None:
    lines = drawn(waterfall({"stages_ms": STAGES_MS, "voice_to_voice_ms": 600.0}))
    assert [line.split()[-2] for line in lines] == ["310", "95", "0", "40", "80", "70", "5", "600"]
    assert lines[0].startswith("end of turn")
    assert lines[-1].startswith("voice to voice")
    assert max(map(len, lines)) < BAR_CELLS + 35


def test_a_typed_turn_has_no_voice_to_voice() -> None:
    lines = drawn(waterfall({"stages_ms": STAGES_MS, "voice_to_voice_ms": None}))
    assert lines[-1].startswith("to the first sound")


@pytest.mark.parametrize("trace", [{}, {"stages_ms": {}}, {"stages_ms": None}])
def test_a_turn_without_audio(trace: dict[str, Any]) -> None:
    assert drawn(waterfall(trace)) == ["no stages: the turn had no audible reply"]


def test_stages_that_took_no_time_are_explained() -> None:
    early = STAGES_MS | dict.fromkeys(("asr", "queue", "prefill", "decode"), 0.0)
    assert early_note({"stages_ms": early}).startswith("0 ms: done before")
    assert early_note({"stages_ms": early | {"tts": 0.0}})


@pytest.mark.parametrize(
    "stages_ms",
    [None, {}, STAGES_MS, dict.fromkeys(STAGES_MS, 0.0), STAGES_MS | {"endpoint": 0.0}],
)
def test_others_need_no_explanation(stages_ms: dict[str, float] | None) -> None:
    assert early_note({"stages_ms": stages_ms}) == ""
