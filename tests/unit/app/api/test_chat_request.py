"""Chat requests: what the engine is asked, and what is refused with which words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.api.chat.request import Chat, ChatDefaults, ChatRequest, parse_chat
from app.errors import ClientError
from llm_core import (
    ChatMessage,
    ChoiceGuide,
    JsonGuide,
    RegexGuide,
    SamplingParams,
    ToolCall,
    ToolGuide,
    ToolSpec,
)

HI = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "does f", "parameters": {"type": "object"}},
}
OTHER = {"type": "function", "function": {"name": "g", "strict": True}}
F = ToolSpec(name="f", description="does f", parameters='{"type": "object"}')
G = ToolSpec(name="g", parameters='{"type": "object", "properties": {}}', strict=True)


DEFAULTS = ChatDefaults(temperature=0.3, top_p=0.8, repetition_penalty=1.1)


def parse(**fields: Any) -> Chat:
    body = json.dumps({"model": "parley", "messages": HI, **fields}).encode()
    return parse_chat(body, 1000, DEFAULTS)


def test_the_least_that_can_be_asked() -> None:
    chat = parse()
    assert chat.messages == [ChatMessage("user", "Hi")]
    assert chat.params == SamplingParams(
        max_tokens=1000, temperature=0.3, top_p=0.8, repetition_penalty=1.1
    )
    assert (chat.model, chat.tools) == ("parley", ())
    assert not (chat.stream or chat.usage_at_end or chat.usage_always)


def test_without_a_temperature_the_model_talks_as_the_operator_wants() -> None:
    params = parse(repetition_penalty=1.0, top_p=1.0).params
    assert (params.temperature, params.top_p, params.repetition_penalty) == (0.3, 1.0, 1.0)


def test_with_a_temperature_nothing_else_is_changed_that_was_not_named() -> None:
    params = parse(temperature=0).params
    assert (params.temperature, params.top_p, params.repetition_penalty) == (0.0, 1.0, 1.0)


def test_every_parameter_reaches_the_engine() -> None:
    chat = parse(
        temperature=0,
        top_p=0.5,
        seed=-7,
        stop=["a", "b"],
        max_completion_tokens=9,
        n=1,
        logprobs=True,
        top_logprobs=3,
        frequency_penalty=1,
        presence_penalty=-2,
        logit_bias={"5": -100, "7": 1.5},
        top_k=4,
        min_p=0.1,
        repetition_penalty=1.2,
        min_tokens=2,
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        modalities=["text"],
    )
    assert chat.params == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.0,
        top_k=4,
        top_p=0.5,
        min_p=0.1,
        seed=-7,
        repetition_penalty=1.2,
        frequency_penalty=1.0,
        presence_penalty=-2.0,
        logit_bias={5: -100.0, 7: 1.5},
        logprobs=3,
        stop=("a", "b"),
        ignore_eos=True,
    )
    assert chat.stream and chat.usage_at_end and chat.usage_always


@pytest.mark.parametrize("name", ["top_k", "max_tokens", "max_completion_tokens", "min_tokens"])
def test_numbers_that_cannot_be_sent_are_named(name: str) -> None:
    with pytest.raises(ClientError) as caught:
        parse(**{name: 2**70})
    assert caught.value.param == name


@pytest.mark.parametrize("factor", [1e-300, 0.0, 101.0])
def test_factors_that_make_no_numbers_of_logits(factor: float) -> None:
    with pytest.raises(ClientError) as caught:
        parse(repetition_penalty=factor)
    assert caught.value.param == "repetition_penalty"


def test_null_is_the_default() -> None:
    names = (
        *("temperature", "top_p", "seed", "stop", "max_tokens", "max_completion_tokens", "n"),
        *("logprobs", "top_logprobs", "frequency_penalty", "presence_penalty", "logit_bias"),
        *("response_format", "tools", "tool_choice", "parallel_tool_calls", "stream", "user"),
        *("stream_options", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos"),
        *("structured_outputs", "store", "modalities", "functions", "function_call", "metadata"),
    )
    assert parse(**dict.fromkeys(names)) == parse()


def test_stop_may_be_one_string_and_logprobs_without_alternatives() -> None:
    assert parse(stop="x").params.stop == ("x",)
    assert parse(logprobs=True).params.logprobs == 0
    assert parse(logprobs=False).params.logprobs is None
    assert parse(max_tokens=7).params.max_tokens == 7


def test_messages_of_all_roles() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    answer = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    chat = parse(
        messages=[
            {"role": "developer", "content": "Be kind."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": None, "tool_calls": [call], **answer, "parsed": None},
            {"role": "tool", "content": "1", "tool_call_id": "call_1"},
            {"role": "assistant", "content": "It is 1.", "name": "bot"},
        ],
        tools=[TOOL],
    )
    assert chat.messages == [
        ChatMessage("system", "Be kind.", tools=(F,)),
        ChatMessage("user", "ab"),
        ChatMessage(
            "assistant", "", tool_calls=(ToolCall(call_id="call_1", name="f", arguments='{"a":1}'),)
        ),
        ChatMessage("tool", "1", call_id="call_1"),
        ChatMessage("assistant", "It is 1."),
    ]


def test_tools_and_choices() -> None:
    tools = [TOOL, OTHER]
    chat = parse(tools=tools)
    assert chat.messages[0] == ChatMessage("system", "", tools=(F, G))
    assert chat.params.guide == ToolGuide(tools=(F, G))
    assert parse(tools=tools, tool_choice="auto", parallel_tool_calls=False).params.guide == (
        ToolGuide(tools=(F, G), parallel=False)
    )
    assert parse(tools=tools, tool_choice="required").params.guide == ToolGuide(
        tools=(F, G), required=True
    )
    named = parse(tools=tools, tool_choice={"type": "function", "function": {"name": "g"}})
    assert named.params.guide == ToolGuide(tools=(G,), required=True, parallel=False)
    assert named.tools == (G,)
    nothing = parse(tools=tools, tool_choice="none")
    assert (nothing.tools, nothing.params.guide) == ((), None)
    assert nothing.messages == [ChatMessage("user", "Hi")]


def test_formats_of_the_answer() -> None:
    assert parse(response_format={"type": "text"}).params.guide is None
    assert parse(response_format={"type": "json_object"}).params.guide == JsonGuide()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    assert parse(response_format=wanted).params.guide == JsonGuide(schema=json.dumps(schema))
    lenient = JsonGuide(schema=json.dumps(schema), strict=False)
    del wanted["json_schema"]["strict"]  # type: ignore[attr-defined]
    assert parse(response_format=wanted).params.guide == lenient
    assert parse(response_format=wanted, tools=[TOOL]).params.guide == ToolGuide(
        tools=(F,), text=lenient
    )
    for asked, guide in (
        ({"regex": "a+"}, RegexGuide(pattern="a+")),
        ({"choice": ["a", "b"]}, ChoiceGuide(options=("a", "b"))),
        ({"json": schema}, JsonGuide(schema=json.dumps(schema))),
    ):
        assert parse(structured_outputs=asked).params.guide == guide


def user_part(part: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}]}


CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": None}, "messages", "got null"),
        ({"messages": "Hi"}, "messages", "array"),
        ({"messages": [{"role": "user", "content": "x"}] * 4097}, "messages", "at most 4096"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "'assistant'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "a text is needed"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "Missing required"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content", "a text is needed"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "array"),
        ({"messages": [{"role": "user", "content": "x", "x": 1}]}, "messages[0].x", "Unknown"),
        (
            {"messages": [{**CALLED, "role": "user", "content": ""}]},
            "messages[0].tool_calls",
            "only",
        ),
        (
            {"messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}]},
            "messages[0].tool_call_id",
            "must answer a call",
        ),
        (
            {"messages": [CALLED, {"role": "tool", "content": "x"}]},
            "messages[1].tool_call_id",
            "must answer a call",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]},
            "messages[0].tool_call_id",
            "only a message",
        ),
        (
            user_part({"type": "image_url", "image_url": {"url": "x"}}),
            "messages[0].content[0].type",
            "Only parts of type 'text'",
        ),
        (user_part({"type": "text"}), "messages[0].content[0].text", "Missing required"),
        (user_part("x"), "messages[0].content[0]", ""),
        ({"model": 5}, "model", "string"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"temperature": True}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_p": 1.1}, "top_p", "less than or equal to 1"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"seed": 1.5}, "seed", "integer"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 1001}, "max_tokens", "the context of this model holds 1000 tokens"),
        ({"max_completion_tokens": 10**30}, "max_completion_tokens", "too large"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "not both"),
        ({"n": 2}, "n", "Only 1"),
        ({"top_logprobs": 3}, "top_logprobs", "'logprobs' is true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"logprobs": 5}, "logprobs", "boolean"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "less than or equal to 2"),
        ({"presence_penalty": -3}, "presence_penalty", "greater than or equal to -2"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "no token id"),
        ({"logit_bias": {" 5_0": 1}}, "logit_bias", "no token id"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1", "number"),
        ({"logit_bias": [1]}, "logit_bias", "object"),
        ({"stop": 5}, "stop", "array"),
        ({"stop": [5]}, "stop[0]", "string"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "'stream' is true"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needed"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "Missing required",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs",
            "more than",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "tools": [TOOL]},
            "structured_outputs",
            "no room for 'tools'",
        ),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "'f' is used twice"),
        ({"tools": [TOOL] * 129}, "tools", "at most 128"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "Only tools of type 'function'"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "pattern",
        ),
        ({"tool_choice": "required"}, "tool_choice", "only allowed when 'tools' are given"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice", "expected"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "h"}}},
            "tool_choice.function.name",
            "not a function of 'tools'",
        ),
        ({"functions": []}, "functions", "Use 'tools'"),
        ({"store": True}, "store", "Nothing is stored"),
        ({"modalities": ["audio"]}, "modalities", "Only"),
        ({"prediction": {}}, "prediction", "Unknown parameter"),
    ],
)
def test_what_cannot_be_served_is_named(fields: Any, param: str, message: str) -> None:
    with pytest.raises(ClientError) as refused:
        parse(**fields)
    assert refused.value.param == param
    assert message in refused.value.message
    assert len(refused.value.message) < 400


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"5", b'"x"', b"\xff\xfe", b"null"),
        b'{"model": "parley", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "parley", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "parley", "messages": [{"role": "user", "content": "x"}], "top_p": NaN}',
        b'{"model": ' + b"[" * 100_000,
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ClientError) as refused:
        parse_chat(body, 1000, DEFAULTS)
    assert refused.value.code == "invalid_json"
    assert len(refused.value.message) < 200


FIELDS = [field.alias or name for name, field in ChatRequest.model_fields.items()]
WORDS = ("type", "function", "name", "role", "content", "text", "user", "tool", "json_schema", "a")
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(WORDS)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)
    ),
    max_leaves=10,
)


@given(fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
@settings(max_examples=400, deadline=None)
def test_no_json_brings_the_server_down(fields: dict[str, Any]) -> None:
    """Whatever is in it, a request is understood or refused in words."""
    try:
        chat = parse(**fields)
    except ClientError as error:
        assert error.message and error.param
    else:
        assert chat.messages
