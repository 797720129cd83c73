"""What ``bench/voice/compare_servers.py`` makes of its figures."""

from __future__ import annotations

from bench.voice.compare_servers import table


def test_only_what_both_answered_is_compared() -> None:
    asked = [
        ({"v2v": 100.0, "asr": 50.0}, {"v2v": 120.0, "asr": 40.0}),
        ({}, {"v2v": 9000.0, "asr": 900.0}),
        ({"v2v": 200.0}, {"v2v": 300.0}),
        ({"v2v": 300.0}, {}),
        ({"v2v": 400.0, "filler": 0.0}, {"v2v": 400.0, "filler": 0.5, "tts": 3.0}),
    ]
    assert list(table(asked)) == [
        "v2v              200     300 ms   ratio 1.20   n 3",
        "asr               50      40 ms   ratio 0.80   n 1",
        "filler             0       0 ms   ratio -   n 1",
        "tts          never measured of both",
    ]
