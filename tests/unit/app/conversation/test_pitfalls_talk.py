"""Faults that systems of this kind keep having: turn-taking, barge-in, audio, recogniser.

The numbers are those of the design's list of pitfalls. Which test is about which:

    15-19  here
    20     test_barge_in (counting interrupted after five; "mhm"; 200 random interruptions)
    21     here, test_phone_playout (an interruption after all was sent still cuts)
    22     test_session (truncate tells better than the clock), test_phone_playout (marks)
    23     here
    24     here (telephone audio), test_webrtc_opus (channels are mixed down), test_wav (stereo)
    25     here, test_codecs, test_session_faults (odd bytes), test_phone_playout (part of a frame)
    26     test_resample (any cutting is the same signal; flush)
    32, 33 here, integration/test_asr_real (noise, loops, threads with their own words)
    34     test_markdown (every cut in two), test_normalize, test_clause_chunker
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from app.conversation.events import (
    IdleTimedOut,
    InputCommitted,
    PlaybackCut,
    ResponseDone,
    ResponseStarted,
    TranscriptionCompleted,
    TranscriptionDelta,
)
from app.conversation.session_config import TurnDetection
from app.conversation.speech.asr_scheduler import AsrPriority, AsrScheduler, BusyRecognizerError
from app.conversation.tools import ToolBox, tool
from audio.asr.local_agreement import LocalAgreement, text_after
from audio.asr.recognizer import Transcript
from audio.codecs import PCM16_24K, PCMA_8K, PCMU_8K, AudioFormat, decode, encode
from tests.support.fakes import (
    InlineExecutor,
    ScriptedEngine,
    ScriptedRecognizer,
    settle,
    silence,
    voice,
)
from tests.support.session_call import call

SEMANTIC = TurnDetection(kind="semantic_vad")
IDLE = TurnDetection(idle_timeout_ms=5_000)


async def test_15_digits_with_pauses_of_a_second_are_one_turn() -> None:
    heard = ["4 1 5", "4 1 5 5 5 5", "4 1 5 5 5 5 0 1 3 2"]
    async with call(ScriptedEngine("Noted."), *heard, turn_detection=SEMANTIC) as c:
        for _ in heard[:-1]:
            await c.hear(voice(0.6) + silence(1.0))
        await c.hear(voice(0.6) + silence(1.5))
        await c.clock.advance(5)
        assert len(c.out.of(InputCommitted)) == 1
        assert [m.content for m in c.messages()] == [heard[-1], "Noted."]


async def test_15_a_name_in_two_breaths_is_answered_whole() -> None:
    heard = ["My name is John.", "My name is John Doe."]
    async with call(ScriptedEngine("Hello."), *heard, turn_detection=SEMANTIC) as c:
        c.engine.end_logprob = -6.0
        await c.hear(voice(0.6) + silence(0.6))
        c.engine.end_logprob = -0.1
        await c.hear(voice(0.4) + silence(1.5))
        await c.clock.advance(5)
        assert [m.content for m in c.messages()] == ["My name is John Doe.", "Hello."]


async def test_16_a_clap_between_the_end_and_the_answer_loses_nothing() -> None:
    engine = ScriptedEngine("Half past nine.", "Half past nine.")
    heard = ["What time is it?"] * 3  # all of the turn is heard again, the clap with it
    async with call(engine, *heard, turn_detection=SEMANTIC) as c:
        engine.gate.clear()
        await c.hear(voice(0.6) + silence(0.6))
        await c.hear(voice(0.1) + silence(1.0))
        engine.gate.set()
        await c.clock.advance(5)
        assert [m.content for m in c.messages()] == ["What time is it?", "Half past nine."]


async def test_17_frames_that_stop_in_mid_speech_end_the_turn() -> None:
    async with call(ScriptedEngine("Yes."), "Are you there?", turn_detection=SEMANTIC) as c:
        await c.hear(voice(0.8))
        await c.clock.advance(5)
        assert [m.content for m in c.messages()] == ["Are you there?", "Yes."]


async def test_18_the_idle_prompt_waits_for_the_end_of_what_is_going_on() -> None:
    engine = ScriptedEngine("It is late.", "Are you still there?")
    async with call(engine, "What time is it?", turn_detection=IDLE) as c:
        await c.clock.advance(20)
        assert c.out.of(IdleTimedOut) == [], "nothing was said yet"
        engine.gate.clear()
        await c.ask()
        await c.clock.advance(20)
        assert c.out.of(IdleTimedOut) == [], "an answer is on its way"
        engine.gate.set()
        await c.clock.advance(0.1)
        length_s = 11_000 / 24_000
        await c.clock.advance(length_s + 4.5)
        assert c.out.of(IdleTimedOut) == []
        await c.clock.advance(1.0)
        (timed_out,) = c.out.of(IdleTimedOut)
        assert 5_000 <= timed_out.audio_end_ms - timed_out.audio_start_ms <= 5_800 or (
            timed_out.audio_start_ms == 0
        )
        await c.clock.advance(2)
        assert [m.content for m in c.messages()][-1] == "Are you still there?"
        assert "silent" in engine.requests[-1][0].content


async def test_18_no_idle_prompt_in_a_tool_call() -> None:
    let_go = asyncio.Event()

    @tool
    async def look_up(what: str) -> str:
        """Look something up."""
        await let_go.wait()
        return f"a {what}"

    wanted = '<tool_call>{"name": "look_up", "arguments": {"what": "cat"}}</tool_call>'
    engine = ScriptedEngine(wanted, "It is a cat.", "Are you still there?")
    tools = ToolBox([look_up])
    async with call(engine, "What is it?", turn_detection=IDLE, server=tools) as c:
        await c.ask()
        await c.clock.advance(20)
        assert c.out.of(IdleTimedOut) == []
        let_go.set()
        await c.clock.advance(3)
        assert c.messages()[-1].content == "It is a cat."
        assert c.out.of(IdleTimedOut) == []


async def test_18_nobody_is_asked_for_ever() -> None:
    engine = ScriptedEngine("It is late.", "Are you still there?")
    async with call(engine, "What time is it?", turn_detection=IDLE) as c:
        await c.ask()
        for _ in range(120):
            await c.clock.advance(1)
        assert len(c.out.of(IdleTimedOut)) == 3


async def test_18_no_idle_prompt_while_the_caller_speaks() -> None:
    async with call(ScriptedEngine("Yes.", "No."), "One?", "Two?", turn_detection=IDLE) as c:
        await c.ask()
        await c.clock.advance(4)
        await c.hear(voice(6.0))
        assert c.out.of(IdleTimedOut) == []


@pytest.mark.parametrize("detection", [SEMANTIC, TurnDetection()])
async def test_19_the_first_words_at_connect_are_kept(detection: TurnDetection) -> None:
    async with call(ScriptedEngine("Hi."), "Hello there.", turn_detection=detection) as c:
        await c.hear(voice(0.7) + silence(1.5))
        await c.clock.advance(5)
        assert c.recognizer.heard_s[-1] >= 0.7, "from the very first sample"
        assert len(c.out.of(ResponseDone)) == 1


async def test_21_after_all_audio_was_sent_an_interruption_still_silences_the_player() -> None:
    async with call(ScriptedEngine("Twenty letters here."), "Why?", "Stop it.") as c:
        await c.session.create_response()
        await c.clock.advance(0.4)
        assert c.out.of(ResponseDone), "all was sent, half of it is still to be heard"
        await c.hear(voice(0.3))
        assert c.out.of(PlaybackCut)
        heard = c.messages()[0].content
        assert heard != "Twenty letters here." and "Twenty letters here.".startswith(heard)


async def test_21_mhm_after_all_audio_was_sent_costs_no_more_than_the_lead() -> None:
    engine = ScriptedEngine("One two three four five six seven eight nine ten eleven twelve.")
    async with call(engine, "Count.", "Mhm.", turn_detection=SEMANTIC) as c:
        await c.ask()
        while not c.out.of(ResponseDone):
            await c.clock.advance(0.1)
        item = c.out.of(ResponseDone)[0].response.output[0]
        sent_ms = item.content[0].audio_ms
        await c.hear(voice(0.3) + silence(1.0))
        await c.clock.advance(3)
        assert sent_ms - 1_000 <= item.content[0].audio_ms <= sent_ms


@pytest.mark.parametrize("after_s", [0.0, 0.3, 0.9, 2.5])
async def test_23_after_an_interruption_the_talk_goes_on(after_s: float) -> None:
    engine = ScriptedEngine("One two three four five six seven.", "Yes.", "Good.")
    texts = ("Count.", "Stop it now.", "And now?")
    async with call(engine, *texts, turn_detection=SEMANTIC) as c:
        await c.ask()
        await c.hear(silence(after_s) + voice(0.6) + silence(1.0))
        await c.clock.advance(5)
        await c.ask(pause_s=1.0)
        await c.clock.advance(5)
        assert c.out.of(ResponseDone)[-1].response.status == "completed"
        assert c.messages()[-1].content == "Good."


@pytest.mark.parametrize("telephone", [PCMU_8K, PCMA_8K])
async def test_24_telephone_audio_is_as_long_for_the_models_as_it_was(
    telephone: AudioFormat,
) -> None:
    engine = ScriptedEngine("Hi.")
    async with call(engine, "Hello there.", input_format=telephone) as c:
        spoken = decode(voice(0.8) + silence(0.9), PCM16_24K)[::3]
        payload = encode(spoken, telephone)
        for start in range(0, len(payload), 160):
            await c.clock.advance(0.02)
            await c.session.append_audio(payload[start : start + 160], c.clock.now_ns())
        await c.clock.advance(3)
        assert len(c.out.of(ResponseDone)) == 1
        # The voice, some padding in front and the pause behind; twice that would be half speed.
        assert 0.8 <= c.recognizer.heard_s[-1] <= 1.4


@pytest.mark.parametrize("num_samples", [24_000, 24_001, 25_003, 27_119])
async def test_25_the_last_samples_of_a_turn_are_heard(num_samples: int) -> None:
    async with call(ScriptedEngine("Hi."), "Hello there.", turn_detection=None) as c:
        payload = voice(2.0)[: 2 * num_samples]
        for start in range(0, len(payload), 962):
            await c.session.append_audio(payload[start : start + 962], c.clock.now_ns())
        await c.session.commit_audio()
        await c.clock.advance(1)
        # The resampler has its last 2 ms inside.
        assert c.recognizer.heard_s[-1] == pytest.approx(num_samples / 24_000, abs=0.003)


async def test_32_noise_that_the_recogniser_rejects_says_nothing() -> None:
    async with call(ScriptedEngine("never"), "", "", turn_detection=SEMANTIC) as c:
        await c.hear(voice(0.3) + silence(2.0) + voice(0.2) + silence(2.0))
        await c.clock.advance(5)
        assert c.out.of(ResponseStarted) == []
        assert c.out.of(TranscriptionDelta) == []


def test_32_a_loop_is_never_agreed_upon() -> None:
    agreement = LocalAgreement()
    loop = "thank you for watching thank you for watching thank you for watching"
    assert [agreement.add_hypothesis(loop) for _ in range(4)] == [""] * 4
    assert (
        agreement.add_hypothesis("Thank you for")
        == agreement.add_hypothesis("Thank you for the book")[:0]
    )
    assert agreement.stable == "Thank you for"


def test_only_what_two_runs_agree_on_is_stable_and_it_never_changes() -> None:
    agreement = LocalAgreement()
    runs = (
        "I really",
        "I really like an",
        "I really like animals.",
        "I really like animals. Let's",
        "I rarely like animals. Let's talk",
        "I really like animals. Let's talk about work",
        "I really like animals. Let's talk about working dogs.",
    )
    given = [agreement.add_hypothesis(run) for run in runs]
    assert given == ["", "I really", " like", " animals", "", "", " Let's talk about"]
    assert agreement.stable == "".join(given) == "I really like animals Let's talk about"
    assert text_after(agreement.stable, runs[-1]) == " working dogs."
    assert text_after("I rarely", runs[-1]) is None
    assert text_after("", "Yes.") == "Yes."


async def test_stable_words_are_told_while_the_caller_speaks_and_never_taken_back() -> None:
    heard = ["Tell me", "Tell me a long", "Tell me a long story now.", "Tell me a long story now."]
    async with call(
        ScriptedEngine("No."),
        *heard,
        turn_detection=SEMANTIC,
        settings={"partial_transcripts": True},
    ) as c:
        await c.hear(voice(1.9))
        early = [e.text for e in c.out.of(TranscriptionDelta)]
        assert early and "".join(early) == "Tell me a long"[: len("".join(early))]
        await c.hear(silence(1.5))
        await c.clock.advance(3)
        (completed,) = c.out.of(TranscriptionCompleted)
        assert "".join(e.text for e in c.out.of(TranscriptionDelta)) == completed.transcript
        read = [m[-1].content for m in c.engine.prefills if m[-1].role == "user"]
        assert "Tell me a long"[: len(read[0])] == read[0], "and read by the model meanwhile"


class SlowRecognizer(ScriptedRecognizer):
    """Says whose audio it hears: the first sample tells."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] = []

    def transcribe(self, samples: Any, **hints: Any) -> Transcript:
        self.was_wanted = hints["is_wanted"]
        self.order.append(round(float(samples[0])))
        self.texts = [f"caller {self.order[-1]}"]
        return super().transcribe(samples)


