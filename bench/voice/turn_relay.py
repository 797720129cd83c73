"""Connection time of a call through a TURN server, coturn on loopback (apt install coturn).

    python -m bench.voice.turn_relay

The client sees only the relayed address of our SDP answer. Fails when events or audio do not pass.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from tests.support.rtc_client import tone, until
from tests.support.rtc_server import loud_s, serving

USER, PASSWORD = "parley", "a-password-for-this-run"


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def turn_server(folder: Path) -> AsyncIterator[str]:
    """Run coturn; yields its URI."""
    if (program := shutil.which("turnserver")) is None:
        sys.exit("turnserver is not on this machine: apt install coturn")
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        program,
        *("--listening-ip=127.0.0.1", f"--listening-port={port}", "--relay-ip=127.0.0.1"),
        *("--allow-loopback-peers", "--lt-cred-mech", f"--user={USER}:{PASSWORD}"),
        *("--realm=parley.test", "--no-tls", "--no-dtls", "--no-cli", "--no-stdout-log"),
        *(f"--pidfile={folder}/turn.pid", f"--log-file={folder}/turn.log", "--simple-log"),
        *("-n", f"--userdb={folder}/turn.db"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await asyncio.sleep(1.0)  # it does not report when it is ready
        assert process.returncode is None, "coturn has ended"
        yield f"turn:127.0.0.1:{port}?transport=udp"
    finally:
        process.terminate()
        await process.wait()


def only_relayed(answer: str) -> str:
    lines = [x for x in answer.split("\r\n") if "a=candidate" not in x or "typ relay" in x]
    assert any("typ relay" in line for line in lines), "the answer has no relayed address"
    return "\r\n".join(lines)


async def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with (
            turn_server(folder) as uri,
            serving(
                folder, ice_servers=(uri,), ice_username=USER, ice_credential=PASSWORD
            ) as server,
            httpx.AsyncClient(base_url=server.url) as http,
            server.client() as client,
        ):
            began_s = time.monotonic()
            offer = await client.offer()
            headers = {"content-type": "application/sdp"}
            reply = await http.post("/v1/realtime/calls", content=offer, headers=headers)
            assert reply.status_code == 201, reply.text
            answered_ms = (time.monotonic() - began_s) * 1000
            await client.accept(only_relayed(reply.text))
            await client.is_open.wait()
            print(f"answered after {answered_ms:.0f} ms")
            print(f"data channel open after {(time.monotonic() - began_s) * 1000:.0f} ms")
            client.microphone.say(tone(0.8))
            await client.until("output_audio_buffer.stopped")
            await until(lambda: loud_s(client) > 0.4)
            print(f"a spoken question was answered by {loud_s(client):.2f} s of sound")


if __name__ == "__main__":
    asyncio.run(main())
