"""Pauses in recordings with the features of the end-of-turn detector, for ``endpointing.curve``.

    python -m bench.endpointing.events ../shared/data events.jsonl [--kinds speech hard tts] \
        [--num 60]

Every recording gives its own pauses and its end. Further pauses of 0.3 to 1 s are spliced into it
at random words. One JSON object a pause: `is_end`, `is_spliced`, `pause_ms` (null at the end),
`text` up to there, `prosody`, `end_marks` and `tail` of the recogniser, `end_logprob` of the
language model, the probability of the `turn_model`, `speaker` (for cross-validation) and `kind`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from app.config import load_settings
from app.conversation.input.endpointing import end_of_turn_logprob
from app.models.store import ModelStore
from audio.asr.recognizer import Recognizer
from audio.endpointing.prosody import measure_prosody
from audio.endpointing.smart_turn import SmartTurnModel
from audio.endpointing.speech_offset import find_speech_offset
from audio.endpointing.vad_endpointer import (
    Endpointer,
    ServerVadConfig,
    VoicePaused,
    VoiceResumed,
    VoiceStarted,
)
from audio.frame import SPEECH_RATE, Samples
from audio.vad import WINDOW_SAMPLES, VadModel
from bench.endpointing.corpus import (
    SENTENCE_ENDS,
    Word,
    quietest_cut,
    recordings,
    room_noise,
    speaker,
    word_boundaries_without_noise,
)
from bench.harness.speech import installed_recognizer, installed_voice
from llm_core import ChatMessage, EngineClient, EngineConfig

_MIN_PAUSE_MS = 240
_EAGER_MS = 64
_TURN_MODEL_DELAY_MS = 64  # after the recogniser
_SPLICES = {"speech": 5, "hard": 2, "tts": 2}  # pauses spliced into a recording of each kind


async def collect(options: argparse.Namespace) -> None:
    """Write all pauses of the data folder."""
    settings = load_settings()
    store = ModelStore(settings.home)
    recognizer, (voice, vad) = installed_recognizer(), installed_voice()
    turn_model = SmartTurnModel(store.resolve("package:smart-turn-v3.2"))
    rng = np.random.default_rng(1)
    config = EngineConfig(model_path=str(store.resolve(settings.llm_model)), max_context=1024)
    engine = await EngineClient.start(config)
    try:
        with options.out.open("w") as file:
            for kind in options.kinds:
                for name, samples in recordings(options.data, voice, kind, options.num):
                    words = word_boundaries_without_noise(recognizer, options.data, name, samples)
                    for at_s, audio in _spliced(samples, words, kind, rng):
                        for event in _pauses(audio, vad, recognizer, turn_model, words, at_s):
                            event |= {"name": name, "kind": kind, "speaker": speaker(name)}
                            prompt = [
                                ChatMessage("system", settings.instructions),
                                ChatMessage("user", event["text"]),
                            ]
                            event["end_logprob"] = await end_of_turn_logprob(
                                engine, prompt, timeout_s=10.0
                            )
                            file.write(json.dumps(event) + "\n")
                            file.flush()
    finally:
        await engine.close()


def _spliced(
    samples: Samples, words: list[Word], kind: str, rng: np.random.Generator
) -> Iterator[tuple[float | None, Samples]]:
    """The recording unchanged (None), then with one spliced pause each, and the second of it."""
    yield None, samples
    inside = [i for i in range(1, len(words) - 1) if not words[i][0].endswith(SENTENCE_ENDS)]
    rng.shuffle(inside)
    for i in inside[: _SPLICES[kind]]:
        cut = quietest_cut(samples, (words[i][2] + words[i + 1][1]) / 2)
        if cut is None or min(cut, samples.size - cut) < 80:
            continue
        first, second = samples[:cut].copy(), samples[cut:].copy()
        fade = np.linspace(0, 1, 80, dtype=np.float32)
        first[-fade.size :] *= fade[::-1]
        second[: fade.size] *= fade
        gap = room_noise(samples, int(rng.uniform(0.3, 1.0) * SPEECH_RATE), rng)
        yield cut / SPEECH_RATE, np.concatenate((first, gap, second))


def _pauses(
    samples: Samples,
    vad: VadModel,
    recognizer: Recognizer,
    turn_model: SmartTurnModel,
    words: list[Word],
    spliced_at: float | None,
) -> Iterator[dict[str, Any]]:
    """Features of every pause that a detector would judge."""
    audio = np.concatenate(
        (samples, room_noise(samples, 2 * SPEECH_RATE, np.random.default_rng(0)))
    )
    start, found = _voice_pauses(audio, vad)
    for voiced, at, resumed in found:
        is_end = resumed is None
        pause_ms = None if resumed is None else (resumed - voiced) * 1000 / SPEECH_RATE
        is_spliced = spliced_at is not None and abs(voiced / SPEECH_RATE - spliced_at) < 0.35
        said = [word for word, begin, _ in words if begin < voiced / SPEECH_RATE + 0.1]
        between = bool(said) and said[-1].endswith(SENTENCE_ENDS) and not is_end
        if (pause_ms or 1_000) < _MIN_PAUSE_MS or (between and not is_spliced):
            continue
        if spliced_at is not None and (is_end or not is_spliced):
            continue
        turn = audio[start:at]
        prosody = measure_prosody(turn, find_speech_offset(turn, voiced - start))
        heard = recognizer.transcribe(turn)
        if not heard.text:
            continue
        later = at + _TURN_MODEL_DELAY_MS * SPEECH_RATE // 1000
        yield {
            "is_end": is_end,
            "is_spliced": is_spliced,
            "pause_ms": pause_ms,
            "turn_s": turn.size / SPEECH_RATE,
            "text": heard.text,
            "prosody": (
                *prosody.levels_db,
                *(prosody.pitch_drop, prosody.pitch_slope),
                *(prosody.last_run_s, prosody.pitched_share),
            ),
            "turn_model": turn_model.probability(audio[start:later]),
            "end_marks": None if heard.punctuation is None else astuple(heard.punctuation),
            "tail": None
            if heard.pooled_features is None
            else np.round(heard.pooled_features, 4).tolist(),
        }


def _voice_pauses(audio: Samples, vad: VadModel) -> tuple[int, list[tuple[int, int, int | None]]]:
    """Start of the voice, and (last voiced sample, detected at, resumed at) of its pauses."""
    endpointer = Endpointer(ServerVadConfig(silence_ms=6_000, eager_silence_ms=_EAGER_MS))
    start: int | None = None
    found: list[tuple[int, int, int | None]] = []
    for i, probability in enumerate(vad.probabilities(audio)):
        now = (i + 1) * WINDOW_SAMPLES
        for event in endpointer.process_window(float(probability), now - WINDOW_SAMPLES, now):
            if isinstance(event, VoiceStarted):
                start = event.start_sample if start is None else start
            elif isinstance(event, VoicePaused):
                found.append((event.last_voiced_sample, now, None))
            elif isinstance(event, VoiceResumed):
                found[-1] = (*found[-1][:2], event.sample)
    return start or 0, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=list(_SPLICES), default=list(_SPLICES))
    parser.add_argument("--num", type=int, default=60, help="recordings of each kind, at most")
    asyncio.run(collect(parser.parse_args()))


if __name__ == "__main__":
    main()
