"""The handler: client events in, session calls and server events out."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from app.api.realtime.connection import RealtimeConnection, decode_base64
from app.conversation import events as e
from app.conversation.response.spec import ResponseRequest
from app.conversation.session import Session
from app.errors import ClientError, GenerationError
from app.transports.base import ChannelClosed
from tests.support.fake_realtime import FakeChannel, FakeSession
from tests.support.fakes import ScriptedEngine, ScriptedRecognizer, fake_services, silence, voice

TEXT_ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}


@asynccontextmanager
async def connected(
    model: str = "parley", **settings: Any
) -> AsyncIterator[tuple[FakeChannel, FakeSession]]:
    """A connection with a fake session; ends it, and checks that nothing is left."""
    before = asyncio.all_tasks()
    channel, sessions = FakeChannel(), list[FakeSession]()

    def make(*args: Any) -> Session:
        sessions.append(FakeSession(*args))
        return cast(Session, sessions[-1])

    services = fake_services(ScriptedEngine(), **settings)
    connection = RealtimeConnection(channel, services, model, make_session=make)
    running = asyncio.create_task(connection.run())
    created = await channel.next()
    assert created["type"] == "session.created"
    yield channel, sessions[0]
    await channel.close(1000, "bye")
    await running
    assert sessions[0].is_closed
    assert asyncio.all_tasks() == before


# --- with a fake session ---


async def test_session_created_comes_first() -> None:
    async with connected("gpt-realtime", instructions="Be kind.") as (channel, _):
        session = channel.sent[0]["session"]
        assert session["id"] == "sess_fake"
        assert session["model"] == "gpt-realtime"
        assert session["instructions"] == "Be kind."


async def test_an_unknown_model_is_refused() -> None:
    channel = FakeChannel()
    services = fake_services(ScriptedEngine())
    await RealtimeConnection(channel, services, "llama-7b").run()
    (error,) = channel.sent
    assert error["error"]["code"] == "model_not_found"
    assert (await channel.when_closed()).code == 1008


async def test_each_event_reaches_the_session() -> None:
    async with connected() as (channel, session):
        channel.say("input_audio_buffer.append", audio=base64.b64encode(b"\0\0" * 480).decode())
        channel.say("input_audio_buffer.commit")
        channel.say("input_audio_buffer.clear")
        channel.say("conversation.item.create", item=TEXT_ITEM | {"id": "i1"})
        channel.say("conversation.item.delete", item_id="i1")
        channel.say("conversation.item.truncate", item_id="i2", content_index=0, audio_end_ms=30)
        channel.say("response.create", response={"output_modalities": ["text"]})
        channel.say("response.cancel")
        channel.say("conversation.item.retrieve", item_id="i9")
        retrieved = await channel.until("conversation.item.retrieved")
        assert retrieved["item"]["id"] == "i9"
        append, *rest = session.calls
        assert append[0] == "append_audio"
        assert append[1] == b"\0\0" * 480
        item = e.Item("i1", "user", [e.Part("input_text", "Hi")])
        assert rest == [
            ("commit_audio",),
            ("clear_audio",),
            ("add_item", item, None),
            ("delete_item", "i1"),
            ("truncate_item", "i2", 0, 30, {"may_extend": True}),
            (
                "create_response",
                ResponseRequest(modality="text"),
            ),
            ("cancel_response", None),
            ("get_item", "i9"),
        ]


async def test_updates_reach_the_session_and_are_shown() -> None:
    async with connected() as (channel, session):
        channel.say("session.update", session={"instructions": "Sing."})
        updated = await channel.until("session.updated")
        assert updated["session"]["instructions"] == "Sing."
        assert session.config.instructions == "Sing."
        error = await channel.refused("session.update", session={"tools": [{}]})
        assert error["code"] == "missing_required_parameter"
        assert error["param"] == "session.tools[0].type"
        assert session.config.instructions == "Sing."


async def test_a_session_that_refuses_an_update_keeps_the_old_state() -> None:
    async with connected() as (channel, session):
        session.failure = ClientError("not now")
        await channel.refused("session.update", session={"instructions": "Sing."})
        channel.say("session.update", session={"audio": {"output": {"speed": 1.2}}})
        updated = await channel.until("session.updated")
        assert updated["session"]["instructions"] != "Sing."


async def test_the_voice_is_locked_by_the_first_audio() -> None:
    async with connected() as (channel, session):
        await session.sink(e.ResponseStarted(e.Response("r", "audio")))
        item = e.Item("i", "assistant", [e.Part("output_audio", "")], "in_progress")
        await session.sink(e.OutputStarted("r", item, None))
        await session.sink(e.OutputAudio("r", "i", b"\0\0"))
        await channel.until("response.output_audio.delta")
        voice_update = {"audio": {"output": {"voice": "ash"}}}
        error = await channel.refused("session.update", session=voice_update)
        assert error["code"] == "cannot_update_voice"


async def test_long_audio_is_handed_over_in_pieces_of_a_second() -> None:
    payload = bytes(range(256)) * 375 * 2  # 4 s
    async with connected() as (channel, session):
        channel.say("input_audio_buffer.append", audio=base64.b64encode(payload).decode())
        channel.say("conversation.item.retrieve", item_id="i")
        await channel.until("conversation.item.retrieved")
        pieces = [call[1] for call in session.calls if call[0] == "append_audio"]
        assert [len(piece) for piece in pieces] == [48_000] * 4
        assert b"".join(pieces) == payload
        assert len({call[2] for call in session.calls if call[0] == "append_audio"}) == 1


async def test_bad_audio_changes_nothing() -> None:
    async with connected() as (channel, session):
        good = base64.b64encode(bytes(60_000)).decode()
        for audio, code in (
            ("not base64!", "invalid_value"),
            ("AAA", "invalid_value"),
            ("AA-_", "invalid_value"),
            ("AAAA\nAAAA", "invalid_value"),
            ("", "invalid_value"),
            ("AA==" + good, "invalid_value"),
            (good + "=", "invalid_value"),
            (good + "====", "invalid_value"),
            ("====", "invalid_value"),
            ("A===", "invalid_value"),
            ("ÄÄÄÄ", "invalid_value"),
            (base64.b64encode(b"123").decode(), "invalid_audio"),
            (base64.b64encode(bytes(100_001)).decode(), "invalid_audio"),
        ):
            error = await channel.refused("input_audio_buffer.append", audio=audio)
            assert (error["code"], error["param"]) == (code, "audio"), audio[:20]
        assert session.calls == []
        channel.say(
            "session.update", session={"audio": {"input": {"format": {"type": "audio/pcmu"}}}}
        )
        await channel.until("session.updated")
        channel.say("input_audio_buffer.append", audio=base64.b64encode(b"123").decode())
        channel.say("conversation.item.retrieve", item_id="i")
        await channel.until("conversation.item.retrieved")
        assert session.calls[-2][1] == b"123"


async def test_padding_only_at_the_very_end() -> None:
    first = base64.b64encode(bytes(49_151)).decode()  # 64 KiB of text, the last character a "="
    assert len(first) == 64 * 1024
    assert await decode_base64(first) == bytes(49_151)
    with pytest.raises(ClientError):
        await decode_base64(first + "AAAA")


async def test_decoding_a_long_append_lets_others_run() -> None:
    ticks = 0

    async def count() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    assert len(await decode_base64("A" * (15 * 1024 * 1024))) == 15 * 1024 * 1024 * 3 // 4
    counting.cancel()
    assert ticks >= 200


async def test_malformed_messages_are_answered() -> None:
    async with connected() as (channel, _):
        for message, code in (
            ("{", "invalid_json"),
            ("[]", "invalid_json"),
            (b"\x00\x01", "invalid_message"),
            ('{"type": "paint"}', "invalid_value"),
            ('{"a": 1}', "missing_required_parameter"),
        ):
            channel.incoming.put_nowait(message)
            error = (await channel.next())["error"]
            assert error["type"] == "invalid_request_error"
            assert (error["code"], error["event_id"]) == (code, None)


async def test_output_buffer_is_the_clients_own() -> None:
    async with connected() as (channel, _):
        error = await channel.refused("output_audio_buffer.clear")
        assert error["code"] == "unsupported_value"


async def test_errors_of_the_session_go_to_the_client() -> None:
    async with connected() as (channel, session):
        session.failure = ClientError("there is none", code="response_cancel_not_active")
        error = await channel.refused("response.cancel")
        assert error["type"] == "invalid_request_error"
        assert error["code"] == "response_cancel_not_active"
        session.failure = GenerationError("the engine is down", code="engine_died")
        error = await channel.refused("response.create")
        assert (error["type"], error["code"]) == ("server_error", "engine_died")


async def test_a_fault_of_ours_is_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with connected() as (channel, session):
        session.failure = ZeroDivisionError("private detail")
        error = await channel.refused("input_audio_buffer.commit")
        assert (error["type"], error["code"]) == ("server_error", "server_error")
        assert "private detail" not in error["message"]
        (record,) = [r for r in caplog.records if r.exc_info]
        assert vars(record)["reference"] in error["message"]
        channel.say("conversation.item.retrieve", item_id="i")
        await channel.until("conversation.item.retrieved")


async def test_a_broken_session_loop_ends_the_connection() -> None:
    async with connected() as (channel, session):
        session.broken.set()
        error = (await channel.next())["error"]
        assert error["type"] == "server_error"
        assert (await channel.when_closed()).code == 1011


async def test_a_silent_client_is_closed() -> None:
    channel = FakeChannel()
    services = fake_services(ScriptedEngine(), idle_timeout_s=1.0)
    connection = RealtimeConnection(channel, services, "parley")
    await connection.run()
    assert channel.sent[-1]["error"]["code"] == "session_idle"
    assert (await channel.when_closed()).code == 1001


async def test_a_gone_client_does_not_break_the_session() -> None:
    async with connected() as (channel, session):
        channel.closed = ChannelClosed(1006)
        await session.sink(e.InputCleared())
        assert len(channel.sent) == 1


# --- with the real session ---


@asynccontextmanager
async def conversation(
    engine: ScriptedEngine, *heard: str, **settings: Any
) -> AsyncIterator[FakeChannel]:
    channel = FakeChannel()
    services = fake_services(engine, ScriptedRecognizer(*heard), **settings)
    running = asyncio.create_task(RealtimeConnection(channel, services, "parley").run())
    await channel.until("session.created")
    yield channel
    await channel.close(1000, "")
    await running
    assert engine.num_running == 0


async def test_a_typed_question_is_answered_in_text() -> None:
    async with conversation(ScriptedEngine("Fine, thank you.")) as channel:
        channel.say("session.update", session={"output_modalities": ["text"]})
        channel.say("conversation.item.create", item=TEXT_ITEM)
        channel.say("response.create", response={"metadata": {"n": "1"}})
        done = await channel.until("response.done")
        assert done["response"]["status"] == "completed"
        assert done["response"]["metadata"] == {"n": "1"}
        assert done["response"]["output"][0]["content"] == [
            {"type": "output_text", "text": "Fine, thank you."}
        ]
        kinds = [event["type"] for event in channel.sent]
        assert kinds[:6] == [
            "session.created",
            "session.updated",
            "conversation.item.added",
            "conversation.item.done",
            "response.created",
            "response.output_item.added",
        ]
        assert kinds[-5:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "conversation.item.done",
            "response.done",
        ]


async def test_a_spoken_question_is_answered_in_speech() -> None:
    engine = ScriptedEngine("It is noon.")
    async with conversation(engine, "What time is it?", "What time is it?") as channel:
        channel.say("session.update", session={"audio": {"input": {"turn_detection": None}}})
        channel.say("input_audio_buffer.append", audio=base64.b64encode(voice(1.0)).decode())
        channel.say("input_audio_buffer.append", audio=base64.b64encode(silence(0.2)).decode())
        channel.say("input_audio_buffer.commit")
        committed = await channel.until("input_audio_buffer.committed")
        transcript = await channel.until("conversation.item.input_audio_transcription.completed")
        assert transcript["item_id"] == committed["item_id"]
        assert transcript["transcript"] == "What time is it?"
        channel.say("response.create")
        await channel.until("response.output_audio.delta")
        done = await channel.until("response.done")
        assert done["response"]["output"][0]["content"][0]["transcript"] == "It is noon."


async def test_errors_in_the_words_of_the_api() -> None:
    engine = ScriptedEngine("One two three four.")
    async with conversation(engine) as channel:
        for kind, fields, code in (
            ("input_audio_buffer.commit", {}, "input_audio_buffer_commit_empty"),
            ("response.cancel", {}, "response_cancel_not_active"),
            ("conversation.item.retrieve", {"item_id": "x"}, "item_retrieve_invalid_item_id"),
            ("conversation.item.delete", {"item_id": "x"}, "item_delete_invalid_item_id"),
            (
                "conversation.item.truncate",
                {"item_id": "x", "content_index": 0, "audio_end_ms": 0},
                "item_truncate_invalid_item_id",
            ),
            (
                "conversation.item.create",
                {"item": TEXT_ITEM, "previous_item_id": "x"},
                "item_create_invalid_previous_item_id",
            ),
        ):
            error = await channel.refused(kind, **fields)
            assert error["type"] == "invalid_request_error"
            assert error["code"] == code
        engine.gate.clear()
        channel.say("conversation.item.create", item=TEXT_ITEM)
        channel.say("response.create")
        await channel.until("response.created")
        channel.say("response.create", event_id="evt_second")
        while (event := await channel.next())["type"] != "error":
            pass
        assert event["error"]["code"] == "conversation_already_has_active_response"
        assert event["error"]["event_id"] == "evt_second"
        channel.say("response.cancel")
        done = await channel.until("response.done")
        assert done["response"]["status"] == "cancelled"
        assert done["response"]["status_details"]["reason"] == "client_cancelled"
