"""The corpus of generated conversations: numbered files, to which later runs add.

Each file holds some conversations, concatenated:

    token_ids int32 [T], is_answer uint8 [T], lengths int32 [C] (sum T), temperatures float32 [C],
    and, where they were captured, features float16 [T, K * hidden_size]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional

from llm_core.errors import ModelLoadError
from llm_core.loading import SafetensorsFile, write_safetensors
from llm_core.offline.train_head.self_distillation import Conversation

_PATTERN = "talk-*.safetensors"
_REQUIRED = ("token_ids", "is_answer", "lengths", "temperatures")


def corpus_files(directory: Path) -> list[Path]:
    """All files of a corpus, oldest first."""
    return sorted(directory.glob(_PATTERN))


def next_index(directory: Path) -> int:
    """The number of the next file."""
    taken = [int(path.stem.split("-")[1]) for path in corpus_files(directory)]
    return max(taken, default=-1) + 1


def corpus_path(directory: Path, index: int) -> Path:
    """The path of file number ``index``."""
    return directory / f"talk-{index:08d}.safetensors"


def write_conversations(path: Path, conversations: Sequence[Conversation]) -> None:
    """Writes a file atomically."""
    tensors = {
        "token_ids": torch.tensor([i for c in conversations for i in c.token_ids]).int(),
        "is_answer": torch.tensor([a for c in conversations for a in c.is_answer]).byte(),
        "lengths": torch.tensor([len(c.token_ids) for c in conversations]).int(),
        "temperatures": torch.tensor([c.temperature for c in conversations]),
    }
    features = [c.features for c in conversations if c.features is not None]
    if len(features) == len(conversations):
        # The last token of each was never computed: pad with a row of zeros.
        tensors["features"] = torch.cat([functional.pad(f, (0, 0, 0, 1)) for f in features])
    partial = path.with_suffix(".partial")
    write_safetensors(partial, tensors)
    partial.replace(path)


def has_features(path: Path) -> bool:
    """True if a file holds hidden states."""
    with SafetensorsFile(path) as file:
        return "features" in file.tensors


def read_conversations(path: Path) -> list[Conversation]:
    """The conversations of a file. Features are memory-mapped: a corpus may exceed the memory.

    Raises ModelLoadError for a damaged file.
    """
    with SafetensorsFile(path) as file:
        missing = [name for name in _REQUIRED if name not in file.tensors]
        if missing:
            raise ModelLoadError(f"{path.name}: lacks {', '.join(missing)}")
        token_ids, is_answer, lengths, temperatures = (file.read(name) for name in _REQUIRED)
        features = file.mapped("features") if "features" in file.tensors else None
    sizes = lengths.tolist()
    if sum(sizes) != len(token_ids) or len(is_answer) != len(token_ids):
        raise ModelLoadError(f"{path.name}: the lengths do not add up to its tokens")
    parts = [None] * len(sizes) if features is None else torch.split(features, sizes)
    return [
        Conversation(
            ids.tolist(), answer.bool().tolist(), temperature, None if rows is None else rows[:-1]
        )
        for ids, answer, temperature, rows in zip(
            torch.split(token_ids, sizes),
            torch.split(is_answer, sizes),
            temperatures.tolist(),
            parts,
            strict=True,
        )
    ]
