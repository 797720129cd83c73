"""Where a voice really ended.

Silero's probability stays high for about 100 ms after the last sound, so its last voiced window
says too late when the caller fell silent.
"""

from __future__ import annotations

import numpy as np

from audio.frame import SPEECH_RATE, Samples

_FRAME = SPEECH_RATE // 100
# Quiet sounds of a voice lie at most so far below its loud ones, and so far above the noise.
_VOICE_RANGE_DB = 30.0
_NOISE_MARGIN_DB = 6.0
# Noise near the voice's own level hides its end; then this much below the loud parts counts.
_LEAST_RANGE_DB = 10.0


def find_voice_end(samples: Samples, voiced_len: int) -> int:
    """End of the last audible sound of the voice, to 10 ms.

    ``samples`` float32 [n] at 16 kHz hold a turn and the silence that closed it; the VAD's voice
    ends at ``voiced_len``. Returns a position in [0, voiced_len]; ``voiced_len`` itself when the
    levels say nothing (no voice, no silence to compare with).
    """
    voice = _levels_db(samples[:voiced_len])
    if not len(voice):
        return voiced_len
    loud = float(np.percentile(voice, 95))
    threshold = loud - _VOICE_RANGE_DB
    noise = _levels_db(samples[voiced_len:])
    if len(noise):
        above_noise = float(np.median(noise)) + _NOISE_MARGIN_DB
        threshold = max(threshold, min(above_noise, loud - _LEAST_RANGE_DB))
    audible = np.flatnonzero(voice >= threshold)
    return min((int(audible[-1]) + 1) * _FRAME, voiced_len)


def _levels_db(samples: Samples) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    frames = samples[: len(samples) // _FRAME * _FRAME].reshape(-1, _FRAME)
    levels: np.ndarray[tuple[int], np.dtype[np.float32]] = 10.0 * np.log10(
        np.mean(np.square(frames), axis=1) + np.float32(1e-12)
    )
    return levels
