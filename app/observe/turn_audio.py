"""The sound of a turn, both sides as they lay in time: kept only when ``PARLEY_RECORD`` is on.

left    [ the caller ... last word ]
right                               ........[ the answer ]
                                    ^ speech_end       ^ what was not heard is cut off
"""

from __future__ import annotations

import io
import os
import re
import wave
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from audio.frame import SPEECH_RATE, Samples
from audio.resample import resample

_NAME = re.compile(r"turn_[0-9a-zA-Z]{1,64}")
_NS = 1_000_000_000


@dataclass(slots=True)
class TurnAudio:
    """Collected while the turn runs.

    ``caller`` float32 [n] at 16 kHz; its sample ``speech_end_sample`` arrived at ``speech_end``, an
    instant in monotonic nanoseconds (both 0 for a typed turn that begins there). ``reply``: chunks
    with the instants at which they began to sound, float32 at ``rate``. What would sound after
    ``stopped_ns`` was not heard; None: the answer was not stopped.
    """

    speech_end_ns: int
    caller: Samples = field(default_factory=lambda: np.zeros(0, np.float32))
    speech_end_sample: int = 0
    rate: int = SPEECH_RATE
    stopped_ns: int | None = None
    reply: list[tuple[int, Samples]] = field(default_factory=list)

    def add_reply(self, chunk: Samples, rate: int, sounds_ns: int) -> None:
        """A piece of the answer that was sent."""
        self.rate = rate
        self.reply.append((sounds_ns, chunk))

    def to_wav(self) -> bytes:
        """Stereo PCM16 at ``rate``."""
        left = resample(self.caller, SPEECH_RATE, self.rate)
        origin = self.speech_end_sample * self.rate // SPEECH_RATE

        def position(at_ns: int) -> int:
            return origin + max(0, at_ns - self.speech_end_ns) * self.rate // _NS

        placed = [(position(at_ns), chunk) for at_ns, chunk in self.reply]
        num_right = max((start + len(chunk) for start, chunk in placed), default=0)
        end = num_right if self.stopped_ns is None else min(num_right, position(self.stopped_ns))
        frames = np.zeros((max(len(left), end), 2), np.float32)
        frames[: len(left), 0] = left
        for start, chunk in placed:
            kept = chunk[: max(0, end - start)]
            frames[start : start + len(kept), 1] = kept
        pcm = (np.clip(frames, -1.0, 1.0) * 32767).astype("<i2")
        content = io.BytesIO()
        with wave.open(content, "wb") as file:
            file.setnchannels(2)
            file.setsampwidth(2)
            file.setframerate(self.rate)
            file.writeframes(pcm.tobytes())
        return content.getvalue()


class AudioFiles:
    """Recordings in a folder, one WAV a turn, within an age and a size. Any thread."""

    def __init__(self, folder: Path, *, max_age_s: float, max_bytes: int) -> None:
        self.max_age_s = max_age_s
        self._folder = folder
        self._max_bytes = max_bytes

    def write(self, turn_id: str, content: bytes) -> None:
        """Whole or not at all; for the owner's ears only. Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / f"{turn_id}.wav"
        partial = path.with_suffix(".part")
        descriptor = os.open(partial, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        partial.replace(path)

    def path(self, turn_id: str) -> Path | None:
        """The recording of a turn, if there is one. ``turn_id`` may be anything."""
        if not _NAME.fullmatch(turn_id):
            return None
        path = self._folder / f"{turn_id}.wav"
        return path if path.is_file() else None

    def newest_s(self) -> float | None:
        """Unix time of the last recording; None: there is none. Raises OSError."""
        return max((stat.st_mtime for stat, _ in self._files()), default=None)

    def prune(self, now_s: float | None) -> int:
        """Delete what is too old at Unix time ``now_s`` (None: nothing is, the time is not known),
        then the oldest until the rest fits. Raises OSError."""
        oldest_s = float("-inf") if now_s is None else now_s - self.max_age_s
        files = self._files()
        files.sort(key=lambda file: file[0].st_mtime, reverse=True)
        kept_bytes = deleted = 0
        for stat, path in files:
            kept_bytes += stat.st_size
            if kept_bytes > self._max_bytes or stat.st_mtime < oldest_s:
                path.unlink(missing_ok=True)
                deleted += 1
        return deleted

    def _files(self) -> list[tuple[os.stat_result, Path]]:
        if not self._folder.is_dir():
            return []
        return [(path.stat(), path) for path in self._folder.iterdir()]
