"""Workloads of `parley bench llm`. Each one returns named figures of one round.

Prompts are made of common words, about one token each. They differ in every round, so that only
what a workload means to find in the prefix cache is there.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from bench.harness.rounds import Figures
from bench.llm.engines import Generated, MeasuredEngine
from llm_core import ChatMessage

Workload = Callable[[MeasuredEngine, str], Awaitable[Figures]]

_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line"
)
_WORDS = tuple(_TEXT.split())

_QUESTIONS = (
    "What should I cook tonight with eggs and rice?",
    "Can you explain how rainbows appear?",
    "How do I get better at remembering names?",
    "Why do cats purr?",
    "What is a good way to start running?",
    "How does a bicycle stay upright?",
    "Tell me something about the history of tea.",
    "What could I give my sister for her birthday?",
)

SYSTEM_LEN = 600
PREFILL_LEN = 512
DECODE_LEN = 128
STREAM_LEN = 96
LONG_LEN = 3600  # words; with the template's own about 4,000 tokens of some tokenizers
_NUM_RUNNING = 4  # streams beside a long prompt


def words(seed: str, count: int) -> str:
    """``count`` words, the same for the same ``seed``."""
    return " ".join(random.Random(seed).choices(_WORDS, k=count))


def conversation(seed: str, *, system_len: int, user_len: int) -> list[ChatMessage]:
    """A system message of ``system_len`` words and a question of ``user_len`` words."""
    return [
        ChatMessage(role="system", content=words(f"{seed} system", system_len)),
        ChatMessage(role="user", content=words(f"{seed} user", user_len) + "?"),
    ]


async def decode(engine: MeasuredEngine, seed: str) -> Figures:
    """One stream."""
    messages = conversation(seed, system_len=20, user_len=20)
    return {"decode_tok_s": (await engine.generate(messages, DECODE_LEN)).decode_tok_s}


async def spoken(engine: MeasuredEngine, seed: str) -> Figures:
    """One stream that answers a question as callers ask it. Drafts are accepted more often in such
    an answer than in one to random words."""
    messages = [ChatMessage(role="user", content=random.Random(seed).choice(_QUESTIONS))]
    return {"spoken_tok_s": (await engine.generate(messages, DECODE_LEN)).decode_tok_s}


async def prefill(engine: MeasuredEngine, seed: str) -> Figures:
    """One prompt without a cached prefix; the time to the first text is its prefill."""
    messages = conversation(seed, system_len=2, user_len=PREFILL_LEN)
    done = await engine.generate(messages, 2)
    return {"prefill_tok_s": (done.prompt_tokens - done.cached_tokens) / (done.ttft_ms / 1e3)}


async def cached_prefix(engine: MeasuredEngine, seed: str) -> Figures:
    """A question after a system prompt that is not cached, then another one after the same."""
    system = conversation(seed, system_len=SYSTEM_LEN, user_len=1)[0]

    def ask(question: str) -> Awaitable[Generated]:
        return engine.generate([system, ChatMessage(role="user", content=question)], 4)

    cold = await ask("What is the time now?")
    warm = await ask("How long is the river?")
    return {
        "ttft_cold_ms": cold.ttft_ms,
        "ttft_cached_ms": warm.ttft_ms,
        "cached_tokens": float(warm.cached_tokens),
    }


def streams(count: int) -> Workload:
    """``count`` streams at once, each with a prompt of its own."""

    async def run(engine: MeasuredEngine, seed: str) -> Figures:
        prompts = [conversation(f"{seed} {i}", system_len=20, user_len=20) for i in range(count)]
        clock = asyncio.get_running_loop().time
        start_s = clock()
        done = await asyncio.gather(*(engine.generate(p, STREAM_LEN) for p in prompts))
        took_s = clock() - start_s
        gaps = sorted(gap for generated in done for gap in generated.gaps_ms)
        slowest = max(sum(generated.gaps_ms) for generated in done)
        fastest = min(sum(generated.gaps_ms) for generated in done)
        return {
            f"streams{count}_tok_s": sum(g.completion_tokens for g in done) / took_s,
            f"itl_p50_ms_streams{count}": gaps[len(gaps) // 2],
            f"itl_p99_ms_streams{count}": gaps[int(len(gaps) * 0.99)],
            f"slowest_to_fastest_streams{count}": slowest / fastest,
        }

    return run


async def long_prompt(engine: MeasuredEngine, seed: str) -> Figures:
    """The longest gap in running streams during the prefill of a long prompt."""
    running = [
        asyncio.ensure_future(
            engine.generate(conversation(f"{seed} {i}", system_len=20, user_len=20), 4 * STREAM_LEN)
        )
        for i in range(_NUM_RUNNING)
    ]
    long = await engine.generate(conversation(seed, system_len=2, user_len=LONG_LEN), 2)
    done = await asyncio.gather(*running)
    gaps = sorted(gap for generated in done for gap in generated.gaps_ms)
    return {
        "long_prompt_tokens": float(long.prompt_tokens),
        "long_prompt_ttft_ms": long.ttft_ms,
        "long_prompt_max_gap_ms": gaps[-1],
        "long_prompt_gap_ratio": gaps[-1] / gaps[len(gaps) // 2],
    }


def all_workloads(stream_counts: tuple[int, ...]) -> list[Workload]:
    """All workloads, in the order in which a round runs them."""
    return [decode, spoken, prefill, cached_prefix, *map(streams, stream_counts), long_prompt]
