"""Python functions as tools: what is made of a signature, and what comes of a call."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from pathlib import Path
from typing import Literal

import pytest

from app.conversation.session_config import SessionConfig, Tool, ToolChoice
from app.conversation.tools import (
    MAX_OUTPUT_CHARS,
    MAX_THREADS,
    ToolBox,
    ToolContext,
    ToolError,
    tool,
)
from app.errors import ConfigError
from tests.support.busy import Stopwatch


@tool
def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    The second is 1 if it is not given.
    """
    return a + b


@tool(name="forecast", description="Tomorrow's weather.", timeout_s=0.05)
async def weather(city: str, unit: Literal["C", "F"] = "C") -> dict[str, str]:
    if city == "Nowhere":
        raise ToolError("there is no such city")
    if city == "Slowville":
        await asyncio.sleep(60)
    if city == "Bugtown":
        raise ZeroDivisionError("private detail")
    return {"city": city, "sky": "clear", "unit": unit}


BOX = ToolBox([add, weather])


def test_a_signature_becomes_a_schema() -> None:
    assert add(2, 3) == 5
    assert add.tool == Tool(
        "add",
        "Add two numbers.\n\nThe second is 1 if it is not given.",
        {
            "additionalProperties": False,
            "properties": {"a": {"type": "integer"}, "b": {"default": 1, "type": "integer"}},
            "required": ["a"],
            "type": "object",
        },
    )
    assert (weather.tool.name, weather.tool.description) == ("forecast", "Tomorrow's weather.")
    assert weather.tool.parameters["properties"]["unit"]["enum"] == ["C", "F"]


@tool
async def remember(what: str, talk: ToolContext) -> str:
    """Keep something in mind."""
    talk.notes.setdefault("kept", []).append(what)
    return f"{talk.call_id}: {', '.join(talk.notes['kept'])}"


@tool
def caller(talk: ToolContext) -> str:
    return talk.parameters.get("from", "nobody")


async def test_a_tool_that_asks_for_it_knows_its_conversation() -> None:
    assert list(remember.tool.parameters["properties"]) == ["what"], "the model is told nothing"
    box = ToolBox([remember, caller])
    one = box.of(ToolContext(call_id="c1", parameters={"from": "+49301"}))
    other = box.of(ToolContext(call_id="c2"))
    assert (await one.run("remember", '{"what": "two"}')).output == "c1: two"
    assert (await other.run("remember", '{"what": "six"}')).output == "c2: six"
    assert (await one.plus(add).run("remember", '{"what": "salami"}')).output == "c1: two, salami"
    assert (await one.run("caller", "{}")).output == "+49301", "also one that blocks"
    assert (await other.run("caller", "")).output == "nobody"
    assert (await box.run("remember", '{"what": "x"}')).output == ": x"
    assert (await box.run("remember", '{"what": "y"}')).output == ": y", (
        "of nobody, nothing is kept"
    )
    wrong = await one.run("remember", '{"what": "x", "talk": {}}')
    assert wrong.error is not None and wrong.error.startswith("bad arguments")


def test_signatures_that_say_too_little() -> None:
    with pytest.raises(ConfigError, match="'a' has no type"):
        tool(lambda a: a)

    def star(*numbers: int) -> int:
        return sum(numbers)

    with pytest.raises(ConfigError, match="numbers"):
        tool(star)
    with pytest.raises(ConfigError, match="two tools named 'add'"):
        ToolBox([add, add])


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("add", '{"a": 2, "b": 40}', "42"),
        ("add", '{"a": 2}', "3"),
        ("add", '{"a": "two"}', "Error: bad arguments: a: Input should be a valid integer"),
        ("add", '{"a": 1, "c": 2}', "Error: bad arguments: c: Extra inputs are not permitted"),
        ("add", "", "Error: bad arguments: a: Field required"),
        ("add", "{", "Error: bad arguments: Invalid JSON"),
        ("forecast", '{"city": "Oslo"}', '{"city":"Oslo","sky":"clear","unit":"C"}'),
        ("forecast", '{"city": "Nowhere"}', "Error: there is no such city"),
        ("forecast", '{"city": "Slowville"}', "Error: no answer within 0.05 seconds"),
        ("forecast", '{"city": "Bugtown"}', "Error: the tool failed"),
    ],
)
async def test_what_the_model_reads(name: str, arguments: str, text: str) -> None:
    outcome = await BOX.run(name, arguments)
    assert outcome.for_model.startswith(text)
    assert "private" not in outcome.for_model


