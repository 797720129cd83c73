"""A recording of both sides of a call, as a recorder between caller and server would make it.

Left is the caller, right is the reply where a client plays it: on arrival, or after what is still
playing. Latency measured here is the silence that a listener hears; it owes nothing to the server's
own account of the turn.
"""

from __future__ import annotations

import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from audio.frame import SPEECH_RATE, Samples
from audio.loudness import FRAME_MS, levels_db
from audio.resample import resample
from audio.vad import WINDOW_SAMPLES, VadModel, VadStream

Pcm = npt.NDArray[np.int16]

RATE = 24_000
# A sound below this (about -46 dBFS) is not heard as the beginning of a reply.
AUDIBLE_LEVEL = round(0.005 * 32768)
# A run of windows above the lower bound is a voice when one of them is above the upper one.
VOICE_PROBABILITY = 0.5
STILL_VOICE_PROBABILITY = 0.35
MIN_VOICE_WINDOWS = 2
# How far below the voice's loud parts its quiet parts may lie, and how far above the noise; where
# the noise is nearly as loud as the voice, only its loud parts are told from it.
VOICE_RANGE_DB = 31.0
NOISE_MARGIN_DB = 6.0
LEAST_RANGE_DB = 10.0
# The release of a consonant leaps up from the frame before it and fades: not faster than this, nor
# at once to so far below what is heard. One may follow the voice that the model hears.
BURST_DB = 8.0
STEEPEST_FADE_DB = 20.0
FADE_DB = 10.0
RELEASE_MS = 100
# A pause this long parts one stretch of voice from the next, and its noise is what the voice before
# it is compared with. How loud the voice is say its last three seconds.
PAUSE_MS = 300
LOUDNESS_MS = 3000
WRITE_BLOCK_SAMPLES = 10 * RATE


class VoicedFrames:
    """Where a recording holds a voice, in frames of 10 ms.

    Silero's model decides where there is a voice at all (its windows are 32 ms, and it lets go
    late); inside, a frame counts when an ear hears it: its A-weighted level is within 31 dB of the
    loud parts of the voice and 6 dB above the noise that follows, and so is that of the frame
    before, or it fades into the next: a single frame is a click. The release of a last consonant
    counts also where the model hears no voice any more. So the end of a word is found to a frame.
    """

    def __init__(self, samples: Samples, rate: int, model: VadModel) -> None:
        """``samples`` float32 [n] at ``rate``, with the silence in which the voice ends: a
        microphone goes on after the last word. Costs about 5 ms per second of audio.
        """
        self.rate = rate
        self._frames = np.flatnonzero(_voiced_mask(samples, rate, model))

    @property
    def found(self) -> bool:
        """Whether there is any voice."""
        return self._frames.size > 0

    def last_before(self, sample: int) -> int | None:
        """End of the last voiced frame that begins before ``sample``; None when there is none."""
        frame_samples = self.rate * FRAME_MS // 1000
        index = int(np.searchsorted(self._frames * frame_samples, sample))
        if index == 0:
            return None
        return min((int(self._frames[index - 1]) + 1) * frame_samples, sample)

    def first_after(self, sample: int) -> int | None:
        """Start of the first voiced frame at or after ``sample``; None when there is none."""
        frame_samples = self.rate * FRAME_MS // 1000
        index = int(np.searchsorted(self._frames * frame_samples, sample))
        return int(self._frames[index]) * frame_samples if index < self._frames.size else None


