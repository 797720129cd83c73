"""Voice to voice through a phone: recordings call a server of their own, provider by provider.

    python bench/phone_calls.py ../shared/data/speech/un_*.flac [--provider twilio] [--rounds 2]

Each recording is one call over G.711 at 8 kHz (or what the provider sends), in frames of 20 ms,
with marks and pacing, by ``parley call``. Two figures: the server's own account, and the silence in
a recording of both sides at the caller's ear, which has the line's frames and resamplers in it.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from app.server_process import own_server

GOAL_MS = 550


async def calls(files: list[Path], provider: str) -> list[dict[str, Any]]:
    """What ``parley call --json`` says of each call to one server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    results = []
    async with own_server(home=None, settings={"PARLEY_AUDIOSOCKET_PORT": port}) as server:
        where = ["--url", server.url]
        where += ["--audiosocket-port", port] if provider == "audiosocket" else []
        command = [sys.executable, "-m", "app", "call", "--json", "--provider", provider, *where]
        for file in files:
            process = await asyncio.create_subprocess_exec(
                *command, str(file), stdout=asyncio.subprocess.PIPE
            )
            out, _ = await process.communicate()
            results += [json.loads(line) for line in out.splitlines()]
    return results


def row(name: str, values: list[float]) -> str:
    ranked = sorted(values)
    p95 = ranked[min(len(ranked) - 1, int(len(ranked) * 0.95))]
    return f"| {name} | {statistics.median(ranked):.0f} ms | {p95:.0f} ms | {len(ranked)} |"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--provider", default="twilio")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    results = asyncio.run(calls(options.files * options.rounds, options.provider))
    turns = [turn for result in results for turn in result.get("turns", [])]
    account = [t["voice_to_voice_ms"] for t in turns if t["voice_to_voice_ms"] is not None]
    heard = [t["gap_in_recording_ms"] for t in turns if t.get("gap_in_recording_ms") is not None]
    if not account:
        sys.exit("no call was answered")
    print("| | p50 | p95 | turns |\n|---|---|---|---|")
    print(row(f"{options.provider}: the server's account", account))
    print(row(f"{options.provider}: silence at the caller's ear", heard))
    print(f"goal: p50 at or under {GOAL_MS} ms")


if __name__ == "__main__":
    main()
