"""Chat completions over real sockets, with a scripted engine: shapes, errors, clients that go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.chat import routes as chat_api
from app.api.http import body as http_body
from app.server.lifecycle import create_app, listening
from llm_core import (
    EngineBusyError,
    EngineDiedError,
    InvalidRequestError,
    LlmError,
    ModelLoadError,
    PromptTooLongError,
)
from tests.support.fakes import ScriptedEngine, fake_services

HI = {"model": "parley", "messages": [{"role": "user", "content": "Hi"}]}
TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "New York"}}\n</tool_call>'


@asynccontextmanager
async def serving(
    tmp_path: Path, engine: ScriptedEngine, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server; checks at the end that nothing is left behind."""
    (tmp_path / "index.html").write_text("<!doctype html><title>Parley</title>")
    tasks = asyncio.all_tasks()
    services = fake_services(engine, host="127.0.0.1", port=0, **settings)
    app = create_app(services.settings, services, web_root=tmp_path)
    async with (
        listening(app, services.settings) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        yield client
    assert engine.num_running == 0
    await eventually(lambda: asyncio.all_tasks() == tasks, "all tasks of the server end")


async def ask(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={**HI, **fields})


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[Any]:
    """The data of the events."""
    response = await ask(client, stream=True, **fields)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = response.text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    data = [event.removeprefix("data: ") for event in events]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


async def eventually(is_true: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(10):
            while not is_true():  # noqa: ASYNC110 - what is waited for is in the server
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"waited in vain: {what}")


async def test_a_completion(tmp_path: Path) -> None:
    engine = ScriptedEngine("Hello there, friend")
    async with serving(tmp_path, engine) as client:
        body = (await ask(client, max_tokens=2)).json()
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"
    assert body["model"] == "scripted"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Hello there,",
                "refusal": None,
                "annotations": [],
            },
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        10,
        2,
        12,
    )
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4


async def test_without_a_temperature_the_settings_hold(tmp_path: Path) -> None:
    engine = ScriptedEngine("Hello", "Hello")
    settings = {"temperature": 0.4, "top_p": 0.7, "repetition_penalty": 1.2}
    async with serving(tmp_path, engine, **settings) as client:
        await ask(client)
        await ask(client, temperature=1)
    plain, hot = [(p.temperature, p.top_p, p.repetition_penalty) for p in engine.params]
    assert plain == (0.4, 0.7, 1.2)
    assert hot == (1.0, 1.0, 1.0)


async def test_a_stream(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedEngine("Hello there")) as client:
        *chunks, last = await stream(client)
    assert last == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello there"
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + [
        "stop"
    ]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_in_streams(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedEngine("Hello there")) as client:
        *chunks, counts, _ = await stream(client, stream_options={"include_usage": True})
        assert all(chunk["usage"] is None for chunk in chunks)
        assert counts["choices"] == [] and counts["usage"]["completion_tokens"] == 2
        *always, _ = await stream(client, stream_options={"continuous_usage_stats": True})
    totals = [chunk["usage"]["completion_tokens"] for chunk in always]
    assert totals == sorted(totals) and (totals[0], totals[-1]) == (0, 2)
    assert {chunk["usage"]["prompt_tokens"] for chunk in always} == {10}


