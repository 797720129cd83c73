"""A hung engine is replaced; a busy one is not."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from llm_core import (
    ChatMessage,
    EngineClient,
    EngineConfig,
    EngineDiedError,
    InternalError,
    SamplingParams,
)
from llm_core.client import engine_client as client_module
from llm_core.client import engine_process
from llm_core.client.engine_process import _is_traced
from llm_core.client.heartbeat import Heartbeat, period_s
from llm_core.progress import Progress
from tests.support.tiny_model import write_tiny_gguf

# --- the judge ---


def test_silence_is_a_hang_at_the_limit() -> None:
    heart = Heartbeat(10.0)
    for _ in range(10):
        assert heart.tick(1.0) == ""
    assert heart.tick(1.0) == "it has not answered for 10 s"


def test_whatever_is_heard_is_a_sign_of_life() -> None:
    heart = Heartbeat(10.0)
    for _ in range(100):
        assert heart.tick(1.0) == ""
        heart.heard()


def test_time_in_which_we_did_not_run_ourselves_is_not_counted() -> None:
    heart = Heartbeat(10.0)
    for _ in range(5):  # the program was stopped for an hour, each time
        assert heart.tick(3600.0) == ""
    assert heart.tick(3600.0) != ""


def test_what_takes_long_by_its_nature_may() -> None:
    heart = Heartbeat(10.0)
    heart.beat([("model", 100.0), ("guide", 50.0)])
    assert heart.tick(1.0) == ""
    heart.beat([("step", 11.0), ("nothing", 0.0)])
    assert heart.tick(1.0) == "it has been busy with a step for 11 s"
    heart.beat([("step", 0.0)])
    assert heart.tick(1.0) == "", "a debugger let it go on"
    heart.beat([("model", 121.0)])
    assert heart.tick(1.0) == "it has been busy with computing for 121 s"


def test_a_short_limit_has_many_beats_in_it() -> None:
    assert period_s(10.0) == period_s(0.0) == 1.0
    assert period_s(1.0) == Heartbeat(1.0).period_s == 0.2


def test_without_a_limit_nothing_is_a_hang() -> None:
    heart = Heartbeat(0.0)
    heart.beat([("step", 1e6)])
    assert all(heart.tick(1.0) == "" for _ in range(1000))


def test_progress_is_of_what_is_done_now() -> None:
    now_ns = 0
    progress = Progress(lambda: now_ns)
    assert progress.now() == ("nothing", 0)
    with progress.at("step"):
        now_ns = 5
        with progress.at("model"):
            now_ns = 12
            assert progress.now() == ("model", 7)
        assert progress.now() == ("step", 0), "what was computed counts as progress"
        now_ns = 20
        assert progress.now() == ("step", 8)
    assert progress.now() == ("nothing", 0)


def test_a_process_in_a_debuggers_hands_is_known() -> None:
    assert not _is_traced(os.getpid())
    code = "import ctypes; ctypes.CDLL(None).ptrace(0, 0, 0, 0); print(flush=True); input()"
    traced = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with traced:
        assert traced.stdout is not None
        traced.stdout.readline()
        try:
            assert _is_traced(traced.pid)
        finally:
            traced.kill()
    assert not _is_traced(traced.pid)


# --- engines ---

# An engine that does what its prompts say.
OBEDIENT = """
import sys, time
from llm_core import worker
from llm_core.engine.engine import Engine
from llm_core.model.runner import ModelRunner

submit, forward = Engine.submit, ModelRunner.forward

def submitting(self, request_id, messages, *args, **kwargs):
    match messages[0].content:
        case "hang":
            time.sleep(1000)
        case "fail":
            raise ZeroDivisionError
        case "leak":
            self.scheduler.tables.pool.allocate(1)
            raise ZeroDivisionError
        case "compute":
            self.delay_s = 6.0
    submit(self, request_id, messages, *args, **kwargs)
    self._runner.delay_s = getattr(self, "delay_s", 0.0)

def computing(self, batch):
    time.sleep(getattr(self, "delay_s", 0.0))
    return forward(self, batch)

