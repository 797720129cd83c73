"""Out-of-band responses: beside the conversation, and several at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from app.api.realtime.connection import RealtimeConnection
from app.conversation.events import ResponseDone, SessionEvent
from app.conversation.history import History
from app.conversation.response.out_of_band import OutOfBandResponses
from app.conversation.response.spec import ResponseRequest
from app.conversation.services import Services
from app.conversation.session_config import SessionConfig
from tests.support.fake_realtime import FakeChannel
from tests.support.fakes import ScriptedEngine, fake_services, recent

Wire = dict[str, Any]


def user(text: str) -> Wire:
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "role": "user", "content": content}


@asynccontextmanager
async def conversation(
    engine: ScriptedEngine, services: Services | None = None
) -> AsyncIterator[FakeChannel]:
    before = asyncio.all_tasks()
    channel = FakeChannel()
    services = services or fake_services(engine)
    running = asyncio.create_task(RealtimeConnection(channel, services, "parley").run())
    await channel.until("session.created")
    channel.say("session.update", session={"output_modalities": ["text"], "instructions": "Be."})
    await channel.until("session.updated")
    yield channel
    await channel.close(1000, "")
    await running
    assert engine.num_running == 0
    assert asyncio.all_tasks() == before


async def test_it_reads_its_own_input_and_leaves_the_conversation_alone() -> None:
    engine = ScriptedEngine("support")
    async with conversation(engine) as channel:
        channel.say("conversation.item.create", item=user("Hi") | {"id": "i1"})
        await channel.until("conversation.item.done")
        num_sent = len(channel.sent)
        channel.say(
            "response.create",
            response={
                "conversation": "none",
                "instructions": "Classify.",
                "metadata": {"topic": "class"},
                "input": [{"type": "item_reference", "id": "i1"}, user("My printer burns.")],
            },
        )
        response = (await channel.until("response.done"))["response"]
        assert response["metadata"] == {"topic": "class"}
        assert response["conversation_id"] is None
        assert response["output"][0]["content"][0]["text"] == "support"
        assert [m.content for m in engine.requests[0]] == ["Classify.", "Hi", "My printer burns."]
        kinds = [event["type"] for event in channel.sent[num_sent:]]
        assert not any(kind.startswith("conversation.") for kind in kinds)
        item_id = response["output"][0]["id"]
        error = await channel.refused("conversation.item.retrieve", item_id=item_id)
        assert error["code"] == "item_retrieve_invalid_item_id"


async def test_without_input_it_reads_the_conversation_and_an_empty_one_reads_nothing() -> None:
    engine = ScriptedEngine("ok")
    async with conversation(engine) as channel:
        channel.say("conversation.item.create", item=user("Hi"))
        for wishes in ({}, {"input": []}):
            channel.say("response.create", response={"conversation": "none", **wishes})
            await channel.until("response.done")
        assert [[m.content for m in request] for request in engine.requests] == [
            ["Be.", "Hi"],
            ["Be."],
        ]


async def test_input_for_the_conversation_answers_it_and_is_kept() -> None:
    engine = ScriptedEngine("ok")
    async with conversation(engine) as channel:
        channel.say("conversation.item.create", item=user("Hi"))
        channel.say("response.create", response={"input": [user("Only this.")]})
        response = (await channel.until("response.done"))["response"]
        assert [m.content for m in engine.requests[0]] == ["Be.", "Only this."]
        channel.say("conversation.item.retrieve", item_id=response["output"][0]["id"])
        await channel.until("conversation.item.retrieved")


async def test_several_run_beside_the_conversations_own_and_are_bounded() -> None:
    engine = ScriptedEngine("one two three")
    async with conversation(engine) as channel:
        engine.gate.clear()
        channel.say("conversation.item.create", item=user("Hi"))
        channel.say("response.create")
        for _ in range(4):
            channel.say("response.create", response={"conversation": "none"})
        ids = [(await channel.until("response.created"))["response"]["id"] for _ in range(5)]
        channel.say("response.create", response={"conversation": "none"}, event_id="evt_5")
        while (event := await channel.next())["type"] != "error":
            pass
        assert event["error"]["code"] == "too_many_active_responses"
        channel.say("response.cancel", response_id=ids[2])
        cancelled = (await channel.until("response.done"))["response"]
        assert (cancelled["id"], cancelled["status"]) == (ids[2], "cancelled")
        engine.gate.set()
        done = {(await channel.until("response.done"))["response"]["id"] for _ in range(4)}
        assert done == set(ids) - {ids[2]}


async def test_a_client_that_leaves_takes_them_along() -> None:
    engine = ScriptedEngine("one two three")
    engine.gate.clear()
    services = fake_services(engine)
    async with conversation(engine, services) as channel:
        channel.say("response.create", response={"conversation": "none"})
        response = (await channel.until("response.created"))["response"]
    (turn,) = recent(services.traces.store, 2)
    assert (turn["response_id"], turn["outcome"]) == (response["id"], "cancelled")


async def test_one_whose_end_is_being_told_is_not_left_behind() -> None:
    """Telling may wait for a client that does not read."""
    services = fake_services(ScriptedEngine("ok"))
    is_told = asyncio.Event()

    async def sink(event: SessionEvent) -> None:
        if isinstance(event, ResponseDone):
            is_told.set()
            await asyncio.Event().wait()

    before = asyncio.all_tasks()
    side = OutOfBandResponses(services, sink, "sess_1")
    side.start(ResponseRequest(modality="text"), History(), SessionConfig("Be."))
    await is_told.wait()
    assert len(side) == 0, "another one may be asked for"
    await side.close()
    assert asyncio.all_tasks() == before


async def test_one_that_is_ended_before_it_began_is_recorded() -> None:
    services = fake_services(ScriptedEngine("ok"))

    async def sink(event: SessionEvent) -> None:
        raise AssertionError(f"nothing is told of it: {event}")

    side = OutOfBandResponses(services, sink, "sess_1")
    side.start(ResponseRequest(modality="text"), History(), SessionConfig("Be."))
    await side.close()
    (turn,) = recent(services.traces.store, 2)
    assert turn["outcome"] == "cancelled"


async def test_unknown_references_and_choices_are_refused() -> None:
    async with conversation(ScriptedEngine("ok")) as channel:
        reference = {"type": "item_reference", "id": "nowhere"}
        for response, code in (
            ({"conversation": "none", "input": [reference]}, "item_retrieve_invalid_item_id"),
            ({"tool_choice": "required"}, "invalid_value"),
            ({"tool_choice": {"type": "function", "name": "f"}}, "invalid_value"),
            ({"tools": [{"type": "function", "name": "f"}] * 2}, "invalid_value"),
        ):
            error = await channel.refused("response.create", response=response)
            assert error["code"] == code