async def test_calls_of_tools(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedEngine(f"One moment. {CALL}")) as client:
        choice = (await ask(client, tools=TOOLS)).json()["choices"][0]
        *chunks, _ = await stream(client, tools=TOOLS)
        text = (await ask(client)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "One moment."
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_") and call["type"] == "function"
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "New York"}'}

    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    deltas = [c["choices"][0]["delta"] for c in chunks]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
    assert pieces[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert {piece["index"] for piece in pieces} == {0}
    assert "".join(p["function"]["arguments"] for p in pieces) == '{"city": "New York"}'
    assert len(pieces) > 2, "arguments stream as they come"
    assert "".join(delta.get("content", "") for delta in deltas) == "One moment."

    assert text["finish_reason"] == "stop", "nobody offered tools"
    assert text["message"]["content"] == f"One moment. {CALL}"


async def test_a_model_that_repeats_its_call_has_made_it_once(tmp_path: Path) -> None:
    engine = ScriptedEngine("\n".join([CALL] * 100))
    async with serving(tmp_path, engine) as client:
        body = (await ask(client, tools=TOOLS)).json()
        *chunks, counts, _ = await stream(
            client, tools=TOOLS, stream_options={"include_usage": True}
        )
    choice = body["choices"][0]
    assert choice["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert len(choice["message"]["tool_calls"]) == 1 and not choice["message"]["content"]
    indices = {c["index"] for k in chunks for c in k["choices"][0]["delta"].get("tool_calls", [])}
    assert indices == {0}
    num_words = 2 * len(CALL.split())  # the engine says a word a token
    assert body["usage"] == counts["usage"] and counts["usage"]["prompt_tokens"] == 10
    assert 0 < counts["usage"]["completion_tokens"] <= num_words


async def test_a_call_alone_has_no_content(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedEngine(CALL, "")) as client:
        assert (await ask(client, tools=TOOLS)).json()["choices"][0]["message"]["content"] is None
        assert (await ask(client, tools=TOOLS)).json()["choices"][0]["message"]["content"] == ""


async def test_models(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedEngine("Hi")) as client:
        listed = (await client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [(model["id"], model["task"]) for model in listed["data"]] == [
            ("scripted", "text-generation"),
            ("parley", "text-generation"),
            ("whisper-tiny.en", "automatic-speech-recognition"),
            ("piper-en_US-joe-medium", "text-to-speech"),
        ]
        assert [model.get("max_model_len") for model in listed["data"]] == [1000, 1000, None, None]
        for model in listed["data"]:
            assert (await client.get(f"/v1/models/{model['id']}")).json() == model
        for name, own in (("whisper-1", 2), ("tts-1", 3)):
            task = (await client.get(f"/v1/models/{name}")).json()["task"]
            assert task == listed["data"][own]["task"]
        assert (await client.get("/v1/models/scripted")).json()["object"] == "model"
        for name in ("scripted", "parley", "gpt-4o-mini", "gpt-5"):
            assert (await ask(client, model=name)).status_code == 200
        for response in (
            await client.get("/v1/models/llama-99"),
            await ask(client, model="llama-99"),
            await ask(client, model="gpt"),
        ):
            assert response.status_code == 404
            error = error_of(response)
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert "'scripted'" in error["message"]


async def test_keys_are_asked_for(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedEngine("Hi"), api_keys=("secret",)) as client:
        for response in (await ask(client), await client.get("/v1/models")):
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        client.headers["authorization"] = "Bearer secret"
        assert (await ask(client)).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200
        foreign = {"origin": "http://elsewhere.example"}
        response = await client.post("/v1/chat/completions", json=HI, headers=foreign)
        assert (response.status_code, error_of(response)["code"]) == (403, "origin_not_allowed")


async def test_bad_requests(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedEngine("Hi")) as client:
        response = await ask(client, top_p=0)
        assert response.status_code == 400
        error = error_of(response)
        assert (error["type"], error["param"]) == ("invalid_request_error", "top_p")
        response = await client.post("/v1/chat/completions", content=b"{\xff")
        assert (response.status_code, error_of(response)["code"]) == (400, "invalid_json")
        response = await client.get("/v1/chat/completions")
        assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")
        assert error_of(response)["message"] == "Method Not Allowed: GET /v1/chat/completions"
        assert response.headers["allow"] == "POST"
        response = await client.post("/v1/no-such-thing", json={})
        assert (response.status_code, error_of(response)["code"]) == (404, "not_found")


async def test_a_body_that_is_too_large(tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(chat_api.MAX_BODY_BYTES // 65536 + 2):
            yield bytes(65536)

    async with serving(tmp_path, ScriptedEngine("Hi")) as client:
        for content in (bytes(chat_api.MAX_BODY_BYTES + 1), endless()):
            response = await client.post("/v1/chat/completions", content=content)
            assert response.status_code == 413
            error = error_of(response)
            assert error["code"] == "request_too_large"
            assert str(chat_api.MAX_BODY_BYTES) in error["message"]


async def test_a_body_that_never_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_body, "BODY_TIMEOUT_S", 0.05)
    engine = ScriptedEngine("Hi")
    async with serving(tmp_path, engine) as client:
        reader, writer = await connect(client)
        writer.write(head(1000) + b'{"model": ')
        assert b" 408 " in await reader.readline()
        writer.close()
        await writer.wait_closed()
    assert engine.requests == []


@pytest.mark.parametrize(
    ("error", "status", "kind", "param"),
    [
        (
            InvalidRequestError("logit_bias: token 7 is outside"),
            400,
            "invalid_request_error",
            "logit_bias",
        ),
        (PromptTooLongError("the prompt has 9 tokens"), 400, "invalid_request_error", "messages"),
        (EngineBusyError("8 are running"), 429, "rate_limit_error", None),
        (EngineDiedError("the engine was killed"), 503, "server_error", None),
        (ModelLoadError("no model"), 503, "server_error", None),
        (LlmError("unusable logits"), 500, "server_error", None),
    ],
)
async def test_errors_of_the_engine(
    tmp_path: Path, error: LlmError, status: int, kind: str, param: str | None
) -> None:
    engine = ScriptedEngine("Hello there friend")
    engine.error = error
    async with serving(tmp_path, engine) as client:
        for streamed in (False, True):
            response = await ask(client, stream=streamed)
            assert response.status_code == status
            body = error_of(response)
            assert (body["type"], body["param"], body["code"]) == (kind, param, error.code)
            assert body["message"] == str(error)
            assert ("retry-after" in response.headers) == (status in (429, 503))
        engine.words_before_error = 2
        assert (await ask(client)).status_code == status
        *chunks, last = await stream(client)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Hello there"
        assert last["error"]["code"] == error.code


async def test_a_fault_of_ours_has_the_shape_too(tmp_path: Path) -> None:
    engine = ScriptedEngine("Hi")
    engine.error = ZeroDivisionError("secret detail")
    async with serving(tmp_path, engine) as client:
        response = await ask(client)
        assert response.status_code == 500
        assert error_of(response)["type"] == "server_error"
        assert "secret" not in response.text


def head(num_bytes: int) -> bytes:
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        b"content-length: %d\r\n\r\n" % num_bytes
    )


async def connect(client: httpx.AsyncClient) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", client.base_url.port)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_goes_at_any_moment_leaves_nothing(
    tmp_path: Path, streamed: bool
) -> None:
    """Within the headers, within the body, before the first token, after each word, at the end."""
    engine = ScriptedEngine("one two three four five six")
    body = json.dumps({**HI, "stream": streamed}).encode()
    request = head(len(body)) + body
    async with serving(tmp_path, engine) as client:
        for num_bytes in (10, len(head(len(body))), len(request) - 1):
            _, writer = await connect(client)
            writer.write(request[:num_bytes])
            await writer.drain()
            writer.transport.abort()
        for num_words in range(8):
            engine.gate.clear()
            reader, writer = await connect(client)
            writer.write(request)
            await eventually(lambda: engine.num_running == 1, "the request arrives")
            for _ in range(num_words):
                engine.gate.set()
                await asyncio.sleep(0)
                engine.gate.clear()
            writer.transport.abort()
            await eventually(lambda: engine.num_running == 0, "the request is aborted")
            engine.gate.set()
            del reader
        assert (await ask(client)).status_code == 200
    assert len(engine.requests) == 9


async def test_a_client_that_reads_nothing_is_waited_for_alone(tmp_path: Path) -> None:
    """Its answer waits; the others get theirs, and when it goes nothing is left."""
    engine = ScriptedEngine(" ".join(["word" * 5_000] * 900))
    body = json.dumps({**HI, "stream": True}).encode()
    async with serving(tmp_path, engine) as client:
        _, writer = await connect(client)
        writer.write(head(len(body)) + body)
        await eventually(lambda: engine.num_running == 1, "the request arrives")
        assert (await ask(client, max_tokens=1)).status_code == 200
        assert engine.num_running == 1, "it waits for the reader"
        writer.transport.abort()
        await eventually(lambda: engine.num_running == 0, "the request is aborted")


async def test_the_server_stops_with_a_stream_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.server.lifecycle._GRACE_S", 1)
    engine = ScriptedEngine("one two")
    engine.gate.clear()
    body = json.dumps({**HI, "stream": True}).encode()
    async with serving(tmp_path, engine) as client:
        _, writer = await connect(client)
        writer.write(head(len(body)) + body)
        await eventually(lambda: engine.num_running == 1, "the request arrives")
    writer.close()
    await writer.wait_closed()


async def test_a_server_that_ends_finishes_answers_and_begins_none(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<!doctype html>")
    engine = ScriptedEngine("One two.")
    services = fake_services(engine, port=0)
    app = create_app(services.settings, services, web_root=tmp_path)
    async with listening(app, services.settings) as url, httpx.AsyncClient(base_url=url) as client:
        engine.gate.clear()
        begun = asyncio.create_task(ask(client))
        await eventually(lambda: engine.num_running == 1, "the answer begins")
        await app.state.connections.drain(0, "the server is shutting down")
        late = await ask(client)
        assert late.status_code == 503 and int(late.headers["retry-after"]) > 0
        assert error_of(late)["code"] == "server_shutting_down"
        engine.gate.set()
        answer = (await begun).json()
        assert answer["choices"][0]["message"]["content"] == "One two."


async def test_whoever_speaks_is_served_before_whoever_writes(tmp_path: Path) -> None:
    engine = ScriptedEngine("Yes.")
    async with serving(tmp_path, engine) as client:
        assert (await ask(client)).status_code == 200
    assert engine.options[0].get("priority", 0) < 0
