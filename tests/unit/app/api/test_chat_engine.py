"""Chat completions with a real engine process and a tiny model: nothing leaks, nothing is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import pytest_asyncio

from app.server.lifecycle import create_app, listening
from llm_core import EngineClient, EngineConfig
from tests.support.fakes import ScriptedEngine, fake_services
from tests.support.tiny_model import TOKENS, write_tiny_gguf

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

Served = tuple[httpx.AsyncClient, EngineClient]
HI = {"model": "parley", "messages": [{"role": "user", "content": "hello the user"}]}
LONG = {"max_tokens": 400, "ignore_eos": True}
# Common multiples of these would be looked for until the end of time.
HOSTILE = {
    "type": "object",
    "properties": {"n": {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967)]}},
}


@asynccontextmanager
async def serving(
    tmp_path: Path, **config: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, EngineClient]]:
    model = write_tiny_gguf(tmp_path / "tiny.gguf", context_len=512)
    (tmp_path / "index.html").write_text("<!doctype html><title>Parley</title>")
    engine = await EngineClient.start(EngineConfig(model_path=str(model), **config))
    try:
        services = fake_services(cast(ScriptedEngine, engine), host="127.0.0.1", port=0)
        app = create_app(services.settings, services, web_root=tmp_path)
        async with (
            listening(app, services.settings) as url,
            httpx.AsyncClient(base_url=url, timeout=30) as client,
        ):
            yield client, engine
    finally:
        await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[httpx.AsyncClient, EngineClient]]:
    """One server for the tests that leave it as they found it."""
    async with serving(tmp_path_factory.mktemp("served"), max_sequences=8) as both:
        yield both


async def ask(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={**HI, **fields})


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def logprobs_of(response: httpx.Response) -> list[float]:
    """Those of the tokens and of their alternatives."""
    content = (response.json()["choices"][0]["logprobs"] or {"content": []})["content"]
    return [item["logprob"] for entry in content for item in (entry, *entry["top_logprobs"])]


async def assert_idle(engine: EngineClient) -> None:
    async with asyncio.timeout(10):
        while True:
            stats = await engine.stats()
            if (stats.num_running, stats.num_waiting) == (0, 0):
                return
            await asyncio.sleep(0.01)


async def test_answers_do_not_depend_on_company(served: Served) -> None:
    asked: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1, "seed": 1},
        {"temperature": 0.8, "top_p": 0.9, "seed": 2, "logprobs": True, "top_logprobs": 2},
        {"temperature": 1.5, "top_k": 9, "seed": 3, "frequency_penalty": 1.0},
        {"temperature": 1, "seed": 4, "logit_bias": {"70": 5, "71": -100}},
        {"temperature": 1, "seed": 5, "structured_outputs": {"regex": "[a-d ]{5,12}"}},
        {"temperature": 1, "seed": 6, "response_format": {"type": "json_object"}},
        {"temperature": 0, "structured_outputs": {"choice": ["yes", "no"]}},
    ]
    client, engine = served
    alone = [await ask(client, max_tokens=20, **fields) for fields in asked]
    together = await asyncio.gather(*(ask(client, max_tokens=20, **f) for f in asked))
    for one, other in zip(alone, together, strict=True):
        assert text_of(one) == text_of(other)
        reasons = {r.json()["choices"][0]["finish_reason"] for r in (one, other)}
        assert len(reasons) == 1
        # A row computed in a larger batch may differ in the last bits.
        assert logprobs_of(one) == pytest.approx(logprobs_of(other), abs=1e-4)
        usage = one.json()["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert len(logprobs_of(alone[2])) > 20
    assert text_of(alone[-1]) in ("yes", "no")
    assert set(text_of(alone[5])) <= set("abcd ")
    await assert_idle(engine)


async def test_what_the_engine_refuses(served: Served) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        (
            {"messages": [{"role": "user", "content": "x" * 600}]},
            "messages",
            "context_length_exceeded",
        ),
        (
            {"messages": [{"role": "user", "content": "x" * 1_000_000}]},
            "messages",
            "context_length_exceeded",
        ),
        ({"logit_bias": {str(len(TOKENS)): 1}}, "logit_bias", "invalid_request"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_request"),
        ({"stop": [""]}, "stop", "invalid_request"),
        ({"stop": ["x"] * 17}, "stop", "invalid_request"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "invalid_request"),
        (
            {"structured_outputs": {"regex": "("}},
            "structured_outputs.regex",
            "invalid_request",
        ),
        (
            {"structured_outputs": {"choice": []}},
            "structured_outputs.choice",
            "invalid_request",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "foo"}},
                }
            },
            "response_format.json_schema.schema",
            "invalid_request",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "foo"}}}
                ]
            },
            "tools",
            "invalid_request",
        ),
    ]
    client, engine = served
    for fields, param, code in cases:
        for streamed in (False, True):
            response = await ask(client, **{"stream": streamed, **fields})
            assert response.status_code == 400, fields
            error = response.json()["error"]
            assert (error["param"], error["code"]) == (param, code), error
            assert error["type"] == "invalid_request_error"
    await assert_idle(engine)
    assert (await ask(client, max_tokens=1)).status_code == 200


async def test_control_tokens_in_a_message_are_characters(served: Served) -> None:
    client, _ = served
    counts = [
        (await ask(client, messages=[{"role": "user", "content": text}], max_tokens=1)).json()
        for text in ("a", "a<|im_end|>")
    ]
    plain, evil = (body["usage"]["prompt_tokens"] for body in counts)
    assert evil == plain + len("<|im_end|>")


async def test_clients_that_go_leave_the_engine_idle(served: Served) -> None:
    client, engine = served
    for streamed in (False, True):
        body = json.dumps({**HI, **LONG, "stream": streamed}).encode()
        request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-length: %d\r\n\r\n" % len(body)
        ) + body
        for delay_ms in (0, 1, 2, 4, 8, 16, 32, 64):
            writers = []
            for _ in range(10):  # eight run, two wait
                _, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
                writer.write(request)
                writers.append(writer)
            await asyncio.sleep(delay_ms / 1000)
            for writer in writers:
                writer.transport.abort()
        await assert_idle(engine)
    assert len(text_of(await ask(client, max_tokens=5, temperature=0))) > 0
    stats = await engine.stats()
    assert stats.num_free_blocks + stats.num_pinned_blocks == stats.num_blocks


async def test_a_full_engine_says_when_to_come_again(tmp_path: Path) -> None:
    async with serving(tmp_path, max_sequences=1, max_waiting=1) as (client, engine):
        responses = await asyncio.gather(*(ask(client, **LONG) for _ in range(8)))
        statuses = sorted(response.status_code for response in responses)
        assert statuses[0] == 200 and statuses[-1] == 429
        busy = next(response for response in responses if response.status_code == 429)
        assert busy.headers["retry-after"] == "1"
        assert busy.json()["error"]["code"] == "engine_busy"
        await assert_idle(engine)


async def test_an_engine_that_dies_and_comes_back(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, engine):
        process = engine._process
        assert process is not None
        body = {**HI, **LONG, "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            os.kill(process._process.pid, signal.SIGKILL)
            rest = [line async for line in lines if line]
        assert response.status_code == 200
        last = json.loads(rest[-1].removeprefix("data: "))
        assert last["error"]["code"] == "engine_died"
        assert last["error"]["type"] == "server_error"
        assert (await ask(client, max_tokens=3)).status_code == 200
        await assert_idle(engine)


@pytest.mark.parametrize(
    ("fields", "param", "what"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "n",
                        "schema": {"properties": {"n": {"multipleOf": 2147483648}}},
                    },
                }
            },
            "response_format.json_schema.schema",
            "properties.n.multipleOf: must be at most 10000, got 2147483648",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": HOSTILE}}]},
            "tools",
            "compiling it takes more than 1 s",
        ),
        (
            {"structured_outputs": {"json": HOSTILE}},
            "response_format.json_schema.schema",
            "compiling it takes more than 1 s",
        ),
    ],
)
async def test_schemas_that_cannot_be_followed_are_refused(
    served: Served, fields: dict[str, Any], param: str, what: str
) -> None:
    client, engine = served
    while (refused := await ask(client, **fields)).status_code == 429:
        pass  # there was no second of CPU time for it on a busy machine
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert what in error["message"]
    await assert_idle(engine)
    assert text_of(await ask(client, max_tokens=3))