def _voiced_mask(samples: Samples, rate: int, model: VadModel) -> npt.NDArray[np.bool_]:
    audio = resample(samples, rate, SPEECH_RATE)
    stream = VadStream(model)
    tail = np.zeros(-audio.size % WINDOW_SAMPLES, dtype=np.float32)
    windows = _voiced_windows(np.array(stream.detect(np.concatenate((audio, tail)))))
    level_db = levels_db(samples, rate)
    middles = (2 * np.arange(level_db.size) + 1) * SPEECH_RATE * FRAME_MS // 2000
    in_voice = windows[middles // WINDOW_SAMPLES]
    mask = np.zeros(level_db.size, dtype=np.bool_)
    before_db = np.append(np.inf, level_db[:-1])
    after_db = np.append(level_db[1:], -np.inf)
    is_burst = level_db >= before_db + BURST_DB
    fades_at_all = after_db >= level_db - STEEPEST_FADE_DB
    for start, end in _stretches(in_voice):
        recent = slice(max(start, end - LOUDNESS_MS // FRAME_MS), end)
        loud_db = float(np.percentile(level_db[recent][in_voice[recent]], 95))
        threshold_db = loud_db - VOICE_RANGE_DB
        fade_db = threshold_db - FADE_DB
        noise = level_db[end : end + PAUSE_MS // FRAME_MS]
        if noise.size:
            noise_db = float(np.median(noise))
            above_noise_db = min(noise_db + NOISE_MARGIN_DB, loud_db - LEAST_RANGE_DB)
            threshold_db = max(threshold_db, above_noise_db)
            fade_db = max(threshold_db - FADE_DB, noise_db + NOISE_MARGIN_DB)
        late = slice(end, end + RELEASE_MS // FRAME_MS)
        fades = fades_at_all & (after_db >= fade_db)
        heard = level_db >= threshold_db
        heard &= fades | np.append(False, heard[:-1])
        mask[start:end] = in_voice[start:end] & heard[start:end]
        mask[late] = heard[late] & fades[late] & is_burst[late]
    return mask


def _stretches(in_voice: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Frames [start, end) from the first to the last of a voice, parted by pauses."""
    frames = np.flatnonzero(in_voice)
    if not frames.size:
        return []
    last = np.flatnonzero(np.diff(frames) > PAUSE_MS // FRAME_MS)
    starts = [frames[0], *frames[last + 1]]
    ends = [*frames[last], frames[-1]]
    return [(int(start), int(end) + 1) for start, end in zip(starts, ends, strict=True)]


def _voiced_windows(probability: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Windows [n] that hold a voice: runs with entry and exit thresholds, none too short."""
    mask = probability >= STILL_VOICE_PROBABILITY
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        if end - start < MIN_VOICE_WINDOWS or probability[start:end].max() < VOICE_PROBABILITY:
            mask[start:end] = False
    return mask


@dataclass(slots=True)
class Played:
    """A piece of the reply and its place: samples ``[start, start + len(pcm))``."""

    start: int
    pcm: Pcm

    @property
    def end(self) -> int:
        """The sample after the last."""
        return self.start + self.pcm.size


class Recording:
    """Both sides on one time line in samples at 24 kHz. Silence costs no memory."""

    def __init__(self, caller: Pcm) -> None:
        """The caller speaks from sample 0 on; ``caller`` is kept, not copied."""
        self.caller = caller
        self.played: list[Played] = []

    @property
    def reply_end(self) -> int:
        """Where the reply that has arrived so far ends; 0 before any."""
        return self.played[-1].end if self.played else 0

    def play(self, pcm: Pcm, arrived_at: int) -> Played:
        """Puts a piece of the reply where a client would play it."""
        piece = Played(max(arrived_at, self.reply_end), pcm)
        self.played.append(piece)
        return piece

    def stop_playing(self, at: int) -> None:
        """The client falls silent at once: what would come later is not heard."""
        while self.played and self.played[-1].start >= at:
            self.played.pop()
        if self.played and self.played[-1].end > at:
            last = self.played[-1]
            # In place: others hold this piece, and they must see what was heard of it.
            last.pcm = last.pcm[: at - last.start]

    def write(self, path: Path) -> None:
        """A stereo 16-bit WAV file, block by block. Raises OSError."""
        total = max(self.caller.size, self.reply_end)
        with path.open("wb") as stream, wave.open(stream, "wb") as file:
            file.setnchannels(2)
            file.setsampwidth(2)
            file.setframerate(RATE)
            for start in range(0, total, WRITE_BLOCK_SAMPLES):
                block = np.zeros((min(WRITE_BLOCK_SAMPLES, total - start), 2), dtype="<i2")
                _overlay(block[:, 0], start, self.caller, 0)
                for piece in self.played:
                    _overlay(block[:, 1], start, piece.pcm, piece.start)
                file.writeframesraw(block.tobytes())


def _overlay(block: Pcm, block_start: int, pcm: Pcm, pcm_start: int) -> None:
    """Copies the part of ``pcm`` that falls into the block."""
    start = max(block_start, pcm_start)
    end = min(block_start + block.size, pcm_start + pcm.size)
    if start < end:
        block[start - block_start : end - block_start] = pcm[start - pcm_start : end - pcm_start]


def first_audible(pieces: list[Played]) -> int | None:
    """The first sample of a reply loud enough to be heard; None when all is silence."""
    for piece in pieces:
        loud = np.flatnonzero(np.abs(piece.pcm.astype(np.int32)) >= AUDIBLE_LEVEL)
        if loud.size:
            return piece.start + int(loud[0])
    return None


def write_mono(path: Path, pieces: list[Pcm]) -> None:
    """A mono 16-bit WAV file at 24 kHz. Raises OSError."""
    with path.open("wb") as stream, wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        for pcm in pieces:
            file.writeframesraw(pcm.astype("<i2", copy=False).tobytes())
