"""Figures of ``bench.voice.compare_servers``."""

from __future__ import annotations

from bench.harness.rounds import Rounds
from bench.voice.compare_servers import table


def test_only_figures_of_questions_that_both_answered_are_compared() -> None:
    rounds = Rounds(
        {
            "before": [
                {"v2v": 100.0, "asr": 50.0},
                {},
                {"v2v": 200.0},
                {"v2v": 300.0},
                {"v2v": 400.0, "filler": 0.0},
            ],
            "after": [
                {"v2v": 120.0, "asr": 40.0},
                {"v2v": 9000.0, "asr": 900.0},
                {"v2v": 300.0},
                {},
                {"v2v": 400.0, "filler": 0.5, "tts": 3.0},
            ],
        }
    )
    assert table(rounds).rows == [
        ("v2v", 200.0, 300.0, 1.2, 3),
        ("asr", 50.0, 40.0, 0.8, 1),
        ("filler", 0.0, 0.5, None, 1),
        ("tts", None, None, None, 0),
    ]
