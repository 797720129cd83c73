"""Pauses in recordings, and what is known at each: the data behind docs/turn-end.svg.

    python -m bench.endpointing.events ../shared/data events.jsonl [KINDS] [NUM]

KINDS: of the three below, with commas between them. NUM: only so many recordings and prompts of
each kind, to try it out.

Every recording gives its own pauses and its end; into most of them pauses of 0.3 to 1 s are spliced
at random words, and prompts are spoken by the installed voice and treated the same. One JSON object
a pause: `is_end`, `is_spliced`, `pause_ms` (null at the end), `text` up to there, `prosody`, the
recogniser's `end_marks` and `tail`, `end_logprob`, the `turn_model`'s probability a little later,
`speaker` (for cross-validation) and `kind` (speech, hard, tts).
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from app.config import Settings, load_settings
from app.conversation.input.endpointing import end_of_turn_logprob
from app.models.store import ModelStore
from audio.asr.recognizer import Recognizer
from audio.endpointing.prosody import measure_end
from audio.endpointing.smart_turn import TurnModel
from audio.endpointing.speech_offset import find_voice_end
from audio.endpointing.vad_endpointer import (
    Endpointer,
    ServerVadConfig,
    VoicePaused,
    VoiceResumed,
    VoiceStarted,
)
from audio.files.reader import read_audio
from audio.frame import SPEECH_RATE, Samples
from audio.resample import resample
from audio.tts.synthesizer import Synthesizer
from audio.vad import WINDOW_SAMPLES, VadModel
from bench.voice.script import speech_at
from llm_core import ChatMessage, EngineClient, EngineConfig

_MIN_PAUSE_MS = 240
_EAGER_MS = 64
# The turn model is asked so long after the recogniser.
_LATER_MS = 64
_NUM_PROMPTS = 60
# Pauses spliced into a recording of each kind.
_SPLICES = {"speech": 5, "hard": 2, "tts": 2}
_SENTENCE_ENDS = (".", "?", "!")


def main() -> None:
    """Collect all pauses of the data folder."""
    data, out = Path(sys.argv[1]), Path(sys.argv[2])
    kinds = sys.argv[3].split(",") if len(sys.argv) > 3 else list(_SPLICES)
    most = int(sys.argv[4]) if len(sys.argv) > 4 else _NUM_PROMPTS
    asyncio.run(_collect(data, out, kinds, most))


async def _collect(data: Path, out: Path, kinds: list[str], most: int) -> None:
    settings = load_settings()
    store = ModelStore(settings.home)
    recognizer = Recognizer(store.resolve(settings.asr_model))
    voice = Synthesizer(store.resolve(settings.tts_model))
    turn_model = TurnModel(store.resolve("package:smart-turn-v3.2"))
    vad, rng = VadModel(), np.random.default_rng(1)
    config = EngineConfig(model_path=str(store.resolve(settings.llm_model)), max_context=1024)
    engine = await EngineClient.start(config)
    try:
        with out.open("w") as file:
            for name, kind, samples in recordings(data, voice, kinds, most):
                words = words_with_times(recognizer, samples)
                if (clean := _without_noise(data, name)) is not None:
                    words = _moved(words_with_times(recognizer, clean), samples, clean)
                for at, audio in _spliced(samples, words, kind, rng):
                    for event in _pauses(audio, vad, recognizer, turn_model, words, at):
                        event |= {"name": name, "kind": kind, "speaker": speaker(name)}
                        event["end_logprob"] = await _logprob(engine, settings, event["text"])
                        file.write(json.dumps(event) + "\n")
                        file.flush()
    finally:
        await engine.close()


def recordings(
    data: Path, voice: Synthesizer, kinds: list[str], most: int
) -> Iterator[tuple[str, str, Samples]]:
    for kind in kinds:
        if kind == "tts":
            yield from _prompts(data, voice, most)
            continue
        # Announcements, several voices at once, codecs of the 1990s: no callers.
        paths = [
            path
            for path in sorted((data / kind).iterdir())
            if path.suffix != ".ulaw"
            and not path.name.startswith(("ivr", "overlap", "stereo", "st48", "c2_"))
        ]
        for path in paths[:most]:
            samples, rate = read_audio(path)
            yield path.name, kind, resample(samples, rate, SPEECH_RATE)


def _without_noise(data: Path, name: str) -> Samples | None:
    """What was mixed with noise for ``name``: where sentences end is not to depend on noise."""
    if not name.startswith("noisy_"):
        return None
    stem = name.removeprefix("noisy_").rpartition("_")[0]
    paths = [data / "speech" / f"{prefix}{stem}.flac" for prefix in ("", "ls_")]
    samples, rate = read_audio(next(path for path in paths if path.exists()))
    return resample(samples, rate, SPEECH_RATE)


def _moved(
    words: list[tuple[str, float, float]], samples: Samples, clean: Samples
) -> list[tuple[str, float, float]]:
    """Words of ``clean`` with their times in ``samples``, which holds it somewhere."""
    size = samples.size + clean.size
    products = np.fft.irfft(np.fft.rfft(samples, size) * np.fft.rfft(clean, size).conj(), size)
    lag = int(products.argmax())
    late = (lag if lag < samples.size else lag - size) / SPEECH_RATE
    return [(word, begin + late, end + late) for word, begin, end in words]


def _prompts(data: Path, voice: Synthesizer, most: int) -> Iterator[tuple[str, str, Samples]]:
    for number, text in enumerate(prompts(data)[:most]):
        mark = "?" if text.split()[0].lower() in _ASKING else "."
        yield f"tts{number}", "tts", spoken_prompt(text + mark, voice)


def prompts(data: Path) -> list[str]:
    """What people say to assistants, with a capital and no mark at the end, in a fixed order."""
    found = [
        line.split("\t")[column].strip()
        for name, column in (("clinc150_sample.tsv", 1), ("slurp_spoken_sample.tsv", 3))
        for line in (data / "prompts" / name).read_text().splitlines()[1:]
    ]
    random.Random(1).shuffle(found)
    return [text[0].upper() + text[1:] for text in found]


def spoken_prompt(text: str, voice: Synthesizer) -> Samples:
    """A third of a second of silence, then the text: float32 [n] at 16 kHz."""
    lead = np.zeros(SPEECH_RATE // 3, np.float32)
    return np.concatenate((lead, speech_at(voice.synthesize(text), voice, SPEECH_RATE)))


_ASKING = frozenset(
    ("what", "how", "why", "when", "where", "who", "can", "could", "do", "does", "is", "are")
)


def words_with_times(recognizer: Recognizer, samples: Samples) -> list[tuple[str, float, float]]:
    """Words of the whole recording with their times, by the library's own alignment."""
    whisper = recognizer._decoder._whisper
    segments, _ = whisper.transcribe(samples, language="en", word_timestamps=True, temperature=0)
    return [(w.word.strip(), w.start, w.end) for s in segments for w in s.words or ()]


