"""States of the recogniser's encoder at ends of turns and inside them, for ``endpointing.curve``.

    python -m bench.endpointing.tails ../shared/data tails.npz [--kinds speech hard tts clauses] \
        [--num 300] [--seed 1]

Every recording is cut at words in mid-sentence, in its own pauses there, and at its end. Ends are
cut like the others, so that the cut itself is no feature. Often a first part is left out; the level
varies, and 60 to 200 ms of silence follow. The file: `tails` float32 [n, 4 * width], `is_end`,
`is_natural` bool [n], `speakers` [n].
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from audio.frame import SPEECH_RATE, Samples
from bench.endpointing.corpus import (
    SENTENCE_ENDS,
    Word,
    quietest_cut,
    recordings,
    room_noise,
    speaker,
    word_boundaries,
)
from bench.harness.speech import installed_recognizer, installed_voice

_NUM_CUTS = {"speech": 14, "hard": 8, "tts": 3, "clauses": 1}
_NUM_ENDS = {"speech": 4, "hard": 3, "tts": 1, "clauses": 1}
_MIN_PAUSE_S = 0.14
_FADE = 80
Example = tuple[Samples, bool, bool]
"""Audio, whether the turn ends there, whether the pause is natural."""


def collect(options: argparse.Namespace) -> None:
    """Write the tails of all examples."""
    recognizer, (voice, _) = installed_recognizer(), installed_voice()
    rng = np.random.default_rng(options.seed)
    rows: list[tuple[Samples, bool, bool, str]] = []
    for kind in options.kinds:
        for name, samples in recordings(options.data, voice, kind, options.num):
            words = word_boundaries(recognizer, samples)
            if len(words) < 2:
                continue
            for audio, is_end, is_natural in _examples(samples, words, kind, rng):
                tail = recognizer.transcribe(audio).pooled_features
                if tail is not None:
                    rows.append((tail, is_end, is_natural, speaker(name)))
    tails, is_end, is_natural, speakers = map(list, zip(*rows, strict=True))
    np.savez(options.out, tails=tails, is_end=is_end, is_natural=is_natural, speakers=speakers)
    print(f"{len(rows)} examples: {sum(is_end)} ends, {sum(is_natural)} natural")


def _examples(
    samples: Samples, words: list[Word], kind: str, rng: np.random.Generator
) -> Iterator[Example]:
    last = len(words) - 1
    inside = [i for i in range(last) if not words[i][0].endswith(SENTENCE_ENDS)]
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
    """First sample of the example: of the recording, or of a clause before word ``at``."""
    if rng.random() < 0.5:
        return 0
    firsts = [0, *(i + 1 for i in range(at) if words[i][0].endswith((*SENTENCE_ENDS, ",")))]
    return max(0, int(words[rng.choice(firsts)][1] * SPEECH_RATE) - 3_000)


def _cut(
    samples: Samples, start: int, at_s: float, is_end: bool, rng: np.random.Generator
) -> Iterator[Example]:
    """Cut at the quietest place around ``at_s``, with synthetic silence after it."""
    cut = quietest_cut(samples, at_s)
    if cut is None or cut - start < 10 * _FADE:
        return
    part = samples[start:cut].copy()
    part[-_FADE:] *= np.linspace(1, 0, _FADE, dtype=np.float32)
    silence = room_noise(samples, int(rng.uniform(0.06, 0.2) * SPEECH_RATE), rng)
    yield _at_random_level(np.concatenate((part, silence)), rng), is_end, False


def _pause(
    samples: Samples, start: int, end_s: float, is_end: bool, rng: np.random.Generator
) -> Iterator[Example]:
    """The original audio until 80 to 160 ms after the word, padded where it ends before."""
    stop = int((end_s + 0.02 + rng.uniform(0.06, 0.14)) * SPEECH_RATE)
    part = samples[start:stop]
    if part.size < 10 * _FADE:
        return
    missing = max(0, stop - start - part.size)
    part = np.concatenate((part, room_noise(samples, missing, rng)))
    yield _at_random_level(part, rng), is_end, True


def _at_random_level(samples: Samples, rng: np.random.Generator) -> Samples:
    changed: Samples = (samples * 10 ** (rng.uniform(-6, 6) / 20)).astype(np.float32)
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=list(_NUM_CUTS), default=list(_NUM_CUTS))
    parser.add_argument("--num", type=int, default=300, help="recordings of each kind, at most")
    parser.add_argument("--seed", type=int, default=1)
    collect(parser.parse_args())


if __name__ == "__main__":
    main()
