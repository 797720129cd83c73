"""Drafts, handles, pins and the supervised restart, through a real engine process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from llm_core import (
    ChatMessage,
    EngineClient,
    EngineDiedError,
    FirstToken,
    GenerationDone,
    InvalidRequestError,
    PromptTooLongError,
    RequestTimeoutError,
    SamplingParams,
    TextDelta,
)
from llm_core.client import engine_client as client_module
from llm_core.client.engine_client import Reply
from tests.support.tiny_model import write_tiny_gguf
from tests.unit.llm_core.engine.test_client import (
    ENDLESS,
    assert_nothing_left,
    child_pids,
    config,
    pid_of,
    read,
    user,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineClient]:
    path = write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context_len=100_000)
    started = await EngineClient.start(config(path), start_timeout_s=60)
    yield started
    await started.close()


async def text_of(reply: Reply) -> str:
    return "".join([event.text async for event in reply if isinstance(event, TextDelta)])


async def test_a_draft_grows_and_is_answered(client: EngineClient) -> None:
    plain, _ = await read(client, "what is the capital", max_tokens=6, ignore_eos=True)
    # Salted, so that what is reused below was computed by the draft itself.
    async with await client.open_draft(user("what is"), cache_salt="draft") as draft:
        first = await draft.computed()
        draft.update(user("what is the capital"))
        second = await draft.computed()
        assert (first.revision, second.revision) == (0, 1)
        assert second.prompt_tokens > first.prompt_tokens
        async with draft.commit(SHORT, deadline_ns=time.monotonic_ns() + 10**9) as reply:
            events = [event async for event in reply]
    assert isinstance(events[0], FirstToken) and isinstance(events[-1], GenerationDone)
    assert events[0].cached_tokens == second.prompt_tokens - 1
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == plain
    await assert_nothing_left(client)


async def test_forks_answer_apart(client: EngineClient) -> None:
    async with await client.open_draft(user("one")) as draft, draft.fork() as fork:
        fork.update(user("one or two"))
        replies = [draft.commit(SHORT), fork.commit(SHORT)]
        texts = await asyncio.gather(*(text_of(reply) for reply in replies))
    alone = [
        (await read(client, t, max_tokens=6, ignore_eos=True))[0] for t in ("one", "one or two")
    ]
    assert texts == alone
    await assert_nothing_left(client)


async def test_closing_a_draft_frees_its_blocks(client: EngineClient) -> None:
    draft = await client.open_draft(user("something"))
    await draft.computed()
    assert (await client.stats()).num_drafts == 1
    draft.close()
    draft.close()
    await assert_nothing_left(client)


async def test_errors_of_a_draft_reach_whoever_waits(client: EngineClient) -> None:
    async with await client.open_draft(user("something")) as draft:
        draft.update(user("word " * 40_000))
        with pytest.raises(PromptTooLongError):
            await draft.computed()
        with pytest.raises(PromptTooLongError):
            await text_of(draft.commit(SHORT))
    async with await client.open_draft(user("something")) as draft:
        draft.truncate(10_000)
        with pytest.raises(InvalidRequestError, match="num_tokens"):
            await draft.computed()
    await assert_nothing_left(client)


async def test_a_handle_sets_deadlines_and_ends(client: EngineClient) -> None:
    async with await client.open_reply(user(), ENDLESS, deadline_ns=time.monotonic_ns()) as reply:
        async for _ in reply:
            reply.set_deadline(time.monotonic_ns() + 10**9)
            break
    await assert_nothing_left(client)
    async with await client.open_reply(user(), SHORT) as reply:
        assert await text_of(reply)
        reply.set_deadline(None)
        with pytest.raises(StopAsyncIteration):
            await anext(reply)
    await assert_nothing_left(client)


async def test_a_request_times_out_by_itself(client: EngineClient) -> None:
    stream = client.generate(user(), ENDLESS, timeout_ms=150)
    with pytest.raises(RequestTimeoutError, match="while running"):
        async for _ in stream:
            pass
    await assert_nothing_left(client)


async def test_pins_and_the_process_come_back_by_themselves(
    client: EngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody asks for anything: the death alone starts another process, and it has the pins."""
    system = ChatMessage(role="system", content="be kind " * 20)
    pinned = await client.pin([system])
    assert pinned.prompt_tokens > 100
    assert (await client.pin([system])).cached_tokens == pinned.prompt_tokens
    draft = await client.open_draft(user())
    old_pid = pid_of(client)
    with caplog.at_level(logging.CRITICAL):
        os.kill(old_pid, signal.SIGKILL)
        with pytest.raises(EngineDiedError, match="it is being restarted"):
            while True:
                draft.update(user("again"))
                await draft.computed()
        with pytest.raises(EngineDiedError):
            draft.commit(SHORT)
        assert client._supervising is not None
        await client._supervising
    assert client.is_alive and pid_of(client) != old_pid
    stats = await client.stats()
    assert stats.num_pinned_blocks == -(-pinned.prompt_tokens // 16)
    events = [event async for event in client.generate([system, *user()], SHORT)]
    assert isinstance(events[0], FirstToken)
    assert events[0].cached_tokens >= pinned.prompt_tokens
    await assert_nothing_left(client)


async def test_a_process_in_reserve_takes_over(tmp_path: Path) -> None:
    children = child_pids()
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    client = await EngineClient.start(config(path, max_context=100, standby=True))
    assert client._spare is not None
    spare_pid = client._spare.pid
    os.kill(pid_of(client), signal.SIGKILL)
    with pytest.raises(EngineDiedError):
        await client.stats()
    assert client.info.num_layers == 2, "known while the next one loads"
    await client.restart()
    assert pid_of(client) == spare_pid
    await assert_nothing_left(client)
    await client.close()
    assert child_pids() == children


async def test_a_process_in_reserve_that_dies_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_SPARE_PAUSE_S", 0.0)
    children = child_pids()
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    client = await EngineClient.start(config(path, max_context=100, standby=True))
    first = client._spare
    assert first is not None
    (watching,) = client._watching
    os.kill(first.pid, signal.SIGKILL)
    await watching
    second = client._spare
    assert second is not None and second is not first and not second.has_exited
    assert len(child_pids()) == len(children) + 2
    # It is one in reserve like the first.
    os.kill(pid_of(client), signal.SIGKILL)
    with pytest.raises(EngineDiedError):
        await client.stats()
    await client.restart()
    assert pid_of(client) == second.pid
    await client.close()
    assert child_pids() == children
    assert client._watching == set()
