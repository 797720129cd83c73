"""What noise reduction does to words, to the voice detector, and what it costs.

    python -m bench.speech.noise_reduction ../shared/data [LEVEL ...]

Recordings in noise, quiet ones, and quiet ones mixed with recorded noise at 5 and 10 dB go to the
recogniser as they are and with their noise reduced at each level (0 to 3). The same for the voice
detector with the default endpointer: turns that begin in recordings without any speech, and how
late the end of speech is found when the noise goes on for two seconds.
"""

from __future__ import annotations

import csv
import sys
import time
from pathlib import Path
from statistics import median

import jiwer
import numpy as np
from pywebrtc_audio import NoiseSuppressor
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from app.config import load_settings
from app.models.store import ModelStore
from audio.asr.recognizer import Recognizer
from audio.endpointing.vad_endpointer import (
    Endpointer,
    ServerVadConfig,
    VoiceEnded,
    VoiceEvent,
    VoiceStarted,
)
from audio.files.reader import read_audio
from audio.frame import SPEECH_RATE, Samples
from audio.resample import resample
from audio.text.normalize.english import normalize
from audio.vad import WINDOW_SAMPLES, VadModel, VadStream

_NOISES = ("office_lk_12s", "typing_a", "holdmusic_lk_15s", "white_25dbfs_10s", "brown_30dbfs_10s")
_NUM_MIXED = 8
_TAIL = 2 * SPEECH_RATE
_whisper = EnglishTextNormalizer({})


def main() -> None:
    """Measure and print a table."""
    data = Path(sys.argv[1])
    levels = [int(level) for level in sys.argv[2:]] or [1, 3]
    settings = load_settings()
    recognizer = Recognizer(ModelStore(settings.home).resolve(settings.asr_model))
    vad = VadModel()
    rows = _rows(data)
    sets = {
        "in noise": [
            (load(data / r["file"]), r["transcript"]) for r in rows if "/noisy_" in r["file"]
        ],
        "quiet": [(load(data / r["file"]), r["transcript"]) for r in rows if r["set"] == "speech"],
    }
    short = sorted(sets["quiet"], key=lambda pair: pair[0].size)[:_NUM_MIXED]
    noises = {name: load(data / "noise" / f"{name}.flac") for name in _NOISES}
    for snr in (5, 10):
        sets[f"mixed, {snr} dB"] = [
            (mix(samples, noise, snr), text) for samples, text in short for noise in noises.values()
        ]
    quiet = [load(data / r["file"]) for r in rows if r["set"] == "noise"]
    ways: list[int | None] = [None, *levels]
    print("| | " + " | ".join("as it is" if w is None else f"level {w}" for w in ways) + " |")
    print("|---" * (len(ways) + 1) + "|")
    for name, pairs in sets.items():
        cells = []
        for way in ways:
            heard = [
                words(recognizer.transcribe(reduced(samples, way)).text) for samples, _ in pairs
            ]
            cells.append(f"{jiwer.wer([words(text) for _, text in pairs], heard):.1%}")
        print(f"| WER, {name} ({len(pairs)}) | " + " | ".join(cells) + " |", flush=True)
    cells = []
    for way in ways:
        runs = [events(reduced(samples, way), vad) for samples in quiet]
        starts = [sum(isinstance(e, VoiceStarted) for e in run) for run in runs]
        cells.append(f"{sum(starts)} in {sum(n > 0 for n in starts)} of {len(runs)}")
    print("| turns begun without speech | " + " | ".join(cells) + " |")
    ends = {
        "in noise": [(s, np.resize(s[-SPEECH_RATE // 2 :], _TAIL)) for s, _ in sets["in noise"]]
    }
    for snr in (5, 10):
        longer = [np.pad(samples, (0, _TAIL)) for samples, _ in short]
        mixed = [mix(samples, noise, snr) for samples in longer for noise in noises.values()]
        ends[f"mixed, {snr} dB"] = [(m[:-_TAIL], m[-_TAIL:]) for m in mixed]
    for name, parts in ends.items():
        cells = []
        for way in ways:
            lates: list[float] = []
            for samples, tail in parts:
                run = events(reduced(np.concatenate((samples, tail)), way), vad)
                found = [e.at_sample for e in run if isinstance(e, VoiceEnded)]
                lates += [(found[-1] - samples.size) / SPEECH_RATE] if found else []
            missed = len(parts) - len(lates)
            cells.append(f"{median(lates):.2f} s, {missed} never")
        print(f"| end found after that of the recording, {name} | " + " | ".join(cells) + " |")
    cost = []
    for way in levels:
        suppressor, chunk = NoiseSuppressor(level=way), quiet[0][:320].copy()
        begun = time.perf_counter()
        for _ in range(500):
            suppressor.process(chunk)
        cost.append(f"{(time.perf_counter() - begun) / 10:.5f}")
    print(f"cost, share of a core: {', '.join(cost)}")
    tone = np.zeros(16_000, np.float32)
    tone[8_000] = 0.5
    print(f"delay: {int(np.abs(reduced(tone, levels[0])).argmax()) - 8_000} samples")


def reduced(samples: Samples, level: int | None) -> Samples:
    """As a call would have it, 20 ms at a time."""
    if level is None:
        return samples
    suppressor = NoiseSuppressor(level=level)
    padded = np.concatenate((samples, np.zeros(-samples.size % 320, np.float32)))
    parts = [suppressor.process(part) for part in padded.reshape(-1, 320)]
    return np.concatenate(parts)[: samples.size]


def mix(samples: Samples, noise: Samples, snr_db: float) -> Samples:
    long = np.resize(noise, samples.size)
    power = np.mean(samples[np.abs(samples) > 0] ** 2)
    ratio = np.sqrt(power / (np.mean(long**2) * 10 ** (snr_db / 10)))
    return np.clip(samples + long * ratio, -1, 1).astype(np.float32)


def events(samples: Samples, vad: VadModel) -> list[VoiceEvent]:
    endpointer, stream = Endpointer(ServerVadConfig()), VadStream(vad)
    found: list[VoiceEvent] = []
    for i, probability in enumerate(stream.feed(samples)):
        found += endpointer.feed(probability, i * WINDOW_SAMPLES, (i + 1) * WINDOW_SAMPLES)
    return found


def load(path: Path) -> Samples:
    return resample(*read_audio(path), SPEECH_RATE)


def words(text: str) -> str:
    return " ".join(_whisper(normalize(text)).split()) or "nothing"


def _rows(data: Path) -> list[dict[str, str]]:
    with (data / "MANIFEST.tsv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


if __name__ == "__main__":
    main()
