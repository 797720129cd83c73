"""Calls in streamed text: found, streamed and told from text, wherever the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_core.chat.tool_parser import (
    ToolArguments,
    ToolCallEnd,
    ToolCallParser,
    ToolCallStart,
    ToolEvent,
    ToolText,
)
from llm_core.messages import ToolFormat

NAMES = ("get_weather", "stop")
WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
ROME = WEATHER.replace("Paris", "Rome")


def parse(
    *deltas: str, tool_format: ToolFormat = "hermes"
) -> tuple[str, list[tuple[str, str, bool]]]:
    """The text, and (name, arguments, is complete) of every call."""
    parser = ToolCallParser(tool_format, NAMES)
    events: list[ToolEvent] = [event for delta in deltas for event in parser.feed(delta)]
    events += parser.flush()
    text = ""
    calls: list[list[Any]] = []
    ids = set()
    for event in events:
        match event:
            case ToolText(new):
                assert new
                text += new
            case ToolCallStart(index, call_id, name):
                assert index == len(calls) and all(call[2] is not None for call in calls)
                ids.add(call_id)
                calls.append([name, "", None])
            case ToolArguments(index, delta):
                assert delta and index == len(calls) - 1 and calls[index][2] is None
                calls[index][1] += delta
            case ToolCallEnd(index, is_complete):
                assert index == len(calls) - 1 and calls[index][2] is None
                calls[index][2] = is_complete
    assert len(ids) == len(calls) == parser.num_calls
    return text, [(call[0], call[1], call[2]) for call in calls]


PARIS = ("get_weather", '{"city": "Paris"}', True)


@pytest.mark.parametrize(
    ("reply", "text", "calls"),
    [
        ("Just text, 5 < 7.", "Just text, 5 < 7.", []),
        ("", "", []),
        ("ends in space \n", "ends in space \n", []),
        (f"<tool_call>\n{WEATHER}\n</tool_call>", "", [PARIS]),
        (f"Sure. \n<tool_call>{WEATHER}</tool_call>\n", "Sure.", [PARIS]),
        (f"<tool_call>{WEATHER}</tool_call>\n\nDone.", "Done.", [PARIS]),
        (
            f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n"
            '{"arguments": {}, "name": "stop"}\n</tool_call>',
            "",
            [PARIS, ("stop", "{}", True)],
        ),
        (
            f"<tool_call>[{WEATHER}, {ROME}]</tool_call>",
            "",
            [PARIS, ("get_weather", '{"city": "Rome"}', True)],
        ),
        ('<tool_call>{"name": "stop"}</tool_call>', "", [("stop", "{}", True)]),
        ('<tool_call>{"name": "stop", "arguments": null}</tool_call>', "", [("stop", "{}", True)]),
        (
            '<tool_call>{"name": "stop", "arguments": "{\\"a\\": 1}"}</tool_call>',
            "",
            [("stop", '{"a": 1}', True)],
        ),
        (
            '<tool_call>{"id": [1, {"name": "x"}], "name" : "stop" , '
            '"arguments":\n{"a": "}</tool_call>\\"", "b": [1, {}]} }</tool_call>',
            "",
            [("stop", '{"a": "}</tool_call>\\"", "b": [1, {}]}', True)],
        ),
        (f"<tool_call>{WEATHER}}}</tool_call>", "", [PARIS]),
        (f"<tool_call>{WEATHER}\nIt will rain.", "It will rain.", [PARIS]),
        ("<tool_call>stop()</tool_call>", "<tool_call>stop()</tool_call>", []),
        ("a <tool_call", "a <tool_call", []),
        ("<tool_call>\n", "<tool_call>\n", []),
        ('<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>', []),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        ('<tool_call>{"nam', '<tool_call>{"nam', []),
        (
            '<tool_call>{"name": "stop", "arguments": {"a": "b',
            "",
            [("stop", '{"a": "b', False)],
        ),
        (
            '<tool_call>{"name": "stop", "arguments": {\'a\': 1}}</tool_call>ok',
            "ok",
            [("stop", "{'a': 1}", False)],
        ),
    ],
)
def test_hermes(reply: str, text: str, calls: list[Any]) -> None:
    assert parse(reply) == (text, calls)
    assert parse(*reply) == (text, calls), "character by character"


@pytest.mark.parametrize(
    ("reply", "text", "calls"),
    [
        ('{"name": "stop", "parameters": {"a": 1}}', "", [("stop", '{"a": 1}', True)]),
        (
            '{"name": "stop", "parameters": {}}; {"name": "stop", "parameters": {"b": 2}}',
            "",
            [("stop", "{}", True), ("stop", '{"b": 2}', True)],
        ),
        ('Braces {"name": "stop"} later', 'Braces {"name": "stop"} later', []),
        ('{"city": "Paris"}', '{"city": "Paris"}', []),
        ('  {"name": "rm", "parameters": {}}', '  {"name": "rm", "parameters": {}}', []),
    ],
)
def test_llama3(reply: str, text: str, calls: list[Any]) -> None:
    assert parse(reply, tool_format="llama3") == (text, calls)
    assert parse(*reply, tool_format="llama3") == (text, calls)


PARIS_2 = WEATHER.replace('"Paris"}', '"Paris", "days": 2}')


@pytest.mark.parametrize(
    ("made", "num_kept"),
    [
        ([WEATHER, WEATHER, WEATHER], 1),
        ([WEATHER, ROME, WEATHER, ROME], 2),
        ([WEATHER, PARIS_2, ROME], 3),
        (['{"name": "stop"}', '{"name": "stop", "arguments": {}}'], 1),
        ([WEATHER, '{"name": "stop", "arguments": {"city": "Paris"}}'], 2),
    ],
)
def test_a_reply_is_over_where_it_repeats_a_call(made: list[str], num_kept: int) -> None:
    reply = "".join(f"<tool_call>\n{call}\n</tool_call>\n" for call in made) + "Done."
    parser = ToolCallParser("hermes", NAMES)
    parser.feed(reply)
    text, calls = parse(*reply)
    assert parser.is_repeating == (num_kept < len(made)) and len(calls) == num_kept
    assert parse(reply) == (text, calls)
    assert text == ("" if parser.is_repeating else "Done.")
    assert all(is_complete for *_, is_complete in calls)


def test_a_call_waits_only_as_long_as_it_repeats_another() -> None:
    parser = ToolCallParser("hermes", NAMES)
    parser.feed(f"<tool_call>{WEATHER}</tool_call>")
    assert parser.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "') == []
    start, more = parser.feed("R")
    assert isinstance(start, ToolCallStart) and more == ToolArguments(1, '{"city": "R')
    assert parser.feed('ome"') == [ToolArguments(1, 'ome"')]
    parser.feed("}}</tool_call>")
    parser.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "Ro')
    start, more, end = parser.flush()
    assert isinstance(start, ToolCallStart) and more == ToolArguments(2, '{"city": "Ro')
    assert end == ToolCallEnd(2, is_complete=False)


PIECES = st.sampled_from(
    [
        *("Hello ", "\n", " ", "<", "<tool_call>", "</tool_call>", WEATHER, "<tool", "_call>", "{"),
        *('{"name": "stop"}', '"', "}", "[", ",", '{"name": "stop", "arguments": {"x": "'),
    ]
)


@given(pieces=st.lists(PIECES, max_size=12), cuts=st.lists(st.integers(0, 300), max_size=8))
@settings(max_examples=300, deadline=None)
def test_where_the_text_is_cut_does_not_matter(pieces: list[str], cuts: list[int]) -> None:
    reply = "".join(pieces)
    ends = sorted({min(cut, len(reply)) for cut in cuts} | {len(reply)})
    starts = [0, *ends[:-1]]
    deltas = [reply[a:b] for a, b in zip(starts, ends, strict=True)]
    assert parse(*deltas) == parse(reply)


def test_arguments_stream_as_they_come() -> None:
    parser = ToolCallParser("hermes", NAMES)
    assert parser.feed("Let me see. <tool_call>\n") == [ToolText("Let me see.")]
    (start,) = parser.feed('{"name": "get_weather", "arg')
    assert isinstance(start, ToolCallStart) and start.name == "get_weather"
    assert parser.feed('uments": {"city": "Pa') == [ToolArguments(0, '{"city": "Pa')]
    assert parser.feed('ris"}') == [ToolArguments(0, 'ris"}')]
    assert parser.feed("}") == [ToolCallEnd(0, is_complete=True)]
    assert parser.feed("\n</tool_call>") == parser.flush() == []


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
@settings(max_examples=150, deadline=None)
def test_any_arguments_come_through(value: Any) -> None:
    arguments = json.dumps({"v": value}, ensure_ascii=False)
    reply = f'<tool_call>{{"name": "stop", "arguments": {arguments}}}</tool_call>'
    assert parse(*reply) == ("", [("stop", arguments, True)])
