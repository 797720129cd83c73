"""Calls on the wire: each server event is checked against the openai package's own classes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.api.realtime.connection import RealtimeConnection
from app.api.realtime.server_events import Speaker, WireMapper
from app.conversation import events as e
from app.conversation.tools import ToolBox, ToolError, tool
from llm_core import EngineBusyError, EngineDiedError, InvalidRequestError, RegexGuide, ToolGuide
from tests.support.fake_realtime import FakeChannel
from tests.support.fakes import ScriptedEngine, fake_services
from tests.support.openai_events import check_server_event

Wire = dict[str, Any]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
QUESTION = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "How is the weather in Oslo?"}],
}


@tool
async def weather(city: str) -> str:
    """The weather of a city."""
    if city == "Nowhere":
        raise ToolError("no such city")
    return f"Sunny in {city}."


@asynccontextmanager
async def conversation(engine: ScriptedEngine, *tools: Any) -> AsyncIterator[FakeChannel]:
    channel = FakeChannel()
    services = fake_services(engine, tools=ToolBox(tools))
    running = asyncio.create_task(RealtimeConnection(channel, services, "parley").run())
    await channel.until("session.created")
    yield channel
    await channel.close(1000, "")
    await running


def kinds_after(channel: FakeChannel, kind: str) -> list[str]:
    kinds = [event["type"] for event in channel.sent]
    return kinds[kinds.index(kind) + 1 :]


async def test_a_function_call_round_trip() -> None:
    engine = ScriptedEngine(CALL, "It is sunny.")
    async with conversation(engine) as channel:
        channel.say(
            "session.update",
            session={"tools": [WEATHER], "tool_choice": "auto", "output_modalities": ["text"]},
        )
        session = (await channel.until("session.updated"))["session"]
        assert session["tools"] == [WEATHER]
        channel.say("conversation.item.create", item=QUESTION)
        channel.say("response.create")
        done = (await channel.until("response.done"))["response"]
        kinds = kinds_after(channel, "response.created")
        assert kinds == [
            "response.output_item.added",
            "conversation.item.added",
            *(["response.function_call_arguments.delta"] * (len(kinds) - 6)),
            "response.function_call_arguments.done",
            "response.output_item.done",
            "conversation.item.done",
            "response.done",
        ]
        (made,) = done["output"]
        assert (made["type"], made["name"], made["status"]) == (
            "function_call",
            "weather",
            "completed",
        )
        assert made["arguments"] == '{"city": "Oslo"}'
        arguments = [x for x in channel.sent if x["type"].startswith("response.function_call")]
        assert "".join(x.get("delta", "") for x in arguments) == made["arguments"]
        assert {x["call_id"] for x in arguments} == {made["call_id"]}

        output = {"type": "function_call_output", "call_id": made["call_id"], "output": "sunny"}
        channel.say("conversation.item.create", item=output)
        added = await channel.until("conversation.item.added")
        assert added["item"]["output"] == "sunny"
        assert added["previous_item_id"] == made["id"]
        channel.say("response.create")
        final = (await channel.until("response.done"))["response"]
        assert final["output"][0]["content"][0]["text"] == "It is sunny."
        error = await channel.refused(
            "conversation.item.create", item=output | {"call_id": "call_x"}
        )
        assert (error["code"], error["param"]) == ("invalid_tool_call_id", "item.call_id")
        channel.say("conversation.item.retrieve", item_id=made["id"])
        assert (await channel.until("conversation.item.retrieved"))["item"] == made


async def test_tools_of_the_server_are_shown_as_calls_that_the_server_makes() -> None:
    engine = ScriptedEngine(CALL, CALL.replace("Oslo", "Nowhere"), "It is sunny.")
    async with conversation(engine, weather) as channel:
        channel.say("conversation.item.create", item=QUESTION)
        channel.say("response.create", response={"output_modalities": ["text"]})
        done = (await channel.until("response.done"))["response"]
        good, bad, message = done["output"]
        assert good == {
            "id": good["id"],
            "type": "mcp_call",
            "server_label": "parley",
            "name": "weather",
            "arguments": '{"city": "Oslo"}',
            "output": "Sunny in Oslo.",
            "error": None,
            "approval_request_id": None,
        }
        assert bad["error"] == {"type": "tool_execution_error", "message": "no such city"}
        assert message["content"][0]["text"] == "It is sunny."
        kinds = {kind for kind in kinds_after(channel, "response.created") if "mcp" in kind}
        assert kinds == {
            "response.mcp_call.in_progress",
            "response.mcp_call_arguments.delta",
            "response.mcp_call_arguments.done",
            "response.mcp_call.completed",
            "response.mcp_call.failed",
        }
        channel.say("conversation.item.retrieve", item_id=good["id"])
        assert (await channel.until("conversation.item.retrieved"))["item"] == good


async def test_a_session_chooses_among_the_servers_tools() -> None:
    engine = ScriptedEngine("Hello.")
    async with conversation(engine, weather) as channel:
        error = await channel.refused("session.update", session={"parley": {"tools": ["time"]}})
        assert (error["code"], error["param"]) == ("invalid_value", "session.parley.tools[0]")
        channel.say("session.update", session={"parley": {"tools": []}})
        session = (await channel.until("session.updated"))["session"]
        assert session["parley"] == {
            "trace": False,
            "word_timestamps": False,
            "tools": [],
            "budget_ms": None,
        }
        named = {"type": "function", "name": "weather"}
        error = await channel.refused("session.update", session={"tool_choice": named})
        assert error["param"] == "session.tool_choice"
        channel.say("session.update", session={"parley": {"tools": None}, "tool_choice": named})
        session = (await channel.until("session.updated"))["session"]
        assert session["tool_choice"] == named


async def test_truncation_and_tracing_as_clients_send_them() -> None:
    async with conversation(ScriptedEngine("Hello.")) as channel:
        for truncation in (
            "disabled",
            {"type": "retention_ratio", "retention_ratio": 0.8},
            "auto",
        ):
            update = {"truncation": truncation, "tracing": {"workflow_name": "w"}}
            channel.say("session.update", session=update)
            session = (await channel.until("session.updated"))["session"]
            assert session["truncation"] == truncation
            assert session["tracing"] is None


def test_events_of_phones_and_idle_callers() -> None:
    mapper = WireMapper("conv_1", Speaker({"type": "audio/pcm", "rate": 24000}, "parley"))
    (idle,) = mapper.to_wire(e.IdleTimedOut("item_1", 100, 6100))
    check_server_event(idle)
    assert idle["type"] == "input_audio_buffer.timeout_triggered"
    (key,) = mapper.to_wire(e.DtmfReceived("5", 1_700_000_000))
    check_server_event(key)
    assert (key["event"], key["received_at"]) == ("5", 1_700_000_000)


# --- tools that cannot be followed ---

BAD = WEATHER | {"parameters": {"properties": {"n": {"type": "integer", "multipleOf": 2**31}}}}
REASON = "tools: weather: parameters: properties.n.multipleOf: must be at most 10000"


def picky() -> ScriptedEngine:
    """Refuses all guides, as an engine does those of ``BAD``."""
    engine = ScriptedEngine("Hello.")
    engine.guide_error = InvalidRequestError(REASON)
    return engine


async def test_tools_are_made_ready_when_they_are_declared() -> None:
    engine = ScriptedEngine("Hello.")
    async with conversation(engine) as channel:
        assert engine.guides == [], "without tools there is nothing to make ready"
        session = {"type": "realtime", "tools": [WEATHER], "tool_choice": "required"}
        channel.say("session.update", session=session)
        await channel.until("session.updated")
        first, later, in_words = engine.guides
        assert isinstance(first, ToolGuide) and first.required
        assert isinstance(later, ToolGuide) and not later.required, "behind the first call"
        assert isinstance(in_words, RegexGuide)
        channel.say("session.update", session={"type": "realtime", "instructions": "Be kind."})
        await channel.until("session.updated")
        assert len(engine.guides) == 3, "the same tools are ready"
        channel.say("conversation.item.create", item=QUESTION)
        channel.say("response.create")
        await channel.until("response.done")
        assert engine.params[-1].guide == first


async def test_tools_of_the_server_are_made_ready_for_each_session() -> None:
    engine = ScriptedEngine("Hello.")
    async with conversation(engine, weather):
        assert [type(guide) for guide in engine.guides] == [ToolGuide, RegexGuide]
    engine = picky()
    async with conversation(engine, weather) as channel:
        channel.say("session.update", session={"type": "realtime", "instructions": "Be kind."})
        await channel.until("session.updated")


async def test_tools_that_cannot_be_followed_are_refused_when_they_are_declared() -> None:
    engine = picky()
    async with conversation(engine) as channel:
        error = await channel.refused(
            "session.update", session={"type": "realtime", "tools": [BAD], "instructions": "Sing."}
        )
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_value")
        assert error["param"] == "session.tools"
        assert error["message"] == f"Invalid value for 'session.tools': {REASON}."
        error = await channel.refused("response.create", response={"tools": [BAD]})
        assert error["param"] == "response.tools" and REASON in error["message"]
        engine.guide_error = None
        channel.say("session.update", session={"type": "realtime"})
        session = (await channel.until("session.updated"))["session"]
        assert session["tools"] == [] and session["instructions"] != "Sing."
        channel.say("conversation.item.create", item=QUESTION)
        channel.say("response.create")
        assert (await channel.until("response.done"))["response"]["status"] == "completed"


async def test_a_session_cannot_begin_with_tools_that_cannot_be_followed() -> None:
    channel = FakeChannel()
    services = fake_services(picky())
    opening = {"tools": [BAD]}
    await RealtimeConnection(channel, services, "parley", opening=opening).run()
    (error,) = channel.sent
    assert error["error"]["param"] == "session.tools" and REASON in error["error"]["message"]
    assert (await channel.when_closed()).code == 1008


@pytest.mark.parametrize("error", [EngineDiedError("gone"), EngineBusyError("later")])
async def test_an_engine_in_trouble_refuses_no_tools(error: Exception) -> None:
    engine = ScriptedEngine("Hello.")
    engine.guide_error = error
    async with conversation(engine) as channel:
        channel.say("session.update", session={"type": "realtime", "tools": [WEATHER]})
        assert (await channel.until("session.updated"))["session"]["tools"]
