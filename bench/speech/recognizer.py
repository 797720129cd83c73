"""Our recogniser beside plain faster-whisper with the same model: words, time, and silence.

    python -m bench.speech.recognizer ../shared/data [NUM]

Every recording of MANIFEST.tsv's speech set (or the first NUM) goes to both in turn, one thread
each; faster-whisper as it comes (30 s of context, beam 5). Then the noise set goes to both; ours
must say nothing.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import jiwer
from faster_whisper import WhisperModel
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from app.config import load_settings
from app.models.store import ModelStore
from audio.asr.recognizer import Recognizer
from audio.files.reader import read_audio
from audio.frame import SPEECH_RATE, Samples
from audio.resample import resample
from audio.text.normalize.english import normalize

_CLASSES_S = ((0, 3), (3, 6), (6, 12), (12, 1_000))
_whisper = EnglishTextNormalizer({})


def main() -> None:
    """Measure and print."""
    data = Path(sys.argv[1])
    num = int(sys.argv[2]) if len(sys.argv) > 2 else None
    settings = load_settings()
    model_dir = ModelStore(settings.home).resolve(settings.asr_model)
    ours = Recognizer(model_dir)
    ours.warm_up()
    plain = WhisperModel(str(model_dir), device="cpu", compute_type="int8", cpu_threads=1)

    def hear_plain(samples: Samples) -> str:
        segments, _ = plain.transcribe(samples, language="en")
        return "".join(segment.text for segment in segments)

    hearers: dict[str, Callable[[Samples], str]] = {
        "ours": lambda samples: ours.transcribe(samples).text,
        "plain": hear_plain,
    }
    said: list[str] = []
    heard: dict[str, list[str]] = {name: [] for name in hearers}
    took: list[tuple[float, dict[str, float]]] = []
    for row in _rows(data, "speech")[:num]:
        samples = _load(data / row["file"])
        said.append(_words(row["transcript"]))
        times = {}
        for name, hear in hearers.items():
            begun_s = time.perf_counter()
            heard[name].append(_words(hear(samples)))
            times[name] = (time.perf_counter() - begun_s) * 1000
        took.append((samples.size / SPEECH_RATE, times))
    for low, high in _CLASSES_S:
        some = [times for seconds, times in took if low <= seconds < high]
        if some:
            a, b = (median(t[name] for t in some) for name in ("ours", "plain"))
            ratio = median(t["plain"] / t["ours"] for t in some)
            print(f"{low}-{high} s ({len(some)}): {a:.0f} ms, plain {b:.0f} ms, ratio {ratio:.1f}")
    for name, texts in heard.items():
        print(f"{name}: WER {jiwer.wer(said, texts):.2%} of {len(said)} recordings")
    noises = _rows(data, "noise")
    for name, hear in hearers.items():
        loud = [text for row in noises if (text := hear(_load(data / row["file"])).strip())]
        print(f"{name}: words in {len(loud)} of {len(noises)} recordings without speech")


def _rows(data: Path, part: str) -> list[dict[str, str]]:
    with (data / "MANIFEST.tsv").open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file, delimiter="\t") if row["set"] == part]


def _load(path: Path) -> Samples:
    return resample(*read_audio(path), SPEECH_RATE)


def _words(text: str) -> str:
    """Text for comparison: numbers as words, digit strings split, as Whisper's authors do it."""
    words = _whisper(normalize(text)).split()
    return " ".join(" ".join(w) if w.isdigit() else w for w in words) or "nothing"


if __name__ == "__main__":
    main()
