"""Voice-to-voice latency of phone calls, beside the same questions over a WebSocket.

    python -m bench.voice.phone_calls ../shared/data/speech/un_*.flac [--provider twilio] \
        [--rounds 2]

Each recording is one call by ``parley call``: G.711 at 8 kHz (or the codec of the provider) in
frames of 20 ms, with marks and pacing. Right after it the same recording is spoken over a
WebSocket, so that the share of the phone line shows. Latency is given by the trace of the server
and as silence in the recording of both sides, which includes the frames and resamplers of the line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

from app.clients.server_process import own_server
from bench.harness.figures import percentiles
from bench.harness.results import Result, add_json_option, report

GOAL_MS = 550
WEBSOCKET = "websocket"


async def calls(files: list[Path], provider: str) -> dict[str, list[dict[str, Any]]]:
    """Turns of ``parley call --json`` and ``parley talk --json`` over all files, by transport."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    turns: dict[str, list[dict[str, Any]]] = {provider: [], WEBSOCKET: []}
    async with own_server(home=None, settings={"PARLEY_AUDIOSOCKET_PORT": port}) as server:
        parley = [sys.executable, "-m", "app"]
        call = [*parley, "call", "--provider", provider, "--json", "--url", server.url]
        call += ["--audiosocket-port", port] if provider == "audiosocket" else []
        talk = [*parley, "talk", "--json", "--url", server.url]
        for file in files:
            for transport, command in ((provider, call), (WEBSOCKET, talk)):
                process = await asyncio.create_subprocess_exec(
                    *command, str(file), stdout=asyncio.subprocess.PIPE
                )
                out, _ = await process.communicate()
                for line in out.splitlines():
                    turns[transport] += json.loads(line).get("turns", [])
    return turns


def measure(turns_by_transport: dict[str, list[dict[str, Any]]]) -> Result:
    """Latency by transport, by trace and by recording, and the stages of the trace."""
    result = Result(("latency", "p50, ms", "p95, ms", "turns"))
    result.notes = f"Goal by phone: p50 of at most {GOAL_MS} ms."

    def add(name: str, values: list[float]) -> None:
        found = percentiles(values)
        result.add(name, found.get("p50"), found.get("p95"), found["n"])

    for transport, turns in turns_by_transport.items():
        for key, name in (("voice_to_voice_ms", "trace"), ("gap_in_recording_ms", "recording")):
            known = [turn[key] for turn in turns if turn.get(key) is not None]
            add(f"{transport}: {name}", known)
        for stage in turns[0]["stages_ms"] if turns else []:
            known = [turn["stages_ms"][stage] for turn in turns if turn.get("stages_ms")]
            add(f"{transport}: stage {stage}", known)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--provider", default="twilio")
    parser.add_argument("--rounds", type=int, default=1)
    add_json_option(parser)
    options = parser.parse_args()
    turns = asyncio.run(calls(options.files * options.rounds, options.provider))
    if not turns[options.provider]:
        sys.exit("no call was answered")
    report(measure(turns), options)


if __name__ == "__main__":
    main()