class OneAtATime(InlineExecutor):
    """Begins a job when it is told to."""

    def __init__(self) -> None:
        super().__init__(1)
        self.waiting: list[Any] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        from concurrent.futures import Future

        future: Future[Any] = Future()
        self.waiting.append((future, fn))
        return future

    def run_next(self) -> None:
        future, fn = self.waiting.pop(0)
        future.set_result(fn())


def audio(caller: int) -> Any:
    return np.full(1_600, caller, np.float32)


async def test_33_callers_share_the_recogniser_without_mixing_and_ends_go_first() -> None:
    recognizer, executor = SlowRecognizer(), OneAtATime()
    recognition = AsrScheduler(recognizer, executor)  # type: ignore[arg-type]
    jobs = [
        recognition.submit(audio(1), AsrPriority.PARTIAL),
        recognition.submit(audio(2), AsrPriority.PARTIAL),
        recognition.submit(audio(3), AsrPriority.EARLY),
        recognition.submit(audio(4), AsrPriority.FINAL),
        recognition.submit(audio(5), AsrPriority.EARLY),
    ]
    jobs[4].priority = AsrPriority.FINAL  # the pause was the end
    jobs[2].result.cancel()  # the caller went on
    while executor.waiting:
        assert len(executor.waiting) == 1, "one at a time"
        executor.run_next()
        await settle(5)
    assert recognizer.order == [1, 4, 5, 2]
    assert jobs[0].result.cancelled(), "a look that had begun is given up for an end"
    for number, job in enumerate(jobs, 1):
        if number not in (1, 3):
            assert job.result.result().text == f"caller {number}"