async def test_long_outputs_are_cut() -> None:
    @tool
    def book() -> str:
        """A book."""
        return "x" * (MAX_OUTPUT_CHARS + 1)

    outcome = await ToolBox([book]).run("book", "{}")
    assert outcome.output == "x" * MAX_OUTPUT_CHARS + " [cut]"


async def test_a_blocking_function_does_not_block_and_its_late_result_is_dropped() -> None:
    begun, let_go = threading.Event(), threading.Event()

    @tool(timeout_s=0.1)
    def stuck() -> str:
        """Blocks."""
        begun.set()
        let_go.wait(20)
        return "late"

    box = ToolBox([stuck])
    watch = Stopwatch()
    running = asyncio.create_task(box.run("stuck", ""))
    assert await asyncio.to_thread(begun.wait, 10), "the loop runs on"
    assert (await running).error == "no answer within 0.1 seconds"
    assert watch.took_s() < 5.0
    let_go.set()
    async with asyncio.timeout(10):
        for _ in range(MAX_THREADS):  # the thread's place is free again
            await box._threads.acquire()


@tool
def leaving(how: str) -> str:
    """Ends more than it should."""
    if how == "exit":
        sys.exit(3)
    raise StopIteration


@tool
async def leaving_at_once() -> str:
    """The same, on the loop."""
    sys.exit(3)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("leaving", '{"how": "exit"}'),
        ("leaving", '{"how": "stop"}'),
        ("leaving_at_once", "{}"),
    ],
)
async def test_a_tool_cannot_end_the_server(name: str, arguments: str) -> None:
    outcome = await ToolBox([leaving, leaving_at_once]).run(name, arguments)
    assert outcome.for_model == "Error: the tool failed", "and it did not take until its time-out"


async def test_boxes_made_of_one_share_its_threads() -> None:
    """Each phone call has a box of its own, and the machine is one."""
    gate, running = threading.Event(), []

    @tool(timeout_s=5)
    def block(number: int) -> str:
        running.append(number)
        gate.wait(5)
        return "done"

    box = ToolBox([block])
    calls = [
        asyncio.create_task(box.plus().run("block", f'{{"number": {number}}}'))
        for number in range(MAX_THREADS + 3)
    ]
    async with asyncio.timeout(5):
        while len(running) < MAX_THREADS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert len(running) == MAX_THREADS
    gate.set()
    assert {outcome.output for outcome in await asyncio.gather(*calls)} == {"done"}


def test_what_a_session_is_offered() -> None:
    theirs = Tool("add", "Their own.", {})
    config = SessionConfig("", tools=(theirs,))
    assert [t.name for t in BOX.offered(config)] == ["add", "forecast"]
    assert BOX.offered(config)[0] is theirs
    assert not BOX.runs_here("add", config), "the client's tool hides ours"
    assert BOX.runs_here("forecast", config)
    some = SessionConfig("", server_tools=("add",))
    assert [t.name for t in BOX.offered(some)] == ["add"]
    assert not BOX.runs_here("forecast", some)
    assert BOX.offered(SessionConfig("", tool_choice=ToolChoice("none"))) == ()


def test_the_module_may_lie_where_the_server_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from app.conversation.tools import tool\n@tool\ndef here() -> str: ...\n"
    (tmp_path / "tools_of_here.py").write_text(source)
    (tmp_path / "json.py").write_text("raise RuntimeError('not the json that is meant')\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    assert ToolBox.load("tools_of_here").names == ("here",)
    monkeypatch.delitem(sys.modules, "json")
    importlib.import_module("json")  # what lies there hides nothing


def test_tools_are_loaded_from_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tools.py").write_text(
        "from app.conversation.tools import tool\n"
        "@tool\ndef one() -> int:\n    'One.'\n    return 1\n"
        "@tool\ndef two() -> int:\n    'Two.'\n    return 2\n"
    )
    (tmp_path / "no_tools.py").write_text("x = 1\n")
    (tmp_path / "broken_tools.py").write_text("raise RuntimeError('oh')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert ToolBox.load("my_tools").names == ("one", "two")
    assert ToolBox.load("my_tools: two").names == ("two",)
    for place, why in (
        ("my_tools:three", "'three'"),
        ("no_tools", "no function marked"),
        ("broken_tools", "oh"),
        ("absent_tools", "cannot import"),
    ):
        with pytest.raises(ConfigError, match=why):
            ToolBox.load(place)


def test_the_former_name_of_the_tool_context_works_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match="is now called ToolContext"):
        from app.conversation.tools import Conversation
    assert Conversation is ToolContext
