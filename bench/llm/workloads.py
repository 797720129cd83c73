"""What the LLM benchmark asks of an engine. Each workload gives named figures of one round.

Prompts are made of common words, so that a word is about one token; each round's are its own, so
that nothing is cached but what is meant to be.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from bench.llm.engines import Generated, MeasuredEngine
from llm_core import ChatMessage

Figures = dict[str, float]
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
_NUM_RUNNING = 4  # streams that a long prompt meets


def words(seed: str, count: int) -> str:
    """``count`` words that follow from ``seed``."""
    return " ".join(random.Random(seed).choices(_WORDS, k=count))


def conversation(seed: str, *, system_len: int, user_len: int) -> list[ChatMessage]:
    """A system message and a question of so many words."""
    return [
        ChatMessage(role="system", content=words(f"{seed} system", system_len)),
        ChatMessage(role="user", content=words(f"{seed} user", user_len) + "?"),
    ]


async def decode(engine: MeasuredEngine, seed: str) -> Figures:
    """One stream."""
    messages = conversation(seed, system_len=20, user_len=20)
    return {"decode_tok_s": (await engine.generate(messages, DECODE_LEN)).decode_tok_s}


async def spoken(engine: MeasuredEngine, seed: str) -> Figures:
    """One stream that answers what a caller may ask: unlike an answer to random words, a text of
    which something can be foreseen."""
    messages = [ChatMessage(role="user", content=random.Random(seed).choice(_QUESTIONS))]
    return {"spoken_tok_s": (await engine.generate(messages, DECODE_LEN)).decode_tok_s}


async def prefill(engine: MeasuredEngine, seed: str) -> Figures:
    """One prompt of which nothing is cached; the whole time to the first text is its prefill."""
    messages = conversation(seed, system_len=2, user_len=PREFILL_LEN)
    done = await engine.generate(messages, 2)
    return {"prefill_tok_s": (done.prompt_tokens - done.cached_tokens) / (done.ttft_ms / 1e3)}


async def cached_prefix(engine: MeasuredEngine, seed: str) -> Figures:
    """A new question after a system prompt that is cold, then warm."""
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
    """``count`` callers at once, each with a prompt of its own."""

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
    """The longest gap in running streams while a long prompt is read."""
    running = [
        asyncio.ensure_future(
            engine.generate(conversation(f"{seed} {i}", system_len=20, user_len=20), 4 * STREAM_LEN)
        )
        for i in range(_NUM_RUNNING)
    ]
    newcomer = await engine.generate(conversation(seed, system_len=2, user_len=LONG_LEN), 2)
    done = await asyncio.gather(*running)
    gaps = sorted(gap for generated in done for gap in generated.gaps_ms)
    return {
        "long_prompt_tokens": float(newcomer.prompt_tokens),
        "long_prompt_ttft_ms": newcomer.ttft_ms,
        "long_prompt_max_gap_ms": gaps[-1],
        "long_prompt_gap_ratio": gaps[-1] / gaps[len(gaps) // 2],
    }


def all_workloads(stream_counts: tuple[int, ...]) -> list[Workload]:
    """In the order in which a round runs them."""
    return [decode, spoken, prefill, cached_prefix, *map(streams, stream_counts), long_prompt]
