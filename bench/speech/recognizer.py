"""Our recogniser and plain faster-whisper with the same model: latency, WER, and noise.

    python -m bench.speech.recognizer ../shared/data [--num 10] [--json OUT]

Recordings of the set `speech` go to both in turn, with one thread each; faster-whisper as it comes
(30 s of context, beam 5). Then the set `noise` goes to both, where no words are right.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from faster_whisper import WhisperModel

from audio.frame import SPEECH_RATE, Samples
from bench.harness.results import Result, add_json_option, report
from bench.harness.rounds import Rounds
from bench.harness.speech import (
    installed_model,
    installed_recognizer,
    load_speech,
    manifest,
    word_error_rate,
)

_LENGTHS_S = ((0, 3), (3, 6), (6, 12), (12, 1_000))


def recognizers() -> dict[str, Callable[[Samples], str]]:
    """Transcribing functions by name."""
    ours = installed_recognizer()
    ours.warm_up()
    whisper = WhisperModel(
        str(installed_model("asr_model")), device="cpu", compute_type="int8", cpu_threads=1
    )

    def plain(samples: Samples) -> str:
        segments, _ = whisper.transcribe(samples, language="en")
        return "".join(segment.text for segment in segments)

    return {"parley": lambda samples: ours.transcribe(samples).text, "faster-whisper": plain}


def measure(data: Path, num: int | None) -> Result:
    """Latency by length of the recording, WER, and recordings of noise with words."""
    transcribers = recognizers()
    references: list[str] = []
    heard: dict[str, list[str]] = {name: [] for name in transcribers}
    by_length = {length: Rounds() for length in _LENGTHS_S}
    for row in manifest(data, "speech")[:num]:
        samples = load_speech(data / row["file"])
        references.append(row["transcript"])
        times = {}
        for name, transcribe in transcribers.items():
            started_s = time.perf_counter()
            heard[name].append(transcribe(samples))
            times[name] = {"ms": (time.perf_counter() - started_s) * 1000}
        seconds = samples.size / SPEECH_RATE
        by_length[next(x for x in _LENGTHS_S if x[0] <= seconds < x[1])].add(times)
    ours, plain = transcribers
    result = Result(("measure", ours, plain, "ratio"))
    for (low, high), rounds in by_length.items():
        if not rounds.sides:
            continue
        count = len(rounds.figures[ours])
        cells = [round(rounds.medians(name)["ms"]) for name in (ours, plain)]
        ratio = round(rounds.ratios(plain, ours)["ms"], 1)
        result.add(f"{low} to {high} s ({count}), ms", *cells, ratio)
    rates = [round(word_error_rate(references, heard[name]), 4) for name in (ours, plain)]
    result.add(f"WER, {len(references)} recordings", *rates, None)
    noises = [load_speech(data / row["file"]) for row in manifest(data, "noise")]
    counts = [
        sum(bool(transcribers[name](samples).strip()) for samples in noises)
        for name in (ours, plain)
    ]
    result.add(f"words in recordings without speech, of {len(noises)}", *counts, None)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--num", type=int, help="the first recordings only")
    add_json_option(parser)
    options = parser.parse_args()
    report(measure(options.data, options.num), options)


if __name__ == "__main__":
    main()
