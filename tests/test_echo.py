"""Our own voice in the caller's microphone, and another voice in it."""

from __future__ import annotations

import numpy as np
import pytest

from audio.echo import EchoGuard
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


def share_of_echo(guard: EchoGuard, heard: Samples) -> float:
    """Share of the windows from 0.5 s on that are taken for an echo."""
    found = []
    for start in range(0, heard.size - 511, 512):
        guard.hear(heard[start : start + 512], start)
        if start > SPEECH_RATE // 2:
            found.append(guard.is_echo())
    return float(np.mean(found))


@pytest.mark.parametrize("level_db", [-3, -15, -25])
@pytest.mark.parametrize("delay_ms", [40, 200, 500])
@pytest.mark.parametrize("rate", [16_000, 24_000, 8_000])
def test_an_echo_is_known_whatever_its_level_delay_and_rate(
    level_db: int, delay_ms: int, rate: int
) -> None:
    rng = np.random.default_rng(1)
    played = babble(0, 2.0, 48_000)
    guard = EchoGuard()
    guard.play(played[:: 48_000 // rate], rate, 0)
    heard = rng.normal(0, 3e-4, int(2.6 * SPEECH_RATE)).astype(np.float32)
    delay = delay_ms * SPEECH_RATE // 1000
    own = played[::3]
    heard[delay : delay + own.size] += own * 10 ** (level_db / 20)
    guard.play(np.zeros(0, np.float32), rate, 0)
    assert share_of_echo(guard, heard[: delay + own.size - 4_000]) > 0.85


@pytest.mark.parametrize("seed", range(1, 5))
def test_another_voice_is_no_echo(seed: int) -> None:
    guard = EchoGuard()
    guard.play(babble(0, 2.0), SPEECH_RATE, 0)
    assert share_of_echo(guard, babble(seed, 2.0)) < 0.15


def test_nothing_played_is_nothing_heard() -> None:
    guard = EchoGuard()
    assert not guard.is_sounding
    assert share_of_echo(guard, babble(0, 1.0)) == 0.0


def test_what_was_stopped_did_not_sound() -> None:
    guard = EchoGuard()
    guard.play(babble(0, 2.0), SPEECH_RATE, 16_000)
    guard.stop(16_000)
    assert not guard.is_sounding


def test_what_sounded_is_forgotten() -> None:
    guard = EchoGuard()
    guard.play(babble(0, 1.0), SPEECH_RATE, 0)
    share_of_echo(guard, np.zeros(6 * SPEECH_RATE, np.float32))
    assert not guard.is_sounding


def test_windows_that_were_left_out() -> None:
    """Nobody listens while nothing sounds: what was heard before then is not compared."""
    guard = EchoGuard()
    dice = np.random.default_rng(3)
    sound = dice.normal(0, 0.1, SPEECH_RATE * 4).astype(np.float32)
    guard.play(sound, SPEECH_RATE, 0)
    for start in (*range(0, 512 * 20, 512), *range(512 * 23, 512 * 60, 512)):
        guard.hear(sound[start : start + 512], start)
        guard.is_echo()
    assert guard.is_echo()


@pytest.mark.parametrize("gap_s", [0.032, 0.64, 60.0])
def test_after_a_gap_it_begins_anew(gap_s: float) -> None:
    """Nobody listens for echoes while nothing sounds; then the next answer is compared alone."""
    guard = EchoGuard()
    guard.play(babble(0, 1.0), SPEECH_RATE, 0)
    share_of_echo(guard, babble(0, 1.0))
    begin = SPEECH_RATE + int(gap_s * SPEECH_RATE) // 512 * 512
    begin -= begin % 512
    again = babble(3, 1.0)
    guard.play(again, SPEECH_RATE, begin)
    found = []
    for at in range(0, again.size - 511, 512):
        guard.hear(again[at : at + 512], begin + at)
        found.append(guard.is_echo())
    assert np.mean(found[8:]) > 0.85
