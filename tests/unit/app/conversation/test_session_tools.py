"""Tools in a conversation: calls of the client's and of ours, waits, interruptions, limits."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from app.conversation.events import (
    Item,
    OutputArguments,
    OutputAudio,
    OutputDone,
    OutputStarted,
    OutputText,
    Part,
    ResponseDone,
    ToolOutput,
)
from app.conversation.response.spec import ResponseRequest
from app.conversation.session_config import SessionConfig, Tool, ToolChoice
from app.conversation.tools import ToolBox, ToolError, tool
from app.errors import ClientError
from llm_core import ChatMessage, RegexGuide, ToolGuide
from tests.support.fakes import ScriptedEngine, recent, settle, silence, voice
from tests.support.session_call import Call, call

WEATHER = Tool("weather", "The weather.", {"type": "object", "properties": {}})


def calls(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Clockwork:
    """A tool of ours that answers when it is told to."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.begun: list[str] = []
        self.cancelled = 0

        @tool
        async def look(what: str) -> str:
            """Look at something."""
            self.begun.append(what)
            if what == "trouble":
                raise ToolError("nothing to see")
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return f"a {what}"

        self.box = ToolBox([look])


async def ask(c: Call, text: str, **wishes: Any) -> None:
    await c.session.add_item(Item(f"q{len(c.out.events)}", "user", [Part("input_text", text)]))
    await c.session.create_response(ResponseRequest(**wishes))
    await settle()


def roles(messages: list[ChatMessage]) -> list[str]:
    return [message.role for message in messages]


# --- the client's tools ---


async def test_a_call_goes_to_the_client_and_its_output_to_the_model() -> None:
    engine = ScriptedEngine(f"Let me see. {calls('weather', city='Oslo')}", "It is sunny.")
    async with call(engine, tools=(WEATHER,)) as c:
        await ask(c, "How is the weather?", modality="text")
        started = c.out.of(OutputStarted)
        assert [e.item.call is None for e in started] == [True, False]
        item = started[1].item
        assert item.call is not None
        assert (item.call.name, item.call.arguments) == ("weather", '{"city": "Oslo"}')
        assert "".join(e.text for e in c.out.of(OutputArguments)) == item.call.arguments
        (done,) = c.out.of(ResponseDone)
        assert done.response.status == "completed"
        assert [i.id for i in done.response.output] == [e.item.id for e in started]
        assert item.status == "completed"
        assert "".join(e.text for e in c.out.of(OutputText)) == "Let me see."

        # What has not come back is nothing that the model could read.
        assert roles(c.messages()) == ["user", "assistant"]
        call_id = item.call.call_id
        await c.session.add_item(Item("o1", "tool", output=ToolOutput(call_id, "sunny")))
        assert roles(c.messages()) == ["user", "assistant", "tool"]
        await c.session.create_response(ResponseRequest(modality="text"))
        await settle()
        prompt = engine.requests[-1]
        assert [tool.name for tool in prompt[0].tools] == ["weather"]
        assert prompt[2].content == "Let me see."
        assert prompt[2].tool_calls[0].call_id == call_id
        assert (prompt[3].content, prompt[3].call_id) == ("sunny", call_id)
        assert c.out.of(OutputDone)[-1].item.content[0].text == "It is sunny."


async def test_a_spoken_call_does_not_wait_for_the_words_before_it() -> None:
    engine = ScriptedEngine(f"Let me have a look at the weather. {calls('weather')}")
    async with call(engine, tools=(WEATHER,)) as c:
        await ask(c, "How is the weather?")
        assert [e.item.call is None for e in c.out.of(OutputStarted)] == [True, False]
        assert c.out.of(OutputDone)[0].item.call is not None
        assert not c.out.of(ResponseDone), "the words still play"
        await c.clock.advance(3.0)
        assert c.out.of(ResponseDone)[0].response.status == "completed"


