"""The head that comes with the package, on the embedded model: it fits, and it is often right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from llm_core.batch import ForwardBatch, Segment
from llm_core.engine.engine import Engine
from llm_core.loading.model_files import open_model
from llm_core.messages import ChatMessage, EngineConfig, RequestOptions, SamplingParams
from llm_core.model.runner import ModelRunner
from llm_core.offline.train_head.topics import PARLEY_INSTRUCTIONS
from llm_core.scheduling.draft_tree import DraftTree
from llm_core.speculative.control.base import FixedController
from llm_core.speculative.drafters.base import DraftRequest, DraftShape
from llm_core.speculative.drafters.eagle import EagleDrafter
from llm_core.speculative.factory import make_drafter
from llm_core.speculative.heads.base import HeadBatch
from llm_core.speculative.heads.eagle import EagleHead, TargetEmbeddings
from llm_core.speculative.heads.files import bundled_head, fingerprint, read_head

pytestmark = pytest.mark.integration

QUESTIONS = ("What is the capital of France?", "can you tell me how to boil an egg")
NUM_TOKENS = 40


def test_the_bundled_head_drafts_for_the_embedded_model(llm_model_path: Path) -> None:
    engine_config = EngineConfig(
        model_path=str(llm_model_path), max_context=256, kv_cache_tokens=512, num_threads=1
    )
    num_right = num_drafts = 0
    with open_model(llm_model_path) as opened:
        config, weights = opened.model.config, opened.model.weights
        mark = fingerprint(config, weights)
        directory = bundled_head(mark)
        assert directory is not None
        stored = read_head(directory, config, mark)
        head = EagleHead(
            stored.config, stored.tensors, TargetEmbeddings.of(config, weights), max_context=256
        )
        runner = ModelRunner.of(opened.model, engine_config)
        runner.set_feature_layers(head.feature_layers)
        for question in QUESTIONS:
            messages = [
                ChatMessage(role="system", content=PARLEY_INSTRUCTIONS),
                ChatMessage(role="user", content=question),
            ]
            ids = opened.tokenizer.encode_pieces(opened.template.render(messages))
            prompt_len, features = len(ids), []
            start = 0
            while len(ids) - prompt_len < NUM_TOKENS and ids[-1] not in opened.tokenizer.eos_ids:
                new = ids[start:]
                table = tuple(range(16))
                batch = ForwardBatch(
                    torch.tensor(new),
                    (Segment(table, start, len(new)),),
                    torch.tensor([len(new) - 1]),
                    wants_features=True,
                )
                result = runner.forward(batch)
                assert result.features is not None
                features.append(result.features)
                start = len(ids)
                ids.append(int(result.logits[0].argmax()))
            # Row i has the features of i and the token after: all its drafts at once.
            rows = HeadBatch(
                torch.tensor(ids[1:-1]),
                torch.cat(features)[: len(ids) - 2],
                True,
                (Segment(tuple(range(16)), 0, len(ids) - 2),),
                torch.arange(prompt_len - 1, len(ids) - 2),
            )
            with torch.inference_mode():
                drafted = head.target_ids[
                    head.forward(rows, head.make_cache(16, 16)).logits.argmax(-1)
                ]
            right = drafted == torch.tensor(ids[prompt_len + 1 :])
            num_right, num_drafts = num_right + int(right.sum()), num_drafts + len(right)
    assert num_drafts > 20
    # A head of another model is right one time in thousands.
    assert num_right / num_drafts > 0.3


@pytest.mark.parametrize("is_pinned", [False, True], ids=["anew", "pinned instructions"])
def test_the_engine_drafts_what_the_whole_text_gives(llm_model_path: Path, is_pinned: bool) -> None:
    """Token by token: the first of each chain of drafts, made of features that came in chunks and
    after drafts that were right or wrong, beside the head's word over the whole answer at once.
    After pinned instructions the head has their keys too, but for the last of them (it was read
    with nothing behind it), which changes few drafts."""
    config = EngineConfig(
        model_path=str(llm_model_path),
        max_context=256,
        kv_cache_tokens=1024,
        num_threads=1,
        max_sequences=2,
        speculation="auto",
    )
    with open_model(llm_model_path) as opened:
        runner = ModelRunner.of(opened.model, config)
        drafter = make_drafter(config, runner, opened)
    assert isinstance(drafter, EagleDrafter)
    engine = Engine(runner, opened.tokenizer, opened.template, max_sequences=2)
    engine.scheduler.prompt_budget = 23
    drafts = recorded(drafter)
    engine.speculate(drafter, FixedController(DraftShape(2, 2)))
    instructions = ChatMessage(role="system", content=PARLEY_INSTRUCTIONS)
    if is_pinned:
        engine.pin(100, [instructions], received_ns=0)
        while engine.has_work:
            engine.step()
    sequences = []
    for number, question in enumerate(QUESTIONS):
        params = SamplingParams(max_tokens=NUM_TOKENS)
        messages = [instructions, ChatMessage(role="user", content=question)]
        # Without pins nothing is shared: the second question begins as the first does.
        options = RequestOptions(cache_salt="" if is_pinned else str(number))
        engine.submit(number, messages, params, received_ns=0, options=options)
        sequences.append(engine._requests[number].sequence)
    while engine.has_work:
        engine.step()
    num_drafts = num_equal = 0
    for sequence in sequences:
        ids = sequence.token_ids
        whole = first_drafts(runner, drafter, ids)
        for known, tree in drafts.items():
            if known == tuple(ids[: len(known)]) and len(tree) > 0:
                num_drafts += 1
                num_equal += tree.token_ids[0] == whole[len(known) - 2]
    assert num_drafts > 20
    assert (sequences[0].cached_len > 30) == is_pinned
    assert num_equal == num_drafts if not is_pinned else num_equal > 0.85 * num_drafts


def recorded(drafter: EagleDrafter) -> dict[tuple[int, ...], DraftTree]:
    """From now on, what is drafted after which tokens."""
    found: dict[tuple[int, ...], DraftTree] = {}
    propose = drafter.propose

    def recording(requests: Sequence[DraftRequest]) -> list[DraftTree]:
        trees = propose(requests)
        for request, tree in zip(requests, trees, strict=True):
            found[tuple(request.sequence.token_ids)] = tree
        return trees

    drafter.propose = recording  # type: ignore[method-assign]
    return found


def first_drafts(runner: ModelRunner, drafter: EagleDrafter, ids: list[int]) -> list[int]:
    """After each pair (features of i, token i + 1) of a text, computed in one go."""
    table, head = tuple(range(16)), drafter._head
    segment = Segment(table, 0, len(ids) - 1)
    last = torch.tensor([len(ids) - 2])
    features = runner.forward(ForwardBatch(torch.tensor(ids[:-1]), (segment,), last, True)).features
    assert features is not None
    rows = HeadBatch(torch.tensor(ids[1:]), features, True, (segment,), torch.arange(len(ids) - 1))
    with torch.inference_mode():
        logits = head.forward(rows, head.make_cache(16, 16)).logits
    return [int(token) for token in head.target_ids[logits.argmax(-1)]]
