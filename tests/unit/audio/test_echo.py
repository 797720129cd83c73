"""Our own voice taken out of what is heard, and another voice left in it."""

from __future__ import annotations

import numpy as np
import pytest

from audio.echo_canceller import FRAME_SAMPLES, EchoCanceller
from audio.frame import SPEECH_RATE, Samples


def babble(seed: int, seconds: float, rate: int = SPEECH_RATE) -> Samples:
    """Something like speech: syllables of random length, loudness and spectrum below 4 kHz."""
    rng = np.random.default_rng(seed)
    out = []
    while sum(map(len, out)) < seconds * rate:
        n = int(rng.uniform(0.06, 0.2) * rate)
        spectrum = np.fft.rfft(rng.standard_normal(n))
        hz = np.fft.rfftfreq(n, 1 / rate)
        shape_db = np.interp(hz, np.linspace(0, 4_000, 12), rng.uniform(-40, 0, 12), right=-90)
        wave = np.fft.irfft(spectrum * 10 ** (shape_db / 20), n) * np.hanning(n)
        level = 0.1 * rng.uniform(0.3, 1) / max(1e-9, float(np.sqrt(np.square(wave).mean())))
        out += [wave * level, np.zeros(int(rng.uniform(0, 0.1) * rate))]
    return np.concatenate(out)[: int(seconds * rate)].astype(np.float32)


def level_db(samples: Samples) -> float:
    return float(10 * np.log10(np.mean(np.square(samples)) + 1e-12))


