"""The costliest inputs that strangers can think of, for every endpoint and event that takes JSON.

What an input costs is counted, not timed: the values that it may have before it is parsed
(test_json_input.py), the elements that a list or a dict of a model may have, and the errors that a
refusal makes of which one is told.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection, connect

from app.api.audio.speech_request import SpeechRequest
from app.api.audio.transcription_request import TranscriptionForm
from app.api.chat.request import ChatRequest
from app.api.realtime.client_events import EVENT_TYPES
from app.api.realtime.client_secrets import ClientSecretRequest
from app.api.traces import PlayoutReport
from app.api.validation import WireModel, checked, shorten
from app.conversation.session import Session
from app.errors import ClientError
from app.server.lifecycle import create_app, listening
from tests.support.fake_realtime import FakeSession
from tests.support.fakes import ScriptedEngine, fake_services
from tests.unit.app.server.test_server import socket_url

MAX_ERRORS = 64

FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}
SPOKEN = {
    "type": "message",
    "role": "user",
    "id": "i",
    "content": [{"type": "input_text", "text": "Hi"}, {"type": "input_audio", "transcript": "a"}],
}
SESSION = {
    "type": "realtime",
    "model": "parley",
    "instructions": "Be kind.",
    "output_modalities": ["text"],
    "max_output_tokens": 5,
    "tools": [FUNCTION],
    "tool_choice": {"type": "function", "name": "f"},
    "truncation": {"type": "retention_ratio", "retention_ratio": 0.5},
    "tracing": None,
    "include": [],
    "audio": {
        "input": {
            "format": {"type": "audio/pcm", "rate": 24000},
            "noise_reduction": {"type": "near_field"},
            "transcription": {"model": "parley", "language": "en", "prompt": "p", "keywords": []},
            "turn_detection": {"type": "server_vad", "threshold": 0.5},
        },
        "output": {"format": {"type": "audio/pcm"}, "voice": {"id": "v"}, "speed": 1.0},
    },
    "parley": {"trace": True, "tools": ["f"], "budget_ms": 500},
}
EVENTS: dict[str, dict[str, Any]] = {
    "session.update": {"session": SESSION},
    "input_audio_buffer.append": {"audio": "AAAA"},
    "input_audio_buffer.commit": {},
    "input_audio_buffer.clear": {},
    "conversation.item.create": {"item": SPOKEN, "previous_item_id": "root"},
    "conversation.item.retrieve": {"item_id": "i"},
    "conversation.item.delete": {"item_id": "i"},
    "conversation.item.truncate": {"item_id": "i", "content_index": 0, "audio_end_ms": 1},
    "response.create": {
        "response": {
            "output_modalities": ["text"],
            "metadata": {"a": "b"},
            "audio": {"output": {"voice": "v"}},
            "input": [SPOKEN, {"type": "item_reference", "id": "i"}],
            "tools": [FUNCTION],
            "tool_choice": "auto",
        }
    },
    "response.cancel": {"response_id": "r"},
    "output_audio_buffer.clear": {},
}
CHAT = {
    "model": "parley",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "n"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "annotations": [], "parsed": {}},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ],
    "stop": ["a"],
    "logit_bias": {"5": 1},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"a": 1}}},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "stream": True,
    "stream_options": {"include_usage": True},
    "structured_outputs": {"choice": ["a"], "json": {"a": 1}},
    "metadata": {"a": "b"},
    "modalities": ["text"],
}
MODELS: dict[str, tuple[type[WireModel], dict[str, Any]]] = {
    "chat": (ChatRequest, CHAT),
    "secret": (ClientSecretRequest, {"expires_after": {"seconds": 60}, "session": SESSION}),
    "speech": (SpeechRequest, {"model": "parley", "input": "Hi", "voice": {"id": "v"}}),
    "playout": (PlayoutReport, {"gap_ms": 1.5, "num_gaps": 2}),
    "form": (TranscriptionForm, {"model": "m", "timestamp_granularities": ["word"], "include": []}),
    **{
        name: (kind, {"type": name, "event_id": "e", **EVENTS[name]})
        for name, kind in EVENT_TYPES.items()
    },
}
MANY = 5_000  # no list or dict may have as many
NESTED: Any = 0
for _ in range(150):
    NESTED = [NESTED]
WORST: dict[str, Any] = {
    "zeros": [0] * MANY,
    "texts": ["a"] * MANY,
    "nulls": [None] * MANY,
    "objects": [{}] * MANY,
    "lists": [[[]]] * (MANY // 2),
    "messages": [{"type": "message", "role": "user", "content": [0]}] * (MANY // 4),
    "fields": {f"x{number}": 0 for number in range(MANY)},
    "fields with texts": {f"x{number}": "a" for number in range(MANY)},
    "nesting": [NESTED] * 20,
    "text": "a" * 1_000_000,
    "key": {"k" * 1_000_000: 0},
    "number": 10**4299,
    "numbers": [10**4299] * 15,
    "fraction": -1.7e308,
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in ``value``, without itself."""
    inside: Any = ()
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, list):
        inside = enumerate(value)
    for key, inner in inside:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of ``value`` with ``new`` at ``path``."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


