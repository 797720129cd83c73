"""Lossless speculation: equal output, token by token, for a float32 model, every drafter, chains
and trees, temperatures 0, 0.7 and 1.0, and batches of mixed requests.

``PARLEY_SPECULATION_CASES=20000`` sets the number of requests.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from llm_core.engine.engine import Engine
from llm_core.messages import RequestOptions, SamplingParams
from llm_core.model.backend import RunnerOptions
from llm_core.model.runner import ModelRunner
from llm_core.sampling.sampler import FloatRow, SamplerState, sample_row
from llm_core.speculative.control.base import FixedController
from llm_core.speculative.drafters.base import Drafter, DraftShape
from llm_core.speculative.drafters.draft_model import DraftModelDrafter
from llm_core.speculative.drafters.eagle import EagleDrafter
from llm_core.speculative.drafters.medusa import MedusaDrafter
from llm_core.speculative.drafters.ngram import NgramDrafter
from llm_core.speculative.heads.eagle import EagleHead, TargetEmbeddings
from llm_core.speculative.heads.medusa import MedusaHeads
from tests.support.fake_drafter import EXACT_COUPLING, GuessingDrafter, RestingController
from tests.support.random_heads import head_config, head_tensors
from tests.support.random_llama import random_weights, run_chunk, tiny_config
from tests.support.tiny_model import TOKENS
from tests.unit.llm_core.engine.test_engine import assert_nothing_left, make_engine, prompt_of, user

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
    return ModelRunner(CONFIG, weights, RunnerOptions(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE))


def target_rows() -> TargetEmbeddings:
    return TargetEmbeddings.of(CONFIG, random_weights(CONFIG))


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
    """The target itself: nearly all drafts are accepted, sampled ones too."""
    weights = random_weights(CONFIG)
    weights["head"] = weights["head"] * 3
    model = ModelRunner(CONFIG, weights, RunnerOptions(num_blocks=100, block_size=8))
    return DraftModelDrafter(model, vocab_size=len(TOKENS), coupling=EXACT_COUPLING)


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
    """Each request's tokens, including its prompt, and its events."""
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
    """Equal, or different from where rounding in the last bits of a sum decides."""
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
    """Requests and their plain results, shared by all drafters."""
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
    assert drafted > 20 or name == "ngram", "random text rarely repeats n-grams"
    if name in ("guessing", "draft_model"):
        assert accepted > 0.2 * drafted, "too few for a meaningful test"


def engine_of(drafter: Drafter | None, shape: DraftShape, seed: int) -> Engine:
    engine = make_engine(runner(), max_sequences=BATCH - seed % 2)
    engine.scheduler.mixed_budget = 5 + seed % 20
    if drafter is not None:
        rests = RestingController(shape, seed=seed)
        engine.speculate(drafter, rests if seed % 3 == 1 else FixedController(shape))
    return engine


NUM_SEEDS, REPLY_LEN = 700, 4


@cache
def flat_runner() -> ModelRunner:
    """A model with flat distributions."""
    return ModelRunner(CONFIG, random_weights(CONFIG), RunnerOptions(num_blocks=300, block_size=8))


@cache
def replies_by_seed(shape_name: str) -> list[Text]:
    """The first tokens after one prompt at temperature 1, by seed. The drafter is the target, so
    most of them are drafts that were accepted; its likeliest tokens are many."""
    model = flat_runner()
    drafter = DraftModelDrafter(
        ModelRunner(CONFIG, random_weights(CONFIG), RunnerOptions(num_blocks=400, block_size=8)),
        vocab_size=len(TOKENS),
        coupling=EXACT_COUPLING,
    )
    engine = make_engine(model, max_sequences=24, max_waiting=1000)
    engine.speculate(drafter, FixedController(SHAPES[shape_name]))
    params: dict[str, Any] = {"max_tokens": REPLY_LEN, "temperature": 1.0, "ignore_eos": True}
    sequences = []
    for seed in range(NUM_SEEDS):
        engine.submit(seed, user("hello"), SamplingParams(seed=seed, **params), received_ns=0)
        sequences.append(engine._requests[seed].sequence)
    while engine.has_work:
        engine.step()
    assert engine.stats().speculation.num_accepted > NUM_SEEDS
    return [tuple(s.token_ids[s.prompt_len :]) for s in sequences]


@cache
def exact(text: Text) -> FloatRow:
    """The target's distribution after the prompt and ``text``, at temperature 1."""
    logits = run_chunk(flat_runner(), torch.tensor([*prompt_of("hello"), *text]))[-1, : len(TOKENS)]
    return logits.double().softmax(-1).numpy()


def assert_distributed(counts: Sequence[int], expected: Sequence[float]) -> int:
    """Chi-square over categories of which five are expected at least, the others together. Returns
    how many there were."""
    pairs = [(c, e) for c, e in zip(counts, expected, strict=True) if e >= 5]
    rare = [(c, e) for c, e in zip(counts, expected, strict=True) if e < 5]
    if sum(e for _, e in rare) >= 5:
        pairs.append((sum(c for c, _ in rare), sum(e for _, e in rare)))
    chi_square = sum((count - e) ** 2 / e for count, e in pairs)
    freedom = len(pairs) - 1
    # Wilson and Hilferty's approximation; the seeds are fixed, so this passes always or never.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.7 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert chi_square < bound, (chi_square, freedom)
    return len(pairs)


@pytest.mark.parametrize("shape_name", SHAPES)
def test_drafted_tokens_follow_the_targets_distribution(shape_name: str) -> None:
    """The first token beside its exact probabilities, the second beside the exact mixture of them
    over all first ones; many tokens are likely."""
    texts = replies_by_seed(shape_name)
    first = exact(())
    second = sum(p * exact((token,)) for token, p in enumerate(first) if p > 1e-6)
    for place, wanted in enumerate((first, second)):
        counts = [0] * len(TOKENS)
        for text in texts:
            counts[text[place]] += 1
        assert assert_distributed(counts, NUM_SEEDS * wanted) >= 20


@pytest.mark.parametrize("shape_name", SHAPES)
def test_each_drafted_token_follows_its_conditional_distribution(shape_name: str) -> None:
    """Every token's place in the exact distribution after what was said before it, the likeliest
    tokens first, falls evenly into twenty parts (a tall token is spread over the parts that it
    covers)."""
    counts, num_parts = np.zeros(20), 20
    texts = replies_by_seed(shape_name)[::3]
    for text in texts:
        for place in range(1, REPLY_LEN):
            wanted = exact(text[:place])
            order = np.argsort(-wanted, kind="stable")
            ends = np.cumsum(wanted[order])
            at = int(np.flatnonzero(order == text[place])[0])
            low, high = (ends[at] - wanted[text[place]]) * num_parts, ends[at] * num_parts
            edges = np.clip(np.arange(num_parts + 1), low, high)
            counts += np.diff(edges) / (high - low)
    expected = len(texts) * (REPLY_LEN - 1) / num_parts
    # Spreading only makes counts vary less than a chi-square's do.
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 45, chi_square  # 0.1% of draws with 19 degrees of freedom exceed 43.8
