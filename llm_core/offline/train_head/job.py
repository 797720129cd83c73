"""The job of ``train_head``: extend the corpus, initialise a head, train it, write it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from llm_core.config import ModelConfig
from llm_core.errors import InvalidRequestError
from llm_core.loading import OpenModel, SafetensorsFile, open_model, write_safetensors
from llm_core.messages import EngineConfig
from llm_core.model import ModelRunner
from llm_core.offline.cpu_features import multiplies_bfloat16
from llm_core.offline.options import HeadProgress, Progress, TrainHeadOptions, TrainHeadReport
from llm_core.offline.train_head.corpus import corpus_files, has_features, read_conversations
from llm_core.offline.train_head.examples import (
    Example,
    draft_vocabulary,
    example_of,
    has_anchor,
)
from llm_core.offline.train_head.generate_corpus import (
    NUM_STREAMS,
    capture_features,
    generate_corpus,
)
from llm_core.offline.train_head.objective import Objective
from llm_core.offline.train_head.ridge import (
    Teacher,
    eagle1_initial_tensors,
    eagle3_initial_tensors,
)
from llm_core.offline.train_head.self_distillation import MAX_LEN, Conversation, SelfDistillation
from llm_core.offline.train_head.training import RunSteps, Training, TrainingOptions
from llm_core.offline.train_head.training_time_test import eagle_outputs, medusa_outputs
from llm_core.quant import float_rows
from llm_core.speculative import (
    TENSORS_NAME,
    EagleHead,
    HeadConfig,
    HeadFile,
    MedusaHeads,
    TargetEmbeddings,
    fingerprint,
    head_shapes,
    read_head,
    target_ids,
    write_head,
)

_BLOCK_SIZE = 16
_HELD_OUT_EVERY = 32  # conversations of a file; one of them is for evaluation
_MAX_HELD_OUT = 96
_RIDGE_EXAMPLES = 1500  # conversations for the initial regression
_NUM_MEDUSA_HEADS = 3
_OPENING_WORDS = 4
_CARD_COUNTS = ("answer_tokens", "anchors_trained_on", "steps")  # of a head's card


def train(
    options: TrainHeadOptions, progress: Progress, on_training: Callable[[HeadProgress], None]
) -> TrainHeadReport:
    """Raises LlmError."""
    started_s = time.monotonic()
    if (options.out_dir / TENSORS_NAME).exists():
        raise InvalidRequestError(f"{options.out_dir} holds a head already: choose another one")
    with open_model(options.model_path) as opened:
        config = opened.model.config
        target_fingerprint = fingerprint(config, opened.model.weights)
        directory = options.data_dir / target_fingerprint
        _extend_corpus(opened, options, directory, progress)
        torch.set_num_threads(options.num_threads)
        corpus = _Corpus(directory, config.hidden_size, is_narrow=options.kind != "eagle3")
        corpus.load()
        if not corpus.examples or not corpus.held_out:
            raise InvalidRequestError(
                f"{directory} holds too few conversations to train on: let the model talk longer"
            )
        # Embedding in float32: every batch reads thousands of its rows.
        shared = TargetEmbeddings.of(config, opened.model.weights)
        embedding = float_rows(shared.embedding, torch.arange(config.vocab_size))
        shared = TargetEmbeddings(embedding, shared.lm_head, shared.embedding_scale)
        start = _start_head(options, config, target_fingerprint)
        if start is None:
            draft_ids = _draft_vocabulary(directory, options, corpus, config.vocab_size)
            head_config = _head_config(
                options, config, len(draft_ids), opened.model.name, target_fingerprint
            )
        else:
            draft_ids = target_ids(start.config, start.tensors)
            head_config = replace(
                start.config,
                target_name=opened.model.name,
                target_fingerprint=target_fingerprint,
            )
        teacher = Teacher(config, opened.model.weights, shared)
        state_path = directory / f"head-{options.kind}" / "state.safetensors"
        progress("start", 0, 1)
        trained, run_steps = _trainable_head(
            head_config,
            draft_ids,
            corpus,
            teacher,
            is_new=not state_path.exists(),
            start=None if start is None else start.tensors,
        )
        progress("start", 1, 1)
    embedding_rms = float(embedding.square().mean().sqrt()) * shared.embedding_scale
    training = Training(
        trained,
        run_steps,
        Objective(
            trained.lm_head,
            draft_ids,
            config.vocab_size,
            regresses_features=options.kind == "eagle1",
        ),
        TrainingOptions(
            train_s=options.train_s, seed=options.seed, is_bfloat16=multiplies_bfloat16()
        ),
        state_path=state_path,
        embedding_rms=embedding_rms,
    )
    training.run(corpus.load, corpus.held_out, on_training)
    chain_lens = training.measure(corpus.held_out)
    card = _card(options, corpus, training, chain_lens)
    if start is not None:
        card["begun_with"] = {name: start.card.get(name) for name in _CARD_COUNTS}
    head = HeadFile(head_config, trained.tensors(), card)
    write_head(options.out_dir, head, is_int8=True)
    return TrainHeadReport(
        chain_lens=chain_lens,
        num_answer_tokens=corpus.num_answer_tokens,
        num_anchors=training.num_anchors,
        num_steps=training.step,
        size_bytes=sum(path.stat().st_size for path in options.out_dir.iterdir()),
        wall_s=time.monotonic() - started_s,
    )


class _Corpus:
    """The examples of a corpus; ``load`` adds those of new files."""

    def __init__(self, directory: Path, hidden_size: int, *, is_narrow: bool) -> None:
        self._directory = directory
        self._width = hidden_size if is_narrow else None
        self._known: set[Path] = set()
        self.examples: list[Example] = []
        self.held_out: list[Example] = []
        self.num_answer_tokens = 0

    def load(self) -> list[Example]:
        """All training examples."""
        for path in corpus_files(self._directory):
            if path in self._known:
                continue
            if not has_features(path):
                continue  # a new file of another program; the next run captures them
            self._known.add(path)
            for index, conversation in enumerate(read_conversations(path)):
                self._add(conversation, is_held_out=index % _HELD_OUT_EVERY == 0)
        return self.examples

    def _add(self, conversation: Conversation, *, is_held_out: bool) -> None:
        if not has_anchor(conversation):
            return
        self.num_answer_tokens += conversation.num_answer_tokens
        example = example_of(conversation, self._width)
        if not is_held_out:
            self.examples.append(example)
        elif len(self.held_out) < _MAX_HELD_OUT:
            self.held_out.append(example)


def _extend_corpus(
    opened: OpenModel, options: TrainHeadOptions, directory: Path, progress: Progress
) -> None:
    config = opened.model.config
    engine_config = EngineConfig(
        model_path=str(options.model_path),
        num_threads=options.num_threads,
        max_context=min(MAX_LEN, config.context_len),
        kv_cache_tokens=_BLOCK_SIZE * SelfDistillation.num_blocks(NUM_STREAMS, _BLOCK_SIZE),
    )
    runner = ModelRunner.of(opened.model, engine_config)
    runner.set_feature_layers(feature_layers(config))
    if options.talk_s > 0:
        generate_corpus(
            runner,
            opened.tokenizer,
            opened.template,
            directory,
            talk_s=options.talk_s,
            seed=options.seed,
            openings=_openings(options.text),
            on_progress=lambda elapsed_s, _: progress(
                "talk", min(int(elapsed_s), int(options.talk_s)), int(options.talk_s)
            ),
        )
    capture_features(runner, directory, partial(progress, "features"))


def feature_layers(config: ModelConfig) -> tuple[int, ...]:
    """A middle layer, one near the end, and the final hidden state."""
    last = config.num_layers
    return (last // 2, max(last // 2, last - 3), last)


def _openings(text: str | None) -> list[str]:
    """The first words of a text's sentences."""
    if text is None:
        return []
    sentences = re.split(r"(?<=[.!?])\s+|\n+", text)
    words = [sentence.split()[:_OPENING_WORDS] for sentence in sentences]
    return sorted({" ".join(part) for part in words if part})