async def test_outputs_must_belong_to_a_call() -> None:
    async with call(ScriptedEngine(calls("weather")), tools=(WEATHER,)) as c:
        await ask(c, "How is the weather?", modality="text")
        item = c.out.of(OutputStarted)[0].item
        assert item.call is not None
        with pytest.raises(ClientError) as caught:
            await c.session.add_item(Item("o0", "tool", output=ToolOutput("call_x", "1")))
        assert (caught.value.code, caught.value.param) == ("invalid_tool_call_id", "item.call_id")
        await c.session.add_item(Item("o1", "tool", output=ToolOutput(item.call.call_id, "1")))
        with pytest.raises(ClientError, match="already"):
            await c.session.add_item(Item("o2", "tool", output=ToolOutput(item.call.call_id, "2")))


async def test_choices_become_guides() -> None:
    other = Tool("time", "The time.", {"type": "object", "properties": {}})
    engine = ScriptedEngine("Hello.")
    async with call(engine, tools=(WEATHER, other)) as c:
        for choice, names, required in (
            (None, ["weather", "time"], False),
            (ToolChoice("required"), ["weather", "time"], True),
            (ToolChoice("function", "time"), ["time"], True),
        ):
            await ask(c, "Hi", modality="text", tool_choice=choice)
            guide = engine.params[-1].guide
            assert isinstance(guide, ToolGuide)
            assert [tool.name for tool in guide.tools] == names
            assert guide.required is required
        await ask(c, "Hi", modality="text", tool_choice=ToolChoice("none"))
        assert engine.params[-1].guide is None
        assert not any(message.tools for message in engine.requests[-1])


async def test_one_call_at_a_time_unless_the_client_wants_more() -> None:
    engine = ScriptedEngine(f"{calls('weather')} {calls('weather')} and so on")
    async with call(engine, tools=(WEATHER,)) as c:
        await ask(c, "Hi", modality="text")
        (done,) = c.out.of(ResponseDone)
        assert [item.call is not None for item in done.response.output] == [True]


async def test_parallel_calls_stand_in_one_message() -> None:
    engine = ScriptedEngine(f"{calls('weather', a=1)} {calls('weather', a=2)} <tool_c")
    async with call(engine, tools=(WEATHER,), parallel_tool_calls=True) as c:
        await ask(c, "Hi", modality="text")
        items = c.out.of(ResponseDone)[0].response.output
        assert len(items) == 2, "a call that was hardly begun is not shown as text"
        for number, item in enumerate(reversed(items)):
            output = ToolOutput(item.call.call_id, f"out {number}")
            await c.session.add_item(Item(f"o{number}", "tool", output=output))
        asked, made, first, second = c.messages()
        assert [call.arguments for call in made.tool_calls] == ['{"a": 1}', '{"a": 2}']
        assert (first.content, second.content) == ("out 1", "out 0")


async def test_a_model_that_repeats_its_call_has_made_it_once() -> None:
    engine = ScriptedEngine(" ".join([calls("weather", a=1), *[calls("weather", a=2)] * 50]))
    async with call(engine, tools=(WEATHER,), parallel_tool_calls=True) as c:
        await ask(c, "Hi", modality="text")
        (done,) = c.out.of(ResponseDone)
        assert done.response.status == "completed" and engine.num_running == 0
        made = [item.call.arguments for item in done.response.output if item.call]
        assert made == ['{"a": 1}', '{"a": 2}']


async def test_a_call_cut_short_is_incomplete() -> None:
    cut = calls("weather", city="Oslo")[:-16]
    async with call(ScriptedEngine(cut), tools=(WEATHER,)) as c:
        await ask(c, "Hi", modality="text")
        (item,) = c.out.of(ResponseDone)[0].response.output
        assert item.status == "incomplete"


# --- our own tools ---


