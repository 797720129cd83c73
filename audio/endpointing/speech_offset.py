"""Speech offset detection: the sample at which speech became inaudible.

Silero's probability stays high for about 100 ms after the last sound, so the end of its last voiced
window is later than the speech offset.
"""

from __future__ import annotations

import numpy as np

from audio.frame import SPEECH_RATE, Samples
from audio.loudness import levels_db

_FRAME = SPEECH_RATE // 100
# Quiet speech sounds lie at most this far below the loud ones, and at least this far above the
# noise. Of 26 to 34 dB, 31 places 19 offsets closest to those read off a spectrogram by hand.
_SPEECH_RANGE_DB = 31.0
_NOISE_MARGIN_DB = 6.0
# Where noise is nearly as loud as the speech, this much below its loud parts counts as audible.
_MIN_RANGE_DB = 10.0
# The release of a consonant: a burst after the closure that fades over several frames and may lie
# this far below the quietest sound that counts by itself. A click lasts a single frame.
_BURST_DB = 8.0
_STEEPEST_FADE_DB = 20.0
_FADE_DB = 10.0
_RELEASE_FRAMES = 10  # after the VAD's end: depending on its window phase the VAD misses a release
_PAUSE_LOOK_BACK = 2 * SPEECH_RATE
# The level of speech is that of its last sentence. The limit also bounds the work to about 1 ms.
_SPEECH_LOOK_BACK = 3 * SPEECH_RATE
# The noise floor is measured directly after the speech; later there may be digital silence, or
# another sound.
_NOISE_LEN = 3 * SPEECH_RATE // 10


def find_speech_offset(samples: Samples, voiced_len: int) -> int:
    """End of the last audible speech sound in ``samples``, with a resolution of 10 ms.

    ``samples`` float32 [n] at 16 kHz hold a turn and the silence after it; the VAD's last voiced
    window ends at ``voiced_len``. Returns a position in [0, voiced_len + 100 ms], or ``voiced_len``
    itself when the levels say nothing (no speech, no silence to compare with).
    """
    start = max(0, voiced_len - _SPEECH_LOOK_BACK)
    levels = levels_db(samples[start : voiced_len + _NOISE_LEN], SPEECH_RATE)
    speech, noise = np.split(levels, [(voiced_len - start) // _FRAME])
    if not len(speech):
        return voiced_len
    loud = _loud_level_db(speech)
    quiet = float(np.median(noise)) if len(noise) else -np.inf
    threshold_db = _audible_threshold_db(loud, quiet)
    audible = levels >= threshold_db
    # A single frame is a click (the cut at the end of a recording, a key) unless it fades, as the
    # release of a consonant does. A release may come so late that the VAD misses it; there it has
    # to stand out, because noise after speech can be as loud as its quiet sounds.
    before, after = np.append(np.inf, levels[:-1]), np.append(levels[1:], -np.inf)
    fading_db = max(threshold_db - _FADE_DB, quiet + _NOISE_MARGIN_DB)
    fades = (after >= fading_db) & (after >= levels - _STEEPEST_FADE_DB)
    audible &= fades | np.append(False, audible[:-1])
    audible[len(speech) :] &= (fades & (levels >= before + _BURST_DB))[len(speech) :]
    audible[len(speech) + _RELEASE_FRAMES :] = False
    ends = np.flatnonzero(audible)
    if not len(ends):
        return voiced_len
    return start + (int(ends[-1]) + 1) * _FRAME


def trailing_silence_len(samples: Samples) -> int:
    """Number of silent samples at the end of ``samples`` float32 [n] at 16 kHz; 0 during sound.

    For speech that may go on; resolution 10 ms. The noise floor is the quietest part of the last
    two seconds, so without any silence there the result is 0. This runs for every packet of every
    caller, so levels are not A-weighted (which is ten times the work).
    """
    levels = _plain_levels_db(samples[-_PAUSE_LOOK_BACK:][::-1])
    if not len(levels):
        return 0
    loud, quiet = float(np.percentile(levels, 95)), float(np.percentile(levels, 4))
    audible = np.flatnonzero(levels >= _audible_threshold_db(loud, quiet))
    return int(audible[0]) * _FRAME if len(audible) else 0


def _loud_level_db(levels: Samples) -> float:
    """Level of the loud parts of the speech, however much silence lies between them."""
    return float(np.percentile(levels[levels >= levels.max() - _SPEECH_RANGE_DB], 95))


def _audible_threshold_db(loud: float, quiet: float) -> float:
    """Level above which speech of this loudness is audible over noise of level ``quiet``."""
    return max(loud - _SPEECH_RANGE_DB, min(quiet + _NOISE_MARGIN_DB, loud - _MIN_RANGE_DB))


def _plain_levels_db(samples: Samples) -> Samples:
    frames = samples[: len(samples) // _FRAME * _FRAME].reshape(-1, _FRAME)
    levels: Samples = 10.0 * np.log10(np.mean(np.square(frames), axis=1) + np.float32(1e-12))
    return levels
