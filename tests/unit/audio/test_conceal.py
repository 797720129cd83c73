"""What is made up for lost audio: it sounds on, fades, and meets what comes next."""

from __future__ import annotations

import numpy as np
import pytest

from audio.frame import Samples
from audio.packet_loss_concealment import PacketLossConcealer

RATE = 48_000
FRAME = RATE // 50


def voiced(num_samples: int, hz: float = 140.0, start: int = 0) -> Samples:
    """A buzz with harmonics, like a vowel."""
    at = (np.arange(num_samples) + start) / RATE
    sound = sum(np.sin(2 * np.pi * hz * k * at) / k for k in range(1, 8))
    return (0.2 * np.asarray(sound)).astype(np.float32)


def rms(samples: Samples) -> float:
    return float(np.sqrt(np.mean(samples**2)))


@pytest.mark.parametrize("hz", [90.0, 140.0, 220.0, 330.0])
def test_one_frame_is_close_to_what_was_lost(hz: float) -> None:
    whole = voiced(12 * FRAME, hz)
    concealer = PacketLossConcealer(RATE)
    concealer.good(whole[: 10 * FRAME])
    made = concealer.conceal(FRAME)
    lost = whole[10 * FRAME : 11 * FRAME]
    half = FRAME // 2  # the second half fades already
    assert rms(made[:half] - lost[:half]) < 0.35 * rms(lost[:half])
    assert rms(made) > 0.5 * rms(lost)


def test_no_steps_at_the_joints() -> None:
    whole = voiced(12 * FRAME)
    concealer = PacketLossConcealer(RATE)
    parts = [concealer.good(whole[: 10 * FRAME]), concealer.conceal(FRAME)]
    parts.append(concealer.good(whole[11 * FRAME :]))
    sound = np.concatenate(parts)
    largest_step = float(np.abs(np.diff(whole)).max())
    assert float(np.abs(np.diff(sound)).max()) < 3 * largest_step
    # What came is as it came, once the joint is over.
    assert np.array_equal(sound[11 * FRAME + RATE // 100 :], whole[11 * FRAME + RATE // 100 :])


def test_a_long_gap_falls_silent_in_60_ms() -> None:
    concealer = PacketLossConcealer(RATE)
    concealer.good(voiced(10 * FRAME))
    made = np.concatenate([concealer.conceal(FRAME) for _ in range(10)])
    assert rms(made[:FRAME]) > 0.05
    assert np.all(made[RATE * 60 // 1000 :] == 0)
    levels = [rms(made[i : i + FRAME]) for i in range(0, 4 * FRAME, FRAME)]
    assert levels == sorted(levels, reverse=True)


def test_silence_stays_silent() -> None:
    concealer = PacketLossConcealer(RATE)
    concealer.good(np.zeros(5 * FRAME, np.float32))
    assert np.all(concealer.conceal(5 * FRAME) == 0)
    fresh = PacketLossConcealer(RATE)  # nothing was heard yet
    assert np.all(fresh.conceal(FRAME) == 0)


def test_an_odd_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 8000"):
        PacketLossConcealer(44_100)