async def test_a_tool_of_ours_runs_here_and_the_answer_goes_on() -> None:
    clockwork = Clockwork()
    clockwork.let_go.set()
    engine = ScriptedEngine(f"Let me see. {calls('look', what='cat')}", "It is a cat.")
    async with call(engine, server=clockwork.box) as c:
        await ask(c, "What is it?", modality="text")
        (done,) = c.out.of(ResponseDone)
        assert done.response.status == "completed"
        kinds = [item.call.name if item.call else "message" for item in done.response.output]
        assert kinds == ["message", "look", "message"]
        ours = done.response.output[1].call
        assert ours is not None
        assert (ours.runs_here, ours.output, ours.error) == (True, "a cat", None)
        assert roles(engine.requests[1]) == ["system", "user", "assistant", "tool"]
        assert engine.requests[1][2].content == "Let me see."
        assert done.response.usage.input_tokens == 20, "of both of the model's replies"
        # The next prompt begins as this one did: what is in the cache stays useful.
        assert c.session._responses.prompt()[: len(engine.requests[1])] == engine.requests[1]
        facts = recent(c.services.traces.store, 1)[0]["facts"]
        assert facts["tool_calls"] == 1


async def test_errors_are_for_the_model_to_read() -> None:
    engine = ScriptedEngine(calls("look", what="trouble"), calls("look"), "Sorry.")
    async with call(engine, server=Clockwork().box) as c:
        await ask(c, "What is it?", modality="text")
        assert engine.requests[1][-1].content == "Error: nothing to see"
        assert engine.requests[2][-1].content.startswith("Error: bad arguments: what")
        first, second, _ = c.out.of(ResponseDone)[0].response.output
        assert first.call.error == "nothing to see"


async def test_the_model_does_not_call_for_ever() -> None:
    clockwork = Clockwork()
    clockwork.let_go.set()
    engine = ScriptedEngine(*(calls("look", what=animal) for animal in ("cat", "dog", "cow")))
    async with call(engine, server=clockwork.box, settings={"max_tool_rounds": 2}) as c:
        await ask(c, "What is it?", modality="text")
        (done,) = c.out.of(ResponseDone)
        assert clockwork.begun == ["cat", "dog"]
        assert [bool(request[0].tools) for request in engine.requests] == [True, True, False]
        words = engine.params[-1].guide
        assert isinstance(words, RegexGuide), "it can say no call, and not nothing"
        assert re.fullmatch(words.pattern, "A cat, and\na dog.")
        for wrong in ("", calls("look", what="cow"), " " + calls("look"), '{"name": "look"}'):
            assert not re.fullmatch(words.pattern, wrong)
        assert done.response.output[-1].call.error == "too many calls in one answer"
        assert engine.num_running == 0


async def test_after_one_call_of_ours_the_model_is_not_listened_to() -> None:
    clockwork = Clockwork()
    clockwork.let_go.set()
    engine = ScriptedEngine(f"{calls('look', what='cat')} and so on", "A cat.")
    async with call(engine, server=clockwork.box) as c:
        await ask(c, "What is it?", modality="text")
        assert "".join(e.text for e in c.out.of(OutputText)) == "A cat."


async def test_what_is_known_is_not_asked_again() -> None:
    clockwork = Clockwork()
    clockwork.let_go.set()
    look = calls("look", what="cat")
    engine = ScriptedEngine(look, look, "A cat.")
    async with call(engine, server=clockwork.box) as c:
        await ask(c, "What is it?", modality="text")
        assert clockwork.begun == ["cat"]
        first, second, answer = c.out.of(ResponseDone)[0].response.output
        assert first.call.output == second.call.output == "a cat"
        assert answer.content[0].text == "A cat."
        assert [bool(request[0].tools) for request in engine.requests] == [True, True, False]


async def test_a_demand_for_a_call_is_met_by_the_first() -> None:
    clockwork = Clockwork()
    clockwork.let_go.set()
    engine = ScriptedEngine(calls("look", what="cat"), "A cat.")
    async with call(engine, server=clockwork.box) as c:
        await ask(c, "What?", modality="text", tool_choice=ToolChoice("required"))
        guides = [params.guide for params in engine.params]
        assert [isinstance(g, ToolGuide) and g.required for g in guides] == [True, False]


