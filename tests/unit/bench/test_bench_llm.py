"""The LLM benchmark's arithmetic, on engines whose times are known."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer

from app.cli.bench import _counts
from app.errors import ParleyError
from bench.harness import machine
from bench.harness.rounds import Rounds
from bench.llm import compare, peer, workloads
from bench.llm.engines import Generated, Stopwatch
from llm_core import ChatMessage


class SteadyEngine:
    """Every text ``gap_ms`` after the one before, the first after ``ttft_ms``."""

    name = "steady"

    def __init__(self, *, ttft_ms: float, gap_ms: float, cached_tokens: int = 0) -> None:
        self.ttft_ms = ttft_ms
        self.gap_ms = gap_ms
        self.cached_tokens = cached_tokens
        self.asked: list[tuple[Sequence[ChatMessage], int]] = []

    async def generate(self, messages: Sequence[ChatMessage], num_tokens: int) -> Generated:
        self.asked.append((messages, num_tokens))
        num_words = sum(len(message.content.split()) for message in messages)
        gaps = (self.gap_ms,) * (num_tokens - 1)
        return Generated(num_words, self.cached_tokens, num_tokens, self.ttft_ms, gaps)

    async def close(self) -> None:
        pass


async def test_decoding_counts_the_tokens_after_the_first() -> None:
    figures = await workloads.decode(SteadyEngine(ttft_ms=1000, gap_ms=10), "a")
    assert figures == {"decode_tok_s": pytest.approx(100.0)}


async def test_prefill_counts_what_is_not_cached() -> None:
    engine = SteadyEngine(ttft_ms=500, gap_ms=10, cached_tokens=14)
    figures = await workloads.prefill(engine, "a")
    assert figures == {"prefill_tok_s": pytest.approx(1000.0)}  # 2 + 512 words less 14, in 0.5 s


async def test_the_warm_question_shares_the_system_prompt_and_nothing_else() -> None:
    engine = SteadyEngine(ttft_ms=20, gap_ms=10)
    await workloads.cached_prefix(engine, "a")
    (cold, _), (warm, _) = engine.asked
    assert cold[0] == warm[0] and len(cold[0].content.split()) == workloads.SYSTEM_LEN
    assert cold[1].content.split()[0] != warm[1].content.split()[0]


async def test_streams_have_prompts_of_their_own() -> None:
    engine = SteadyEngine(ttft_ms=20, gap_ms=10)
    figures = await workloads.streams(8)(engine, "a")
    prompts = {messages[0].content for messages, _ in engine.asked}
    assert len(prompts) == 8
    assert figures["itl_p99_ms_streams8"] == 10
    assert figures["slowest_to_fastest_streams8"] == 1


def test_words_follow_from_the_seed() -> None:
    assert workloads.words("a", 5) == workloads.words("a", 5)
    assert workloads.words("a", 50) != workloads.words("b", 50)
    assert len(workloads.words("a", 50).split()) == 50


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    rounds = {
        "parley": [{"x": 10.0, "zero": 1.0}, {"x": 40.0, "zero": 0.0}, {"x": 90.0, "zero": 1.0}],
        "peer": [{"x": 10.0, "zero": 0.0}, {"x": 20.0, "zero": 0.0}, {"x": 30.0, "zero": 0.0}],
    }
    options = compare.LlmBenchOptions(Path("m"), peer=True)
    result = compare.LlmBenchResult({}, options, {}, Rounds(rounds))
    assert result.rounds.ratios("parley", "peer") == {"x": 2.0}
    assert result.as_dict()["engines"]["parley"]["x"] == 40.0


def test_a_generation_without_text_is_an_error() -> None:
    with pytest.raises(ParleyError, match="no text"):
        Stopwatch().generated(1, 0, 1)


async def test_a_peer_that_does_not_start_is_ended_and_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[asyncio.subprocess.Process] = []
    really_start = asyncio.create_subprocess_exec

    async def start(*_: str, **pipes: int) -> asyncio.subprocess.Process:
        started.append(await really_start(sys.executable, "-c", "input()", **pipes))
        return started[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(peer, "_START_TIMEOUT_S", 0.05)
    with pytest.raises(ParleyError, match=r"was not ready after 0\.05 s"):
        await peer.LlamaCppEngine.start(Path("m"), num_threads=1, num_streams=1, max_context=64)
    assert started[0].returncode == -signal.SIGKILL


def test_the_machine_is_described() -> None:
    facts = machine.describe(1)
    assert facts.processor and facts.num_cores >= 1
    assert 0.1 < facts.read_gb_s < 10_000


@pytest.mark.parametrize("text", ["", "0", "8,x", "-1", "257", "8,,0"])
def test_wrong_stream_counts_are_refused(text: str) -> None:
    if text == "":
        assert _counts(text) == ()
        return
    with pytest.raises(typer.BadParameter, match="1 to 256"):
        _counts(text)