def worst_of(base: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """``base`` with everything bad everywhere: in place of each value, and beside its fields."""
    for path in places(base):
        for bad in WORST.values():
            yield changed(base, path, bad)
    crowd = WORST["fields"]
    for path in ((), *places(base)):
        here = base
        for key in path:
            here = here[key]
        if isinstance(here, dict):
            yield changed(base, path, {**here, **crowd})
            yield changed(base, path, {**crowd, **here})
        elif isinstance(here, list) and here:
            yield changed(base, path, here * MANY)


def wire_models(kind: type[WireModel] = WireModel) -> Iterator[type[WireModel]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from wire_models(sub)


def test_every_event_and_model_is_tried() -> None:
    assert set(EVENTS) == set(EVENT_TYPES)
    reached = {kind.__name__ for kind, _ in MODELS.values()}
    for kind, _ in MODELS.values():
        reached |= set(kind.model_json_schema().get("$defs", {}))
    assert reached >= {kind.__name__ for kind in wire_models() if not kind.__subclasses__()}


@pytest.mark.parametrize("kind", [*wire_models()], ids=lambda kind: kind.__name__)
def test_every_list_and_dict_has_a_length(kind: type[WireModel]) -> None:
    def check(schema: Any, path: str) -> None:
        if isinstance(schema, list):
            for index, one in enumerate(schema):
                check(one, f"{path}[{index}]")
        if not isinstance(schema, dict):
            return
        if schema.get("type") == "array":
            assert schema["maxItems"] < MANY, path
        if schema.get("type") == "object" and schema.get("additionalProperties") is not False:
            assert "properties" in schema or schema["maxProperties"] < MANY, path
        for name, inner in schema.items():
            check(inner, f"{path}.{name}")

    check(kind.model_json_schema(), kind.__name__)


@pytest.mark.parametrize("name", MODELS)
def test_a_refusal_makes_few_errors_and_tells_one_that_names_a_field(name: str) -> None:
    kind, base = MODELS[name]
    kind.model_validate(base)
    for worst in worst_of(base):
        try:
            checked(worst, kind)
        except ClientError as error:
            assert isinstance(error.__cause__, ValidationError)
            assert error.__cause__.error_count() <= MAX_ERRORS, shorten(worst, 300)
            assert len(error.message) < 1000
            assert error.param is not None and len(error.param) <= 200


# --- over the wire ---

CHAT_HEAD = '{"model":"m","messages":[{"role":"user","content":'
PART = '{"type":"text","text":""}'


def filled(head: str, unit: str, tail: str, num_bytes: int) -> bytes:
    """``unit`` again and again between ``head`` and ``tail``, with commas, up to a length."""
    count = (num_bytes - len(head) - len(tail)) // (len(unit) + 1)
    return (head + ",".join([unit] * count) + tail).encode()


def crowded(head: str, tail: str, num_bytes: int) -> bytes:
    names = ",".join(f'"x{number:07}":0' for number in range(num_bytes // 14 - 20))
    return (head + names + tail).encode()


BODIES: dict[str, tuple[str, int, tuple[str, str]]] = {
    "chat parts": ("/v1/chat/completions", 4_194_304, (f"{CHAT_HEAD}[", "]}]}")),
    "chat messages": ("/v1/chat/completions", 4_194_304, ('{"model":"m","messages":[', "]}")),
    "chat stop": ("/v1/chat/completions", 4_194_304, (f'{CHAT_HEAD}""}}],"stop":[', "]}")),
    "secret tools": ("/v1/realtime/client_secrets", 131_072, ('{"session":{"tools":[', "]}}")),
    "secret texts": (
        "/v1/realtime/client_secrets",
        131_072,
        ('{"session":{"output_modalities":[', "]}}"),
    ),
    "speech voice": ("/v1/audio/speech", 131_072, ('{"model":"m","input":"a","voice":[', "]}")),
    "playout": ("/v1/traces/turn_1/playout", 2_048, ('{"gap_ms":[', "]}")),
}
UNITS = ("0", "{}", "[]", '""', PART, "9" * 4000, "[" * 150 + "]" * 150, '"\\n"')


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    (tmp_path / "index.html").write_text("<!doctype html>")
    services = fake_services(ScriptedEngine("Hi"), host="127.0.0.1", port=0)
    cast(Any, services.engine).is_alive = True
    make = cast(Any, lambda *args: cast(Session, FakeSession(*args)))
    app = create_app(services.settings, services, web_root=tmp_path, make_session=make)
    async with listening(app, services.settings) as url:
        yield url


@pytest.mark.parametrize("name", BODIES)
async def test_worst_bodies_are_refused_in_the_shape_of_the_api(name: str, url: str) -> None:
    path, num_bytes, (head, tail) = BODIES[name]
    bodies = [filled(head, unit, tail, num_bytes) for unit in UNITS]
    bodies += [crowded(head[: head.rindex("{") + 1], head[head.rindex("{") :] + tail, num_bytes)]
    bodies += [head.encode() + b"[" * (num_bytes - len(head)), b'{"a":' + b"9" * (num_bytes - 5)]
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        for body in bodies:
            response = await client.post(path, content=body)
            error = response.json()["error"]
            assert response.status_code in (400, 413), body[:100]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
            assert 10 < len(error["message"]) < 1000
            assert (response.status_code == 413) is (error["code"] == "request_too_large")
        assert (await client.get("/healthz")).status_code == 200


async def refusal(socket: ClientConnection, message: bytes) -> dict[str, Any]:
    await socket.send(message.decode())
    answer = json.loads(await socket.recv())
    assert answer["type"] == "error", answer
    error: dict[str, Any] = answer["error"]
    assert error["type"] == "invalid_request_error"
    assert 10 < len(error["message"]) < 1000
    return error


@pytest.mark.parametrize(
    ("head", "tail"),
    [
        ('{"type":"session.update","session":{"output_modalities":[', "]}}"),
        ('{"type":"session.update","session":{"tools":[', "]}}"),
        ('{"type":"response.create","response":{"input":[', "]}}"),
        ('{"type":"conversation.item.create","item":{"type":"message","role":"user","content":[',)
        + ("]}}",),
        ('{"type":"response.cancel","x":[', "]}"),
        ('{"type":"input_audio_buffer.append","audio":[', "]}"),
        ('{"type":[', "]}"),
    ],
)
async def test_worst_events_are_refused_and_the_session_goes_on(
    head: str, tail: str, url: str
) -> None:
    async with connect(socket_url(url), max_size=None) as socket:
        await socket.recv()
        for num_bytes in (20_000, 60_000, 1_048_000):
            for unit in UNITS:
                await refusal(socket, filled(head, unit, tail, num_bytes))
            await refusal(socket, crowded(head + "{", "}" + tail, num_bytes))
        await refusal(socket, head.encode() + b"[" * 1_000_000)
        await socket.send('{"type":"conversation.item.retrieve","item_id":"i"}')
        assert json.loads(await socket.recv())["type"] == "conversation.item.retrieved"


@pytest.mark.parametrize("name", EVENT_TYPES)
async def test_only_events_with_texts_tools_or_audio_may_be_long(name: str, url: str) -> None:
    event = json.dumps({"type": name, **EVENTS[name]})
    for num_chars, is_refused in ((65_536, False), (65_537, True), (200_000, True)):
        message = event + " " * (num_chars - len(event))
        async with connect(socket_url(url)) as socket:
            await socket.recv()
            await socket.send(message)
            await socket.send('{"type":"conversation.item.retrieve","item_id":"mark"}')
            answers = []
            while not answers or answers[-1].get("item", {}).get("id") != "mark":
                answers.append(json.loads(await socket.recv()))
        codes = [answer["error"]["code"] for answer in answers if answer["type"] == "error"]
        long_ones = ("session.update", "conversation.item.create", "response.create")
        is_long = name in (*long_ones, "input_audio_buffer.append")
        assert ("message_too_large" in codes) is (is_refused and not is_long), (num_chars, codes)


# --- what an error shows of a value ---


@pytest.mark.parametrize("bad", WORST)
def test_a_value_is_shown_by_its_beginning(bad: str) -> None:
    value = WORST[bad]
    shown = repr(value[:80] if isinstance(value, str) else value)
    assert shorten(value) == (shown if len(shown) <= 80 else shown[:77] + "...")


@pytest.mark.parametrize("value", [[], {}, "", "it's", [1, "a", None, {"b": [True]}], 1.5, "é"])
def test_a_short_value_is_shown_whole(value: Any) -> None:
    assert shorten(value) == repr(value)
