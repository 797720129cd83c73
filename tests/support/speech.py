"""Speech for tests: sentences read by the embedded voice, and recordings of people and rooms.

A test that asks for the fixture `voice` runs on every machine that has the models. One that asks
for `recordings` needs what synthesis lacks (real voices, microphones, rooms, lines), and is skipped
where the recordings are missing. The collection hook below keeps the number of such tests small.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import soundfile as sf

from audio.codecs import to_pcm16
from audio.files.reader import read_audio
from audio.frame import SPEECH_RATE, Samples, silence
from audio.resample import resample
from tests.support.paths import SHARED_DATA

if TYPE_CHECKING:
    from audio.tts.synthesizer import Synthesizer

DATA_DIR = SHARED_DATA
MAX_TESTS_OF_RECORDINGS = 15
"""In tests/integration and tests/browser together."""

WEATHER = "What is the weather like today?"
DOG_OR_CAT = "Should I get a dog or a cat?"
MONOLOGUE = (
    "Yes, I know that there are guide dogs for people who can't see. They learn for about two "
    "years before they begin to work. There are also police dogs, and dogs that find people in "
    "the snow. Some of them live with a family until they are one year old. Then a teacher shows "
    "them how to walk through a busy city, how to stop at every street, and how to find the door "
    "of a shop. I think that a working dog must be very smart and very patient. It may not run "
    "after every cat that it sees. In the evening they play in the garden like all the others. "
    "Please tell me what you think of my answers."
)
"""More than the 30 s that Whisper transcribes at once."""

_NOISE_LEN = 10 * SPEECH_RATE
_LEAD_S = 0.3
_TAIL_S = 0.2
_ROOM_LEVEL = 10 ** (-65 / 20)  # a room is never digitally silent


@dataclass(frozen=True, slots=True)
class Recording:
    """An audio file and the words that are said in it."""

    path: Path
    text: str

    def samples(self, rate: int = SPEECH_RATE) -> Samples:
        """The sound, mono, float32 [n] at ``rate``."""
        return load(self.path, rate)

    def pcm16(self, rate: int) -> bytes:
        """The sound, mono, 16-bit little-endian at ``rate``."""
        return to_pcm16(self.samples(rate)).astype("<i2").tobytes()


@dataclass(frozen=True, slots=True)
class PersonRecording(Recording):
    """A recording of a person. ``voiced_s``: where the voice begins and ends, by an offline VAD."""

    voiced_s: tuple[float, float]


def load(path: Path, rate: int = SPEECH_RATE) -> Samples:
    """An audio file as mono float32 [n] at ``rate``."""
    samples, file_rate = read_audio(path)
    return resample(samples, file_rate, rate)


class Voice:
    """A caller with a synthetic voice.

    Each sentence is synthesised once and kept as a 16 kHz FLAC file in ``folder``, with the noise
    of a quiet room before, under and after it. ``synthesizer`` must depend on the text alone.
    """

    def __init__(self, synthesizer: Synthesizer, folder: Path) -> None:
        self._synthesizer = synthesizer
        self._folder = folder
        self._said: dict[str, Recording] = {}

    def say(self, text: str) -> Recording:
        """A recording of ``text``."""
        if text not in self._said:
            path = self._folder / f"said_{len(self._said)}.flac"
            lead, tail = (silence(int(s * SPEECH_RATE)) for s in (_LEAD_S, _TAIL_S))
            samples = np.concatenate((lead, self.samples(text), tail))
            sf.write(path, samples + noise(samples.size, _ROOM_LEVEL), SPEECH_RATE)
            self._said[text] = Recording(path, text)
        return self._said[text]

    def samples(self, text: str) -> Samples:
        """The bare voice, float32 [n] at 16 kHz, with the pause that suits the last punctuation."""
        return resample(
            self._synthesizer.synthesize(text), self._synthesizer.sample_rate, SPEECH_RATE
        )


def noise(num_samples: int, level: float, seed: int = 0) -> Samples:
    """White noise of the RMS ``level``, float32 [n]."""
    return np.random.default_rng(seed).normal(0.0, level, num_samples).astype(np.float32)


def _brown() -> Samples:
    walk = np.cumsum(noise(_NOISE_LEN, 1.0))
    window = np.ones(801, np.float32) / 801
    centred = walk - np.convolve(walk, window, "same")
    return (centred * (10 ** (-30 / 20) / centred.std())).astype(np.float32)


def _clicks() -> Samples:
    """Sixty keystrokes: 12 ms of fading noise each."""
    rng = np.random.default_rng(0)
    samples = silence(_NOISE_LEN)
    fade = np.exp(-np.arange(200) / 30)
    for start in rng.integers(0, _NOISE_LEN - 200, 60):
        samples[start : start + 200] += (rng.normal(0.0, 0.2, 200) * fade).astype(np.float32)
    return samples


def _chords() -> Samples:
    """Five major chords that fade, with overtones."""
    samples = silence(_NOISE_LEN)
    chord_len = _NOISE_LEN // 5
    t = np.arange(chord_len) / SPEECH_RATE
    for i, root_hz in enumerate((262, 220, 349, 392, 262)):
        for interval in (1.0, 1.26, 1.5):
            for overtone in (1, 2, 3):
                tone = np.sin(2 * np.pi * root_hz * interval * overtone * t) * np.exp(-t)
                part = (0.08 / overtone * tone).astype(np.float32)
                samples[i * chord_len : (i + 1) * chord_len] += part
    return samples


def _hum() -> Samples:
    t = np.arange(_NOISE_LEN) / SPEECH_RATE
    return (0.03 * np.sign(np.sin(2 * np.pi * 50 * t))).astype(np.float32)


NOISES: Mapping[str, Callable[[], Samples]] = {
    "silence": lambda: silence(_NOISE_LEN),
    "faint": lambda: noise(_NOISE_LEN, 10 ** (-60 / 20)),
    "white": lambda: noise(_NOISE_LEN, 10 ** (-25 / 20)),
    "brown": _brown,
    "clicks": _clicks,
    "chords": _chords,
    "hum": _hum,
}
"""Ten seconds without a voice, mono, float32 [n] at 16 kHz."""


class Recordings:
    """The recordings in ``folder`` and what its MANIFEST.tsv says of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with (folder / "MANIFEST.tsv").open(encoding="utf-8", newline="") as manifest:
            self._rows = {row["file"]: row for row in csv.DictReader(manifest, delimiter="\t")}

    def samples(self, name: str) -> Samples:
        """The sound of any file, e.g. ``noise/typing_a.flac``: mono, float32 [n] at 16 kHz."""
        return load(self.folder / name)

    def person(self, name: str) -> PersonRecording:
        """A recording of a person, e.g. ``speech/jfk.flac``."""
        row = self._rows[name]
        voiced_s = float(row["vad_start_s"]), float(row["vad_end_s"])
        return PersonRecording(self.folder / name, row["transcript"], voiced_s)

    def names(self, kind: str) -> Sequence[str]:
        """The files of one kind: ``speech``, ``hard``, ``noise``."""
        return [name for name, row in self._rows.items() if row["set"] == kind]


