"""The client and a real engine process with a tiny real model: streams, aborts, deaths, leaks."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import llm_core
from llm_core import (
    ChatMessage,
    EngineBusyError,
    EngineClient,
    EngineConfig,
    EngineDiedError,
    EngineStats,
    FirstToken,
    GenerationDone,
    InvalidRequestError,
    LlmError,
    ModelLoadError,
    PromptTooLongError,
    SamplingParams,
    TextDelta,
    ipc,
)
from llm_core.client.engine_process import Stream
from tests.support.tiny_model import write_tiny_gguf

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENDLESS = SamplingParams(max_tokens=10_000, ignore_eos=True, temperature=1.0, seed=1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_tiny_gguf(path, context_len=100_000)


def config(path: Path, **kwargs: Any) -> EngineConfig:
    values = {"max_sequences": 2, "max_waiting": 2, "max_context": 16_384, **kwargs}
    return EngineConfig(model_path=str(path), **values)


# One for all tests: each shows at its end that nothing is left, and those that kill the process
# that the next use starts another.
@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(model_path: Path) -> AsyncIterator[EngineClient]:
    started = await EngineClient.start(config(model_path), start_timeout_s=60)
    yield started
    await started.close()


def user(text: str = "Hello") -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text)]


async def read(client: EngineClient, text: str = "Hello", **params: Any) -> tuple[str, list[Any]]:
    events = [event async for event in client.generate(user(text), SamplingParams(**params))]
    return "".join(e.text for e in events if isinstance(e, TextDelta)), events


async def assert_nothing_left(client: EngineClient) -> None:
    stats = await client.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_drafts) == (0, 0, 0)
    assert stats.num_free_blocks + stats.num_pinned_blocks == stats.num_blocks


async def until(client: EngineClient, *, num_running: int, num_waiting: int) -> None:
    """Asks the engine until it is so; the test's timeout ends a wait for what never comes."""
    while True:
        stats = await client.stats()
        if (stats.num_running, stats.num_waiting) == (num_running, num_waiting):
            return


def pid_of(client: EngineClient) -> int:
    assert client._process is not None
    return client._process.pid


async def test_a_reply_in_order(client: EngineClient) -> None:
    text, events = await read(client, max_tokens=20, ignore_eos=True)
    assert isinstance(events[0], FirstToken)
    assert isinstance(events[-1], GenerationDone)
    assert all(isinstance(event, TextDelta) for event in events[1:-1])
    assert events[-1].usage.completion_tokens == 20
    assert events[0].received_ns <= events[0].scheduled_ns <= events[0].first_token_ns
    assert text == (await read(client, max_tokens=20, ignore_eos=True))[0]
    await assert_nothing_left(client)


async def test_a_terminals_ctrl_c_does_not_reach_the_engine(client: EngineClient) -> None:
    # It could ignore it only once its code is loaded: a reserve process takes seconds for that.
    assert os.getpgid(pid_of(client)) != os.getpgid(0)
    # In a session of its own it would get half of the machine (autogroup).
    assert os.getsid(pid_of(client)) == os.getsid(0)


async def test_info(client: EngineClient) -> None:
    assert client.info.num_layers == 2
    assert client.info.context_len == 16_384
    assert client.is_alive


async def test_requests_at_once_equal_requests_alone(client: EngineClient) -> None:
    params = {"max_tokens": 15, "temperature": 0.8, "seed": 5, "ignore_eos": True}
    texts = [f"question {number}" for number in range(4)]
    alone = [(await read(client, text, **params))[0] for text in texts]
    together = await asyncio.gather(*(read(client, text, **params) for text in texts))
    assert [text for text, _ in together] == alone


async def test_prefill_warms_the_cache(client: EngineClient) -> None:
    result = await client.prefill(user("a longer question to prefill"))
    assert result.cached_tokens < 10  # what all chats begin with
    _, events = await read(client, "a longer question to prefill", max_tokens=1)
    assert events[0].cached_tokens == result.prompt_tokens - 1
    await assert_nothing_left(client)


@pytest.mark.parametrize("num_events", [0, 1, 2, 10])
async def test_closing_the_stream_frees_the_blocks(client: EngineClient, num_events: int) -> None:
    stream = client.generate(user(), ENDLESS)
    for _ in range(num_events):
        await anext(stream)
    await stream.aclose()
    await assert_nothing_left(client)


async def test_cancelling_the_task_frees_running_and_waiting(client: EngineClient) -> None:
    seen = asyncio.Event()

    async def consume() -> None:
        async for _ in client.generate(user(), ENDLESS):
            seen.set()

    tasks = [asyncio.create_task(consume()) for _ in range(4)]
    await seen.wait()
    await until(client, num_running=2, num_waiting=2)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await assert_nothing_left(client)


