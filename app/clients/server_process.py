"""A server of our own for as long as one command needs it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import app
from app.errors import ParleyError

READY_PREFIX = "Parley is listening on "
# The first start may fetch models over a slow line.
READY_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 15.0
KEPT_LINES = 30
# A log line longer than this is cut by the reader.
MAX_LINE_BYTES = 1024 * 1024


class ServerStartError(ParleyError):
    """Our own server did not come up, or went down too early."""

    code = "server_failed"


@dataclass
class OwnServer:
    """A running ``parley serve``. ``last_lines``: the newest of its log, for error messages."""

    process: asyncio.subprocess.Process
    url: str = ""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))

    @property
    def has_died(self) -> bool:
        """Whether it is gone although nobody asked it to stop."""
        return self.process.returncode is not None

    def death_notice(self) -> str:
        """How it ended, with the end of its log."""
        log = "\n".join(f"  {line}" for line in self.last_lines)
        notice = f"the server ended with exit code {self.process.returncode}"
        return f"{notice}; its last words:\n{log}" if log else notice


@asynccontextmanager
async def own_server(
    *,
    home: Path | None,
    on_log: Callable[[str], None] = lambda line: None,
    settings: dict[str, str] | None = None,
) -> AsyncIterator[OwnServer]:
    """A server on a free port of this machine, stopped at the end of the block.

    ``settings``: environment variables beside ours.

    Raises ServerStartError when it does not come up.
    """
    command = [sys.executable, "-P", "-m", "app", "serve", "--host", "127.0.0.1", "--port", "0"]
    if home is not None:
        command += ["--home", str(home)]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=_environment() | (settings or {}),
        limit=MAX_LINE_BYTES,
        # Ctrl-C is for this command, which then stops the server in good order.
        start_new_session=True,
    )
    server = OwnServer(process)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    # Both are read to the end: a full pipe would stop the server.
    readers = [
        asyncio.create_task(_read_stdout(process, ready)),
        asyncio.create_task(_read_stderr(process, server.last_lines, on_log)),
    ]
    try:
        server.url = await _wait_ready(server, ready)
        yield server
    finally:
        await _stop(process)
        await asyncio.gather(*readers)


def _environment() -> dict[str, str]:
    """Ours, with this very package first: the current folder may hold another named ``app``."""
    package_root = str(Path(app.__file__).resolve().parents[1])
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([package_root, inherited] if inherited else [package_root])
    return os.environ | {"PYTHONPATH": path}


async def _wait_ready(server: OwnServer, ready: asyncio.Future[str]) -> str:
    ended = asyncio.create_task(server.process.wait())
    either: set[asyncio.Future[Any]] = {ready, ended}
    try:
        await asyncio.wait(either, timeout=READY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended.cancel()
    if ready.done():
        return ready.result()
    if server.has_died:
        raise ServerStartError(f"cannot start the server: {server.death_notice()}")
    raise ServerStartError(f"the server was not ready after {READY_TIMEOUT_S:g} s")


async def _read_stdout(process: asyncio.subprocess.Process, ready: asyncio.Future[str]) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        text = line.decode(errors="replace").strip()
        if text.startswith(READY_PREFIX) and not ready.done():
            ready.set_result(text.removeprefix(READY_PREFIX))


async def _read_stderr(
    process: asyncio.subprocess.Process, last_lines: deque[str], on_log: Callable[[str], None]
) -> None:
    assert process.stderr is not None
    async for line in process.stderr:
        text = line.decode(errors="replace").rstrip()
        if text:
            last_lines.append(text)
            on_log(text)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
