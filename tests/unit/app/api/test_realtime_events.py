"""Client events: what is accepted, and in which words the rest is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.api.realtime.client_events import (
    EVENT_TYPES,
    MAX_AUDIO_CHARS,
    AudioAppend,
    FunctionCallItem,
    FunctionOutputItem,
    ItemCreate,
    ResponseCreate,
    event_id_of,
    parse_event,
    parse_message,
)
from app.errors import ClientError


def refused(event: Any) -> ClientError:
    with pytest.raises(ClientError) as caught:
        parse_event(event)
    return caught.value


# --- messages ---


@pytest.mark.parametrize(
    "message",
    [
        "",
        "{",
        "[1, 2",
        "nul",
        '{"type": NaN}',
        '{"a": "\\ud800"}',
        "[" * 100_000,
        '"text"',
        "[]",
        "3",
    ],
)
def test_what_is_not_a_json_object(message: str) -> None:
    with pytest.raises(ClientError) as caught:
        parse_message(message)
    assert caught.value.code == "invalid_json"


def test_binary_messages_are_refused() -> None:
    with pytest.raises(ClientError, match="base64") as caught:
        parse_message(b'{"type": "response.create"}')
    assert caught.value.code == "invalid_message"


def test_only_an_append_may_be_big() -> None:
    big = parse_message(json.dumps({"type": "input_audio_buffer.append", "audio": "A" * 2**21}))
    assert len(big["audio"]) == 2**21
    with pytest.raises(ClientError) as caught:
        parse_message(json.dumps({"type": "session.update", "session": {"tools": [1] * 2**19}}))
    assert caught.value.code == "message_too_large"


@settings(max_examples=50, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=8))
def test_any_value_of_a_field_is_taken_or_refused(value: Any) -> None:
    for name in EVENT_TYPES:
        for field in ("session", "audio", "item", "item_id", "response", "event_id"):
            try:
                parse_event({"type": name, field: value})
            except ClientError as error:
                assert error.message
                assert error.code


# --- events ---


def test_every_event_of_the_protocol_is_taken() -> None:
    message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    for event in (
        {"type": "session.update", "session": {"type": "realtime"}},
        {"type": "input_audio_buffer.append", "audio": "AAAA"},
        {"type": "input_audio_buffer.commit"},
        {"type": "input_audio_buffer.clear"},
        {"type": "conversation.item.create", "item": message, "previous_item_id": "root"},
        {"type": "conversation.item.retrieve", "item_id": "item_1"},
        {"type": "conversation.item.delete", "item_id": "item_1"},
        {
            "type": "conversation.item.truncate",
            "item_id": "item_1",
            "content_index": 0,
            "audio_end_ms": 12,
        },
        {"type": "response.create"},
        {"type": "response.create", "response": {}},
        {"type": "response.cancel", "response_id": None},
        {"type": "output_audio_buffer.clear"},
    ):
        parsed = parse_event({**event, "event_id": "evt_1"})
        assert type(parsed) is EVENT_TYPES[event["type"]]
        assert parsed.event_id == "evt_1"


def test_unknown_and_missing_types() -> None:
    error = refused({"type": "conversation.item.paint"})
    assert (error.code, error.param) == ("invalid_value", "type")
    assert "'conversation.item.paint'" in error.message
    assert "'response.create'" in error.message
    assert refused({"event_id": "x"}).code == "missing_required_parameter"
    assert refused({"type": ["response.create"]}).code == "invalid_value"
    assert refused({"type": None}).code == "invalid_value"
    assert len(refused({"type": "x" * 100_000}).message) < 1000


def test_missing_unknown_and_mistyped_fields() -> None:
    missing = refused({"type": "conversation.item.delete"})
    assert (missing.code, missing.param) == ("missing_required_parameter", "item_id")
    assert missing.message == "Missing required parameter: 'item_id'."
    unknown = refused({"type": "response.cancel", "why": 1})
    assert (unknown.code, unknown.param) == ("unknown_parameter", "why")
    mistyped = refused({"type": "input_audio_buffer.append", "audio": 5})
    assert (mistyped.code, mistyped.param) == ("invalid_type", "audio")
    assert "an integer" in mistyped.message
    assert refused({"type": "response.cancel", "event_id": 7}).param == "event_id"
    assert event_id_of({"event_id": 7}) is None
    assert event_id_of({"event_id": "e"}) == "e"


def test_numbers_are_checked() -> None:
    def truncate(**fields: Any) -> tuple[str, str | None]:
        event = {"type": "conversation.item.truncate", "item_id": "i", "content_index": 0}
        error = refused({**event, **fields})
        return error.code, error.param

    assert truncate(audio_end_ms=-1) == ("integer_below_min_value", "audio_end_ms")
    assert truncate(audio_end_ms="5") == ("invalid_type", "audio_end_ms")
    assert truncate(audio_end_ms=True) == ("invalid_type", "audio_end_ms")
    assert truncate(audio_end_ms=1.5) == ("invalid_type", "audio_end_ms")


def test_an_append_holds_15_mib_of_base64() -> None:
    event = {"type": "input_audio_buffer.append", "audio": "A" * MAX_AUDIO_CHARS}
    assert isinstance(parse_event(event), AudioAppend)
    error = refused({**event, "audio": "A" * (MAX_AUDIO_CHARS + 1)})
    assert (error.code, error.param) == ("string_above_max_length", "audio")
    assert "15 MiB" in error.message


# --- items ---


def create(*content: dict[str, Any], role: str = "user", **item: Any) -> dict[str, Any]:
    made = {"type": "message", "role": role, "content": list(content), **item}
    return {"type": "conversation.item.create", "item": made}


def test_parts_by_role() -> None:
    event = parse_event(create({"type": "output_text", "text": "Yes."}, role="assistant", id="i1"))
    assert isinstance(event, ItemCreate)
    assert event.item.content[0].words == "Yes."
    heard = parse_event(create({"type": "input_audio", "transcript": "Hello"}))
    assert isinstance(heard, ItemCreate)
    assert heard.item.content[0].words == "Hello"
    error = refused(create({"type": "output_text", "text": "x"}))
    assert (error.code, error.param) == ("invalid_value", "item.content[0].type")
    error = refused(create({"type": "input_text", "text": "x"}, {"type": "input_text"}))
    assert (error.code, error.param) == ("missing_required_parameter", "item.content[1].text")


@pytest.mark.parametrize(
    ("event", "param"),
    [
        (create({"type": "input_image", "image_url": "data:"}), "item.content[0]"),
        (create({"type": "input_audio", "audio": "AAAA"}), "item.content[0].audio"),
        (
            {
                "type": "conversation.item.create",
                "item": {"type": "mcp_approval_response", "approve": True},
            },
            "item.type",
        ),
    ],
)
def test_what_is_not_offered_in_items(event: dict[str, Any], param: str) -> None:
    error = refused(event)
    assert (error.code, error.param) == ("unsupported_value", param)


def test_calls_and_their_outputs_as_items() -> None:
    for item, kind in (
        ({"type": "function_call", "name": "f", "arguments": "{}"}, FunctionCallItem),
        ({"type": "function_call_output", "call_id": "c", "output": "1"}, FunctionOutputItem),
    ):
        event = parse_event({"type": "conversation.item.create", "item": item})
        assert isinstance(event, ItemCreate)
        assert isinstance(event.item, kind)
    bad = {"type": "function_call_output", "call_id": "c", "output": 5}
    error = refused({"type": "conversation.item.create", "item": bad})
    assert (error.code, error.param) == ("invalid_type", "item.output")


def test_item_ids_and_roles() -> None:
    text = {"type": "input_text", "text": "x"}
    assert refused(create(text, id="a b")).param == "item.id"
    assert refused(create(text, id="x" * 65)).code == "string_above_max_length"
    assert refused(create(text, role="tool")).code == "invalid_value"
    assert refused(create()).code == "array_below_min_length"
    assert refused(create(text, status="done")).param == "item.status"


# --- responses ---


def test_response_parameters() -> None:
    event = parse_event(
        {
            "type": "response.create",
            "response": {
                "output_modalities": ["text"],
                "instructions": "Rhyme.",
                "max_output_tokens": 12,
                "metadata": {"a": "b"},
                "conversation": "auto",
                "tools": [],
                "tool_choice": "none",
                "audio": {"output": {"voice": "marin"}},
            },
        }
    )
    assert isinstance(event, ResponseCreate)
    assert event.response is not None
    assert event.response.max_output_tokens == 12


_IN, _TOOL = "response.input[0]", "response.tools[0]"
FUNCTION = {"type": "function", "name": "weather"}
WRONG_PART = {
    "type": "message",
    "role": "user",
    "content": [{"type": "output_text", "text": "x"}],
}


@pytest.mark.parametrize(
    ("response", "code", "param"),
    [
        ({"conversation": "conv_1"}, "unsupported_value", "response.conversation"),
        ({"input": {}}, "invalid_type", "response.input"),
        ({"input": [{"type": "item_reference"}]}, "missing_required_parameter", f"{_IN}.id"),
        ({"input": [{"type": "mcp_call"}]}, "unsupported_value", f"{_IN}.type"),
        ({"input": [{"type": "painting"}]}, "invalid_value", f"{_IN}.type"),
        ({"input": [{"id": "i"}]}, "missing_required_parameter", f"{_IN}.type"),
        ({"input": [WRONG_PART]}, "invalid_value", f"{_IN}.content[0].type"),
        (
            {"tools": [{"type": "function"}]},
            "missing_required_parameter",
            "response.tools[0].name",
        ),
        ({"tools": [{"type": "mcp"}]}, "unsupported_value", "response.tools[0].type"),
        ({"tools": [FUNCTION | {"name": "no spaces"}]}, "invalid_value", f"{_TOOL}.name"),
        ({"tools": [FUNCTION | {"strict": True}]}, "unknown_parameter", f"{_TOOL}.strict"),
        (
            {"tools": [FUNCTION | {"parameters": {"type": "array"}}]},
            "invalid_value",
            f"{_TOOL}.parameters",
        ),
        (
            {"tools": [FUNCTION | {"parameters": {"description": "x" * 70_000}}]},
            "invalid_value",
            f"{_TOOL}.parameters",
        ),
        ({"tools": [FUNCTION] * 129}, "array_above_max_length", "response.tools"),
        ({"tool_choice": "perhaps"}, "invalid_value", "response.tool_choice"),
        ({"tool_choice": {"type": "function"}}, "invalid_value", "response.tool_choice"),
        ({"tool_choice": {"type": "mcp"}}, "unsupported_value", "response.tool_choice"),
        ({"max_output_tokens": 0}, "integer_below_min_value", "response.max_output_tokens"),
        ({"max_output_tokens": 5000}, "integer_above_max_value", "response.max_output_tokens"),
        ({"max_output_tokens": "many"}, "invalid_value", "response.max_output_tokens"),
        ({"max_output_tokens": 1.5}, "invalid_type", "response.max_output_tokens"),
        ({"max_output_tokens": True}, "invalid_type", "response.max_output_tokens"),
        ({"output_modalities": ["audio", "text"]}, "invalid_value", "response.output_modalities"),
        ({"output_modalities": ["video"]}, "invalid_value", "response.output_modalities[0]"),
        ({"modalities": ["text"]}, "unknown_parameter", "response.modalities"),
        ({"metadata": {"k" * 65: "v"}}, "invalid_value", "response.metadata"),
        ({"metadata": {"k": 1}}, "invalid_type", "response.metadata.k"),
        (7, "invalid_type", "response"),
    ],
)
def test_refused_response_parameters(response: Any, code: str, param: str) -> None:
    error = refused({"type": "response.create", "response": response})
    assert (error.code, error.param) == (code, param)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (7, "an object, but got an integer"),
        ({"audio": "loud"}, "an object, but got a string"),
        ({"tools": {}}, "an array, but got an object"),
        ({"instructions": 5}, "a string, but got an integer"),
        ({"metadata": {"k": []}}, "a string, but got an array"),
    ],
)
def test_a_wrong_type_is_told_in_words_of_json(response: Any, expected: str) -> None:
    message = refused({"type": "response.create", "response": response}).message
    assert message.endswith(f": expected {expected} instead.")
