"""`parley talk` and `parley chat` as a user runs them, with the real models."""

from __future__ import annotations

import csv
import json
import wave
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import pytest
import soundfile as sf

from tests.support.busy import Stopwatch
from tests.support.command_line import parley

pytestmark = pytest.mark.integration

STAGES = ["endpoint", "asr", "queue", "prefill", "decode", "tts", "send"]


def talk(*arguments: str) -> list[dict[str, Any]]:
    """The JSON objects of a talk in which all went well."""
    done = parley("talk", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def watch() -> Stopwatch:
    """Knows what other programs have taken from the test."""
    return Stopwatch(of_machine=True)


def reference(shared_data: Path, name: str) -> str:
    with (shared_data / "MANIFEST.tsv").open(newline="") as manifest:
        for row in csv.DictReader(manifest, delimiter="\t"):
            if row["file"] == name:
                return row["transcript"]
    raise KeyError(name)


def word_error_rate(truth: str, heard: str) -> float:
    norm = jiwer.Compose(
        [
            jiwer.ToLowerCase(),
            jiwer.RemovePunctuation(),
            jiwer.RemoveMultipleSpaces(),
            jiwer.Strip(),
            jiwer.ReduceToListOfListOfWords(),
        ]
    )
    rate: float = jiwer.wer(truth, heard, reference_transform=norm, hypothesis_transform=norm)
    return rate


def check_turn(turn: dict[str, Any], watch: Stopwatch) -> None:
    """What must be true of every answered turn."""
    assert turn["status"] in ("completed", "incomplete")
    assert turn["reply"]
    assert turn["reply_audio_s"] > 0.3
    assert list(turn["stages_ms"]) == STAGES
    assert all(ms >= 0 for ms in turn["stages_ms"].values())
    assert sum(turn["stages_ms"].values()) == pytest.approx(turn["voice_to_voice_ms"], abs=0.01)
    # The trace is what a listener hears. Two views of where a word ends differ by some frames.
    tolerance_ms = 250 + 1000 * watch.lost_s()
    assert turn["gap_in_recording_ms"] == pytest.approx(turn["voice_to_voice_ms"], abs=tolerance_ms)


def test_a_question_with_a_server_of_our_own(
    shared_data: Path, tmp_path: Path, watch: Stopwatch
) -> None:
    out, both = tmp_path / "reply.wav", tmp_path / "both.wav"
    question = shared_data / "speech" / "az_weather.flac"
    (said,) = talk(str(question), "-o", str(out), "--record", str(both))
    check_turn(said, watch)
    truth = reference(shared_data, "speech/az_weather.flac")
    assert word_error_rate(truth, said["transcript"]) <= 0.25
    reply, rate = sf.read(out, dtype="float32")
    assert rate == 24_000
    assert reply.size / rate == pytest.approx(said["reply_audio_s"], abs=0.001)
    assert float(np.abs(reply).max()) > 0.05
    recording, _ = sf.read(both, dtype="float32")
    # In the recording itself: the caller's last loud sample, then silence, then the reply.
    heard_at = np.flatnonzero(np.abs(recording[:, 1]) > 0.005)[0]
    voiced_until = np.flatnonzero(np.abs(recording[: 2 * rate, 0]) > 0.01)[-1]
    gap_ms = (heard_at - voiced_until) * 1000 / rate
    assert gap_ms == pytest.approx(said["gap_in_recording_ms"], abs=60)


@pytest.mark.parametrize(
    "name",
    ["hard/tel_az_weather_ulaw.wav", "hard/st48_un_dog_or_cat.flac", "hard/tel_un_dog_or_cat.ulaw"],
)
def test_files_of_many_kinds(
    server_url: str, shared_data: Path, name: str, watch: Stopwatch
) -> None:
    (said,) = talk(str(shared_data / name), "--url", server_url)
    check_turn(said, watch)
    assert said["transcript"]


def test_float_wav(server_url: str, shared_data: Path, tmp_path: Path, watch: Stopwatch) -> None:
    samples, rate = sf.read(shared_data / "speech" / "az_weather.flac")
    sf.write(tmp_path / "float.wav", samples, rate, subtype="FLOAT")
    (said,) = talk(str(tmp_path / "float.wav"), "--url", server_url)
    check_turn(said, watch)


def test_a_pause_makes_two_turns(
    server_url: str, shared_data: Path, tmp_path: Path, watch: Stopwatch
) -> None:
    samples, rate = sf.read(shared_data / "speech" / "az_weather.flac")
    # So long that the first answer has at least begun; then it is interrupted, or over.
    pause = np.zeros(rate * 4)
    sf.write(tmp_path / "two.wav", np.concatenate((samples, pause, samples)), rate)
    (said,) = talk(str(tmp_path / "two.wav"), "--url", server_url)
    assert len(said["turns"]) == 2
    check_turn(said["turns"][-1], watch)
    assert said["stages_ms"] == said["turns"][-1]["stages_ms"]
    assert said["transcript"] == " ".join(turn["transcript"] for turn in said["turns"])


def test_one_conversation_remembers(server_url: str, shared_data: Path, watch: Stopwatch) -> None:
    files = [str(shared_data / "speech" / name) for name in ("az_weather.flac", "un_seine.flac")]
    first, second = talk(*files, "--url", server_url, "--same-conversation")
    for said in (first, second):
        check_turn(said, watch)
    # The second prompt holds the first exchange.
    assert (
        second["turns"][0]["facts"]["prompt_tokens"] > first["turns"][0]["facts"]["prompt_tokens"]
    )


@pytest.mark.parametrize("name", ["silence_digital_10s", "white_25dbfs_10s", "dog_bark_5s"])
def test_no_speech_is_said_and_not_waited_for(
    server_url: str, shared_data: Path, name: str
) -> None:
    file = str(shared_data / "noise" / f"{name}.flac")
    done = parley("talk", "--json", "--timeout", "2", file, "--url", server_url)
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["code"] == "no_speech"
    assert f"in {name}.flac" in done.stderr


def test_bad_files_do_not_harm_the_good_ones(
    server_url: str, shared_data: Path, tmp_path: Path, watch: Stopwatch
) -> None:
    (tmp_path / "empty.wav").touch()
    with wave.open(str(tmp_path / "no_samples.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
    (tmp_path / "text.wav").write_text("this is not a WAV file, only text that says so")
    files = [tmp_path / "empty.wav", tmp_path / "no_samples.wav", tmp_path / "text.wav"]
    good = shared_data / "speech" / "az_weather.flac"
    done = parley("talk", "--json", *map(str, [*files, good]), "--url", server_url)
    assert done.returncode == 1
    *bad, said = map(json.loads, done.stdout.splitlines())
    assert [failure["error"]["code"] for failure in bad] == ["invalid_audio"] * 3
    assert all(Path(failure["file"]).name in failure["error"]["message"] for failure in bad)
    check_turn(said, watch)


def test_chat_for_scripts(llm_model_path: Path) -> None:
    arguments = ("chat", "--temperature", "0", "--max-tokens", "24")
    first = parley(*arguments, "What is the capital of France?")
    assert first.returncode == 0, first.stderr
    assert "Paris" in first.stdout
    assert "first word" in first.stderr
    assert "tok/s" in first.stderr
    assert parley(*arguments, stdin="What is the capital of France?\n").stdout == first.stdout


def test_chat_with_too_long_a_prompt(llm_model_path: Path) -> None:
    done = parley("chat", "word " * 10_000)
    assert done.returncode == 1
    assert done.stderr.startswith("parley: ")
    assert "Traceback" not in done.stderr
