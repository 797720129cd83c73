"""Two servers, one caller: the same question to one and then to the other, again and again.

    PYTHONPATH=. python bench/compare_voice.py BEFORE AFTER [ROUNDS]

BEFORE and AFTER are source trees with settings behind them: ``../main`` or
``.,PARLEY_LLM_THREADS=2``. On a machine that others use, only what is measured in turn can be
compared: medians of both, and the median of the ratios of neighbours.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

from app.bench.voice_script import SCRIPT, Kind, Utterance, speak_line
from app.config import load_settings
from app.model_store import ModelStore
from app.server_process import own_server
from app.talk_client import NoReplyError, NoSpeechError, TalkClient, open_talk
from audio.tts import Synthesizer
from audio.vad import VadModel

_ROUNDS = 3
_TIMEOUT_S = 30.0


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
    figures: list[dict[str, list[float]]] = [{} for _ in variants]
    async with AsyncExitStack() as stack:
        urls = []
        for env in variants:
            server = await stack.enter_async_context(own_server(home=None, settings=env))
            urls.append(server.url)
        for number in range(rounds):
            for said in script:
                # Who comes first takes turns: a burst of others' work hits both alike.
                for at in (0, 1) if number % 2 else (1, 0):
                    async with open_talk(urls[at]) as client:
                        _take(figures[at], await _ask(client, said))
    for name in figures[0]:
        a, b = figures[0][name], figures[1].get(name, [])
        pairs_ = [y / x for x, y in zip(a, b, strict=False) if x > 1.0]
        ratio = f"{median(pairs_):.2f}" if pairs_ else "-"
        print(f"{name:12} {median(a):7.0f} {median(b):7.0f} ms   ratio {ratio}   n {len(a)}")


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


def _take(figures: dict[str, list[float]], found: dict[str, float]) -> None:
    if not found:
        found = dict.fromkeys(figures, float("nan"))
    for name, ms in found.items():
        figures.setdefault(name, []).append(ms)


if __name__ == "__main__":
    main()
