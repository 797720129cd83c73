"""A folder of recordings in place of the script of the voice benchmark."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from app.clients.talk import load_caller_audio
from app.errors import ParleyError
from audio.vad import VadModel
from bench.voice.script import Kind, Utterance

SUFFIXES = (".wav", ".flac", ".ogg")
MAX_S = 30.0  # a longer recording is no single turn
_EXPECTED = (
    f"expected {', '.join(SUFFIXES)} files of a caller's voice, one turn each, up to {MAX_S:g} s"
)
_NUM_SHOWN = 5


@dataclass
class Recordings:
    """A folder of recordings, read when needed. ``left_out``: why a file is unusable, by name."""

    folder: Path
    vad: VadModel
    left_out: dict[str, str] = field(default_factory=dict)
    _read: dict[Path, Utterance] = field(default_factory=dict)

    def distribute(self, callers: int, turns: int) -> list[list[Utterance]]:
        """``turns`` recordings for each caller, the same on every run.

        Every recording is used once before any is used again, then in another order. Callers start
        with different ones, and unused files are not read. Raises ParleyError when the folder
        cannot be read or has no usable recording.
        """
        recordings = self._in_order()
        return [list(itertools.islice(recordings, turns)) for _ in range(callers)]

    def to_dict(self) -> dict[str, object]:
        """Counts for JSON."""
        num_known = sum(said.text is not None for said in self._read.values())
        return {"said": len(self._read), "transcripts": num_known, "left_out": self.left_out}

    def _in_order(self) -> Iterator[Utterance]:
        paths = self._paths()
        for seed in itertools.count():
            random.Random(seed).shuffle(order := [*paths])
            for path in order:
                if path.name not in self.left_out and (said := self._utterance(path)) is not None:
                    yield said
            if not self._read:
                raise ParleyError(self._no_recording(paths))

    def _paths(self) -> list[Path]:
        try:
            paths = [path for path in self.folder.iterdir() if path.suffix.lower() in SUFFIXES]
        except OSError as error:
            raise ParleyError(
                f"cannot read the directory {self.folder}: {error.strerror}"
            ) from error
        if not paths:
            raise ParleyError(f"there are no recordings in {self.folder}: {_EXPECTED}")
        return sorted(paths)

    def _utterance(self, path: Path) -> Utterance | None:
        if path not in self._read:
            try:
                self._read[path] = read_recording(path, self.vad)
            except ParleyError as error:
                self.left_out[path.name] = error.message
        return self._read.get(path)

    def _no_recording(self, paths: list[Path]) -> str:
        shown = [f"  {self.left_out[path.name]}" for path in paths[:_NUM_SHOWN]]
        if len(paths) > _NUM_SHOWN:
            shown.append(f"  and {len(paths) - _NUM_SHOWN} more")
        reasons = "\n".join(shown)
        return f"no recording in {self.folder} can be said: {_EXPECTED}\n{reasons}"


def read_recording(path: Path, vad: VadModel) -> Utterance:
    """A recording, with its words where a file NAME.txt beside it has them.

    Raises ParleyError when either cannot be read, or the recording is too long or has no voice.
    """
    audio = load_caller_audio(path, vad, max_s=MAX_S)
    if not audio.voiced.found:
        raise ParleyError(f"there is no voice in {path}: expected one turn of a caller")
    return Utterance(Kind.PLAIN, _transcript(path.with_suffix(".txt")), audio)


def _transcript(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8-sig").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ParleyError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ParleyError(f"{path} is not text in UTF-8: expected what is said") from error
    if not text:
        raise ParleyError(f"{path} is empty: expected what is said, or no such file")
    return text