Engine.submit, ModelRunner.forward = submitting, computing
sys.exit(worker.main())
"""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context_len=4096)


@asynccontextmanager
async def running(model_path: Path, **options: Any) -> AsyncIterator[EngineClient]:
    config = EngineConfig(model_path=str(model_path), **{"hang_timeout_s": 4.0, **options})
    client = await EngineClient.start(config, start_timeout_s=60)
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture
def obedient(monkeypatch: pytest.MonkeyPatch) -> None:
    original = engine_process._command_line

    def command_line(*args: Any) -> list[str]:
        interpreter, isolated, _, _, *rest = original(*args)
        return [interpreter, isolated, "-c", OBEDIENT, *rest]

    monkeypatch.setattr(engine_process, "_command_line", command_line)


def pid_of(client: EngineClient) -> int:
    assert client._process is not None
    return client._process.pid


async def say(client: EngineClient, text: str, max_tokens: int = 3) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    async for _ in client.generate([ChatMessage("user", text)], params):
        pass


async def test_a_stopped_engine_is_replaced(
    model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(model_path) as client:
        old_pid = pid_of(client)
        assert client.problem == ""
        talking = asyncio.create_task(say(client, "Hello", max_tokens=4000))
        await client.stats()
        with caplog.at_level(logging.ERROR):
            os.kill(old_pid, signal.SIGSTOP)
            stopped_s = time.monotonic()
            with pytest.raises(EngineDiedError, match=r"hangs \(it has not answered for 4 s\)"):
                await talking
            assert time.monotonic() - stopped_s < 30
            assert not client.is_alive
            assert "hangs (it has not answered for 4 s)" in client.problem
        (record,) = caplog.records
        assert "it has not answered for 4 s" in record.getMessage()
        await say(client, "Hello")
        assert client.is_alive and client.problem == ""
        assert pid_of(client) != old_pid
        with pytest.raises(ProcessLookupError):
            os.kill(old_pid, 0)


@pytest.mark.usefixtures("obedient")
async def test_an_engine_that_hangs_at_a_request_is_replaced(model_path: Path) -> None:
    async with running(model_path) as client:
        others = asyncio.create_task(say(client, "Hello", max_tokens=4000))
        await client.stats()
        for task in (asyncio.create_task(say(client, "hang")), others):
            with pytest.raises(EngineDiedError, match="busy with taking requests for"):
                await task
        await say(client, "Hello")


@pytest.mark.usefixtures("obedient")
async def test_an_engine_that_computes_for_long_is_left_alone(model_path: Path) -> None:
    async with running(model_path) as client:
        pid = pid_of(client)
        await say(client, "compute", max_tokens=1)
        assert pid_of(client) == pid


@pytest.mark.usefixtures("obedient")
async def test_a_fault_of_one_request_leaves_the_engine_to_the_others(model_path: Path) -> None:
    async with running(model_path) as client:
        pid = pid_of(client)
        others = asyncio.create_task(say(client, "Hello", max_tokens=200))
        with pytest.raises(InternalError, match="ZeroDivisionError"):
            await say(client, "fail")
        await others
        assert pid_of(client) == pid
        stats = await client.stats()
        assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.usefixtures("obedient")
async def test_an_engine_whose_accounts_are_wrong_is_replaced(model_path: Path) -> None:
    async with running(model_path) as client:
        pid = pid_of(client)
        with pytest.raises(EngineDiedError, match="exited with status 1"):
            await say(client, "leak")
        await say(client, "Hello")
        assert pid_of(client) != pid


async def test_a_stopped_process_in_reserve_does_not_hold_up_the_restart(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_module, "_CODE_S", 0.0)
    monkeypatch.setattr(client_module, "_SPARE_BEGINS_S", 0.5)
    async with running(model_path, standby=True) as client:
        spare = client._spare
        assert spare is not None
        os.kill(spare.pid, signal.SIGSTOP)
        os.kill(pid_of(client), signal.SIGKILL)
        with pytest.raises(EngineDiedError):
            await client.stats()
        await client.restart()
        await say(client, "Hello")
        assert pid_of(client) != spare.pid and spare.has_exited
    assert "in reserve is of no use: the engine was not ready after 0.5 s" in caplog.text
