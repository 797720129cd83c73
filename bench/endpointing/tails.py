"""What the recogniser's encoder makes of ends and of breaks, for ``bench.endpointing.curve`` to
fit.

    python -m bench.endpointing.tails ../shared/data tails.npz [KINDS] [NUM] [SEED]

KINDS and NUM as in ``bench.endpointing.events``; one more kind, `clauses`: two prompts with a
comma and a conjunction between them, said by the installed voice. Every recording is cut at words
in mid-sentence, in its own pauses there, and at its end; ends are treated like cuts, so that the
knife is no sign. Often a first part is left out, the level changes, 60 to 200 ms of silence follow.

The file: `tails` float32 [n, 4 * width], `is_end`, `is_natural` bool [n], `speakers` [n].
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from app.config import load_settings
from app.models.store import ModelStore
from audio.asr.recognizer import Recognizer
from audio.frame import SPEECH_RATE, Samples
from audio.tts.synthesizer import Synthesizer
from bench.endpointing.events import (
    prompts,
    recordings,
    room,
    speaker,
    spoken_prompt,
    words_with_times,
)

_NUM_CUTS = {"speech": 14, "hard": 8, "tts": 3, "clauses": 1}
_NUM_ENDS = {"speech": 4, "hard": 3, "tts": 1, "clauses": 1}
_SENTENCE_ENDS = (".", "?", "!")
_BREAKS = (*_SENTENCE_ENDS, ",")
_JOINTS = (", and ", ", but ", ", because ", ", so ", ", if ", ", or ", ", when ", ", then ")
_MIN_PAUSE_S = 0.14
_FADE = 80

Word = tuple[str, float, float]


def main() -> None:
    """Collect the ends and breaks of the data folder."""
    data, out = Path(sys.argv[1]), Path(sys.argv[2])
    kinds = sys.argv[3].split(",") if len(sys.argv) > 3 else list(_NUM_CUTS)
    most = int(sys.argv[4]) if len(sys.argv) > 4 else 300
    seed = int(sys.argv[5]) if len(sys.argv) > 5 else 1
    settings = load_settings()
    store = ModelStore(settings.home)
    recognizer = Recognizer(store.resolve(settings.asr_model))
    voice = Synthesizer(store.resolve(settings.tts_model))
    rng = np.random.default_rng(seed)
    tails: list[Samples] = []
    is_end: list[bool] = []
    is_natural: list[bool] = []
    speakers: list[str] = []
    for kind in kinds:
        is_made = kind == "clauses"
        found = clauses(data, voice, most) if is_made else recordings(data, voice, [kind], most)
        for name, _, samples in found:
            words = words_with_times(recognizer, samples)
            if len(words) < 2:
                continue
            for audio, ends, natural in _examples(samples, words, kind, rng):
                tail = recognizer.transcribe(audio).tail
                if tail is None:
                    continue
                tails.append(tail)
                is_end.append(ends)
                is_natural.append(natural)
                speakers.append(speaker(name))
    np.savez(out, tails=tails, is_end=is_end, is_natural=is_natural, speakers=speakers)
    print(f"{len(tails)}: {sum(is_end)} ends, {sum(is_natural)} natural")


def clauses(data: Path, voice: Synthesizer, most: int) -> Iterator[tuple[str, str, Samples]]:
    """Two prompts as one sentence each: the voice pauses at the comma as speakers do."""
    texts = prompts(data)
    rng = random.Random(2)
    for number in range(most):
        first, second = texts[(2 * number) % len(texts)], texts[(2 * number + 1) % len(texts)]
        text = first.rstrip(".?!") + rng.choice(_JOINTS) + second.rstrip(".?!") + "."
        yield f"tts{number}", "clauses", spoken_prompt(text, voice)


def _examples(
    samples: Samples, words: list[Word], kind: str, rng: np.random.Generator
) -> Iterator[tuple[Samples, bool, bool]]:
    last = len(words) - 1
    inside = [i for i in range(last) if not words[i][0].endswith(_SENTENCE_ENDS)]
    rng.shuffle(inside)
    for i in inside[: _NUM_CUTS[kind]]:
        middle = (words[i][2] + words[i + 1][1]) / 2
        yield from _cut(samples, _start(words, i, rng), middle, False, rng)
    for i in inside:
        if words[i + 1][1] - words[i][2] >= _MIN_PAUSE_S:
            yield from _pause(samples, _start(words, i, rng), words[i][2], False, rng)
    for _ in range(_NUM_ENDS[kind]):
        yield from _cut(samples, _start(words, last, rng), words[last][2] + 0.06, True, rng)
        yield from _pause(samples, _start(words, last, rng), words[last][2], True, rng)


def _start(words: list[Word], at: int, rng: np.random.Generator) -> int:
    """Sample at which the example begins: often the recording's first, else behind a break."""
    if rng.random() < 0.5:
        return 0
    firsts = [0, *(i + 1 for i in range(at) if words[i][0].endswith(_BREAKS))]
    return max(0, int(words[rng.choice(firsts)][1] * SPEECH_RATE) - 3_000)


def _cut(
    samples: Samples, start: int, at_s: float, is_end: bool, rng: np.random.Generator
) -> Iterator[tuple[Samples, bool, bool]]:
    """Cut off where it is quietest around ``at_s``; made silence follows."""
    middle = int(at_s * SPEECH_RATE)
    places = range(max(0, middle - 960), min(middle + 960, samples.size - 160), 80)
    if not places:
        return
    cut = min(places, key=lambda s: float(np.square(samples[s : s + 160]).sum())) + _FADE
    part = samples[start:cut].copy()
    if part.size < 10 * _FADE:
        return
    part[-_FADE:] *= np.linspace(1, 0, _FADE, dtype=np.float32)
    silence = room(samples, int(rng.uniform(0.06, 0.2) * SPEECH_RATE), rng)
    yield _at_some_level(np.concatenate((part, silence)), rng), is_end, False


def _pause(
    samples: Samples, start: int, end_s: float, is_end: bool, rng: np.random.Generator
) -> Iterator[tuple[Samples, bool, bool]]:
    """As it was said, until 80 to 160 ms behind the word; silence is added where it ends before."""
    stop = int((end_s + 0.02 + rng.uniform(0.06, 0.14)) * SPEECH_RATE)
    part = samples[start:stop]
    if part.size < 10 * _FADE:
        return
    missing = max(0, stop - start - part.size)
    part = np.concatenate((part, room(samples, missing, rng)))
    yield _at_some_level(part, rng), is_end, True


def _at_some_level(samples: Samples, rng: np.random.Generator) -> Samples:
    return (samples * 10 ** (rng.uniform(-6, 6) / 20)).astype(np.float32)


if __name__ == "__main__":
    main()