def _draft_vocabulary(
    directory: Path, options: TrainHeadOptions, corpus: _Corpus, vocab_size: int
) -> torch.Tensor:
    """int64 [V] ascending; stored, since a later run can only resume with the same one."""
    if options.draft_vocab == 0 or options.draft_vocab >= vocab_size:
        return torch.arange(vocab_size)
    path = directory / f"words-{options.draft_vocab}.safetensors"
    if not path.exists():
        ids = draft_vocabulary(corpus.examples, options.draft_vocab, vocab_size)
        write_safetensors(path, {"target_ids": ids})
    with SafetensorsFile(path) as file:
        return file.read("target_ids")


def _start_head(
    options: TrainHeadOptions, target: ModelConfig, target_fingerprint: str
) -> HeadFile | None:
    """The head whose weights training starts with, if one is given. Raises ModelLoadError, or
    InvalidRequestError for one that cannot be trained on this corpus."""
    if options.start_dir is None:
        return None
    head = read_head(options.start_dir, target, target_fingerprint)
    config, layers = head.config, feature_layers(target)
    if config.kind != options.kind:
        raise InvalidRequestError(
            f"{options.start_dir}: holds a head of kind {config.kind}, not {options.kind}"
        )
    if config.kind == "eagle3" and config.feature_layers != layers:
        raise InvalidRequestError(
            f"{options.start_dir}: the head reads layers {config.feature_layers}, the data are of "
            f"{layers}"
        )
    if config.has_lm_head:
        raise InvalidRequestError(
            f"{options.start_dir}: the head has an output head of its own, which is not trained"
        )
    return head