async def test_cancelled_prefill_is_aborted(client: EngineClient) -> None:
    task = asyncio.create_task(client.prefill(user("long " * 2000)))
    await until(client, num_running=1, num_waiting=0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await assert_nothing_left(client)


async def test_too_many_requests_are_refused_and_the_others_go_on(client: EngineClient) -> None:
    streams = [client.generate(user(), ENDLESS) for _ in range(2)]
    for stream in streams:
        await anext(stream)
    waiting = [asyncio.create_task(read(client, max_tokens=1)) for _ in range(2)]
    await until(client, num_running=2, num_waiting=2)
    with pytest.raises(EngineBusyError, match="2 waiting"):
        await read(client)
    for stream in streams:
        await stream.aclose()
    assert len(await asyncio.gather(*waiting)) == 2
    await assert_nothing_left(client)


async def test_errors_of_a_request_have_their_class(client: EngineClient) -> None:
    with pytest.raises(InvalidRequestError, match="temperature"):
        await read(client, temperature=-1.0)
    with pytest.raises(PromptTooLongError, match="context of 16384"):
        await read(client, "word " * 40_000)
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        await read(client, "\ud800")
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        await read(client, seed=2**70)
    with pytest.raises(InvalidRequestError, match="bytes"):
        await read(client, "x" * (ipc.MAX_COMMAND_BYTES + 1))
    with pytest.raises(InvalidRequestError, match="at least one"):
        await client.prefill([])
    await read(client, max_tokens=1)
    await assert_nothing_left(client)


async def test_a_slow_consumer_gets_all_text_and_delays_nobody(client: EngineClient) -> None:
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    slow = client.generate(user("slow"), params)
    await anext(slow)  # and takes nothing more until the other one is through
    fast_text, fast = await read(client, "slow", max_tokens=300, ignore_eos=True)
    events = [event async for event in slow]
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == fast_text
    assert len(events) < len(fast)
    assert events[-1].usage.completion_tokens == 300


async def test_killed_in_mid_reply_and_restarted_by_the_next_use(
    client: EngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    streams = [client.generate(user(), ENDLESS) for _ in range(2)]
    for stream in streams:
        await anext(stream)
    waiting = asyncio.create_task(read(client))
    prefill = asyncio.create_task(client.prefill(user("warm")))
    await until(client, num_running=2, num_waiting=2)
    first_pid = pid_of(client)
    with caplog.at_level(logging.ERROR):
        os.kill(first_pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDiedError, match="SIGKILL"):
                async for _ in stream:
                    pass
        for task in (waiting, prefill):
            with pytest.raises(EngineDiedError, match="SIGKILL"):
                await task
    assert not client.is_alive
    text, _ = await read(client, max_tokens=5, ignore_eos=True)
    assert text
    assert client.is_alive
    assert pid_of(client) != first_pid
    await assert_nothing_left(client)


async def test_many_uses_after_a_death_start_one_process(client: EngineClient) -> None:
    os.kill(pid_of(client), signal.SIGKILL)
    with pytest.raises(EngineDiedError):
        await client.stats()
    uses = [read(client, max_tokens=2) for _ in range(3)]
    results = await asyncio.gather(client.restart(), *uses)
    assert len(results) == 4
    await assert_nothing_left(client)


async def test_who_gives_up_waiting_for_a_restart_neither_waits_nor_stops_it(
    client: EngineClient,
) -> None:
    os.kill(pid_of(client), signal.SIGKILL)
    with pytest.raises(EngineDiedError):
        await client.stats()
    first, second = (asyncio.create_task(read(client, max_tokens=2)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    assert not client.is_alive, "the first one has not waited for the start"
    text, _ = await second
    assert client.is_alive
    await assert_nothing_left(client)


async def test_closing_during_a_restart_ends_it(model_path: Path) -> None:
    children = child_pids()
    client = await EngineClient.start(config(model_path))
    os.kill(pid_of(client), signal.SIGKILL)
    with pytest.raises(EngineDiedError):
        await client.stats()
    waiting = asyncio.create_task(read(client))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(EngineDiedError, match="closed"):
        await waiting
    assert child_pids() == children


async def test_a_broken_model_is_a_load_error_with_the_workers_message(tmp_path: Path) -> None:
    children = child_pids()
    with pytest.raises(ModelLoadError, match="missing.gguf"):
        await EngineClient.start(config(tmp_path / "missing.gguf"), start_timeout_s=60)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    with pytest.raises(ModelLoadError, match="broken.gguf"):
        await EngineClient.start(config(broken), start_timeout_s=60)
    assert child_pids() == children


async def test_an_engine_that_is_never_ready_is_a_load_error(model_path: Path) -> None:
    children = child_pids()
    with pytest.raises(ModelLoadError, match=r"not ready after 0\.01 s"):
        await EngineClient.start(config(model_path), start_timeout_s=0.01)
    assert child_pids() == children


async def test_cancelling_the_start_ends_the_process(model_path: Path) -> None:
    children = child_pids()
    starting = asyncio.create_task(EngineClient.start(config(model_path)))
    while child_pids() == children:
        await asyncio.wait([starting], timeout=0.005)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert child_pids() == children


async def test_a_worker_that_ends_at_once_is_a_load_error(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = child_pids()
    monkeypatch.setattr(
        "llm_core.client.engine_process._command_line",
        lambda *_: [sys.executable, "-c", "raise SystemExit(3)"],
    )
    with pytest.raises(ModelLoadError, match="exited with status 3"):
        await EngineClient.start(config(model_path), start_timeout_s=60)
    assert child_pids() == children


def child_pids() -> list[int]:
    """Processes whose parent we are."""
    children = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children")
    return [int(pid) for pid in children.read_text().split()]


def open_files() -> set[str]:
    links = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            links.add(f"{link.name}:{link.readlink()}")
        except FileNotFoundError:
            continue  # the folder's own descriptor
    return links


async def test_close_leaves_nothing_behind(model_path: Path) -> None:
    tasks, threads, files = asyncio.all_tasks(), set(threading.enumerate()), open_files()
    client = await EngineClient.start(config(model_path), start_timeout_s=60)
    pid = pid_of(client)
    stream = client.generate(user(), ENDLESS)
    await anext(stream)
    await client.close()
    await client.close()
    with pytest.raises(EngineDiedError, match="closed"):
        async for _ in stream:
            pass
    with pytest.raises(EngineDiedError, match="client is closed"):
        await read(client)
    assert not client.is_alive
    assert not is_running(pid)
    gc.collect()
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=5)
        assert not thread.is_alive()
    assert asyncio.all_tasks() == tasks
    assert open_files() <= files


async def test_works_with_uvloop(model_path: Path) -> None:
    # uvloop has its own ways with sockets and child processes, and the server runs on it.
    script = (
        "import asyncio, sys, uvloop\n"
        "from llm_core import *\n"
        "async def main():\n"
        "    client = await EngineClient.start(EngineConfig(model_path=sys.argv[1]))\n"
        "    params = SamplingParams(max_tokens=5, ignore_eos=True)\n"
        "    message = ChatMessage(role='user', content='Hi')\n"
        "    events = [e async for e in client.generate([message], params)]\n"
        "    await client.close()\n"
        "    print(events[-1].usage.completion_tokens)\n"
        "uvloop.run(main())\n"
    )
    assert await run_python(script, str(model_path)) == "5\n"


async def run_python(script: str, *arguments: str) -> str:
    root = Path(llm_core.__file__).parent.parent
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-c", script, *arguments),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd="/",
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


async def test_the_worker_ends_when_its_parent_is_killed(model_path: Path) -> None:
    script = (
        "import asyncio, os, sys\n"
        "from llm_core import *\n"
        "async def main():\n"
        "    client = await EngineClient.start(EngineConfig(model_path=sys.argv[1]))\n"
        "    print(client._process.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    root = Path(llm_core.__file__).parent.parent
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, str(model_path)),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert parent.stdout is not None
    worker_pid = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    # A pidfd becomes readable when the process ends.
    descriptor = os.pidfd_open(worker_pid)
    try:
        assert select.select([descriptor], [], [], 20)[0]
    finally:
        os.close(descriptor)


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


async def test_importing_the_root_does_not_load_torch() -> None:
    script = "import sys, llm_core; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert await run_python(script) == "False False\n"


async def test_a_stream_joins_what_waits_and_keeps_the_order() -> None:
    stream = Stream()
    first = FirstToken(
        received_ns=1, scheduled_ns=2, first_token_ns=3, prompt_tokens=4, cached_tokens=0
    )
    stream.push(first)
    for number in range(1, 1001):
        stream.push(TextDelta(text="x", num_tokens=number))
    stream.push(EngineDiedError("gone"))
    stream.push(LlmError("later ones do not count"))
    assert await stream.next() is first
    assert await stream.next() == TextDelta(text="x" * 1000, num_tokens=1000)
    with pytest.raises(EngineDiedError, match="gone"):
        await stream.next()


async def test_frames_that_are_too_long_or_senseless() -> None:
    for data, message in (
        ((ipc.MAX_EVENTS_BYTES + 1).to_bytes(4, "little"), "exceeds the limit"),
        (b"\x01\x00\x00\x00\xc1", "not understood"),
        (b"\x02\x00\x00\x00\x91\x80", "not understood"),
    ):
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        with pytest.raises(ipc.ProtocolError, match=message):
            await ipc.read_events(reader)
    cut = asyncio.StreamReader()
    cut.feed_data(ipc.encode_events([])[:3])
    cut.feed_eof()
    assert await ipc.read_events(cut) is None


async def test_config_is_checked() -> None:
    for change in ({"num_threads": 0}, {"max_sequences": 0}, {"max_waiting": 0}):
        with pytest.raises(ValueError, match=next(iter(change))):
            EngineConfig(model_path="x", **change)
    with pytest.raises(ValueError, match="max_context"):
        EngineConfig(model_path="x", max_context=1)


async def test_stats_are_plain_data() -> None:
    stats = EngineStats(
        num_running=0,
        num_waiting=0,
        num_drafts=0,
        num_blocks=2,
        num_free_blocks=1,
        num_pinned_blocks=1,
        cached_tokens=0,
    )
    assert stats == ipc.msgspec.msgpack.decode(ipc.msgspec.msgpack.encode(stats), type=EngineStats)