@pytest.fixture(scope="session")
def recordings() -> Recordings:
    """Recordings of people and rooms, beside the project."""
    if not (DATA_DIR / "MANIFEST.tsv").is_file():
        pytest.skip("needs recordings of people or rooms; there are none in ../shared/data")
    return Recordings(DATA_DIR)


@pytest.fixture(scope="session")
def voice(tts_voice_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Voice:
    """The embedded voice as a caller."""
    from audio.tts.synthesizer import Synthesizer  # slow to import, and most tests never speak

    synthesizer = Synthesizer(tts_voice_path, noise_scale=0.0, noise_w_scale=0.0)
    return Voice(synthesizer, tmp_path_factory.mktemp("said"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse to run when a machine without recordings would skip too many tests.

    It counts the tests that could be skipped, so it fails where the recordings are, too.
    """
    found = [
        item.nodeid
        for item in items
        if "recordings" in getattr(item, "fixturenames", ())
        and item.path.parent.name in ("integration", "browser")
    ]
    if len(found) > MAX_TESTS_OF_RECORDINGS:
        raise pytest.UsageError(
            f"{len(found)} tests need recordings of people or rooms, expected at most "
            f"{MAX_TESTS_OF_RECORDINGS}. Use the fixture `voice` of tests/support/speech.py, "
            "or check several recordings in one test:\n" + "\n".join(found)
        )
