"""Drafts in the engine equal those of the head on the whole text, computed from scratch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from llm_core.batch import ForwardBatch, Segment
from llm_core.engine.engine import Engine
from llm_core.messages import RequestOptions, SamplingParams
from llm_core.model.backend import RunnerOptions
from llm_core.model.runner import ModelRunner
from llm_core.scheduling.draft_tree import DraftTree
from llm_core.scheduling.sequence import TokenSequence
from llm_core.speculative.control.base import FixedController
from llm_core.speculative.drafters.base import DraftRequest, DraftShape
from llm_core.speculative.drafters.eagle import EagleDrafter
from llm_core.speculative.heads.base import HeadBatch
from llm_core.speculative.heads.eagle import EagleHead, TargetEmbeddings
from tests.support.fake_drafter import RestingController
from tests.support.random_heads import head_config, head_tensors
from tests.support.random_llama import random_weights, tiny_config
from tests.support.tiny_model import TOKENS
from tests.unit.llm_core.engine.test_engine import (
    assert_nothing_left,
    drain,
    make_engine,
    prompt_of,
    submit,
    user,
)

CONFIG = tiny_config(vocab_size=len(TOKENS), context_len=160, hidden_size=32, num_heads=2)
DEPTH = 3


Text = tuple[int, ...]


class Recorder(EagleDrafter):
    """Records the tokens of each request, its tree, and how many tokens came from the prefix
    cache."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        trees = super().propose(requests)
        for request, tree in zip(requests, trees, strict=True):
            sequence = request.sequence
            seen.append((tuple(sequence.token_ids), tree, sequence.cached_len))
        return trees


seen: list[tuple[Text, DraftTree, int]] = []


def make_head() -> EagleHead:
    shape = head_config(CONFIG, "eagle3")
    target = TargetEmbeddings.of(CONFIG, random_weights(CONFIG))
    return EagleHead(shape, head_tensors(shape), target, max_context=160)


def drafted_from_scratch(
    tokens: Text, count: int, stale: tuple[int, int] | None = None, base: int = 0
) -> list[int]:
    """A chain drafted after the whole text, with empty caches. ``stale`` (position, token): the
    pair before that position is computed with this next token. ``base``: the head starts there."""
    runner, head = ModelRunner(CONFIG, random_weights(CONFIG)), make_head()
    runner.set_feature_layers(head.feature_layers)
    num_pairs = len(tokens) - 1
    table = tuple(range(10))
    ids = torch.tensor(tokens)
    batch = ForwardBatch(
        ids[:-1], (Segment(table, 0, num_pairs),), torch.tensor([num_pairs - 1]), True
    )
    states = runner.forward(batch).features
    assert states is not None
    cache = head.make_cache(10, 16)
    rows, start, from_target = ids[1:].clone(), 0, True
    if stale is not None:
        rows[stale[0] - 1] = stale[1]
    rows, states = rows[base:], states[base:]
    drafts: list[int] = []
    for _ in range(count):
        segment = Segment(table, start, len(rows))
        last = torch.tensor([len(rows) - 1])
        with torch.inference_mode():
            result = head.forward(HeadBatch(rows, states, from_target, (segment,), last), cache)
        drafts.append(int(head.target_ids[int(result.logits[0].argmax())]))
        start += len(rows)
        rows, states, from_target = torch.tensor(drafts[-1:]), result.states, False
    return drafts