async def test_a_long_wait_is_bridged_once_and_the_model_does_not_read_it() -> None:
    clockwork = Clockwork()
    engine = ScriptedEngine(calls("look", what="cat"), "A cat.")
    async with call(engine, server=clockwork.box, settings={"tool_filler_ms": 500}) as c:
        await ask(c, "What is it?")
        assert clockwork.begun == ["cat"]
        await c.clock.advance(0.4)
        assert not c.out.of(OutputAudio)
        await c.clock.advance(5.0)
        assert c.synthesizer.spoken == ["One moment."]
        clockwork.let_go.set()
        await settle()
        await c.clock.advance(5.0)
        (done,) = c.out.of(ResponseDone)
        texts = [i.content[0].text for i in done.response.output if i.call is None]
        assert texts == ["One moment.", "A cat."]
        assert [m.content for m in c.messages()] == ["What is it?", "", "a cat", "A cat."]


async def test_a_filler_waits_for_the_words_before_it() -> None:
    clockwork = Clockwork()
    engine = ScriptedEngine(f"Let me have a careful look. {calls('look', what='cat')}", "A cat.")
    async with call(engine, server=clockwork.box, settings={"tool_filler_ms": 0}) as c:
        await ask(c, "What is it?")  # the words last 1.1 s
        await c.clock.advance(0.9)
        assert "One moment." not in c.synthesizer.spoken
        await c.clock.advance(0.4)
        assert "One moment." in c.synthesizer.spoken
        clockwork.let_go.set()
        await c.clock.advance(5.0)


async def test_a_quick_tool_needs_no_filler() -> None:
    clockwork = Clockwork()
    clockwork.let_go.set()
    engine = ScriptedEngine(calls("look", what="cat"), "A cat.")
    async with call(engine, server=clockwork.box) as c:
        await ask(c, "What is it?")
        await c.clock.advance(5.0)
        assert c.synthesizer.spoken == ["A cat."]


async def test_the_caller_interrupts_a_tool() -> None:
    clockwork = Clockwork()
    engine = ScriptedEngine(calls("look", what="cat"), "Never mind.")
    async with call(engine, "Stop it.", "Stop it.", server=clockwork.box) as c:
        await ask(c, "What is it?")
        await c.hear(voice(0.6))
        (done,) = c.out.of(ResponseDone)
        assert done.response.status == "cancelled"
        assert clockwork.cancelled == 1
        (item,) = done.response.output
        assert item.status == "incomplete"
        assert item.call.error == "interrupted; what came of the call is not known"
        assert c.messages()[-1].content.startswith("Error: interrupted")
        await c.hear(silence(0.7))
        await c.clock.advance(3.0)
        assert c.messages()[-1].content == "Never mind."


async def test_nothing_is_done_before_the_answer_is_wanted() -> None:
    clockwork = Clockwork()
    clockwork.let_go.set()
    look = calls("look", what="cat")
    engine = ScriptedEngine(look, look, "A cat.")
    async with call(engine, "What is", "What is it?", "What is it?", server=clockwork.box) as c:
        await c.hear(voice(0.6) + silence(0.2))  # a pause: the answer is begun in advance
        assert len(engine.requests) == 1
        assert clockwork.begun == []
        await c.hear(voice(0.5))  # and was for nothing
        assert clockwork.begun == []
        await c.hear(silence(0.7))
        await c.clock.advance(3.0)
        assert clockwork.begun == ["cat"]
        assert c.out.of(ResponseDone)[-1].response.status == "completed"


async def test_calls_of_both_kinds_leave_the_turn_to_the_client() -> None:
    clockwork = Clockwork()
    clockwork.let_go.set()
    engine = ScriptedEngine(f"{calls('look', what='cat')} {calls('weather')}")
    both = {"tools": (WEATHER,), "parallel_tool_calls": True}
    async with call(engine, server=clockwork.box, **both) as c:
        await ask(c, "What is it?", modality="text")
        (done,) = c.out.of(ResponseDone)
        assert len(engine.requests) == 1
        ours, theirs = (item.call for item in done.response.output)
        assert ours is not None and theirs is not None
        assert (ours.output, theirs.runs_here) == ("a cat", False)


async def test_a_session_may_do_without_our_tools() -> None:
    engine = ScriptedEngine("Hello.")
    async with call(engine, server=Clockwork().box, server_tools=()) as c:
        await ask(c, "Hi", modality="text")
        assert not any(message.tools for message in engine.requests[0])
        assert isinstance(c.session.config, SessionConfig)