def _spliced(
    samples: Samples, words: list[tuple[str, float, float]], kind: str, rng: np.random.Generator
) -> Iterator[tuple[float | None, Samples]]:
    """The recording as it is (None), and with a pause spliced in after a second."""
    yield None, samples
    inside = [i for i in range(1, len(words) - 1) if not words[i][0].endswith(_SENTENCE_ENDS)]
    rng.shuffle(inside)
    for i in inside[: _SPLICES[kind]]:
        middle = int((words[i][2] + words[i + 1][1]) / 2 * SPEECH_RATE)
        starts = range(max(0, middle - 960), middle + 960, 80)
        cut = min(starts, key=lambda s: float(np.square(samples[s : s + 160]).sum())) + 80
        first, second = samples[:cut].copy(), samples[cut:].copy()
        if min(first.size, second.size) < 80:
            continue
        fade = np.linspace(0, 1, min(80, first.size, second.size), dtype=np.float32)
        first[-fade.size :] *= fade[::-1]
        second[: fade.size] *= fade
        gap = room(samples, int(rng.uniform(0.3, 1.0) * SPEECH_RATE), rng)
        yield cut / SPEECH_RATE, np.concatenate((first, gap, second))


def room(samples: Samples, num_samples: int, rng: np.random.Generator) -> Samples:
    frames = samples[: samples.size // 320 * 320].reshape(-1, 320)
    level = max(float(np.percentile(np.sqrt(np.square(frames).mean(axis=1)), 3)), 1e-4)
    return rng.normal(0, level, num_samples).astype(np.float32)


def _pauses(
    samples: Samples,
    vad: VadModel,
    recognizer: Recognizer,
    turn_model: TurnModel,
    words: list[tuple[str, float, float]],
    spliced_at: float | None,
) -> Iterator[dict[str, Any]]:
    audio = np.concatenate((samples, room(samples, 2 * SPEECH_RATE, np.random.default_rng(0))))
    endpointer = Endpointer(ServerVadConfig(silence_ms=6_000, eager_silence_ms=_EAGER_MS))
    start: int | None = None
    found: list[tuple[int, int, int | None]] = []
    for i, probability in enumerate(vad.probabilities(audio)):
        now = (i + 1) * WINDOW_SAMPLES
        for event in endpointer.feed(float(probability), now - WINDOW_SAMPLES, now):
            if isinstance(event, VoiceStarted):
                start = event.start_sample if start is None else start
            elif isinstance(event, VoicePaused):
                found.append((event.last_voiced_sample, now, None))
            elif isinstance(event, VoiceResumed):
                found[-1] = (*found[-1][:2], event.sample)
    for voiced, at, resumed in found:
        is_end = resumed is None
        pause_ms = None if resumed is None else (resumed - voiced) * 1000 / SPEECH_RATE
        is_spliced = spliced_at is not None and abs(voiced / SPEECH_RATE - spliced_at) < 0.35
        said = [word for word, begin, _ in words if begin < voiced / SPEECH_RATE + 0.1]
        between = bool(said) and said[-1].endswith(_SENTENCE_ENDS) and not is_end
        if (pause_ms or 1_000) < _MIN_PAUSE_MS or (between and not is_spliced):
            continue
        if spliced_at is not None and (is_end or not is_spliced):
            continue
        turn = audio[start or 0 : at]
        prosody = measure_end(turn, find_voice_end(turn, voiced - (start or 0)))
        heard = recognizer.transcribe(turn)
        if heard.text:
            melody = (prosody.pitch_drop, prosody.pitch_slope)
            run = (prosody.last_run_s, prosody.pitched_share)
            values = (*prosody.levels_db, *melody, *run)
            yield {
                "is_end": is_end,
                "is_spliced": is_spliced,
                "pause_ms": pause_ms,
                "turn_s": turn.size / SPEECH_RATE,
                "text": heard.text,
                "prosody": values,
                "turn_model": turn_model.probability(
                    audio[start or 0 : at + _LATER_MS * SPEECH_RATE // 1000]
                ),
                "end_marks": None if heard.end_marks is None else astuple(heard.end_marks),
                "tail": None if heard.tail is None else np.round(heard.tail, 4).tolist(),
            }


async def _logprob(engine: EngineClient, settings: Settings, text: str) -> float | None:
    prompt = [ChatMessage("system", settings.instructions), ChatMessage("user", text)]
    return await end_of_turn_logprob(engine, prompt, timeout_s=10.0)


def speaker(name: str) -> str:
    """Recordings of one speaker are never on both sides of the cross-validation."""
    for prefix in ("pause_", "noisy_", "tel_", "quiet_", "padded_", "ls_"):
        name = name.removeprefix(prefix)
    return name.split("-")[0].split("_")[0] if not name.startswith("tts") else f"tts{name[-1]}"


if __name__ == "__main__":
    main()
