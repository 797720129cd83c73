"""Latency of two servers, or of two source trees, to the same questions in interleaved rounds.

    python -m bench.voice.compare_servers BEFORE AFTER [--rounds 3] [--json OUT]

BEFORE and AFTER are source trees with optional settings: ``../main`` or
``.,PARLEY_LLM_THREADS=2``. Each question of the script is asked to both servers, one right after
the other.
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from app.clients.server_process import own_server
from app.clients.talk import NoReplyError, NoSpeechError, TalkClient, open_talk
from bench.harness.results import Result, add_json_option, report
from bench.harness.rounds import Figures, Rounds, rotated
from bench.harness.speech import installed_voice
from bench.voice.script import Utterance, plain_script

_TIMEOUT_S = 30.0
_LEAST_MS = 1.0  # the ratio to a smaller figure says nothing
_SIDES = ("before", "after")


async def compare(variants: list[str], num_rounds: int) -> Rounds:
    """One round for each question; figures in ms, none where there was no single answer."""
    script = plain_script(*installed_voice())
    rounds = Rounds()
    async with AsyncExitStack() as stack:
        urls = {}
        for name, variant in zip(_SIDES, variants, strict=True):
            settings = environment(variant)
            server = await stack.enter_async_context(own_server(home=None, settings=settings))
            urls[name] = server.url
        for number in range(num_rounds):
            for said in script:
                found: dict[str, Figures] = {name: {} for name in _SIDES}
                for name in rotated(_SIDES, number):
                    async with open_talk(urls[name]) as client:
                        found[name] = await _ask(client, said)
                rounds.add(found)
    return rounds


def environment(variant: str) -> dict[str, str]:
    """Environment variables of ``TREE,NAME=VALUE,...``."""
    tree, *pairs = variant.split(",")
    settings = dict(pair.split("=", 1) for pair in pairs)
    return {"PYTHONPATH": str(Path(tree).resolve())} | settings


async def _ask(client: TalkClient, said: Utterance) -> Figures:
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


def table(rounds: Rounds) -> Result:
    """A row for each figure: the medians of the questions that both sides answered with it."""
    result = Result(("figure", "before, ms", "after, ms", "ratio", "n"))
    pairs = rounds.pairs(*_SIDES)
    common = Rounds()
    for before, after in pairs:
        both = before.keys() & after.keys()
        common.add(
            {
                "before": {name: ms for name, ms in before.items() if name in both},
                "after": {name: ms for name, ms in after.items() if name in both},
            }
        )
    medians = {side: common.medians(side) for side in _SIDES}
    ratios = common.ratios("after", "before", _LEAST_MS)
    for name in dict.fromkeys(name for pair in pairs for figures in pair for name in figures):
        if name not in medians["before"]:
            result.add(name, None, None, None, 0)
            continue
        count = sum(name in figures for figures in common.figures["before"])
        before, after = (round(medians[side][name], 1) for side in _SIDES)
        ratio = round(ratios[name], 2) if name in ratios else None
        result.add(name, before, after, ratio, count)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("variants", nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--rounds", type=int, default=3)
    add_json_option(parser)
    options = parser.parse_args()
    report(table(asyncio.run(compare(options.variants, options.rounds))), options)


if __name__ == "__main__":
    main()