def _head_config(
    options: TrainHeadOptions,
    target: ModelConfig,
    draft_vocab_size: int,
    name: str,
    target_fingerprint: str,
) -> HeadConfig:
    is_eagle3 = options.kind == "eagle3"
    is_medusa = options.kind == "medusa"
    has_draft_vocab = options.kind != "eagle1" and draft_vocab_size < target.vocab_size
    return HeadConfig(
        kind=options.kind,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size if has_draft_vocab else target.vocab_size,
        feature_layers=feature_layers(target) if is_eagle3 else (target.num_layers,),
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=target.intermediate_size,
        rms_eps=target.rms_eps,
        rope_theta=target.rope_theta,
        normalises_features=is_eagle3,
        has_embedding_proj=is_eagle3,
        has_hidden_proj=is_eagle3,
        has_lm_head=False,
        has_draft_vocab=has_draft_vocab,
        num_medusa_heads=_NUM_MEDUSA_HEADS if is_medusa else 0,
        target_name=name,
        target_fingerprint=target_fingerprint,
    )


def _trainable_head(
    config: HeadConfig,
    draft_ids: torch.Tensor,
    corpus: _Corpus,
    teacher: Teacher,
    *,
    is_new: bool,
    start: dict[str, torch.Tensor] | None,
) -> tuple[EagleHead | MedusaHeads, RunSteps]:
    """The head with initial weights, and the function that runs its steps. Weights are ``start``,
    else zeros where a checkpoint will be restored (not ``is_new``) and for Medusa, else those of
    ridge regression."""
    examples = corpus.examples[:_RIDGE_EXAMPLES]
    tensors: dict[str, torch.Tensor] = {}
    if config.has_draft_vocab:
        tensors["d2t"] = draft_ids - torch.arange(len(draft_ids))
    if start is not None:
        tensors |= start
    elif not is_new or config.kind == "medusa":
        tensors |= {name: torch.zeros(shape) for name, shape in head_shapes(config).items()}
    if config.kind == "medusa":
        heads = MedusaHeads(config, tensors, teacher.embeddings)
        return heads, lambda batch, shares, generator: medusa_outputs(heads, batch)
    if is_new and start is None:
        regression = eagle3_initial_tensors if config.kind == "eagle3" else eagle1_initial_tensors
        tensors |= regression(config, examples, teacher)
    head = EagleHead(config, tensors, teacher.embeddings, max_context=MAX_LEN)
    if config.kind == "eagle1":  # drafts from all tokens; for the loss the frequent ones suffice
        head.lm_head = teacher.embeddings.lm_head_rows(draft_ids)
    return head, lambda batch, shares, generator: eagle_outputs(head, batch, shares, generator)


def _card(
    options: TrainHeadOptions,
    corpus: _Corpus,
    training: Training,
    chain_lens: tuple[float, float],
) -> dict[str, object]:
    greedy, sampled = (round(value, 3) for value in chain_lens)
    return {
        "made_by": "parley train-eagle",
        "kind": options.kind,
        "data": "conversations that the target wrote itself, users' turns too",
        "answer_tokens": corpus.num_answer_tokens,
        "anchors_trained_on": training.num_anchors,
        "steps": training.step,
        "training_s": round(training.elapsed_s),
        "accepted_length_of_chains_of_4_on_held_out_answers": {
            "temperature_0_and_0.2": greedy,
            "temperature_0.7_and_1.0": sampled,
        },
    }
