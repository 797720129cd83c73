"""`parley talk` and `parley chat` as a user runs them, with the real models."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import pytest
import soundfile as sf

from audio.codecs import PCMU_8K, encode
from audio.frame import SPEECH_RATE, silence
from tests.support.busy import Stopwatch
from tests.support.command_line import parley
from tests.support.speech import DOG_OR_CAT, NOISES, WEATHER, Recordings, Voice

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
    voice: Voice, tmp_path: Path, watch: Stopwatch
) -> None:
    out, both = tmp_path / "reply.wav", tmp_path / "both.wav"
    question = voice.say(WEATHER)
    (said,) = talk(str(question.path), "-o", str(out), "--record", str(both))
    check_turn(said, watch)
    assert word_error_rate(question.text, said["transcript"]) <= 0.25
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


def write_headerless(path: Path, voice: Voice) -> None:
    path.write_bytes(encode(voice.say(WEATHER).samples(PCMU_8K.rate), PCMU_8K))


def write_telephone(path: Path, voice: Voice) -> None:
    sf.write(path, voice.say(WEATHER).samples(8_000), 8_000, subtype="ULAW")


def write_float(path: Path, voice: Voice) -> None:
    sf.write(path, voice.say(WEATHER).samples(), SPEECH_RATE, subtype="FLOAT")


def write_stereo(path: Path, voice: Voice) -> None:
    left = voice.say(WEATHER).samples(48_000)
    sf.write(path, np.stack((left, left / 2), axis=1), 48_000)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("headerless.ulaw", write_headerless),
        ("telephone.wav", write_telephone),
        ("float.wav", write_float),
        ("stereo.flac", write_stereo),
    ],
)
def test_files_of_many_kinds(
    server_url: str,
    voice: Voice,
    tmp_path: Path,
    watch: Stopwatch,
    name: str,
    write: Callable[[Path, Voice], None],
) -> None:
    write(tmp_path / name, voice)
    (said,) = talk(str(tmp_path / name), "--url", server_url)
    check_turn(said, watch)
    assert word_error_rate(WEATHER, said["transcript"]) <= 0.25


def test_a_person_on_the_telephone(
    server_url: str, recordings: Recordings, watch: Stopwatch
) -> None:
    person = recordings.person("hard/tel_az_weather_ulaw.wav")
    (said,) = talk(str(person.path), "--url", server_url)
    check_turn(said, watch)
    assert word_error_rate(person.text, said["transcript"]) <= 0.25


def test_a_pause_makes_two_turns(
    server_url: str, voice: Voice, tmp_path: Path, watch: Stopwatch
) -> None:
    samples = voice.say(WEATHER).samples()
    # So long that the first answer has at least begun; then it is interrupted, or over.
    pause = silence(4 * SPEECH_RATE)
    sf.write(tmp_path / "two.wav", np.concatenate((samples, pause, samples)), SPEECH_RATE)
    (said,) = talk(str(tmp_path / "two.wav"), "--url", server_url)
    assert len(said["turns"]) == 2
    check_turn(said["turns"][-1], watch)
    assert said["stages_ms"] == said["turns"][-1]["stages_ms"]
    assert said["transcript"] == " ".join(turn["transcript"] for turn in said["turns"])


def test_one_conversation_remembers(server_url: str, voice: Voice, watch: Stopwatch) -> None:
    files = [str(voice.say(text).path) for text in (WEATHER, DOG_OR_CAT)]
    first, second = talk(*files, "--url", server_url, "--same-conversation")
    for said in (first, second):
        check_turn(said, watch)
    # The second prompt holds the first exchange.
    assert (
        second["turns"][0]["facts"]["prompt_tokens"] > first["turns"][0]["facts"]["prompt_tokens"]
    )


@pytest.mark.parametrize("kind", ["silence", "white", "clicks"])
def test_no_speech_is_said_and_not_waited_for(server_url: str, tmp_path: Path, kind: str) -> None:
    name = f"{kind}.wav"
    sf.write(tmp_path / name, NOISES[kind](), SPEECH_RATE)
    done = parley("talk", "--json", "--timeout", "2", str(tmp_path / name), "--url", server_url)
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["code"] == "no_speech"
    assert f"in {name}" in done.stderr


def test_bad_files_do_not_harm_the_good_ones(
    server_url: str, voice: Voice, tmp_path: Path, watch: Stopwatch
) -> None:
    (tmp_path / "empty.wav").touch()
    with wave.open(str(tmp_path / "no_samples.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
    (tmp_path / "text.wav").write_text("this is not a WAV file, only text that says so")
    files = [tmp_path / "empty.wav", tmp_path / "no_samples.wav", tmp_path / "text.wav"]
    good = voice.say(WEATHER).path
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
