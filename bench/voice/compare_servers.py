"""Two servers, one caller: the same question to one and then to the other, again and again.

    python -m bench.voice.compare_servers BEFORE AFTER [ROUNDS]

BEFORE and AFTER are source trees with settings behind them: ``../main`` or
``.,PARLEY_LLM_THREADS=2``. On a machine that others use, only what is measured in turn can be
compared: medians of both, and the median of the ratios of neighbours.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

from app.clients.server_process import own_server
from app.clients.talk import NoReplyError, NoSpeechError, TalkClient, open_talk
from app.config import load_settings
from app.models.store import ModelStore
from audio.tts.synthesizer import Synthesizer
from audio.vad import VadModel
from bench.voice.script import SCRIPT, Kind, Utterance, speak_line

_ROUNDS = 3
_TIMEOUT_S = 30.0
_LEAST_MS = 1.0  # of what is less, ratios say nothing

Asked = tuple[dict[str, float], dict[str, float]]
"""Milliseconds by name of one question to BEFORE and to AFTER; empty where there was no answer."""


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else _ROUNDS
    variants = []
    for variant in sys.argv[1:3]:
        tree, *pairs = variant.split(",")
        settings = dict(pair.split("=", 1) for pair in pairs)
        variants.append({"PYTHONPATH": str(Path(tree).resolve())} | settings)
    asyncio.run(_compare(variants, rounds))


async def _compare(variants: list[dict[str, str]], rounds: int) -> None:
    settings = load_settings()
    voice, vad = Synthesizer(ModelStore(settings.home).resolve(settings.tts_model)), VadModel()
    script = [speak_line(line, voice, vad) for line in SCRIPT if line.kind is Kind.PLAIN]
    asked: list[Asked] = []
    async with AsyncExitStack() as stack:
        urls = []
        for env in variants:
            server = await stack.enter_async_context(own_server(home=None, settings=env))
            urls.append(server.url)
        for number in range(rounds):
            for said in script:
                found: list[dict[str, float]] = [{}, {}]
                # Who comes first takes turns: a burst of others' work hits both alike.
                for at in (0, 1) if number % 2 else (1, 0):
                    async with open_talk(urls[at]) as client:
                        found[at] = await _ask(client, said)
                asked.append((found[0], found[1]))
    print("\n".join(table(asked)))


def table(asked: Sequence[Asked]) -> Iterator[str]:
    """A line for each figure, of those questions that both answered with it."""
    for name in dict.fromkeys(name for pair in asked for found in pair for name in found):
        pairs = [(a[name], b[name]) for a, b in asked if name in a and name in b]
        if not pairs:
            yield f"{name:12} never measured of both"
            continue
        before, after = (median(values) for values in zip(*pairs, strict=True))
        ratios = [b / a for a, b in pairs if a > _LEAST_MS]
        ratio = f"{median(ratios):.2f}" if ratios else "-"
        yield f"{name:12} {before:7.0f} {after:7.0f} ms   ratio {ratio}   n {len(pairs)}"


async def _ask(client: TalkClient, said: Utterance) -> dict[str, float]:
    try:
        result = await client.speak(said.audio, timeout_s=_TIMEOUT_S)
    except (NoSpeechError, NoReplyError) as error:
        print(error)
        return {}
    if len(result.turns) != 1:
        return {}
    trace: dict[str, Any] = result.turns[0].trace or {}
    found = {"v2v": trace.get("voice_to_voice_ms"), "recording": result.gaps_ms[0]}
    found |= trace.get("stages_ms") or {}
    return {name: float(ms) for name, ms in found.items() if ms is not None}


if __name__ == "__main__":
    main()
