"""`parley bench voice` as a user runs it: a recording, the real models, a server of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.command_line import parley
from tests.support.speech import WEATHER, Voice

pytestmark = pytest.mark.integration


@pytest.mark.usefixtures("llm_model_path", "asr_model_dir", "tts_voice_path")
def test_a_recording_is_said_and_what_its_answer_waited_for_adds_up(
    voice: Voice, tmp_path: Path
) -> None:
    question = voice.say(WEATHER)
    shutil.copy(question.path, tmp_path / "weather.flac")
    (tmp_path / "weather.txt").write_text(question.text)
    arguments = ["--speech", str(tmp_path), "--turns", "1", "--provider", "audiosocket", "--json"]
    done = parley(
        *("bench", "voice", *arguments),
        PARLEY_MAX_REPLY_TOKENS="12",
        PARLEY_PHONE_GREETING="Hi.",
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["turns"] == figures["v2v_ms"]["n"] == 1, done.stderr
    assert figures["missed_turns"] == figures["failed_replies"] == 0
    assert figures["wer"] <= 0.25
    assert figures["recordings"] == {"said": 1, "transcripts": 1, "left_out": {}}
    parts = sum(part["p95_answer"] for part in figures["waited_for_ms"].values())
    assert parts == pytest.approx(figures["v2v_ms"]["p95"], abs=0.3)
    assert figures["waited_for_ms"]["end_of_turn"]["p50"] > 0
    assert figures["cpu"]["seconds_per_turn"] is None or figures["cpu"]["seconds_per_turn"] > 0
