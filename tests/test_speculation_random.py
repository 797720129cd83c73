"""Speculative and plain output are equal, token by token: a float32 model, every drafter, chains
and trees, temperatures 0, 0.7 and 1.0, batches of mixed requests.

``PARLEY_SPECULATION_CASES=20000`` sets how many requests are tried.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from llm_core.engine import Engine
from llm_core.messages import RequestOptions, SamplingParams
from llm_core.runner import ModelRunner
from llm_core.sampler import SamplerState, sample_row
from llm_core.speculative.control import FixedController
from llm_core.speculative.draft_model import DraftModelDrafter
from llm_core.speculative.drafter import Drafter, DraftShape
from llm_core.speculative.eagle import EagleHead, TargetRows
from llm_core.speculative.eagle_drafter import EagleDrafter
from llm_core.speculative.medusa import MedusaHeads
from llm_core.speculative.medusa_drafter import MedusaDrafter
from llm_core.speculative.ngram import NgramDrafter
from tests.fake_drafter import GuessingDrafter
from tests.random_heads import head_config, head_tensors
from tests.random_llama import random_weights, run_chunk, tiny_config
from tests.test_engine import assert_nothing_left, make_engine, prompt_of, user
from tests.tiny_model import TOKENS

NUM_CASES = int(os.environ.get("PARLEY_SPECULATION_CASES", "1000"))
BATCH = 6
CONFIG = tiny_config(vocab_size=len(TOKENS), context_len=160, hidden_size=32, num_heads=2)
NUM_BLOCKS, BLOCK_SIZE = 40, 8
SHAPES = {"chain": DraftShape(4, 4), "tree": DraftShape(9, 4, width=3)}
WORDS = ("hello", "what", "the end", "x", "in the user", "hello hello", "tell me")
Text = tuple[int, ...]


@cache
def runner() -> ModelRunner:
    weights = random_weights(CONFIG)
    weights["head"] = weights["head"] * 3  # likelier tokens: drafts are right now and then
    return ModelRunner(CONFIG, weights, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


def target_rows() -> TargetRows:
    return TargetRows.of(CONFIG, random_weights(CONFIG))


def eagle(kind: Any = "eagle3", **changes: Any) -> Drafter:
    config = head_config(CONFIG, kind, **changes)
    head = EagleHead(config, head_tensors(config), target_rows(), max_context=160)
    return EagleDrafter(head, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_sequences=BATCH)


def eagle1() -> Drafter:
    return eagle("eagle1", draft_vocab_size=CONFIG.vocab_size, has_draft_vocab=False)


def medusa() -> Drafter:
    config = head_config(CONFIG, "medusa", num_medusa_heads=3)
    return MedusaDrafter(MedusaHeads(config, head_tensors(config), target_rows()))


def draft_model() -> Drafter:
    """The target itself: its drafts are right nearly always, drawn ones too."""
    weights = random_weights(CONFIG)
    weights["head"] = weights["head"] * 3
    model = ModelRunner(CONFIG, weights, num_blocks=100, block_size=8)
    return DraftModelDrafter(model, vocab_size=len(TOKENS))


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": NgramDrafter,
    "eagle3": eagle,
    "eagle1": eagle1,
    "medusa": medusa,
    "draft_model": draft_model,
}


def random_requests(rng: random.Random, temperature: float) -> list[tuple[str, SamplingParams]]:
    requests = []
    for _ in range(BATCH):
        text = " ".join(rng.choices(WORDS, k=rng.randint(1, 4)))
        fields: dict[str, Any] = {"max_tokens": rng.randint(1, 10), "seed": rng.randrange(1 << 40)}
        fields["temperature"] = temperature
        for name, value, share in (
            ("top_p", 0.8, 0.3),
            ("top_k", 20, 0.2),
            ("min_p", 0.05, 0.1),
            ("repetition_penalty", 1.2, 0.2),
            ("frequency_penalty", 0.4, 0.2),
            ("presence_penalty", 0.4, 0.1),
            ("logit_bias", {70: 4.0, 71: -5.0, 2: 1.0}, 0.2),
            ("ignore_eos", True, 0.5),
            ("min_tokens", min(5, fields["max_tokens"]), 0.2),
            ("stop", ("a", "e", "\n"), 0.2),
            ("logprobs", 2, 0.2),
        ):
            if rng.random() < share:
                fields[name] = value
        requests.append((text, SamplingParams(**fields)))
    return requests


def run_all(engine: Engine, requests: list[tuple[str, SamplingParams]]) -> tuple[list[Text], Any]:
    """Each request's tokens, prompt included, and all that was said of it."""
    sequences = {}
    events: dict[int, list[Any]] = {number: [] for number in range(len(requests))}
    for number, (text, params) in enumerate(requests):
        engine.submit(number, user(text), params, received_ns=0, options=RequestOptions())
        sequences[number] = engine._requests[number].sequence
    while engine.has_work:
        for number, event in engine.step():
            assert not isinstance(event, Exception), event
            fields = {name: getattr(event, name) for name in event.__struct_fields__}
            for name in ("first_token_ns", "finished_ns", "num_steps", "speculation"):
                fields.pop(name, None)
            for name in ("scheduled_ns", "cached_tokens", "usage"):
                fields.pop(name, None)
            events[number].append((type(event).__name__, fields))
        engine.scheduler.check()
    assert_nothing_left(engine)
    return [tuple(sequences[number].token_ids) for number in range(len(requests))], events


