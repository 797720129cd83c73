"""When the caller's words were said: told behind the answer's first sound, to those who ask."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.conversation.events import (
    ItemDeleted,
    OutputAudio,
    ResponseDone,
    SpeechStarted,
    SpeechStopped,
    SpokenWord,
    TranscriptionCompleted,
    TranscriptWords,
    TranscriptWordsFailed,
    TurnTraced,
)
from app.conversation.session_config import TurnDetection
from app.conversation.speech.asr_scheduler import AsrPriority, AsrScheduler, BusyRecognizerError
from audio.errors import ModelError
from tests.support.fakes import (
    ManualClock,
    PacedEngine,
    ScriptedEngine,
    ScriptedRecognizer,
    settle,
    silence,
    voice,
)
from tests.support.session_call import Call, call
from tests.unit.app.conversation.test_transcriber import GatedRecognizer
from tests.unit.app.conversation.test_transcriber import voice as samples_of_voice

SEMANTIC = TurnDetection(kind="semantic_vad", eagerness="high")
LONG = "One two three four five six seven eight nine ten. " * 4


def told(c: Call) -> list[TranscriptWords]:
    return c.out.of(TranscriptWords)


async def test_words_have_times_of_the_sessions_audio() -> None:
    async with call(ScriptedEngine("Fine."), "How are you?", word_timestamps=True) as c:
        await c.hear(silence(1.0) + voice(0.6) + silence(0.7))
        await c.clock.advance(5)
        (started,), (stopped,) = c.out.of(SpeechStarted), c.out.of(SpeechStopped)
        (words,) = told(c)
        (completed,) = c.out.of(TranscriptionCompleted)
        assert words.item_id == started.item_id == completed.item_id
        assert " ".join(word.word for word in words.words) == completed.transcript
        # The fake's words last 0.1 s each, from the beginning of what was transcribed.
        assert words.words[0] == SpokenWord(
            "How", started.audio_start_ms, started.audio_start_ms + 100
        )
        assert words.words[-1].end_ms == started.audio_start_ms + 300 <= stopped.audio_end_ms


async def test_nothing_of_it_when_nobody_asks() -> None:
    async with call(ScriptedEngine("Fine."), "How are you?") as c:
        await c.ask()
        await c.clock.advance(5)
        assert told(c) == []
        assert "words" not in c.out.of(TurnTraced)[0].turn


async def test_nothing_of_it_without_a_transcript() -> None:
    async with call(
        ScriptedEngine("Fine."), "How are you?", word_timestamps=True, transcribe=False
    ) as c:
        await c.ask()
        await c.clock.advance(5)
        assert told(c) == []
        assert c.out.of(ResponseDone)


async def test_the_answer_sounds_before_its_cause_is_timed() -> None:
    engine = PacedEngine(ManualClock(), LONG)
    async with call(engine, "How are you?", word_timestamps=True) as c:
        await c.ask(pause_s=2.0)
        await c.clock.advance(20)
        names = c.out.names()
        assert names.index("TranscriptionCompleted") < names.index("OutputAudio")
        assert names.index("OutputAudio") < names.index("TranscriptWords")
        (turn,) = [event.turn for event in c.out.of(TurnTraced)]
        assert [word["word"] for word in turn["words"]] == ["How", "are", "you?"]
        assert turn["words"][0]["start_ms"] == c.out.of(SpeechStarted)[0].audio_start_ms


@pytest.mark.parametrize("modality", ["audio", "text"])
async def test_the_trace_of_a_short_answer_has_them_too(modality: str) -> None:
    engine = PacedEngine(ManualClock(), "No.")
    async with call(engine, "Is it?", word_timestamps=True, modality=modality) as c:
        await c.ask(pause_s=2.0)
        await c.clock.advance(20)
        (turn,) = [event.turn for event in c.out.of(TurnTraced)]
        assert [word["word"] for word in turn["words"]] == ["Is", "it?"]


async def test_an_answers_end_does_not_wait_long_for_them() -> None:
    engine = PacedEngine(ManualClock(), "No.")
    async with call(engine, "Is it?", word_timestamps=True) as c:
        assert c.paced is not None
        c.paced.delays_s["align_words"] = 30.0
        await c.ask(pause_s=2.0)
        await c.clock.advance(10)
        assert c.out.of(ResponseDone)
        assert told(c) == []
        (turn,) = [event.turn for event in c.out.of(TurnTraced)]
        assert "words" not in turn
        await c.clock.advance(30)
        assert len(told(c)) == 1, "late, but told"


async def test_a_turn_without_an_answer_has_them_at_once() -> None:
    detection = TurnDetection(create_response=False)
    async with call(
        ScriptedEngine("Fine."), "How are you?", word_timestamps=True, turn_detection=detection
    ) as c:
        await c.ask()
        await c.clock.advance(1)
        assert len(told(c)) == 1
        assert c.out.of(OutputAudio) == []


async def test_no_words_were_said_at_no_time() -> None:
    async with call(ScriptedEngine("Fine."), "", word_timestamps=True) as c:
        await c.ask()
        await c.clock.advance(1)
        (words,) = told(c)
        assert words.words == ()


async def test_a_failure_is_told_and_the_conversation_goes_on() -> None:
    async with call(ScriptedEngine("Fine."), "How are you?", "And now?", word_timestamps=True) as c:
        c.recognizer.align_error = ModelError("the runtime failed")
        await c.ask()
        await c.clock.advance(5)
        (failed,) = c.out.of(TranscriptWordsFailed)
        assert failed.item_id == c.out.of(SpeechStarted)[0].item_id
        assert (failed.code, told(c)) == ("transcription_failed", [])
        assert c.out.of(ResponseDone)[0].response.status == "completed"
        c.recognizer.align_error = None
        await c.ask()
        await c.clock.advance(5)
        assert [word.word for word in told(c)[0].words] == ["And", "now?"]


async def test_a_fault_of_ours_is_not_told_in_its_words() -> None:
    async with call(ScriptedEngine("Fine."), "How are you?", word_timestamps=True) as c:
        c.recognizer.align_error = KeyError("secret")
        await c.ask()
        await c.clock.advance(5)
        (failed,) = c.out.of(TranscriptWordsFailed)
        assert "secret" not in failed.message


async def test_a_turn_that_was_none_has_no_words() -> None:
    texts = ("Go to the bank.", "Go to the bank and ask.")
    engine = ScriptedEngine("Sure.")
    async with call(engine, *texts, turn_detection=SEMANTIC, word_timestamps=True) as c:
        engine.gate.clear()
        await c.hear(voice(0.5))
        for _ in range(60):
            if c.out.of(TranscriptionCompleted):
                break
            await c.hear(silence(0.02))
        await c.hear(voice(0.5))
        engine.gate.set()
        await c.hear(silence(1.0))
        await c.clock.advance(3)
        gone, whole = c.out.of(SpeechStarted)
        assert [event.item_id for event in c.out.of(ItemDeleted)] == [gone.item_id]
        (words,) = told(c)
        assert words.item_id == whole.item_id
        assert words.words[0].start_ms == gone.audio_start_ms, "counted from the first half"


async def test_a_turn_by_hand_counts_from_what_was_committed() -> None:
    async with call(
        ScriptedEngine("Fine."), "How are you?", word_timestamps=True, turn_detection=None
    ) as c:
        await c.hear(silence(0.5))
        await c.session.clear_audio()
        await c.hear(silence(0.3) + voice(0.6))
        await c.session.commit_audio()
        await settle()
        (words,) = told(c)
        assert words.words[0].start_ms == pytest.approx(500, abs=5)  # the resampler holds 2 ms


async def test_a_turn_by_hand_counts_from_its_voice_where_the_early_words_serve() -> None:
    async with call(ScriptedEngine("Fine."), "How are you?", word_timestamps=True) as c:
        await c.hear(silence(2.0) + voice(0.6) + silence(0.3))
        assert len(c.recognizer.heard_s) == 1
        await c.session.commit_audio()
        await settle()
        assert len(c.recognizer.heard_s) == 1, "the early transcript served"
        (words,) = told(c)
        assert words.words[0].start_ms == c.out.of(SpeechStarted)[0].audio_start_ms


async def test_words_end_with_the_voice() -> None:
    text = " ".join(str(n) for n in range(30))  # three seconds, for the fake
    async with call(ScriptedEngine("Fine."), text, word_timestamps=True) as c:
        await c.ask()
        await c.clock.advance(5)
        (words,) = told(c)
        (stopped,) = c.out.of(SpeechStopped)
        assert len(words.words) == 30
        assert max(word.end_ms for word in words.words) == stopped.audio_end_ms


async def test_only_looks_at_turns_that_go_on_come_later() -> None:
    recognizer = GatedRecognizer("first", "final", "early", "look")
    with ThreadPoolExecutor(1) as pool:
        queue = AsrScheduler(recognizer, pool)  # type: ignore[arg-type]
        transcript = await queue.submit(samples_of_voice(0.1), AsrPriority.FINAL).result
        recognizer.may_finish.clear()
        done: list[str] = []
        first = queue.submit(samples_of_voice(0.1), AsrPriority.FINAL)
        jobs = {
            "look": queue.submit(samples_of_voice(0.1), AsrPriority.PARTIAL),
            "words": queue.align_words(transcript),
            "early": queue.submit(samples_of_voice(0.1), AsrPriority.EARLY),
            "final": queue.submit(samples_of_voice(0.1), AsrPriority.FINAL),
        }
        for name, job in jobs.items():
            job.result.add_done_callback(lambda _, name=name: done.append(name))  # type: ignore[misc]
        recognizer.may_finish.set()
        await asyncio.gather(first.result, *(job.result for job in jobs.values()))
    assert done == ["final", "early", "words", "look"]


async def test_words_are_refused_where_too_many_wait() -> None:
    recognizer = GatedRecognizer("first", "second")
    with ThreadPoolExecutor(1) as pool:
        queue = AsrScheduler(recognizer, pool, max_waiting=1)  # type: ignore[arg-type]
        transcript = await queue.submit(samples_of_voice(0.1), AsrPriority.FINAL).result
        recognizer.may_finish.clear()
        running = queue.submit(samples_of_voice(0.1), AsrPriority.FINAL)
        words = queue.align_words(transcript)
        final = queue.submit(samples_of_voice(0.1), AsrPriority.FINAL)
        with pytest.raises(BusyRecognizerError):
            await words.result
        recognizer.may_finish.set()
        await asyncio.gather(running.result, final.result)


async def test_what_is_needed_for_them_is_kept_only_for_those_who_ask() -> None:
    kept: list[bool] = []

    class Watched(ScriptedRecognizer):
        def transcribe(self, samples: object, **hints: object) -> object:  # type: ignore[override]
            kept.append(bool(hints["keep_encoder_output"]))
            return super().transcribe(samples)  # type: ignore[arg-type]

    for asks in (False, True):
        async with call(ScriptedEngine("Fine."), word_timestamps=asks) as c:
            watched = Watched("How are you?")
            c.services.recognition._recognizer = watched  # type: ignore[assignment]
            await c.ask()
            await c.clock.advance(1)
    assert kept == [False, True]
