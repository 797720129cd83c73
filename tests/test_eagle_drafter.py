"""What a head drafts within the engine is what it drafts over the whole text computed anew."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from llm_core.batch import ForwardBatch, Segment
from llm_core.messages import RequestOptions, SamplingParams
from llm_core.runner import ModelRunner
from llm_core.speculative.control import FixedController
from llm_core.speculative.draft_head import HeadBatch
from llm_core.speculative.drafter import DraftRequest, DraftShape
from llm_core.speculative.eagle import EagleHead, TargetRows
from llm_core.speculative.eagle_drafter import EagleDrafter
from llm_core.speculative.tree import DraftTree
from tests.random_heads import head_config, head_tensors
from tests.random_llama import random_weights, tiny_config
from tests.test_engine import assert_nothing_left, drain, make_engine, submit, user
from tests.tiny_model import TOKENS

CONFIG = tiny_config(vocab_size=len(TOKENS), context_len=160, hidden_size=32, num_heads=2)
DEPTH = 3


class Recorder(EagleDrafter):
    """Remembers the tokens that it was asked to continue, and how."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        trees = super().propose(requests)
        for request, tree in zip(requests, trees, strict=True):
            seen.append((tuple(request.sequence.token_ids), tree))
        return trees


seen: list[tuple[tuple[int, ...], DraftTree]] = []


def make_head() -> EagleHead:
    shape = head_config(CONFIG, "eagle3")
    target = TargetRows.of(CONFIG, random_weights(CONFIG))
    return EagleHead(shape, head_tensors(shape), target, max_context=160)


def drafted_anew(tokens: tuple[int, ...], count: int) -> list[int]:
    """A chain from pairs (features of i, token i + 1) of the whole text, in empty caches."""
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
    rows, start, is_real = ids[1:], 0, True
    drafts: list[int] = []
    for _ in range(count):
        segment = Segment(table, start, len(rows))
        last = torch.tensor([len(rows) - 1])
        with torch.inference_mode():
            result = head.forward(HeadBatch(rows, states, is_real, (segment,), last), cache)
        drafts.append(int(head.target_ids[int(result.logits[0].argmax())]))
        start += len(rows)
        rows, states, is_real = torch.tensor(drafts[-1:]), result.states, False
    return drafts


@pytest.mark.parametrize("block_size", [4, 16])
def test_drafts_follow_from_real_features_of_all_that_was_said(block_size: int) -> None:
    """Two replies at once, prompts in chunks, drafts of them accepted or not."""
    seen.clear()
    runner = ModelRunner(CONFIG, random_weights(CONFIG), num_blocks=80, block_size=block_size)
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
    for tokens, tree in seen[:: len(seen) // 10]:
        assert 0 < len(tree) <= DEPTH
        assert list(tree.token_ids) == drafted_anew(tokens, len(tree)), len(tokens)