def echo_of(played: Samples, delay_ms: int, level_db: float) -> Samples:
    """Through a room of 0.2 s, ``delay_ms`` late, with faint noise; as long as a whole frame."""
    rng = np.random.default_rng(1)
    room = rng.normal(0, 0.05, SPEECH_RATE // 5) * np.exp(-np.arange(SPEECH_RATE // 5) / 460)
    room[0] = 1.0
    wet = np.pad(np.convolve(played, room), (delay_ms * SPEECH_RATE // 1000, 0))
    wet *= 10 ** (level_db / 20)
    wet = wet[: wet.size // FRAME_SAMPLES * FRAME_SAMPLES]
    return (wet + rng.normal(0, 2e-4, wet.size)).astype(np.float32)


def cleaned(canceller: EchoCanceller, heard: Samples, start: int = 0) -> Samples:
    parts = heard.reshape(-1, FRAME_SAMPLES)
    return np.concatenate(
        [canceller.cancel(part, start + i * FRAME_SAMPLES) for i, part in enumerate(parts)]
    )


@pytest.mark.parametrize("in_db", [-3, -15])
@pytest.mark.parametrize("delay_ms", [40, 200, 500])
@pytest.mark.parametrize("rate", [16_000, 24_000, 8_000])
def test_an_echo_is_taken_out_whatever_its_level_delay_and_rate(
    in_db: int, delay_ms: int, rate: int
) -> None:
    played = babble(0, 5.0, 48_000)
    canceller = EchoCanceller()
    own = played[:: 48_000 // rate]
    for start in range(0, own.size, rate // 10):  # as it is sent, 100 ms at a time
        canceller.add_playback(own[start : start + rate // 10], rate, start * SPEECH_RATE // rate)
    heard = echo_of(played[::3], delay_ms, in_db)
    after = cleaned(canceller, heard)
    second = slice(2 * SPEECH_RATE, 5 * SPEECH_RATE)
    assert level_db(heard[second]) - level_db(after[second]) > 20


def test_another_voice_is_left_in() -> None:
    played, other = babble(0, 6.0), babble(5, 2.0)
    canceller = EchoCanceller()
    canceller.add_playback(played, SPEECH_RATE, 0)
    heard = echo_of(played, 100, -3)
    heard[3 * SPEECH_RATE : 5 * SPEECH_RATE] += other
    after = cleaned(canceller, heard)[3 * SPEECH_RATE : 5 * SPEECH_RATE]
    assert level_db(after) > level_db(other) - 8
    lag = max(
        range(-80, 81),
        key=lambda k: float(other[100:-100] @ after[100 + k : k - 100 or None][: other.size - 200]),
    )
    assert abs(lag) < 80, "within 5 ms of where it was: a block of the canceller is 4 ms"


def test_nothing_played_is_nothing_heard() -> None:
    canceller = EchoCanceller()
    assert not canceller.may_echo_at(0)
    canceller.add_playback(babble(0, 1.0), SPEECH_RATE, 1_000)
    assert canceller.may_echo_at(0) and canceller.may_echo_at(17_000 + SPEECH_RATE - 1)
    assert not canceller.may_echo_at(17_000 + SPEECH_RATE)


def test_what_was_stopped_did_not_sound() -> None:
    canceller = EchoCanceller()
    sound = babble(0, 2.0)
    for start in range(0, sound.size, 1_600):
        canceller.add_playback(sound[start : start + 1_600], SPEECH_RATE, start)
    canceller.stop_playback(5_000)
    np.testing.assert_array_equal(canceller._take(0, 5_000), sound[:5_000])
    assert not canceller._take(5_000, 4_000).any()
    assert not canceller.may_echo_at(5_000 + SPEECH_RATE)
    again = babble(1, 0.5)
    canceller.add_playback(again, SPEECH_RATE, 9_000)
    np.testing.assert_array_equal(canceller._take(9_000, again.size), again)


def test_chunks_that_follow_one_another_join_without_a_gap() -> None:
    canceller = EchoCanceller()
    sound = babble(2, 1.0, 24_000)
    for start in range(0, sound.size, 2_400):
        at = start * 2 // 3 + (start // 2_400) % 3  # clocks are not exact
        canceller.add_playback(sound[start : start + 2_400], 24_000, at)
    whole = EchoCanceller()
    whole.add_playback(sound, 24_000, 0)
    np.testing.assert_allclose(canceller._take(0, 15_000), whole._take(0, 15_000), atol=1e-6)


def test_what_sounded_is_forgotten() -> None:
    canceller = EchoCanceller()
    for start in range(0, 10 * SPEECH_RATE, 1_600):
        canceller.add_playback(babble(0, 0.1), SPEECH_RATE, start)
        canceller.cancel(np.zeros(1_600, np.float32), start)
    assert len(canceller._played) <= 1


def test_a_microphone_that_does_not_hear_us_is_believed_after_a_while() -> None:
    canceller = EchoCanceller()
    sound = babble(0, 4.0)
    canceller.add_playback(sound, SPEECH_RATE, 0)
    quiet = np.zeros(FRAME_SAMPLES * 3, np.float32)
    for window in range(100):
        canceller.cancel(quiet, window * quiet.size)
        if window == 5:
            assert canceller.gate_probability(0.9, 0.1, 0.35) == 0.1, "it may be an echo"
        assert canceller.gate_probability(0.0, 0.0, 0.35) == 0.0
    assert canceller.gate_probability(0.9, 0.1, 0.35) == 0.9
    # A voice that is always gone once ours is taken away is ours.
    for _ in range(20):
        canceller.gate_probability(0.9, 0.1, 0.35)
    assert canceller.gate_probability(0.9, 0.1, 0.35) == 0.1
    assert canceller.gate_probability(0.9, 0.8, 0.35) == 0.8


def test_silence_while_nothing_is_played_says_nothing_of_the_microphone() -> None:
    canceller = EchoCanceller()
    canceller.add_playback(np.zeros(4 * SPEECH_RATE, np.float32), SPEECH_RATE, 0)
    for window in range(100):
        canceller.cancel(np.zeros(480, np.float32), window * 480)
        canceller.gate_probability(0.0, 0.0, 0.35)
    assert canceller.gate_probability(0.9, 0.1, 0.35) == 0.1


@pytest.mark.parametrize("is_heard", [True, False])
def test_what_was_said_is_not_kept_for_the_length_of_a_call(is_heard: bool) -> None:
    """Who minds no echo never asks what was played; who sends no audio stays where he was."""
    canceller, position = EchoCanceller(), 0
    voice = babble(3, 0.1)
    for chunk in range(6_000):  # ten minutes
        ahead = 16_000 + (chunk * 1_600 - position if is_heard else 0)
        canceller.add_playback(voice, SPEECH_RATE, position + ahead)
        canceller.discard_before(position - SPEECH_RATE)
        position += 1_600 * is_heard
    kept = sum(piece.size for _, piece in canceller._played)
    assert kept <= 3 * SPEECH_RATE
    starts = [start for start, _ in canceller._played]
    assert starts == sorted(starts)