def assert_equal(plain: Text, said: Text, text: str, params: SamplingParams) -> None:
    """Equal, or apart from where rounding in the last bits of a sum decides."""
    if plain == said:
        return
    at = next(i for i, (a, b) in enumerate(zip(plain, said, strict=False)) if a != b)
    prompt_len = len(prompt_of(text))
    state = SamplerState(params, plain[:prompt_len], vocab_size=len(TOKENS))
    for token in plain[prompt_len:at]:
        state.observe(token)
    logits = run_chunk(runner(), torch.tensor(plain[:at]))[-1].numpy()
    noise = np.random.default_rng(0)
    near = {
        sample_row(logits + noise.normal(0, 1e-5, len(logits)).astype(np.float32), state, at)
        for _ in range(200)
    }
    assert {plain[at], said[at]} <= near, f"token {at} of {said}, should be {plain[at]}"


@cache
def plain_case(
    shape_name: str, temperature: float, case: int
) -> tuple[list[tuple[str, SamplingParams]], list[Text], Any]:
    """Requests, and what plain decoding makes of them; drafters share them."""
    requests = random_requests(random.Random(f"{shape_name} {temperature} {case}"), temperature)
    return requests, *run_all(engine_of(None, SHAPES[shape_name], case), requests)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("shape_name", SHAPES)
@pytest.mark.parametrize("name", [*DRAFTERS, "guessing"])
def test_equal_to_plain_decoding(name: str, shape_name: str, temperature: float) -> None:
    shape = SHAPES[shape_name]
    drafted = accepted = 0
    for case in range(max(1, round(NUM_CASES / BATCH / 36))):
        requests, plain, plain_events = plain_case(shape_name, temperature, case)
        if name == "guessing":
            drafter: Drafter = GuessingDrafter(
                lambda t, plain=plain: next(  # type: ignore[misc]
                    (p[len(t)] for p in plain if len(p) > len(t) and list(p[: len(t)]) == t), 5
                ),
                len(TOKENS),
                seed=case,
            )
        else:
            drafter = DRAFTERS[name]()
        engine = engine_of(drafter, shape, case)
        said, events = run_all(engine, requests)
        for a, b, (text, params) in zip(plain, said, requests, strict=True):
            assert_equal(a, b, text, params)
        if said == plain and not any(p.logprobs for _, p in requests):
            assert events == plain_events
        drafted += engine.stats().speculation.num_drafted
        accepted += engine.stats().speculation.num_accepted
    assert drafted > 20 or name == "ngram", "random text rarely says the same again"
    if name in ("guessing", "draft_model"):
        assert accepted > 0.2 * drafted, "otherwise nothing is tried"


def engine_of(drafter: Drafter | None, shape: DraftShape, seed: int) -> Engine:
    engine = make_engine(runner(), max_sequences=BATCH - seed % 2)
    engine.scheduler.mixed_budget = 5 + seed % 20
    if drafter is not None:
        engine.speculate(drafter, FixedController(shape))
    return engine


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_first_drafted_tokens_are_distributed_as_the_target_says(shape: DraftShape) -> None:
    """Chi-square of the second token over many seeds; the drafter is the target, so that half of
    these tokens are drafts that were accepted."""
    drafter = draft_model()
    engine = make_engine(runner(), max_sequences=8, max_waiting=1000)
    engine.speculate(drafter, FixedController(shape))
    num_seeds = 400
    params: dict[str, Any] = {"max_tokens": 3, "temperature": 1.5, "ignore_eos": True}
    counts: dict[int, int] = {}
    sequences = []
    for seed in range(num_seeds):
        engine.submit(seed, user("hello"), SamplingParams(seed=seed, **params), received_ns=0)
        sequences.append(engine._requests[seed].sequence)
    while engine.has_work:
        engine.step()
    assert engine.stats().speculation.num_accepted > num_seeds / 3
    seconds = [s.token_ids[s.prompt_len : s.prompt_len + 2] for s in sequences]
    most = max({t[0] for t in seconds}, key=lambda token: sum(t[0] == token for t in seconds))
    prompt = [*prompt_of("hello"), most]
    logits = run_chunk(runner(), torch.tensor(prompt))[-1, : len(TOKENS)].double()
    wanted = (logits / 1.5).softmax(-1).numpy()
    followers = [t[1] for t in seconds if t[0] == most]
    for token in followers:
        counts[token] = counts.get(token, 0) + 1
    total = len(followers)
    assert total > 60
    common = [t for t in range(len(TOKENS)) if wanted[t] * total >= 5]
    rest = 1.0 - sum(wanted[t] for t in common)
    observed = [counts.get(t, 0) for t in common]
    pairs = [(o, wanted[t] * total) for o, t in zip(observed, common, strict=True)]
    if rest * total >= 5:
        pairs.append((total - sum(observed), rest * total))
    assert len(pairs) >= 2
    chi_square = sum((o - e) ** 2 / e for o, e in pairs)
    freedom = len(pairs) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5 + 5
