"""Guides at a real engine process: hostile ones hold up nobody, and tools are ready in time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from llm_core import (
    ChatMessage,
    EngineBusyError,
    EngineClient,
    EngineConfig,
    EngineDiedError,
    GenerationDone,
    Guide,
    InvalidRequestError,
    JsonGuide,
    RegexGuide,
    SamplingParams,
    TextDelta,
    ToolGuide,
    ToolSpec,
)
from llm_core.structured.grammar import guide_key
from tests.support.tiny_model import write_tiny_gguf

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Each number is followed easily; their common multiples would be looked for until the end of time.
PRIMES = (9973, 9967, 9949, 9941, 9931)


def hangs(number: int) -> JsonGuide:
    steps = [{"type": "integer", "multipleOf": p} for p in (PRIMES[number], PRIMES[number + 1])]
    return JsonGuide(schema=json.dumps({"allOf": steps}))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineClient]:
    path: Path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path, context_len=100_000)
    config = EngineConfig(model_path=str(path), max_context=65_536, max_sequences=4)
    started = await EngineClient.start(config, start_timeout_s=60)
    yield started
    await started.close()


async def text_of(client: EngineClient, **params: Any) -> str:
    events = client.generate([ChatMessage("user", "Hello")], SamplingParams(**params))
    return "".join([e.text async for e in events if isinstance(e, TextDelta)])


class Talker:
    """A reply without an end, and the times between its events."""

    def __init__(self, client: EngineClient) -> None:
        self.gaps_s: list[float] = []
        self._task = asyncio.create_task(self._talk(client))

    async def _talk(self, client: EngineClient) -> None:
        params = SamplingParams(max_tokens=60_000, ignore_eos=True, temperature=1.0)
        last_s = None
        async for event in client.generate([ChatMessage("user", "Hello")], params):
            assert not isinstance(event, GenerationDone), "it talks for as long as the test takes"
            now_s = time.monotonic()
            if last_s is not None:
                self.gaps_s.append(now_s - last_s)
            last_s = now_s

    async def begun(self) -> None:
        while len(self.gaps_s) < 10:
            await asyncio.wait([self._task], timeout=0.01)
            assert not self._task.done()
        self.gaps_s.clear()

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


async def test_a_schema_that_never_compiles_holds_up_nobody(client: EngineClient) -> None:
    talker = Talker(client)
    await talker.begun()
    process = client._process
    refused = await asyncio.gather(
        *(text_of(client, guide=hangs(number), max_tokens=5) for number in range(3)),
        return_exceptions=True,
    )
    meanwhile_s = list(talker.gaps_s)
    await talker.stop()
    told = {InvalidRequestError: "takes more than 1 s", EngineBusyError: "no time to check it"}
    for error in refused:  # a busy machine may have had no second of CPU time for one
        assert isinstance(error, InvalidRequestError | EngineBusyError)
        assert told[type(error)] in str(error)
    assert sum(meanwhile_s) > 2.5, "it went on for as long as the three were tried"
    assert max(meanwhile_s) < 0.5
    assert client._process is process and client.is_alive
    assert await text_of(client, guide=RegexGuide(pattern="[ab]{3}"), max_tokens=9)


@pytest.mark.parametrize(
    "guide",
    [
        # Each token makes the library look through the text that must follow, 14 kB of it.
        JsonGuide(schema='{"type": "array", "items": {"const": {"a": [1]}}, "minItems": 100000}'),
        RegexGuide(pattern="((a{1,1000}){1,1000}){1,1000}"),
        RegexGuide(pattern="(.){1,1000}\\p{L}"),
        RegexGuide(pattern="(a|b|[^c]){0,200}(x{0,50}y{0,50}){0,40}"),
    ],
)
async def test_a_guide_that_is_hard_to_follow_fails_alone(
    client: EngineClient, guide: Guide
) -> None:
    talker = Talker(client)
    await talker.begun()
    try:
        await text_of(client, guide=guide, max_tokens=60, temperature=1.0)
    except InvalidRequestError as error:
        assert str(error).startswith(("schema: ", "regex: "))
    assert max(talker.gaps_s) < 0.5
    await talker.stop()
    assert await text_of(client, max_tokens=3, ignore_eos=True)


async def test_what_was_prepared_is_not_compiled_again(client: EngineClient) -> None:
    properties = {f"p{n}": {"type": "string"} for n in range(30)}
    parameters = json.dumps({"type": "object", "properties": properties})
    guide = ToolGuide(tools=(ToolSpec(name="f", parameters=parameters),), required=True)
    await client.prepare_guide(guide)
    with pytest.raises(InvalidRequestError, match="tools: f: parameters: not JSON"):
        await client.prepare_guide(ToolGuide(tools=(ToolSpec(name="f", parameters="{"),)))
    assert (await text_of(client, guide=guide, max_tokens=40)).startswith("<tool_call>")


async def test_an_engine_that_is_started_again_knows_what_was_prepared(
    client: EngineClient,
) -> None:
    guide = RegexGuide(pattern="[xyz]{4}")
    await client.prepare_guide(guide)
    assert client._process is not None
    os.kill(client._process.pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError):
        await client.stats()
    assert guide_key(guide) in client._start_command.known_guides
    assert await text_of(client, guide=guide, max_tokens=9)
