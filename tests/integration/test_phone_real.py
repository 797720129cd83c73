"""`parley call` as a user runs it: real models behind two providers' protocols."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
import pytest

from tests.support.busy import Stopwatch
from tests.support.command_line import parley
from tests.support.speech import WEATHER, Voice

pytestmark = pytest.mark.integration


@pytest.mark.usefixtures("llm_model_path", "asr_model_dir", "tts_voice_path")
@pytest.mark.parametrize(
    ("provider", "trouble"),
    [("twilio", ["--late", "40", "--shuffle", "--loss", "0.01"]), ("audiosocket", [])],
)
def test_a_spoken_question_is_answered_by_phone(
    provider: str, trouble: list[str], voice: Voice, tmp_path: Path
) -> None:
    question = voice.say(WEATHER).path
    reply = tmp_path / "reply.wav"
    arguments = ["--provider", provider, "--json", "--out", str(reply), *trouble]
    watch = Stopwatch(of_machine=True)
    done = parley("call", str(question), *arguments)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert "weather" in result["transcript"].lower()
    assert len(result["reply"].split()) >= 3
    assert result["status"] == "completed"
    # The line adds its frames and resamplers to what the server accounts for, and nothing more.
    more_ms = result["gap_in_recording_ms"] - result["voice_to_voice_ms"]
    assert -30 < more_ms < 120 + 1000 * watch.lost_s()
    with wave.open(str(reply)) as file:
        pcm = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
        seconds = file.getnframes() / file.getframerate()
    assert abs(seconds - result["reply_audio_s"]) < 0.2
    assert np.abs(pcm.astype(np.int32)).max() > 3_000, "a voice is heard"
