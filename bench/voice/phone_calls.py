"""Voice to voice through a phone: recordings call a server of their own, provider by provider.

    python -m bench.voice.phone_calls ../shared/data/speech/un_*.flac [--provider twilio] \
        [--rounds 2]

Each recording is one call over G.711 at 8 kHz (or what the provider sends), in frames of 20 ms,
with marks and pacing, by ``parley call``. Two figures: the server's own account, and the silence in
a recording of both sides at the caller's ear, which has the line's frames and resamplers in it.
Each recording is also spoken over a WebSocket, right after, so that what the line adds can be seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
from pathlib import Path
from typing import Any

from app.clients.server_process import own_server

GOAL_MS = 550
BESIDE = "websocket"


async def calls(files: list[Path], provider: str) -> dict[str, list[dict[str, Any]]]:
    """What ``parley call --json`` and ``parley talk --json`` say of each call to one server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    turns: dict[str, list[dict[str, Any]]] = {provider: [], BESIDE: []}
    async with own_server(home=None, settings={"PARLEY_AUDIOSOCKET_PORT": port}) as server:
        parley = [sys.executable, "-m", "app"]
        call = [*parley, "call", "--provider", provider, "--json", "--url", server.url]
        call += ["--audiosocket-port", port] if provider == "audiosocket" else []
        talk = [*parley, "talk", "--json", "--url", server.url]
        for file in files:
            for way, command in ((provider, call), (BESIDE, talk)):
                process = await asyncio.create_subprocess_exec(
                    *command, str(file), stdout=asyncio.subprocess.PIPE
                )
                out, _ = await process.communicate()
                for line in out.splitlines():
                    turns[way] += json.loads(line).get("turns", [])
    return turns


def row(name: str, values: list[float]) -> str:
    ranked = sorted(values)
    if not ranked:
        return f"| {name} | - | - | 0 |"
    p95 = ranked[min(len(ranked) - 1, int(len(ranked) * 0.95))]
    return f"| {name} | {statistics.median(ranked):.0f} ms | {p95:.0f} ms | {len(ranked)} |"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--provider", default="twilio")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    ways = asyncio.run(calls(options.files * options.rounds, options.provider))
    if not ways[options.provider]:
        sys.exit("no call was answered")
    print("| | p50 | p95 | turns |\n|---|---|---|---|")
    for way, turns in ways.items():
        print(row(f"{way}: the server's account", figures(turns, "voice_to_voice_ms")))
        print(row(f"{way}: silence at the caller's ear", figures(turns, "gap_in_recording_ms")))
        for stage in turns[0]["stages_ms"] if turns else []:
            values = [turn["stages_ms"][stage] for turn in turns if turn.get("stages_ms")]
            print(row(f"{way}: of the account, {stage}", values))
    print(f"goal by phone: p50 at or under {GOAL_MS} ms")


def figures(turns: list[dict[str, Any]], name: str) -> list[float]:
    return [turn[name] for turn in turns if turn.get(name) is not None]


if __name__ == "__main__":
    main()
