"""Sharding of a model's weights over the ranks of a tensor-parallel group.

Shoeybi et al. 2019 (Megatron-LM, arXiv:1909.08053). Each of N ranks has 1/N of the query and KV
heads and of the feed-forward's inner width, so a layer needs two all-reduces and no other
communication::

    query, key, value, gate, up    rows    [out / N, in]     a rank's heads and inner dimensions
    attention_output, down         columns [out, in / N]     partial sums, all-reduced
    head                           rows    [vocab / N, in]   logits of a rank's part of the
    vocabulary embedding, norms               replicated

A rank's share is a smaller model of the same architecture, so the decoder is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from llm_core.config import ModelConfig
from llm_core.errors import ModelLoadError
from llm_core.quant import BlockTensor, GroupedCodes, Weight, block_len, row_range, to_float

_BY_ROWS = frozenset(
    ("query", "key", "value", "query_bias", "key_bias", "value_bias", "gate", "up")
)
_BY_COLUMNS = frozenset(("attention_output", "down"))


def shard_config(config: ModelConfig, num_ranks: int) -> ModelConfig:
    """The configuration of one rank, with an untied head. Raises ModelLoadError if heads or inner
    width are not divisible."""
    if num_ranks == 1:
        return config
    for name in ("num_heads", "num_kv_heads", "intermediate_size"):
        if getattr(config, name) % num_ranks != 0:
            raise ModelLoadError(
                f"tensor_parallel is {num_ranks}, but the model's {name} {getattr(config, name)} "
                f"is not a multiple of it"
            )
    return replace(
        config,
        num_heads=config.num_heads // num_ranks,
        num_kv_heads=config.num_kv_heads // num_ranks,
        intermediate_size=config.intermediate_size // num_ranks,
        tie_embeddings=False,
    )


def head_rows(vocab_size: int, num_ranks: int) -> int:
    """Vocabulary size per rank; the last rank may have fewer rows."""
    return -(-vocab_size // num_ranks)


class ShardedWeights(Mapping[str, Weight]):
    """The weights of rank ``rank``, sliced from those of the whole model on access.

    Quantised weights stay quantised if slices align with groups; otherwise they become float32.
    """

    def __init__(
        self, weights: Mapping[str, Weight], config: ModelConfig, *, rank: int, num_ranks: int
    ) -> None:
        """``config``: of the whole model."""
        self._weights = weights
        self._config = config
        self._rank = rank
        self._num_ranks = num_ranks

    def __getitem__(self, name: str) -> Weight:
        last = name.rpartition(".")[2]
        if last == "head":
            source = "embedding" if self._config.tie_embeddings else "head"
            size = head_rows(self._config.vocab_size, self._num_ranks)
            first = min(self._rank * size, self._config.vocab_size)
            return row_range(self._weights[source], first, first + size)
        weight = self._weights[name]
        if last in _BY_ROWS:
            size = weight.shape[0] // self._num_ranks
            return row_range(weight, self._rank * size, (self._rank + 1) * size)
        if last in _BY_COLUMNS:
            size = weight.shape[1] // self._num_ranks
            return column_range(weight, self._rank * size, (self._rank + 1) * size)
        return weight

    def __iter__(self) -> Iterator[str]:
        yield from self._weights
        if self._config.tie_embeddings:
            yield "head"

    def __len__(self) -> int:
        return len(self._weights) + int(self._config.tie_embeddings)


def column_range(weight: Weight, first: int, last: int) -> Weight:
    """Columns [first, last) of a matrix [N, K], in its format if they align with its groups."""
    if isinstance(weight, torch.Tensor):
        return weight[:, first:last]
    group = block_len(weight.kind) if isinstance(weight, BlockTensor) else weight.group
    if first % group or last % group:
        return to_float(weight)[:, first:last]
    groups = slice(first // group, last // group)
    if isinstance(weight, BlockTensor):
        return BlockTensor(weight.kind, weight.blocks[:, groups])
    zero = None if weight.zero is None else weight.zero[:, groups]
    codes = weight.codes[:, first:last]
    return GroupedCodes(codes, weight.scale[:, groups], zero, weight.bits, group)
