"""Adds generated conversations to a corpus, and captures features that its files lack."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from llm_core.batch import ForwardBatch, Segment
from llm_core.chat import ChatTemplate
from llm_core.model import ModelRunner
from llm_core.offline.train_head.corpus import (
    corpus_files,
    corpus_path,
    has_features,
    next_index,
    read_conversations,
    write_conversations,
)
from llm_core.offline.train_head.self_distillation import (
    Conversation,
    SelfDistillation,
    stored_features,
)
from llm_core.tokenizer import Tokenizer

NUM_STREAMS = 32  # conversations at once: with 64, a token took longer
_CONVERSATIONS_PER_FILE = 64


def generate_corpus(
    runner: ModelRunner,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    directory: Path,
    *,
    talk_s: float,
    seed: int,
    openings: Sequence[str],
    on_progress: Callable[[float, int], None],
) -> int:
    """Writes new files until ``talk_s`` seconds are over and the last file is full. Returns the
    number of answer tokens in them.

    ``on_progress(elapsed_s, answer tokens)``. Later runs use other random numbers. Raises
    InvalidRequestError as ``turn_separators``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    index = next_index(directory)
    generator = SelfDistillation(
        runner,
        tokenizer,
        template,
        num_streams=NUM_STREAMS,
        seed=(seed << 32) + index,
        openings=openings,
    )
    started, num_answer_tokens = time.monotonic(), 0
    finished: list[Conversation] = []
    for conversation in generator.conversations():
        elapsed_s = time.monotonic() - started
        finished.append(conversation)
        num_answer_tokens += conversation.num_answer_tokens
        on_progress(elapsed_s, num_answer_tokens)
        if len(finished) < _CONVERSATIONS_PER_FILE:
            continue
        write_conversations(corpus_path(directory, index), finished)
        index, finished = index + 1, []
        if elapsed_s >= talk_s:
            break
    return num_answer_tokens


def capture_features(
    runner: ModelRunner, directory: Path, on_progress: Callable[[int, int], None]
) -> None:
    """Computes the features of files without them; ``on_progress(done, total)`` in files."""
    missing = [path for path in corpus_files(directory) if not has_features(path)]
    for done, path in enumerate(missing):
        on_progress(done, len(missing))
        conversations = [_with_features(runner, c) for c in read_conversations(path)]
        write_conversations(path, conversations)
    on_progress(len(missing), len(missing))


def _with_features(runner: ModelRunner, conversation: Conversation) -> Conversation:
    token_ids = torch.tensor(conversation.token_ids[:-1])
    num_blocks = -(-len(token_ids) // runner.block_size)
    segment = Segment(tuple(range(num_blocks)), 0, len(token_ids))
    batch = ForwardBatch(token_ids, (segment,), torch.tensor([0]), wants_features=True)
    return replace(conversation, features=stored_features(runner.forward(batch).features))