async def test_33_work_that_nobody_waits_for_holds_up_nobody() -> None:
    recognizer, executor = SlowRecognizer(), OneAtATime()
    recognition = AsrScheduler(recognizer, executor)  # type: ignore[arg-type]
    dropped = recognition.submit(audio(1), AsrPriority.PARTIAL)
    kept = recognition.submit(audio(2), AsrPriority.FINAL)
    dropped.result.cancel()  # the recogniser is at it already, and asks
    executor.run_next()
    await settle(5)
    assert not recognizer.was_wanted()
    executor.run_next()
    await settle(5)
    assert recognizer.was_wanted() and kept.result.result().text == "caller 2"


async def test_33_a_full_queue_turns_the_least_urgent_away() -> None:
    recognizer, executor = SlowRecognizer(), OneAtATime()
    recognition = AsrScheduler(recognizer, executor, max_waiting=2)  # type: ignore[arg-type]
    running = recognition.submit(audio(1), AsrPriority.FINAL)
    partial = recognition.submit(audio(2), AsrPriority.PARTIAL)
    recognition.submit(audio(3), AsrPriority.FINAL)
    recognition.submit(audio(4), AsrPriority.FINAL)
    with pytest.raises(BusyRecognizerError):
        await partial.result
    refused = recognition.submit(audio(5), AsrPriority.FINAL)
    with pytest.raises(BusyRecognizerError, match="2 turns wait"):
        await refused.result
    while executor.waiting:
        executor.run_next()
        await settle(5)
    assert recognizer.order == [1, 3, 4]
    assert running.result.done() and recognition.num_refused == 2
    await asyncio.sleep(0)


async def test_under_load_no_answer_is_begun_in_hope() -> None:
    async with call(ScriptedEngine("Yes."), "Is it late?") as c:
        with c.services.load.generating(), c.services.load.generating():
            await c.hear(voice(0.6) + silence(0.3))
            assert c.engine.requests == [], "others need the model for what is certain"
            assert c.services.load.num_skipped >= 1
            await c.hear(silence(0.5))
        await c.clock.advance(3)
        assert c.messages()[-1].content == "Yes."
