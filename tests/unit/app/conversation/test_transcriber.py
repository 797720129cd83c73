"""Looks at a turn that goes on, and which of them serves as the words of its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from app.clock import MonotonicClock
from app.conversation.input.streaming_transcriber import StreamingTranscriber
from app.conversation.input.turn_audio import TurnAudio
from app.conversation.speech.asr_scheduler import AsrScheduler
from audio.asr.recognizer import Transcript
from audio.endpointing import find_speech_offset
from audio.frame import Samples
from audio.vad import VadWindows
from tests.support.fakes import EnergyVad, ScriptedRecognizer

RATE = 16_000


def voice(seconds: float) -> Samples:
    t = np.arange(int(seconds * RATE)) / RATE
    return (0.3 * np.sin(2 * np.pi * 200 * t)).astype(np.float32)


def room(seconds: float) -> Samples:
    rng = np.random.default_rng(1)
    return (0.0005 * rng.standard_normal(int(seconds * RATE))).astype(np.float32)


TURN = np.concatenate((room(0.3), voice(1.0)))


def audio(samples: Samples) -> TurnAudio:
    return TurnAudio(samples, VadWindows(EnergyVad().probabilities(samples)))


def paused(samples: Samples, voiced_len: int) -> TurnAudio:
    return replace(audio(samples), speech_offset=find_speech_offset(samples, voiced_len))


class GatedRecognizer(ScriptedRecognizer):
    """Works until it is let go."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*texts)
        self.may_finish = threading.Event()
        self.may_finish.set()

    def transcribe(
        self,
        samples: Samples,
        *,
        windows: VadWindows | None = None,
        prompt: str | None = None,
        language: str | None = None,
        keep_encoder_output: bool = False,
        skip_thorough: bool = False,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Transcript:
        assert self.may_finish.wait(10)
        return super().transcribe(samples)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as workers:
        yield workers


def transcriber_of(
    recognizer: ScriptedRecognizer, pool: ThreadPoolExecutor
) -> StreamingTranscriber:
    return StreamingTranscriber(AsrScheduler(recognizer, pool), MonotonicClock())  # type: ignore[arg-type]


async def test_a_look_in_the_dip_that_was_the_end_is_the_early_transcript(
    pool: ThreadPoolExecutor,
) -> None:
    recognizer = ScriptedRecognizer("What is it?")
    heard = transcriber_of(recognizer, pool)
    heard.begin_turn()
    assert heard.wants_partial_in_pause(len(TURN))
    heard.start_partial_in_pause(audio(np.concatenate((TURN, room(0.08)))))
    # The VAD lets go of the voice 100 ms late.
    late = np.concatenate((TURN, room(0.16)))
    early = heard.start_early(paused(late, len(TURN) + 1_600), 5_000)
    assert (await early).transcript.text == "What is it?"
    assert (await heard.start_final(audio(late), 5_000)).transcript.text == "What is it?"
    assert recognizer.heard_s == [pytest.approx(1.38)], "the turn was heard once"
    assert heard.take_num_discarded() == 0


async def test_the_look_is_kept_while_it_is_still_in_the_making(pool: ThreadPoolExecutor) -> None:
    recognizer = GatedRecognizer("What is it?")
    recognizer.may_finish.clear()
    heard = transcriber_of(recognizer, pool)
    heard.begin_turn()
    heard.start_partial_in_pause(audio(np.concatenate((TURN, room(0.08)))))
    late = np.concatenate((TURN, room(0.16)))
    heard.start_early(paused(late, len(TURN) + 1_600), 5_000)
    transcript_task = heard.start_final(audio(late), 5_000)
    heard.begin_turn()  # the next turn has no part in it
    recognizer.may_finish.set()
    assert (await transcript_task).transcript.text == "What is it?"
    assert heard.stable_text == ""


async def test_a_look_that_missed_some_of_the_voice_does_not_serve(
    pool: ThreadPoolExecutor,
) -> None:
    recognizer = ScriptedRecognizer("What is", "What is it?")
    heard = transcriber_of(recognizer, pool)
    heard.begin_turn()
    heard.start_partial(audio(TURN[:RATE]))
    late = np.concatenate((TURN, room(0.16)))
    early = heard.start_early(paused(late, len(TURN) + 1_600), 5_000)
    assert (await early).transcript.text == "What is it?"


async def test_where_the_voice_goes_on_the_dip_was_a_look_like_any_other(
    pool: ThreadPoolExecutor,
) -> None:
    recognizer = ScriptedRecognizer("What is", "What is it?", "What is it about?")
    heard = transcriber_of(recognizer, pool)
    heard.begin_turn()
    heard.start_partial_in_pause(audio(np.concatenate((TURN, room(0.08)))))
    await heard.start_early(paused(np.concatenate((TURN, room(0.16))), len(TURN) + 1_600), 5_000)
    assert heard.stable_text == ""
    heard.discard_early()
    assert heard.stable_text == "", "one look agrees with nobody, however often it is taken"
    longer = np.concatenate((TURN, room(0.3), voice(1.0)))
    early = heard.start_early(
        paused(np.concatenate((longer, room(0.16))), len(longer) + 1_600), 9_000
    )
    assert (await early).transcript.text == "What is it?", "heard anew"
    heard.discard_early()
    assert heard.stable_text == "What is"


async def test_a_dropped_look_that_is_not_done_does_not_serve_later(
    pool: ThreadPoolExecutor,
) -> None:
    recognizer = GatedRecognizer("half", "whole")
    recognizer.may_finish.clear()
    heard = transcriber_of(recognizer, pool)
    heard.begin_turn()
    heard.start_partial_in_pause(audio(np.concatenate((TURN, room(0.08)))))
    late = np.concatenate((TURN, room(0.16)))
    heard.start_early(paused(late, len(TURN) + 1_600), 5_000)
    await asyncio.sleep(0)
    heard.discard_early()
    early = heard.start_early(paused(late, len(TURN) + 1_600), 5_000)
    recognizer.may_finish.set()
    assert (await early).transcript.text == "whole"


async def test_no_look_without_a_dip_and_none_twice(pool: ThreadPoolExecutor) -> None:
    recognizer = ScriptedRecognizer("one", "two")
    heard = transcriber_of(recognizer, pool)
    heard.begin_turn()
    heard.start_partial_in_pause(audio(TURN))
    heard.start_partial_in_pause(audio(np.concatenate((TURN, room(0.03)))))
    assert recognizer.heard_s == []
    for silence_s in (0.08, 0.1, 0.12):
        heard.start_partial_in_pause(audio(np.concatenate((TURN, room(silence_s)))))
    while heard.wants_partial_in_pause(
        len(TURN)
    ):  # until the look is done: its cost spaces the next one
        await asyncio.sleep(0)
        if len(recognizer.heard_s) and not heard._recognition.is_busy:
            break
    assert len(recognizer.heard_s) == 1
