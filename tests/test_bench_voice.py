"""Figures of the voice benchmark: computed from results that are known."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.bench.figures import cpu_seconds, percentiles, word_errors
from app.bench.voice import Tally
from app.bench.voice_script import SCRIPT, Kind, Line, Utterance
from app.recording import RATE, Played, Recording, VoicedFrames
from app.talk_client import CallerAudio, TalkResult
from app.talk_log import Turn
from tests.fakes import EnergyVad


def test_percentiles_are_nearest_ranks() -> None:
    assert percentiles(range(1, 101)) == {"p50": 50, "p95": 95, "p99": 99, "n": 100}
    assert percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0, "n": 1}
    assert percentiles([]) == {"n": 0}


@pytest.mark.parametrize(
    ("said", "heard", "expected"),
    [
        ("What is two plus two?", "what is 2 plus 2", (0, 5)),
        ("The red dog.", "a red big dog", (2, 3)),
        ("Stop.", "", (1, 1)),
        ("", "thank you", (2, 0)),
    ],
)
def test_word_errors(said: str, heard: str, expected: tuple[int, int]) -> None:
    assert word_errors(said, heard) == expected


def test_cpu_time_of_this_process() -> None:
    used = cpu_seconds(os.getpid())
    if used is None:
        pytest.skip("this system has no /proc")
    assert 0 < used < 100_000
    assert cpu_seconds(2**30) is None


def utterance(kind: Kind) -> Utterance:
    samples = np.zeros(4 * RATE, np.float32)
    samples[RATE // 2 : RATE] = samples[3 * RATE : 3 * RATE + RATE // 2] = 0.3
    vad: Any = EnergyVad()
    audio = CallerAudio(Path("x"), samples.astype(np.int16), VoicedFrames(samples, RATE, vad), RATE)
    return Utterance(Line(kind, "Stop.", "Tell me."), audio, 2 * RATE)


def result(said: Utterance, *turns: Turn, silenced_at: list[int] | None = None) -> TalkResult:
    recording = Recording(said.audio.pcm)
    return TalkResult(said.audio, [*turns], recording, [], [412.0] * len(turns), silenced_at or [])


def turn(**heard: str | None) -> Turn:
    facts = {"wasted_tokens": 3, "wasted_answers": 1, "playout_gap_ms": 250.0}
    trace = {"voice_to_voice_ms": 400.0, "facts": facts, "stages_ms": {}}
    return Turn(heard=dict(heard), response_id="resp", status="completed", trace=trace)


def test_a_turn_answered_once_is_no_cutoff_and_two_items_for_one_line_are() -> None:
    said, tally = utterance(Kind.PAUSE), Tally()
    tally.take(said, result(said, turn(a="Tell me. Stop.")))
    assert (tally.num_turns, tally.false_cutoffs, tally.missed_turns) == (1, 0, 0)
    tally.take(said, result(said, turn(a="Tell me.", b="Stop.")))
    assert (tally.num_turns, tally.false_cutoffs) == (2, 1)
    figures = tally.to_dict(1, 9.0, 10.0)
    assert figures["v2v_ms"]["p50"] == 400 and figures["gap_in_recording_ms"]["p50"] == 412
    assert figures["gap_in_recording_ms"]["difference"]["p50"] == 12
    assert figures["wasted_tokens"] == 6 and figures["playout_gaps"] == 2
    assert figures["cpu"]["seconds_per_turn"] == 4.5
    assert figures["wer"] == 0


def test_a_cutoff_that_was_repaired_is_counted_by_who_heard_of_it() -> None:
    said, tally = utterance(Kind.PAUSE), Tally()
    withdrawn, whole = turn(), turn(a="Tell me. Stop.")
    withdrawn.is_withdrawn = True
    loud = np.full(RATE // 10, 3_000, np.int16)
    for pieces in ([], [Played(RATE, loud)]):
        withdrawn.pieces = pieces
        tally.take(said, replace(result(said, withdrawn, whole), num_rejoined=1))
    figures = tally.to_dict(1, None, 10.0)
    assert figures["repaired_cutoffs"] == {"heard": 1, "unheard": 1}
    assert (figures["false_cutoffs"], figures["missed_turns"]) == (0, 0)
    assert figures["v2v_ms"]["n"] == 2, "no turn has ended where one was withdrawn"


def test_a_barge_in_is_measured_from_the_onset_of_the_voice() -> None:
    said, tally = utterance(Kind.BARGE_IN), Tally()
    onset = said.audio.voiced.first_after(said.second_from)
    assert onset == pytest.approx(3 * RATE, abs=RATE // 20)
    both = turn(a="Tell me."), turn(b="Stop.")
    tally.take(said, result(said, *both, silenced_at=[onset + RATE // 5]))
    assert tally.barge_in_ms == [200.0] and tally.num_turns == 2
    tally.take(said, result(said, both[0]))
    assert (tally.missed_barge_ins, tally.idle_barge_ins, tally.missed_turns) == (0, 1, 1)


@pytest.mark.parametrize(
    ("reply_s", "is_missed"),
    [
        ([], False),  # no answer yet
        ([(1.2, 2.9)], False),  # it was over
        ([(1.2, 3.3)], False),  # it ended by itself in the moment in which it should have stopped
        ([(1.2, 2.9), (3.9, 5.0)], False),  # the next answer
        ([(1.2, 4.5)], True),  # it went on and on
        ([(1.2, 2.9), (3.1, 3.45), (3.45, 3.48)], False),
        ([(1.2, 2.9), (3.2, 3.8)], True),  # it began while the caller spoke
    ],
)
def test_a_barge_in_is_missed_only_where_a_reply_sounds_over_the_caller(
    reply_s: list[tuple[float, float]], is_missed: bool
) -> None:
    said, tally = utterance(Kind.BARGE_IN), Tally()
    given = result(said, turn(a="Tell me."), turn(b="Stop."))
    for start, end in reply_s:
        loud = np.full(round((end - start) * RATE), 3_000, np.int16)
        given.recording.play(loud, round(start * RATE))
    tally.take(said, given)
    assert (tally.missed_barge_ins, tally.idle_barge_ins) == (is_missed, not is_missed)
    figures = tally.to_dict(1, None, 10.0)
    assert (figures["missed_barge_ins"], figures["idle_barge_ins"]) == (is_missed, not is_missed)


def test_the_script_has_all_kinds_and_pauses_of_at_most_a_second() -> None:
    assert {line.kind for line in SCRIPT[:8]} == set(Kind)
    assert all(0.5 <= line.pause_s <= 1.0 for line in SCRIPT if line.kind is Kind.PAUSE)
