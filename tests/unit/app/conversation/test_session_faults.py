"""What goes wrong in a conversation, and how it goes on: limits, failures, hang-ups."""

from __future__ import annotations

import asyncio
import logging

import pytest

from app.conversation.events import (
    InputCommitted,
    OutputAudio,
    ResponseDone,
    ResponseStarted,
    SessionEvent,
    TranscriptionCompleted,
    TranscriptionFailed,
    TurnTraced,
)
from app.conversation.response.spec import ResponseRequest
from app.conversation.session_config import SessionConfig
from app.conversation.turn_taking import Phase
from app.conversation.warm_up import warm_up
from app.errors import ClientError, ServiceError
from app.logging_setup import setup_logging
from audio.codecs import PCMU_8K
from audio.errors import AudioError
from llm_core import EngineDiedError
from tests.support.fakes import (
    ScriptedEngine,
    ScriptedRecognizer,
    fake_services,
    recent,
    settle,
    silence,
    voice,
)
from tests.support.session_call import call

LONG = "One two three four five six seven eight nine ten, eleven twelve thirteen fourteen fifteen."


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
        listener = c.session._hearing.audio_input
        assert listener.kept_samples <= 7 * 16_000
        assert len(listener._ends) == len(listener._captured) <= 100
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


async def test_the_warm_up_turn_leaves_nothing_and_fails_loudly() -> None:
    engine = ScriptedEngine("Hello there, caller.")
    services = fake_services(engine, ScriptedRecognizer("noise"))
    tasks = asyncio.all_tasks()
    await warm_up(services)
    assert engine.params[0].max_tokens == 4
    assert recent(services.traces.store, 10) == []
    assert asyncio.all_tasks() == tasks
    engine.error = EngineDiedError("the engine process ended")
    with pytest.raises(ServiceError, match="the engine process ended"):
        await warm_up(services)
    assert asyncio.all_tasks() == tasks


async def test_the_log_says_that_the_first_turn_was_nobodys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    services = fake_services(ScriptedEngine("Hello."), ScriptedRecognizer("noise"))
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    setup_logging(services.settings)
    try:
        await warm_up(services)
        logging.getLogger("app").warning("afterwards")
    finally:
        root.handlers[:], level = before
        root.setLevel(level)
    lines = capsys.readouterr().err.splitlines()
    assert ["session=warm-up" in line for line in lines if "turn ended" in line] == [True]
    assert ["session=- " in line for line in lines if "afterwards" in line] == [True]


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


async def test_the_token_limit_is_reported() -> None:
    async with call(ScriptedEngine(LONG)) as c:
        await c.session.create_response(ResponseRequest(max_output_tokens=3))
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

        c.sink = ask_at_once
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
