"""A whole conversation with stand-ins for the models and a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.conversation.dialog import Phase
from app.conversation.events import (
    InputCommitted,
    Item,
    OutputAudio,
    OutputDone,
    OutputText,
    Part,
    ResponseDone,
    ResponseStarted,
    SessionEvent,
    SpeechStarted,
    SpeechStopped,
    TranscriptionCompleted,
    TranscriptionFailed,
    TurnTraced,
)
from app.conversation.session import Session
from app.conversation.session_config import SessionConfig, TurnDetection
from app.errors import ClientError
from audio.errors import AudioError
from llm_core import ChatMessage, EngineDiedError, PromptTooLongError
from tests.fakes import (
    ManualClock,
    Recorder,
    ScriptedEngine,
    ScriptedRecognizer,
    ToneSynthesizer,
    fake_services,
    settle,
    silence,
    voice,
)


class Call:
    """A session and the hands to drive it."""

    def __init__(self, engine: ScriptedEngine, *texts: str, **changes: Any) -> None:
        settings = changes.pop("settings", {})
        self.engine = engine
        self.recognizer = ScriptedRecognizer(*texts)
        self.synthesizer = ToneSynthesizer()
        self.services = fake_services(engine, self.recognizer, self.synthesizer, **settings)
        self.clock = ManualClock()
        self.out = Recorder()
        config = SessionConfig(**{"instructions": "Be brief.", "send_traces": True, **changes})
        self.session = Session(self.services, config, self.out, self.clock)

    async def hear(self, payload: bytes) -> None:
        """Audio at speaking pace, in chunks of 20 ms."""
        for start in range(0, len(payload), 960):
            await self.clock.advance(0.02)
            await self.session.append_audio(payload[start : start + 960], self.clock.now_ns())
            await settle(5)

    async def ask(self, speech_s: float = 0.6, pause_s: float = 0.7) -> None:
        await self.hear(voice(speech_s) + silence(pause_s))

    def messages(self) -> list[ChatMessage]:
        return self.session._history.messages("")


@asynccontextmanager
async def call(engine: ScriptedEngine, *texts: str, **changes: Any) -> AsyncIterator[Call]:
    before = asyncio.all_tasks()
    conversation = Call(engine, *texts, **changes)
    watch = asyncio.create_task(conversation.session.run())
    try:
        yield conversation
    finally:
        watch.cancel()
        await conversation.session.close()
        await settle()
        assert asyncio.all_tasks() - before - {watch} == set(), "tasks are left over"
        assert engine.num_running == 0, "a generation is left over"


async def test_a_spoken_question_gets_a_spoken_answer() -> None:
    async with call(ScriptedEngine("Fine, thank you."), "How are you?") as c:
        await c.ask()
        await c.clock.advance(5)
        assert [n for n in c.out.names() if n != "OutputAudio"] == [
            "SpeechStarted",
            "SpeechStopped",
            "InputCommitted",
            "ItemAdded",
            "ItemDone",
            "TranscriptionDelta",
            "TranscriptionCompleted",
            "ResponseStarted",
            "OutputStarted",
            *["OutputText"] * len(c.out.of(OutputText)),
            "OutputDone",
            "ResponseDone",
            "TurnTraced",
        ]
        assert c.out.of(ResponseDone)[0].response.status == "completed"
        assert c.messages() == [
            ChatMessage("user", "How are you?"),
            ChatMessage("assistant", "Fine, thank you."),
        ]
        assert "".join(e.text for e in c.out.of(OutputText)) == "Fine, thank you."
        assert c.session._dialog.phase is Phase.LISTENING


async def test_voice_to_voice_is_the_sum_of_its_parts_and_of_the_silence() -> None:
    async with call(ScriptedEngine("Fine, thank you."), "How are you?") as c:
        await c.ask()
        await c.clock.advance(5)
        turn = c.out.of(TurnTraced)[0].turn
        assert turn["outcome"] == "answered"
        assert sum(turn["stages_ms"].values()) == pytest.approx(turn["voice_to_voice_ms"])
        # Only the wait for silence takes time here: 500 ms, rounded up to windows and chunks.
        assert 500 <= turn["voice_to_voice_ms"] <= 560
        assert turn["stages_ms"]["asr"] == 0, "the early transcript was there in time"


async def test_the_words_are_tried_early_and_prefilled() -> None:
    async with call(ScriptedEngine("Yes."), "Is it late?") as c:
        await c.hear(voice(0.6) + silence(0.3))
        assert len(c.recognizer.heard_s) == 1
        assert c.engine.prefills[-1] == [
            ChatMessage("system", "Be brief."),
            ChatMessage("user", "Is it late?"),
        ]
        await c.hear(silence(0.4))
        assert len(c.recognizer.heard_s) == 1, "nothing was voiced since: no second pass"
        await c.clock.advance(3)
        assert c.engine.requests == [c.engine.prefills[-1]]


async def test_going_on_after_a_pause_makes_one_turn() -> None:
    async with call(ScriptedEngine("A cat."), "Should I get", "Should I get a cat?") as c:
        await c.hear(voice(0.5) + silence(0.35) + voice(0.5) + silence(0.8))
        await c.clock.advance(3)
        completed = c.out.of(TranscriptionCompleted)
        assert [e.transcript for e in completed] == ["Should I get a cat?"]
        assert c.recognizer.heard_s[1] > 1.3, "the second pass hears the whole turn"


async def test_the_transcribed_audio_begins_before_the_voice() -> None:
    async with call(ScriptedEngine("Yes."), "Hello?") as c:
        await c.hear(silence(2) + voice(0.6) + silence(0.7))
        started = c.out.of(SpeechStarted)[0]
        assert 1_650 <= started.audio_start_ms <= 1_750, "2 s less 300 ms of padding"
        assert 0.9 <= c.recognizer.heard_s[0] <= 1.3
        stopped = c.out.of(SpeechStopped)[0]
        assert 2_550 <= stopped.audio_end_ms <= 2_700
        assert stopped.item_id == started.item_id == c.out.of(InputCommitted)[0].item_id


async def test_silence_and_noise_say_nothing() -> None:
    async with call(ScriptedEngine(), "") as c:
        await c.ask()
        assert [e.transcript for e in c.out.of(TranscriptionCompleted)] == [""]
        assert c.out.of(ResponseStarted) == []
        assert c.messages() == []


async def test_a_typed_question_is_spoken_or_written() -> None:
    async with call(ScriptedEngine("Four.", "Five.")) as c:
        await c.session.add_item(Item("item_1", "user", [Part("input_text", "2 + 2?")]))
        await c.session.create_response()
        await c.clock.advance(3)
        assert c.out.of(OutputAudio)
        c.out.events.clear()
        await c.session.create_response(modality="text")
        await c.clock.advance(1)
        assert not c.out.of(OutputAudio)
        item = c.out.of(OutputDone)[0].item
        assert (item.content[0].type, item.content[0].text) == ("output_text", "Five.")
        assert c.out.of(TurnTraced)[0].turn["voice_to_voice_ms"] is None


LONG = "One two three four five six seven eight nine ten, eleven twelve thirteen fourteen fifteen."


@pytest.mark.parametrize("after_s", [0.05, 0.3, 1.0, 2.0, 2.9, 3.3])
async def test_an_interruption_keeps_what_was_heard(after_s: float) -> None:
    async with call(ScriptedEngine(LONG, "Sure."), "Count.", "Stop.") as c:
        await c.ask()
        await c.clock.advance(after_s)
        await c.ask()
        await c.clock.advance(2)
        first, second = [e.response for e in c.out.of(ResponseDone)]
        # Sent ahead by the lead of a second: what ends within it is done, but not yet heard.
        all_sent = after_s > len(LONG) * 1_000 / 24_000 - 1
        assert first.status == ("completed" if all_sent else "cancelled")
        assert second.status == "completed"
        user, cut, *_ = c.messages()
        heard = cut.content if cut.role == "assistant" else ""
        assert LONG.startswith(heard) and heard != LONG
        # The voice began `after_s` plus its detection time after the first audio: 24 samples a
        # millisecond, 1,000 samples a letter, so about a letter in 42 ms.
        letters = (after_s + 0.15) * 24
        assert letters - 14 <= len(heard) <= letters + 6
        outcome = c.out.of(TurnTraced)[0].turn["outcome"]
        assert outcome == ("answered" if all_sent else "interrupted")


async def test_no_audio_leaves_after_the_callers_voice() -> None:
    async with call(ScriptedEngine(LONG, "Sure."), "Count.", "Stop.") as c:
        await c.ask()
        await c.clock.advance(1)
        await c.hear(voice(0.5))
        names = c.out.names()
        announced = len(names) - 1 - names[::-1].index("SpeechStarted")
        assert "OutputAudio" not in names[announced:]
        assert names[announced + 1 :] == ["OutputDone", "ResponseDone", "TurnTraced"]
        await c.hear(silence(0.7))


async def test_voice_after_all_was_sent_cuts_what_still_plays() -> None:
    async with call(ScriptedEngine("Twenty letters here.", "Sure."), "Go.", "Stop.") as c:
        await c.ask()
        await c.clock.advance(0.1)
        assert c.out.of(ResponseDone), "20,000 samples fit into the lead: all is sent"
        await c.ask(speech_s=0.3)
        heard = c.messages()[1].content
        assert heard != "Twenty letters here." and "Twenty letters here.".startswith(heard)


async def test_truncate_tells_better_than_the_clock() -> None:
    async with call(ScriptedEngine("Twenty letters here.")) as c:
        await c.session.create_response()
        await c.clock.advance(3)
        item = c.out.of(OutputDone)[0].item
        with pytest.raises(ClientError, match="already shorter than 9000ms"):
            await c.session.truncate_item(item.id, 0, 9_000)
        await c.session.truncate_item(item.id, 0, 400)
        assert c.messages()[0].content.strip() == "Twenty"
        await c.session.truncate_item(item.id, 0, 0)
        assert c.messages() == []


async def test_uninterruptible_answers_go_on_and_the_turn_is_answered_next() -> None:
    detection = TurnDetection(interrupt_response=False)
    engine = ScriptedEngine(LONG, "Sure.")
    async with call(engine, "Count.", "And now?", turn_detection=detection) as c:
        await c.ask()
        await c.ask()
        await c.clock.advance(10)
        assert [e.response.status for e in c.out.of(ResponseDone)] == ["completed", "completed"]
        assert [m.content for m in c.messages()] == ["Count.", LONG, "And now?", "Sure."]


async def test_manual_commit_then_response() -> None:
    async with call(ScriptedEngine("Yes."), "Ready?", turn_detection=None) as c:
        with pytest.raises(ClientError) as refused:
            await c.session.commit_audio()
        assert refused.value.code == "input_audio_buffer_commit_empty"
        await c.hear(voice(0.5) + silence(1))
        assert c.out.events == [], "without turn detection nothing happens by itself"
        await c.session.commit_audio()
        await c.session.create_response()
        await c.clock.advance(3)
        assert [m.content for m in c.messages()] == ["Ready?", "Yes."]
        turn = c.out.of(TurnTraced)[0].turn
        assert turn["stages_ms"]["endpoint"] == pytest.approx(1_000, abs=60)


async def test_clear_forgets_the_voice() -> None:
    async with call(ScriptedEngine(), "never") as c:
        await c.hear(voice(0.5))
        await c.session.clear_audio()
        await c.hear(silence(2))
        assert c.out.names() == ["SpeechStarted", "InputCleared"]
        assert c.session._dialog.phase is Phase.LISTENING


async def test_audio_that_stops_in_mid_speech_ends_the_turn() -> None:
    async with call(ScriptedEngine("Yes."), "Are you there") as c:
        await c.hear(voice(1))
        await c.clock.advance(3)
        assert [e.transcript for e in c.out.of(TranscriptionCompleted)] == ["Are you there"]


async def test_a_turn_has_a_longest_length() -> None:
    async with call(ScriptedEngine("Yes."), "Endless", settings={"max_turn_s": 1.0}) as c:
        await c.hear(voice(1.3))
        assert len(c.out.of(InputCommitted)) == 1
        await c.clock.advance(3)


async def test_ten_minutes_of_silence_are_not_kept() -> None:
    async with call(ScriptedEngine()) as c:
        for _ in range(60):
            await c.session.append_audio(silence(10), c.clock.now_ns())
        assert c.session._listener.kept_samples <= 7 * 16_000
        assert len(c.session._listener._arrivals) <= 100
        assert c.out.events == []


async def test_the_manual_buffer_has_a_limit() -> None:
    async with call(ScriptedEngine(), turn_detection=None) as c:
        with pytest.raises(ClientError) as refused:
            for _ in range(61):
                await c.session.append_audio(silence(10), c.clock.now_ns())
        assert refused.value.code == "input_audio_buffer_full"
        await c.session.clear_audio()
        await c.session.append_audio(silence(1), c.clock.now_ns())


async def test_a_failing_recogniser_is_told_and_survived() -> None:
    async with call(ScriptedEngine("Yes."), "Again?") as c:
        c.recognizer.error = AudioError("the model is broken")
        await c.ask()
        failed = c.out.of(TranscriptionFailed)[0]
        assert failed.code == "transcription_failed" and "the model is broken" in failed.message
        c.recognizer.error = None
        await c.ask()
        await c.clock.advance(3)
        assert [m.content for m in c.messages()] == ["Again?", "Yes."]


async def test_a_failing_engine_fails_the_response_only() -> None:
    engine = ScriptedEngine("Yes.")
    async with call(engine, "First?", "Second?") as c:
        engine.error = EngineDiedError("the engine process ended")
        await c.ask()
        failed = c.out.of(ResponseDone)[0].response
        assert (failed.status, failed.reason) == ("failed", "engine_died")
        assert failed.error_message == "the engine process ended"
        assert c.out.of(TurnTraced)[0].turn["outcome"] == "failed"
        engine.error = None
        await c.ask()
        await c.clock.advance(3)
        assert c.out.of(ResponseDone)[1].response.status == "completed"


async def test_a_failing_voice_fails_the_response_only() -> None:
    async with call(ScriptedEngine(LONG, "Yes."), "First?", "Second?") as c:
        c.synthesizer.error = AudioError("no voice")
        await c.ask()
        failed = c.out.of(ResponseDone)[0].response
        assert (failed.status, failed.reason) == ("failed", "synthesis_failed")
        c.synthesizer.error = None
        await c.ask()
        await c.clock.advance(3)
        assert c.out.of(ResponseDone)[1].response.status == "completed"


async def test_an_unknown_error_is_logged_not_told(caplog: pytest.LogCaptureFixture) -> None:
    async with call(ScriptedEngine(LONG)) as c:
        c.synthesizer.error = ZeroDivisionError("secret detail")
        await c.session.create_response()
        await c.clock.advance(1)
        failed = c.out.of(ResponseDone)[0].response
        assert (failed.status, failed.reason) == ("failed", "server_error")
        assert "secret" not in failed.error_message
        assert "secret detail" in caplog.text


class _ShortContext(ScriptedEngine):
    """Refuses prompts of more than four messages."""

    async def generate(self, messages: Any, params: Any) -> AsyncIterator[Any]:
        if len(messages) > 4:
            raise PromptTooLongError("the prompt has 5000 tokens, the context holds 4096")
        async for event in super().generate(messages, params):
            yield event


async def test_a_long_conversation_forgets_its_oldest_messages() -> None:
    async with call(_ShortContext("Yes.")) as c:
        for number in range(7):
            await c.session.add_item(Item(f"i{number}", "user", [Part("input_text", str(number))]))
        await c.session.create_response()
        await c.clock.advance(3)
        assert [m.content for m in c.engine.requests[0]] == ["Be brief.", "4", "5", "6"]
        assert c.out.of(TurnTraced)[0].turn["facts"]["dropped_messages"] == 4


async def test_the_token_limit_is_reported() -> None:
    async with call(ScriptedEngine(LONG)) as c:
        await c.session.create_response(max_output_tokens=3)
        await c.clock.advance(3)
        response = c.out.of(ResponseDone)[0].response
        assert (response.status, response.reason) == ("incomplete", "max_output_tokens")
        assert response.usage.output_tokens == 3
        assert c.engine.params[0].max_tokens == 3


async def test_one_response_at_a_time_and_the_next_at_once() -> None:
    async with call(ScriptedEngine(*["Yes."] * 5)) as c:
        refused = 0
        asked_again = []

        async def ask_at_once(event: SessionEvent) -> None:
            await c.out(event)
            if isinstance(event, ResponseDone) and not asked_again:
                asked_again.append(asyncio.create_task(c.session.create_response()))

        c.session._sink = ask_at_once
        await c.session.create_response()
        try:
            await c.session.create_response()
        except ClientError as error:
            refused += error.code == "conversation_already_has_active_response"
        assert refused == 1
        await c.clock.advance(3)
        await asked_again[0]
        await c.clock.advance(3)
        assert len(c.out.of(ResponseDone)) == 2


async def test_cancel() -> None:
    async with call(ScriptedEngine(LONG)) as c:
        with pytest.raises(ClientError) as refused:
            await c.session.cancel_response()
        assert refused.value.code == "response_cancel_not_active"
        await c.session.create_response()
        await c.clock.advance(1)
        with pytest.raises(ClientError):
            await c.session.cancel_response("resp_of_someone_else")
        await c.session.cancel_response(c.out.of(ResponseStarted)[0].response.id)
        response = c.out.of(ResponseDone)[0].response
        assert (response.status, response.reason) == ("cancelled", "client_cancelled")
        assert c.out.of(TurnTraced)[0].turn["outcome"] == "cancelled"


@pytest.mark.parametrize("after_s", [0.0, 0.3, 0.7, 0.9, 1.1, 1.3, 2.0])
async def test_hanging_up_at_any_moment_leaves_nothing(after_s: float) -> None:
    engine = ScriptedEngine(LONG)
    engine.gate.clear()
    async with call(engine, "Hello?") as c:
        await c.hear((voice(0.6) + silence(1.4))[: int(after_s * 48_000)])
        if after_s > 1.2:
            engine.gate.set()
            await settle()
    # `call` checks that no task and no generation is left.


async def test_changing_the_format_in_mid_speech_is_safe() -> None:
    from audio.codecs import PCMU_8K

    async with call(ScriptedEngine("Yes."), "Hello?") as c:
        await c.hear(voice(0.5))
        config = SessionConfig(instructions="", input_format=PCMU_8K, output_format=PCMU_8K)
        await c.session.update(config)
        assert c.session._dialog.phase is Phase.LISTENING
        await c.session.append_audio(b"\xff" * 8_000, c.clock.now_ns())
        await c.session.create_response()
        await c.clock.advance(3)
        audio = b"".join(e.audio for e in c.out.of(OutputAudio))
        assert len(audio) == pytest.approx(4 * 1_000 / 3, abs=40), "one byte a sample at 8 kHz"


async def test_odd_bytes_are_refused_and_the_session_goes_on() -> None:
    async with call(ScriptedEngine("Yes."), "Hello?") as c:
        with pytest.raises(ClientError, match="odd number of bytes"):
            await c.session.append_audio(b"\x00\x01\x02", c.clock.now_ns())
        await c.ask()
        await c.clock.advance(3)
        assert c.out.of(ResponseDone)[0].response.status == "completed"
