"""Pauses in mid-sentence of real recordings, judged by all signs with the real models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from app.config import DEFAULT_INSTRUCTIONS
from app.conversation.input.endpointing import end_of_turn_logprob
from audio.asr.recognizer import Recognizer
from audio.endpointing.prosody import measure_prosody
from audio.endpointing.semantic import ENDPOINTING_DELAYS, Evidence, endpointing_delay_ms
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
from llm_core import ChatMessage, EngineClient, EngineConfig
from tests.support.speech import Recordings

pytestmark = pytest.mark.integration

# Recordings with a pause of 0.8 s spliced in; the speakers' own are in them, too.
NAMES = ["jfk", "ls_1688-142285-0007", "ls_3005-163389-0000", "un_dog_or_cat"]
LONGEST_MS = 1_000


@dataclass
class Pause:
    """``length_ms`` None: the end of the recording."""

    turn: Samples
    voiced_len: int
    length_ms: float | None


def pauses(samples: Samples, vad: VadModel) -> Iterator[Pause]:
    room = np.random.default_rng(0).normal(0, 1e-4, 2 * SPEECH_RATE).astype(np.float32)
    audio = np.concatenate((samples, room))
    endpointer = Endpointer(ServerVadConfig(silence_ms=6_000, eager_silence_ms=32))
    start, voiced, at = None, 0, 0
    for i, probability in enumerate(vad.probabilities(audio)):
        now = (i + 1) * WINDOW_SAMPLES
        for event in endpointer.process_window(float(probability), now - WINDOW_SAMPLES, now):
            if isinstance(event, VoiceStarted) and start is None:
                start = event.start_sample
            elif isinstance(event, VoicePaused):
                voiced, at = event.last_voiced_sample, now
            elif isinstance(event, VoiceResumed):
                assert start is not None
                length_ms = (event.sample - voiced) * 1000 / SPEECH_RATE
                if length_ms > min(
                    w.min_ms for w in ENDPOINTING_DELAYS.values()
                ):  # else it ends nothing
                    yield Pause(audio[start:at], voiced - start, length_ms)
    assert start is not None
    yield Pause(audio[start:at], voiced - start, None)


def ends_sentence(text: str, whole: str) -> bool:
    """Whether a sentence of ``whole`` ends where ``text``, its beginning, does."""
    said = whole.split()[: len(text.split())]
    return bool(said) and said[-1].endswith((".", "?", "!"))


async def test_pauses_in_mid_sentence_are_waited_for_and_ends_are_found(
    llm_model_path: Path, asr_model_dir: Path, recordings: Recordings
) -> None:
    recognizer, vad = Recognizer(asr_model_dir), VadModel()
    engine = await EngineClient.start(
        EngineConfig(model_path=str(llm_model_path), max_sequences=1, max_context=512)
    )
    cut, hasty, missed, num_pauses = [], [], [], 0
    try:
        for name in NAMES:
            found = []
            for pause in pauses(recordings.samples(f"hard/pause_{name}_0.8s.flac"), vad):
                heard = recognizer.transcribe(pause.turn)
                text = heard.text
                prompt = [ChatMessage("system", DEFAULT_INSTRUCTIONS), ChatMessage("user", text)]
                logprob = await end_of_turn_logprob(engine, prompt, timeout_s=20.0)
                prosody = measure_prosody(
                    pause.turn, find_speech_offset(pause.turn, pause.voiced_len)
                )
                evidence = Evidence(
                    text,
                    prosody,
                    logprob,
                    punctuation=heard.punctuation,
                    end_of_turn_logit=heard.end_of_turn_logit,
                )
                found.append((pause.length_ms, endpointing_delay_ms(evidence), text, evidence))
            *inside, (_, delay_ms, whole, _) = found
            missed += [(name, whole)] if delay_ms > LONGEST_MS else []
            for length_ms, delay_ms, text, evidence in inside:
                if length_ms <= LONGEST_MS and not ends_sentence(text, whole):
                    num_pauses += 1
                    cut += [(name, length_ms, delay_ms, text)] if length_ms > delay_ms else []
                    patient_ms = endpointing_delay_ms(evidence, "low")
                    hasty += [(name, length_ms, patient_ms)] if patient_ms < length_ms else []
    finally:
        await engine.close()
    assert num_pauses >= 5
    assert missed == []
    # One at most: CPUs round int8 differently.
    assert len(cut) <= max(1, 0.05 * num_pauses), cut
    assert hasty == []
