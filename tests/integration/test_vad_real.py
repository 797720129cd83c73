"""Voice activity and turn detection on recordings, with the real network."""

from __future__ import annotations

import numpy as np
import pytest
from faster_whisper.vad import get_vad_model

from audio.codecs import PCMU_8K, decode, encode
from audio.endpointing.vad_endpointer import (
    Endpointer,
    ServerVadConfig,
    VoiceEnded,
    VoiceEvent,
    VoiceStarted,
)
from audio.frame import SPEECH_RATE, Samples
from audio.resample import resample
from audio.vad import WINDOW_SAMPLES, VadModel, VadStream
from tests.support.speech import DOG_OR_CAT, MONOLOGUE, NOISES, WEATHER, Recordings, Voice, noise

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def model() -> VadModel:
    return VadModel()


def events(
    model: VadModel, samples: np.ndarray, config: ServerVadConfig | None = None
) -> list[VoiceEvent]:
    """As a session does it: 20 ms at a time, and a second of silence after the recording."""
    vad, endpointer = VadStream(model), Endpointer(config or ServerVadConfig())
    audio = np.concatenate([samples, np.zeros(16_000, np.float32)])
    found = []
    for chunk in np.split(audio, range(320, audio.size, 320)):
        start = vad.num_samples_scored
        for probability in vad.detect(chunk):
            found += endpointer.process_window(probability, start, start + WINDOW_SAMPLES)
            start += WINDOW_SAMPLES
    return found


def test_streaming_equals_faster_whisper(model: VadModel, voice: Voice) -> None:
    samples = np.concatenate((voice.say(MONOLOGUE).samples(), noise(10 * SPEECH_RATE, 0.05)))
    samples = samples[: samples.size // WINDOW_SAMPLES * WINDOW_SAMPLES]
    reference = get_vad_model()(samples.copy()).reshape(-1)
    vad = VadStream(model)
    streamed = [
        p for chunk in np.split(samples, range(0, samples.size, 331)) for p in vad.detect(chunk)
    ]
    assert len(streamed) == len(reference)
    # faster-whisper zeroes the end of its last window by mistake, so that one differs.
    np.testing.assert_allclose(streamed[:-1], reference[:-1], atol=1e-5)
    np.testing.assert_allclose(model.probabilities(samples), streamed, atol=1e-5)


def test_the_last_incomplete_window_is_filled_up(model: VadModel, voice: Voice) -> None:
    samples = voice.say(MONOLOGUE).samples()[: 40 * WINDOW_SAMPLES + 100]
    padded = np.concatenate([samples, np.zeros(WINDOW_SAMPLES - 100, np.float32)])
    np.testing.assert_allclose(
        model.probabilities(samples), VadStream(model).detect(padded), atol=1e-5
    )
    assert model.probabilities(samples[:0]).shape == (0,)


def is_one_turn(model: VadModel, samples: Samples) -> bool:
    turns = [type(e) for e in events(model, samples) if isinstance(e, VoiceStarted | VoiceEnded)]
    return turns == [VoiceStarted, VoiceEnded]


@pytest.mark.parametrize("text", [WEATHER, DOG_OR_CAT, "Good morning.", "Goodbye.", "Yes."])
def test_a_short_utterance_is_exactly_one_turn(model: VadModel, voice: Voice, text: str) -> None:
    said = voice.say(text)
    assert is_one_turn(model, said.samples())
    telephone = decode(encode(said.samples(PCMU_8K.rate), PCMU_8K), PCMU_8K)
    assert is_one_turn(model, resample(telephone, PCMU_8K.rate, SPEECH_RATE))


def test_a_short_utterance_of_a_person_is_exactly_one_turn(
    model: VadModel, recordings: Recordings
) -> None:
    for name in (
        "speech/az_weather.flac",
        "speech/un_dog_or_cat.flac",
        "hard/az_good_morning.flac",
        "hard/cards_001.flac",
        "hard/ivr_vm-goodbye_8k.wav",
        "hard/tel_az_weather_ulaw.wav",
        "hard/padded_az_weather.flac",
    ):
        assert is_one_turn(model, recordings.samples(name)), name


def test_every_recording_starts_a_turn_near_its_speech(
    model: VadModel, recordings: Recordings
) -> None:
    for name in recordings.names("speech"):
        person = recordings.person(name)
        samples = person.samples()
        found = events(model, samples)
        starts = [e for e in found if isinstance(e, VoiceStarted)]
        ends = [e for e in found if isinstance(e, VoiceEnded)]
        assert len(starts) == len(ends) >= 1, name
        first_s, last_s = person.voiced_s
        assert starts[0].onset_sample / SPEECH_RATE == pytest.approx(first_s, abs=0.1), name
        last_voiced = min(ends[-1].last_voiced_sample, samples.size)
        assert last_voiced / SPEECH_RATE == pytest.approx(last_s, abs=0.3), name


@pytest.mark.parametrize("kind", NOISES)
def test_noise_starts_no_turn(model: VadModel, kind: str) -> None:
    assert events(model, NOISES[kind]()) == []


def test_noise_and_music_of_real_places_start_no_turn(
    model: VadModel, recordings: Recordings
) -> None:
    for name in (
        "silence_digital_10s.flac",
        "white_60dbfs_10s.flac",
        "white_25dbfs_10s.flac",
        "brown_30dbfs_10s.flac",
        "typing_a.flac",
        "holdmusic_lk_15s.flac",
        "office_pc_b.flac",
        "moh_manolo_camp-morning_coffee_15s_8k.wav",
        "sb_noise1.flac",
        "sb_noise3.flac",
        "dog_bark_5s.flac",
    ):
        assert events(model, recordings.samples(f"noise/{name}")) == [], name
