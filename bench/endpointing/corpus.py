"""Recordings and synthesised prompts for the end-of-turn detector, with word boundaries.

Kinds: `speech` and `hard` are folders of the data set; `tts` are prompts to assistants, spoken by
the installed voice; `clauses` are two prompts in one sentence, with a comma and a conjunction.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from audio.asr.recognizer import Recognizer
from audio.frame import SPEECH_RATE, Samples, silence
from audio.tts.synthesizer import Synthesizer
from bench.harness.speech import load_speech
from bench.voice.script import speech_at

SENTENCE_ENDS = (".", "?", "!")
Word = tuple[str, float, float]
"""A word, its start and its end in seconds."""

_ASKING = frozenset(
    ("what", "how", "why", "when", "where", "who", "can", "could", "do", "does", "is", "are")
)
_CONJUNCTIONS = (", and ", ", but ", ", because ", ", so ", ", if ", ", or ", ", when ", ", then ")


def recordings(
    data: Path, voice: Synthesizer, kind: str, most: int
) -> Iterator[tuple[str, Samples]]:
    """(name, float32 [n] at 16 kHz) of at most ``most`` recordings of one kind."""
    if kind in ("tts", "clauses"):
        texts = _questions(data, most) if kind == "tts" else _clauses(data, most)
        for number, text in enumerate(texts):
            yield f"tts{number}", spoken_prompt(text, voice)
        return
    # Announcements, overlapping voices, codecs of the 1990s: no callers.
    paths = [
        path
        for path in sorted((data / kind).iterdir())
        if path.suffix != ".ulaw"
        and not path.name.startswith(("ivr", "overlap", "stereo", "st48", "c2_"))
    ]
    for path in paths[:most]:
        yield path.name, load_speech(path)


def prompts(data: Path) -> list[str]:
    """Prompts to assistants in a fixed order, with a capital and without a final mark."""
    found = [
        line.split("\t")[column].strip()
        for name, column in (("clinc150_sample.tsv", 1), ("slurp_spoken_sample.tsv", 3))
        for line in (data / "prompts" / name).read_text().splitlines()[1:]
    ]
    random.Random(1).shuffle(found)
    return [text[0].upper() + text[1:] for text in found]


def _questions(data: Path, most: int) -> Iterator[str]:
    for text in prompts(data)[:most]:
        yield text + ("?" if text.split()[0].lower() in _ASKING else ".")


def _clauses(data: Path, most: int) -> Iterator[str]:
    """Two prompts in one sentence: the voice pauses at the comma as speakers do."""
    texts = prompts(data)
    rng = random.Random(2)
    for number in range(most):
        first, second = (texts[(2 * number + n) % len(texts)].rstrip(".?!") for n in (0, 1))
        yield first + rng.choice(_CONJUNCTIONS) + second + "."


def spoken_prompt(text: str, voice: Synthesizer) -> Samples:
    """A third of a second of silence, then the text: float32 [n] at 16 kHz."""
    spoken = speech_at(voice.synthesize(text), voice, SPEECH_RATE)
    return np.concatenate((silence(SPEECH_RATE // 3), spoken))


def word_boundaries(recognizer: Recognizer, samples: Samples) -> list[Word]:
    """Words of a recording, aligned by the library of the recogniser."""
    whisper = recognizer._decoder._whisper
    segments, _ = whisper.transcribe(samples, language="en", word_timestamps=True, temperature=0)
    return [(w.word.strip(), w.start, w.end) for s in segments for w in s.words or ()]


def word_boundaries_without_noise(
    recognizer: Recognizer, data: Path, name: str, samples: Samples
) -> list[Word]:
    """As ``word_boundaries``; for a recording mixed with noise, found in the clean one."""
    if not name.startswith("noisy_"):
        return word_boundaries(recognizer, samples)
    stem = name.removeprefix("noisy_").rpartition("_")[0]
    paths = [data / "speech" / f"{prefix}{stem}.flac" for prefix in ("", "ls_")]
    clean = load_speech(next(path for path in paths if path.exists()))
    # The lag at which the clean recording lies in the noisy one, by cross-correlation.
    size = samples.size + clean.size
    products = np.fft.irfft(np.fft.rfft(samples, size) * np.fft.rfft(clean, size).conj(), size)
    lag = int(products.argmax())
    late = (lag if lag < samples.size else lag - size) / SPEECH_RATE
    words = word_boundaries(recognizer, clean)
    return [(word, start + late, end + late) for word, start, end in words]


def quietest_cut(samples: Samples, at_s: float) -> int | None:
    """Sample at the middle of the quietest 10 ms within 60 ms of ``at_s``; None outside."""
    middle = int(at_s * SPEECH_RATE)
    starts = range(max(0, middle - 960), min(middle + 960, samples.size - 160), 80)
    if not starts:
        return None
    return min(starts, key=lambda s: float(np.square(samples[s : s + 160]).sum())) + 80


def room_noise(samples: Samples, num_samples: int, rng: np.random.Generator) -> Samples:
    """Noise at the level of the quietest frames of ``samples``."""
    frames = samples[: samples.size // 320 * 320].reshape(-1, 320)
    level = max(float(np.percentile(np.sqrt(np.square(frames).mean(axis=1)), 3)), 1e-4)
    return rng.normal(0, level, num_samples).astype(np.float32)


def speaker(name: str) -> str:
    """Group of recordings that must stay on one side of the cross-validation."""
    for prefix in ("pause_", "noisy_", "tel_", "quiet_", "padded_", "ls_"):
        name = name.removeprefix(prefix)
    return name.split("-")[0].split("_")[0] if not name.startswith("tts") else f"tts{name[-1]}"