@pytest.mark.parametrize("block_size", [4, 16])
def test_drafts_match_the_whole_text(block_size: int) -> None:
    """Two replies at once, chunked prompts, accepted and rejected drafts."""
    seen.clear()
    runner = ModelRunner(
        CONFIG, random_weights(CONFIG), RunnerOptions(num_blocks=80, block_size=block_size)
    )
    drafter = Recorder(make_head(), num_blocks=80, block_size=block_size, max_sequences=2)
    engine = make_engine(runner, max_sequences=2)
    engine.scheduler.mixed_budget = 7
    engine.speculate(drafter, FixedController(DraftShape(DEPTH, DEPTH)))
    submit(engine, 1, "hello", max_tokens=12, ignore_eos=True)
    engine.step()
    # A shared prefix would be right but for its last position, which knows another next token.
    engine.submit(
        2,
        user("tell me what the user is"),
        SamplingParams(max_tokens=12, ignore_eos=True),
        received_ns=0,
        options=RequestOptions(cache_salt="another tenant"),
    )
    list(drain(engine))
    assert_nothing_left(engine)
    assert len(seen) > 12
    for tokens, tree, _ in seen[:: len(seen) // 10]:
        assert 0 < len(tree) <= DEPTH
        assert list(tree.token_ids) == drafted_from_scratch(tokens, len(tree)), len(tokens)


def recording(**options: Any) -> Engine:
    """An engine whose drafts are recorded."""
    seen.clear()
    num_blocks = options.pop("num_blocks", 80)
    runner = ModelRunner(
        CONFIG, random_weights(CONFIG), RunnerOptions(num_blocks=num_blocks, block_size=4)
    )
    drafter = Recorder(
        make_head(), num_blocks=num_blocks, block_size=4, max_sequences=options["max_sequences"]
    )
    engine = make_engine(runner, **options)
    engine.speculate(drafter, FixedController(DraftShape(DEPTH, DEPTH)))
    return engine


def assert_drafts_follow(others: Sequence[Text], most: int = 14) -> int:
    """The recorded drafts match the whole text. After cached blocks the last cached position may
    have been computed with the token that follows it in one of ``others``; returns how often."""
    assert len(seen) > 8
    num_stale = 0
    for tokens, tree, cached_len in seen[:: -(-len(seen) // most)]:
        drafts, count = list(tree.token_ids), len(tree)
        assert count > 0
        if drafts == drafted_from_scratch(tokens, count):
            continue
        num_stale += 1
        before = {
            t[cached_len]
            for t in others
            if t[:cached_len] == tokens[:cached_len] and t[cached_len:]
        }
        assert cached_len > 0 and any(
            drafts == drafted_from_scratch(tokens, count, (cached_len, token)) for token in before
        ), (len(tokens), cached_len)
    return num_stale


def reply_tokens(engine: Engine, number: int, text: str, num_tokens: int, salt: str = "") -> Text:
    """The tokens of a prompt and its reply."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    options = RequestOptions(cache_salt=salt)
    engine.submit(number, user(text), params, received_ns=0, options=options)
    sequence = engine._requests[number].sequence
    list(drain(engine))
    return tuple(sequence.token_ids)


def test_prefix_cache_hits_include_the_heads_kv() -> None:
    """A second turn continues the first; later ones start in the middle of it (a barge-in)."""
    engine = recording(max_sequences=2)
    first = reply_tokens(engine, 1, "hello hello tell me", 14)
    again = prompt_of("hello hello tell me")
    assert first[: len(again)] == tuple(again)
    for number, kept in ((2, len(first) - 1), (3, len(again) + 7), (4, len(again) + 4)):
        seen.clear()
        request = first[:kept] + tuple(prompt_of("x"))
        sequence = submit_tokens(engine, number, request)
        list(drain(engine))
        assert sequence.cached_len >= kept - 1
        assert_drafts_follow([first, tuple(sequence.token_ids)])
    assert_nothing_left(engine)


def submit_tokens(engine: Engine, number: int, tokens: Text) -> TokenSequence:
    """Submits a request with exactly these prompt tokens."""
    submit(engine, number, "x", max_tokens=14, ignore_eos=True)
    sequence = engine._requests[number].sequence
    sequence.token_ids[:] = tokens
    sequence.prompt_len, sequence.max_len = len(tokens), len(tokens) + 14
    return sequence


def test_after_a_pause_the_head_starts_at_the_next_block() -> None:
    """Positions computed without captured features are skipped; stale KV of other sequences in the
    same blocks is not used."""
    engine = recording(max_sequences=2)
    controller = RestingController(DraftShape(DEPTH, DEPTH), seed=3, mean_steps=8)
    assert engine._speculator is not None
    engine._speculator._controller = controller
    plain = make_engine(ModelRunner(CONFIG, random_weights(CONFIG)), max_sequences=2)
    drafter = engine._speculator._drafter
    assert isinstance(drafter, Recorder)
    num_full = num_later = 0
    for number, text in enumerate(("hello", "tell me what the user is", "the end", "hello you")):
        seen.clear()
        texts = [reply_tokens(e, number, text, 40, salt=str(number)) for e in (engine, plain)]
        assert texts[0] == texts[1]
        for tokens, tree, _ in seen:
            if tree:
                base = base_of(tokens, tree)
                num_full, num_later = num_full + (base == 0), num_later + (base > 0)
    assert num_full > 4 and num_later > 4, "both kinds are to be seen"
    assert_nothing_left(engine)


def base_of(tokens: Text, tree: DraftTree) -> int:
    """The first position of a block from which the head must have started to draft this tree."""
    for base in range(0, len(tokens) - 1, 4):
        if drafted_from_scratch(tokens, len(tree), base=base) == list(tree.token_ids):
            return base
    raise AssertionError(f"{len(tokens)} tokens do not give these drafts")


def test_drafts_after_preemption() -> None:
    """A preempted sequence is computed again, from cached blocks or from scratch."""
    engine = recording(max_sequences=3, num_blocks=22)
    sequences = []
    for number, text in enumerate(("hello", "tell me what the user is", "the end")):
        submit(engine, number, text, max_tokens=18, ignore_eos=True)
        sequences.append(engine._requests[number].sequence)
    list(drain(engine))
    assert engine.stats().total_preempted > 0
    assert_drafts_follow([tuple(s.token_ids) for s in sequences], most=20)
    assert_nothing_left(engine)


@pytest.mark.parametrize("num_steps", [2, 3, 5])
def test_drafts_during_and_after_an_abort(num_steps: int) -> None:
    """The other reply is not disturbed, and a continuation of the aborted one finds its KV."""
    engine = recording(max_sequences=2)
    submit(engine, 1, "hello hello", max_tokens=30, ignore_eos=True)
    submit(engine, 2, "tell me", max_tokens=12, ignore_eos=True)
    given_up, other = (engine._requests[number].sequence for number in (1, 2))
    for _ in range(num_steps + 3):
        engine.step()
    engine.abort(1)
    engine.scheduler.check()
    list(drain(engine))
    sequence = submit_tokens(engine, 3, tuple(given_up.token_ids[:-1]))
    list(drain(engine))
    assert sequence.cached_len > 0
    texts = [tuple(s.token_ids) for s in (given_up, other, sequence)]
    assert_drafts_follow(texts, most=10)
    assert_nothing_left(engine)
