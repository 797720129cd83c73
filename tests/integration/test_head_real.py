"""The head that comes with the package, on the embedded model: it fits, and it is often right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llm_core.batch import ForwardBatch, Segment
from llm_core.messages import ChatMessage, EngineConfig
from llm_core.model_files import open_model
from llm_core.runner import ModelRunner
from llm_core.speculative.draft_head import HeadBatch
from llm_core.speculative.eagle import EagleHead, TargetRows
from llm_core.speculative.head_files import bundled_head, fingerprint, read_head
from llm_core.speculative.train.topics import PARLEY_INSTRUCTIONS

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
            stored.config, stored.tensors, TargetRows.of(config, weights), max_context=256
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
