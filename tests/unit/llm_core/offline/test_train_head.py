"""Training of draft heads on a tiny model: corpus, training-time test, checkpoints, output."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llm_core.batch import Segment
from llm_core.errors import InvalidRequestError, ModelLoadError
from llm_core.loading.model_files import open_model
from llm_core.loading.safetensors import SafetensorsFile
from llm_core.loading.safetensors_writer import write_safetensors
from llm_core.messages import EngineConfig
from llm_core.model.runner import ModelRunner
from llm_core.offline.jobs import train_head
from llm_core.offline.options import HeadKind, HeadProgress, TrainHeadOptions
from llm_core.offline.train_head.corpus import corpus_files, read_conversations, write_conversations
from llm_core.offline.train_head.examples import Example, batches, draft_vocabulary, example_of
from llm_core.offline.train_head.generate_corpus import capture_features
from llm_core.offline.train_head.objective import Objective, accepted_lengths
from llm_core.offline.train_head.self_distillation import Conversation
from llm_core.offline.train_head.training_time_test import eagle_outputs
from llm_core.speculative.heads.base import HeadBatch
from llm_core.speculative.heads.config import HeadConfig
from llm_core.speculative.heads.eagle import EagleHead, TargetEmbeddings
from llm_core.speculative.heads.files import fingerprint, read_head
from tests.support.random_head import random_head_tensors
from tests.support.tiny_model import write_tiny_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", context_len=512)


def options_for(tiny: Path, base: Path, kind: HeadKind, **more: float) -> TrainHeadOptions:
    settings = {"talk_s": 0.001, "train_s": 0.5} | more  # one file of conversations
    return TrainHeadOptions(
        model_path=tiny,
        out_dir=base / "out",
        data_dir=base / "data",
        kind=kind,
        draft_vocab=64,
        num_threads=1,
        **settings,
    )


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "medusa"])
def test_head_is_trained_written_and_read(tiny: Path, tmp_path: Path, kind: HeadKind) -> None:
    stages: set[str] = set()
    seen: list[HeadProgress] = []
    report = train_head(
        options_for(tiny, tmp_path, kind),
        lambda stage, done, total: stages.add(stage),
        seen.append,
    )
    assert stages == {"talk", "features", "start"}
    assert report.num_answer_tokens > 500 and report.num_steps == len(seen) >= 1
    assert seen[-1].num_anchors == report.num_anchors > 0 and math.isfinite(seen[-1].loss)
    # nan: none of the two held-out conversations was of that kind of temperature.
    lengths = [length for length in report.chain_lens if not math.isnan(length)]
    assert lengths and all(1.0 <= length <= 5.0 for length in lengths)
    with open_model(tiny) as opened:
        config, mark = opened.model.config, fingerprint(opened.model.config, opened.model.weights)
    head = read_head(tmp_path / "out", config, mark)
    assert head.config.kind == kind and head.config.target_fingerprint == mark
    assert head.card["answer_tokens"] == report.num_answer_tokens
    with pytest.raises(InvalidRequestError, match="holds a head already"):
        train_head(options_for(tiny, tmp_path, kind), lambda *_: None, seen.append)


def test_later_run_extends_the_corpus_and_resumes(tiny: Path, tmp_path: Path) -> None:
    first = train_head(options_for(tiny, tmp_path, "eagle3"), lambda *_: None, lambda _: None)
    (tmp_path / "out").rename(tmp_path / "first")
    seen: list[HeadProgress] = []
    # More time than the first run took: that one counts as interrupted.
    with SafetensorsFile(next((tmp_path / "data").glob("*/head-eagle3/state.safetensors"))) as file:
        taken_s = float(file.read("elapsed_s")[0])
    again = options_for(tiny, tmp_path, "eagle3", train_s=taken_s + 0.2)
    second = train_head(again, lambda *_: None, seen.append)
    assert second.num_answer_tokens > first.num_answer_tokens
    assert seen[0].step == first.num_steps + 1 and seen[0].elapsed_s > taken_s
    files = corpus_files(next((tmp_path / "data").iterdir()))
    assert len({read_conversations(path)[0].token_ids.__repr__() for path in files}) == len(files)


def test_training_starts_from_a_given_head(tiny: Path, tmp_path: Path) -> None:
    """Without training time, weights and draft vocabulary stay the same."""
    train_head(options_for(tiny, tmp_path / "a", "eagle3"), lambda *_: None, lambda _: None)
    first = tmp_path / "a" / "out"
    options = options_for(tiny, tmp_path / "b", "eagle3", train_s=0.0)
    report = train_head(replace(options, start_dir=first), lambda *_: None, lambda _: None)
    assert report.num_steps == 0
    with open_model(tiny) as opened:
        config, mark = opened.model.config, fingerprint(opened.model.config, opened.model.weights)
    before, after = (read_head(path, config, mark) for path in (first, tmp_path / "b" / "out"))
    assert after.card["begun_with"]["steps"] == before.card["steps"] > 0
    assert before.tensors.keys() == after.tensors.keys()
    for name, value in before.tensors.items():
        torch.testing.assert_close(after.tensors[name], value, rtol=0.02, atol=1e-3)
    with pytest.raises(InvalidRequestError, match="a head of kind eagle3, not medusa"):
        other = options_for(tiny, tmp_path / "c", "medusa")
        train_head(replace(other, start_dir=first), lambda *_: None, lambda _: None)


def test_checkpoint_with_another_draft_vocabulary_is_refused(tiny: Path, tmp_path: Path) -> None:
    options = options_for(tiny, tmp_path, "eagle3", train_s=0.0)
    train_head(options, lambda *_: None, lambda _: None)
    (tmp_path / "out").rename(tmp_path / "first")
    words = next((tmp_path / "data").glob("*/words-64.safetensors"))
    write_safetensors(words, {"target_ids": torch.arange(1, 65)})
    with pytest.raises(ModelLoadError, match="is of a head with other words"):
        train_head(replace(options, talk_s=0.0), lambda *_: None, lambda _: None)


def test_bfloat16_products_give_close_gradients() -> None:
    """Compared with float32 for the same batch and weights."""
    config = small_config()
    target = TargetEmbeddings(torch.randn(96, 32), torch.randn(96, 32), 1.0)
    tensors = random_head_tensors(config)
    batch = [some_example(1, 20, {*range(6, 18)})]
    found = []
    for is_bfloat16 in (False, True):
        head = EagleHead(config, tensors, target, max_context=64)
        objective = Objective(head.lm_head, head.target_ids, 96)
        for weight in head.weights.values():
            weight.requires_grad_(True)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16):
            outputs = eagle_outputs(head, batch, (1.0, 1.0), torch.Generator())
            losses = [
                objective.loss(j, o, head.draft_logits(o.output), objective.draft_index())[0]
                for j, o in enumerate(outputs)
            ]
        assert all(o.output.dtype == torch.float32 for o in outputs)
        sum(losses, torch.zeros(())).backward()
        found.append((losses, head.weights["fc.weight"].grad))
        tensors = {name: value.detach().clone() for name, value in tensors.items()}
    (exact, exact_grad), (rounded, rounded_grad) = found
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)
    assert exact_grad is not None and rounded_grad is not None
    alike = torch.nn.functional.cosine_similarity(exact_grad.flatten(), rounded_grad.flatten(), 0)
    assert float(alike) > 0.99


def test_checkpoint_of_another_head_is_refused(tiny: Path, tmp_path: Path) -> None:
    train_head(options_for(tiny, tmp_path, "eagle3", train_s=0.0), lambda *_: None, lambda _: None)
    (tmp_path / "out").rename(tmp_path / "first")
    state = next((tmp_path / "data").glob("*/head-eagle3/state.safetensors"))
    other = state.parent.with_name("head-eagle1")
    other.mkdir()
    state.rename(other / state.name)
    with pytest.raises(ModelLoadError, match="it is of another head"):
        train_head(options_for(tiny, tmp_path, "eagle1", talk_s=0), lambda *_: None, lambda _: None)


def test_empty_corpus_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="let the model talk longer"):
        train_head(options_for(tiny, tmp_path, "eagle3", talk_s=0), lambda *_: None, print)


def test_missing_features_are_captured(tiny: Path, tmp_path: Path) -> None:
    engine_config = EngineConfig(model_path=str(tiny), max_context=128, kv_cache_tokens=256)
    with open_model(tiny) as opened:
        runner = ModelRunner.of(opened.model, engine_config)
    runner.set_feature_layers((0, 2))
    plain = Conversation([5, 6, 7, 8], [False, False, True, True], 0.7)
    write_conversations(tmp_path / "talk-00000003.safetensors", [plain, plain])
    done: list[tuple[int, int]] = []
    capture_features(runner, tmp_path, lambda *at: done.append(at))
    assert done == [(0, 1), (1, 1)]
    kept = read_conversations(tmp_path / "talk-00000003.safetensors")
    assert [c.token_ids for c in kept] == [[5, 6, 7, 8]] * 2
    assert kept[0].features is not None and kept[0].features.shape == (3, 128)
    assert float(kept[0].features.abs().min()) > 0
    capture_features(runner, tmp_path, lambda *at: done.append(at))
    assert done[-1] == (0, 0)


def small_config() -> HeadConfig:
    return HeadConfig(
        kind="eagle3",
        hidden_size=32,
        vocab_size=96,
        draft_vocab_size=40,
        feature_layers=(0, 1, 2),
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=64,
        normalises_features=True,
        has_embedding_proj=True,
        has_hidden_proj=True,
        has_lm_head=False,
    )


def some_example(seed: int, length: int, answers: set[int]) -> Example:
    generator = torch.Generator().manual_seed(seed)
    return example_of(
        Conversation(
            torch.randint(96, (length,), generator=generator).tolist(),
            [i in answers for i in range(length)],
            0.0,
            torch.randn(length - 1, 96, generator=generator).half(),
        )
    )


def test_training_time_test_matches_drafting() -> None:
    """Each step from each anchor equals a prefill followed by drafts, one token at a time."""
    config = small_config()
    tensors = random_head_tensors(config)
    target = TargetEmbeddings(torch.randn(96, 32), torch.randn(96, 32), 1.5)
    head = EagleHead(config, tensors, target, max_context=64)
    batch = [some_example(1, 20, {*range(6, 11), *range(15, 20)}), some_example(2, 9, {4, 5, 6, 7})]
    with torch.inference_mode():
        outputs = eagle_outputs(head, batch, (1.0, 1.0, 1.0), torch.Generator())
        found = {}
        for step, output in enumerate(outputs):
            for row, value in zip(output.anchor_index.tolist(), output.output, strict=True):
                found[row, step] = value
        row = 0
        for example in batch:
            for anchor, num_steps in zip(
                example.anchors.tolist(), example.num_steps.tolist(), strict=True
            ):
                cache = head.make_cache(4, 16)
                blocks = (2, 0, 1)
                drafted = HeadBatch(
                    example.token_ids[1 : anchor + 2],
                    example.features[: anchor + 1].float(),
                    True,
                    (Segment(blocks, 0, anchor + 1),),
                    torch.tensor([anchor]),
                )
                for step in range(min(3, num_steps)):
                    result = head.forward(drafted, cache)
                    torch.testing.assert_close(
                        found.pop((row, step)), result.states[0], rtol=1e-4, atol=1e-4
                    )
                    place = anchor + 1 + step
                    drafted = HeadBatch(
                        example.token_ids[place + 1 : place + 2],
                        result.states,
                        False,
                        (Segment(blocks, place, 1),),
                        torch.tensor([0]),
                    )
                row += 1
    assert not found  # training has no more steps than drafting


def test_anchors_are_within_answers() -> None:
    example = some_example(0, 12, {3, 4, 5, 9, 10, 11})
    # Pair i says token i + 2: both it and the token before are of one answer.
    assert example.anchors.tolist() == [2, 3, 8, 9]
    assert example.num_steps.tolist() == [2, 1, 2, 1]


def test_accepted_lengths_match_decoding_step_by_step() -> None:
    example = some_example(0, 14, set(range(2, 14)))
    rng = random.Random(3)
    right = {
        (row, step): rng.random() < 0.6
        for row, steps in enumerate(example.num_steps.tolist())
        for step in range(min(3, steps))
    }
    matches = []
    for step in range(3):
        rows = [row for row, s in right if s == step]
        matches.append(
            (torch.tensor(rows), torch.tensor([right[row, step] for row in rows], dtype=torch.bool))
        )
    tokens = rounds = row = 0
    while row < len(example.anchors):
        length = 1
        while length < 4 and right.get((row, length - 1), False):
            length += 1
        tokens, rounds, row = tokens + length, rounds + 1, row + length
    assert accepted_lengths([example], matches, 3) == (tokens, rounds)


def test_batches_partition_the_examples() -> None:
    examples = [some_example(seed, 12, {3, 4, 5, 6}) for seed in range(11)]
    for seed in (0, 1):
        parts = list(batches(examples, 7, seed))
        assert sorted(id(e) for part in parts for e in part) == sorted(map(id, examples))
        assert all(len(part) == 3 for part in parts[:-1])


def test_draft_vocabulary_contains_the_tokens_of_answers() -> None:
    example = some_example(4, 12, set(range(4, 12)))
    said = set(example.token_ids[5:].tolist())
    words = draft_vocabulary([example], len(said) + 2, 96)
    assert said <= set(words.tolist()) and (words[1:] > words[:-1]).all()
