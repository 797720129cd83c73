"""Self-written conversations on disk: numbered files that a later run adds to.

Each file holds some conversations, one after another:

    token_ids int32 [T], is_answer uint8 [T], lengths int32 [C] (sum T), temperatures float32 [C],
    and, where they were captured, features float16 [T, K * hidden_size]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional

from llm_core.loading.safetensors_writer import write_safetensors
from llm_core.speculative.train.self_talk import Conversation

_PATTERN = "talk-*.safetensors"


def next_index(directory: Path) -> int:
    """A number that no file has."""
    taken = [int(path.stem.split("-")[1]) for path in directory.glob(_PATTERN)]
    return max(taken, default=-1) + 1


def write_conversations(path: Path, conversations: Sequence[Conversation]) -> None:
    """Whole or not at all."""
    tensors = {
        "token_ids": torch.tensor([i for c in conversations for i in c.token_ids]).int(),
        "is_answer": torch.tensor([a for c in conversations for a in c.is_answer]).byte(),
        "lengths": torch.tensor([len(c.token_ids) for c in conversations]).int(),
        "temperatures": torch.tensor([c.temperature for c in conversations]),
    }
    features = [c.features for c in conversations if c.features is not None]
    if len(features) == len(conversations):
        # The last token of each was never computed: a row of zeros keeps the counts equal.
        tensors["features"] = torch.cat([functional.pad(f, (0, 0, 0, 1)) for f in features])
    partial = path.with_suffix(".partial")
    write_safetensors(partial, tensors)
    partial.replace(path)
