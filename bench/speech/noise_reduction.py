"""Noise reduction: its effect on WER and on the voice detector, and its cost.

    python -m bench.speech.noise_reduction ../shared/data [--levels 1 3] [--json OUT]

Recordings in noise, quiet ones, and quiet ones mixed with recorded noise at 5 and 10 dB go to the
recogniser without and with noise reduction at each level (0 to 3). The same for the voice detector
with the default endpointer: turns that start in recordings without speech, and the delay of the
end of speech when the noise goes on for two seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
from pywebrtc_audio import NoiseSuppressor

from audio.endpointing.vad_endpointer import (
    Endpointer,
    ServerVadConfig,
    VoiceEnded,
    VoiceEvent,
    VoiceStarted,
)
from audio.frame import SPEECH_RATE, Samples
from audio.vad import WINDOW_SAMPLES, VadModel, VadStream
from bench.harness.results import Cell, Result, add_json_option, report
from bench.harness.speech import installed_recognizer, load_speech, manifest, word_error_rate

_NOISES = ("office_lk_12s", "typing_a", "holdmusic_lk_15s", "white_25dbfs_10s", "brown_30dbfs_10s")
_NUM_MIXED = 8
_TAIL = 2 * SPEECH_RATE
_FRAME = 320
Spoken = tuple[Samples, str]


def measure(data: Path, levels: list[int]) -> Result:
    """A column without noise reduction and one for each level."""
    rows = manifest(data)
    noisy = [row for row in rows if "/noisy_" in row["file"]]
    quiet = [row for row in rows if row["set"] == "speech"]
    sets: dict[str, list[Spoken]] = {
        name: [(load_speech(data / row["file"]), row["transcript"]) for row in chosen]
        for name, chosen in (("in noise", noisy), ("quiet", quiet))
    }
    short = sorted(sets["quiet"], key=lambda pair: pair[0].size)[:_NUM_MIXED]
    noises = [load_speech(data / "noise" / f"{name}.flac") for name in _NOISES]
    # Samples, and the noise that goes on after them.
    tails = {
        "in noise": [(s, np.resize(s[-SPEECH_RATE // 2 :], _TAIL)) for s, _ in sets["in noise"]]
    }
    for snr in (5, 10):
        name = f"mixed, {snr} dB"
        sets[name] = [
            (mix(samples, noise, snr), text) for samples, text in short for noise in noises
        ]
        longer = [np.pad(samples, (0, _TAIL)) for samples, _ in short]
        mixed = [mix(samples, noise, snr) for samples in longer for noise in noises]
        tails[name] = [(m[:-_TAIL], m[-_TAIL:]) for m in mixed]
    silent = [load_speech(data / row["file"]) for row in rows if row["set"] == "noise"]
    result = Result(("measure", "no reduction", *(f"level {level}" for level in levels)))

    def add(name: str, cell: Callable[[int | None], Cell]) -> None:
        result.add(name, *(cell(level) for level in (None, *levels)))

    recognizer = installed_recognizer()
    for name, pairs in sets.items():

        def wer(level: int | None, pairs: list[Spoken] = pairs) -> float:
            heard = [recognizer.transcribe(reduced(s, level)).text for s, _ in pairs]
            return round(word_error_rate([text for _, text in pairs], heard), 4)

        add(f"WER, {name} ({len(pairs)})", wer)
    vad = VadModel()
    add(
        f"turns started without speech, {len(silent)} recordings",
        lambda level: sum(
            isinstance(event, VoiceStarted)
            for samples in silent
            for event in events(reduced(samples, level), vad)
        ),
    )
    for name, parts in tails.items():
        ends = {level: end_delays_s(parts, level, vad) for level in (None, *levels)}
        add(f"end of speech, {name}, median delay, s", lambda k, e=ends: round(median(e[k]), 2))  # type: ignore[misc]
        add(f"end of speech, {name}, never", lambda k, e=ends, p=parts: len(p) - len(e[k]))  # type: ignore[misc]
    add("cost, share of a core", lambda level: level and cost(silent[0][:_FRAME].copy(), level))
    result.notes = f"Delay of the signal at level {levels[0]}: {delay_samples(levels[0])} samples."
    return result


def end_delays_s(
    parts: list[tuple[Samples, Samples]], level: int | None, vad: VadModel
) -> list[float]:
    """Delay of the last end of speech after the end of the recording, where one was found."""
    delays = []
    for samples, tail in parts:
        run = events(reduced(np.concatenate((samples, tail)), level), vad)
        found = [event.at_sample for event in run if isinstance(event, VoiceEnded)]
        delays += [(found[-1] - samples.size) / SPEECH_RATE] if found else []
    return delays


def cost(frame: Samples, level: int) -> float:
    """Share of a core for frames of 20 ms."""
    suppressor = NoiseSuppressor(level=level)
    started_s = time.perf_counter()
    for _ in range(500):
        suppressor.process(frame)
    return round((time.perf_counter() - started_s) / (500 * 0.02), 5)


def delay_samples(level: int) -> int:
    impulse = np.zeros(16_000, np.float32)
    impulse[8_000] = 0.5
    return int(np.abs(reduced(impulse, level)).argmax()) - 8_000


def reduced(samples: Samples, level: int | None) -> Samples:
    """Noise reduction as in a call, 20 ms at a time; None: none."""
    if level is None:
        return samples
    suppressor = NoiseSuppressor(level=level)
    padded = np.concatenate((samples, np.zeros(-samples.size % _FRAME, np.float32)))
    parts = [suppressor.process(part) for part in padded.reshape(-1, _FRAME)]
    return np.concatenate(parts)[: samples.size]


def mix(samples: Samples, noise: Samples, snr_db: float) -> Samples:
    long = np.resize(noise, samples.size)
    power = np.mean(samples[np.abs(samples) > 0] ** 2)
    ratio = np.sqrt(power / (np.mean(long**2) * 10 ** (snr_db / 10)))
    mixed: Samples = np.clip(samples + long * ratio, -1, 1).astype(np.float32)
    return mixed


def events(samples: Samples, vad: VadModel) -> list[VoiceEvent]:
    """Events of the default endpointer."""
    endpointer, stream = Endpointer(ServerVadConfig()), VadStream(vad)
    found: list[VoiceEvent] = []
    for i, probability in enumerate(stream.detect(samples)):
        found += endpointer.process_window(
            probability, i * WINDOW_SAMPLES, (i + 1) * WINDOW_SAMPLES
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 3])
    add_json_option(parser)
    options = parser.parse_args()
    report(measure(options.data, options.levels), options)


if __name__ == "__main__":
    main()
