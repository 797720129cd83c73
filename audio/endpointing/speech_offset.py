"""Where a voice really ended.

Silero's probability stays high for about 100 ms after the last sound, so its last voiced window
says too late when the caller fell silent.
"""

from __future__ import annotations

import numpy as np

from audio.frame import SPEECH_RATE, Samples
from audio.loudness import levels_db

_FRAME = SPEECH_RATE // 100
# Quiet sounds of a voice lie at most so far below its loud ones, and so far above the noise. Of 26
# to 34 dB this is where 19 ends come out closest to where a person reads them off a spectrogram.
_VOICE_RANGE_DB = 31.0
_NOISE_MARGIN_DB = 6.0
# Noise near the voice's own level hides its end; then this much below the loud parts counts.
_LEAST_RANGE_DB = 10.0
# The release of a consonant: it bursts out of the silence of a closed mouth and fades for some
# frames, at least this far below the quietest sound that counts by itself. A click is gone in one.
_BURST_DB = 8.0
_STEEPEST_FADE_DB = 20.0
_FADE_DB = 10.0
_RELEASE_FRAMES = 10  # behind the VAD's end: how its windows fall decides whether it hears one
_DIP_LOOK_BACK = 2 * SPEECH_RATE
# How loud a voice is says its last sentence. It also bounds the work: about 1 ms.
_VOICE_LOOK_BACK = 3 * SPEECH_RATE
# What follows at once tells the noise; later there may be a digital silence, or another sound.
_NOISE_LEN = 3 * SPEECH_RATE // 10


def find_voice_end(samples: Samples, voiced_len: int) -> int:
    """End of the last sound of the voice that an ear hears, to 10 ms.

    ``samples`` float32 [n] at 16 kHz hold a turn and the silence that closed it; the VAD's voice
    ends at ``voiced_len``. Returns a position in [0, voiced_len + 100 ms]; ``voiced_len`` itself
    when the levels say nothing (no voice, no silence to compare with).

    The more silence is there, the better its level is known: of 199 pauses in recordings a quarter
    were placed elsewhere after 350 ms of it than after 100 ms, two in five of these by more than
    20 ms. So it is found anew at each step of a turn.
    """
    start = max(0, voiced_len - _VOICE_LOOK_BACK)
    levels = levels_db(samples[start : voiced_len + _NOISE_LEN], SPEECH_RATE)
    voice, noise = np.split(levels, [(voiced_len - start) // _FRAME])
    if not len(voice):
        return voiced_len
    loud = _loud_db(voice)
    quiet = float(np.median(noise)) if len(noise) else -np.inf
    audible_db = _audible_from_db(loud, quiet)
    audible = levels >= audible_db
    # A single frame is a click, not a sound of a voice (the cut at the end of a recording, a key),
    # unless it fades: the release of a consonant. That may be so late that the VAD misses it; there
    # it has to stand out, for the noise that follows a voice can be as loud as its quiet sounds.
    before, after = np.append(np.inf, levels[:-1]), np.append(levels[1:], -np.inf)
    fading_db = max(audible_db - _FADE_DB, quiet + _NOISE_MARGIN_DB)
    fades = (after >= fading_db) & (after >= levels - _STEEPEST_FADE_DB)
    audible &= fades | np.append(False, audible[:-1])
    audible[len(voice) :] &= (fades & (levels >= before + _BURST_DB))[len(voice) :]
    audible[len(voice) + _RELEASE_FRAMES :] = False
    ends = np.flatnonzero(audible)
    if not len(ends):
        return voiced_len
    return start + (int(ends[-1]) + 1) * _FRAME


def find_dip(samples: Samples) -> int:
    """Samples at the end of a voice, float32 [n] at 16 kHz, that are silent: 0 while it sounds.

    For a voice of which it is not known that it has ended; to 10 ms. The silence that it is
    compared with is the quietest of the last two seconds, so without any there is no dip. Asked for
    every packet of every caller, so the levels are not weighted: that is ten times the work, and
    a dip in vain only costs a look.
    """
    levels = _plain_levels_db(samples[-_DIP_LOOK_BACK:][::-1])
    if not len(levels):
        return 0
    loud, quiet = float(np.percentile(levels, 95)), float(np.percentile(levels, 4))
    audible = np.flatnonzero(levels >= _audible_from_db(loud, quiet))
    return int(audible[0]) * _FRAME if len(audible) else 0


def _loud_db(levels: Samples) -> float:
    """Of the loud parts of a voice in these frames, however much silence is among them."""
    return float(np.percentile(levels[levels >= levels.max() - _VOICE_RANGE_DB], 95))


def _audible_from_db(loud: float, quiet: float) -> float:
    """The level above which a voice with such loud parts is heard over so much noise."""
    return max(loud - _VOICE_RANGE_DB, min(quiet + _NOISE_MARGIN_DB, loud - _LEAST_RANGE_DB))


def _plain_levels_db(samples: Samples) -> Samples:
    frames = samples[: len(samples) // _FRAME * _FRAME].reshape(-1, _FRAME)
    levels: Samples = 10.0 * np.log10(np.mean(np.square(frames), axis=1) + np.float32(1e-12))
    return levels
