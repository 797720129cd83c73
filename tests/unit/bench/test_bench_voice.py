"""Figures of the voice benchmark: computed from results that are known."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from app.cli.bench import _show_voice
from app.cli.main import cli
from app.clients.recording import RATE, Played, Recording, VoicedFrames
from app.clients.talk import CallerAudio, TalkResult
from app.clients.talk_log import LoggedTurn
from app.observe.trace import STAGES
from bench.harness.figures import PARTS, Answer, cpu_seconds, percentiles, waited_for, word_errors
from bench.voice.callers import Tally, wait_note
from bench.voice.script import SCRIPT, Kind, Utterance
from tests.support.fakes import EnergyVad


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
    return Utterance(kind, "Tell me. Stop.", audio, 2 * RATE)


def result(said: Utterance, *turns: LoggedTurn, silenced_at: list[int] | None = None) -> TalkResult:
    recording = Recording(said.audio.pcm)
    return TalkResult(said.audio, [*turns], recording, [], [412.0] * len(turns), silenced_at or [])


def turn(**heard: str | None) -> LoggedTurn:
    facts = {"wasted_tokens": 3, "wasted_answers": 1, "playout_gap_ms": 250.0}
    trace = {"voice_to_voice_ms": 400.0, "facts": facts, "stages_ms": {}}
    return LoggedTurn(heard=dict(heard), response_id="resp", status="completed", trace=trace)


def test_a_turn_answered_once_is_no_cutoff_and_two_items_for_one_line_are() -> None:
    said, tally = utterance(Kind.PAUSE), Tally()
    tally.count(said, result(said, turn(a="Tell me. Stop.")))
    assert (tally.num_turns, tally.false_cutoffs, tally.missed_turns) == (1, 0, 0)
    tally.count(said, result(said, turn(a="Tell me.", b="Stop.")))
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
        tally.count(said, replace(result(said, withdrawn, whole), num_rejoined=1))
    figures = tally.to_dict(1, None, 10.0)
    assert figures["repaired_cutoffs"] == {"heard": 1, "unheard": 1}
    assert (figures["false_cutoffs"], figures["missed_turns"]) == (0, 0)
    assert figures["v2v_ms"]["n"] == 2, "no turn has ended where one was withdrawn"


def test_a_barge_in_is_measured_from_the_onset_of_the_voice() -> None:
    said, tally = utterance(Kind.BARGE_IN), Tally()
    onset = said.audio.voiced.first_after(said.second_from)
    assert onset == pytest.approx(3 * RATE, abs=RATE // 20)
    both = turn(a="Tell me."), turn(b="Stop.")
    tally.count(said, result(said, *both, silenced_at=[onset + RATE // 5]))
    assert tally.barge_in_ms == [200.0] and tally.num_turns == 2
    tally.count(said, result(said, both[0]))
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
    tally.count(said, given)
    assert (tally.missed_barge_ins, tally.idle_barge_ins) == (is_missed, not is_missed)
    figures = tally.to_dict(1, None, 10.0)
    assert (figures["missed_barge_ins"], figures["idle_barge_ins"]) == (is_missed, not is_missed)


def test_words_that_nobody_knows_are_not_wrong() -> None:
    said, tally = replace(utterance(Kind.PLAIN), text=None), Tally()
    tally.count(said, result(said, turn(a="Tell me.")))
    assert tally.to_dict(1, None, 1.0)["wer"] is None
    known = utterance(Kind.PLAIN)
    tally.count(known, result(known, turn(a="Tell me.")))
    tally.count_missed(said)
    figures = tally.to_dict(1, None, 1.0)
    assert figures["wer"] == 0.3333 and figures["turns"] == 3 and figures["missed_turns"] == 1


def test_every_stage_is_part_of_one_wait() -> None:
    parts = [stage for stages in PARTS.values() for stage in stages]
    assert parts == [stage for stage, _ in STAGES]


def test_what_answers_waited_for_and_what_made_the_slow_one_slow() -> None:
    answers = [Answer(400.0, {"endpoint": 300.0 + n, "tts": 100.0 - n}) for n in range(18)]
    slow = Answer(990.0, {"endpoint": 310.0, "queue": 80.0, "prefill": 500.0, "tts": 100.0})
    answers += [slow, Answer(2000.0, {"endpoint": 1990.0, "send": 10.0})]
    waits = waited_for(answers)
    assert waits["end_of_turn"] == {"p50": 309.0, "p95": 317.0, "n": 20, "p95_answer": 310.0}
    assert waits["model"] == {"p50": 0.0, "p95": 0.0, "n": 20, "p95_answer": 580.0}
    assert sum(part["p95_answer"] for part in waits.values()) == slow.v2v_ms
    assert percentiles([a.v2v_ms for a in answers])["p95"] == slow.v2v_ms
    assert waited_for([Answer(400.0, {})]) == {}, "another server has no stages"


def test_figures_are_shown_with_the_waits_as_a_table() -> None:
    said, tally = replace(utterance(Kind.PLAIN), text=None), Tally()
    answered = turn(a="Tell me.")
    assert answered.trace is not None
    answered.trace["stages_ms"] = {"endpoint": 345.0, "send": 55.0}
    tally.count(said, result(said, answered))
    figures = tally.to_dict(1, None, 1.0) | {"recordings": {"said": 1, "left_out": {}}}
    shown = io.StringIO()
    _show_voice(figures, Console(file=shown, width=100))
    lines = [line.split() for line in shown.getvalue().splitlines()]
    assert ["end", "of", "turn", "345", "345", "345"] in lines
    assert ["transport", "55", "55", "55"] in lines
    assert ["wer", "unknown"] in lines
    assert ["recordings", "said", "1", "left_out", "none"] in lines


def test_the_script_has_all_kinds_and_pauses_of_at_most_a_second() -> None:
    assert {line.kind for line in SCRIPT[:8]} == set(Kind)
    assert all(0.5 <= line.pause_s <= 1.0 for line in SCRIPT if line.kind is Kind.PAUSE)


def test_a_folder_that_cannot_be_made_is_a_mistake_in_the_command(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = ["bench", "voice", "--record", str(tmp_path / "file" / "inside")]
    told = CliRunner(env={"COLUMNS": "200"}).invoke(cli, command)
    assert told.exit_code == 2 and "cannot be made" in told.output and "--record" in told.output


def test_a_wait_is_told_as_what_it_was() -> None:
    """The silence before an answer that was taken back is none: it began in a pause."""
    assert wait_note(LoggedTurn(), 412.3) == "412 ms"
    assert wait_note(LoggedTurn(), None) == "no sound"
    assert wait_note(LoggedTurn(is_withdrawn=True), 0.0) == "answered too early and withdrawn"
