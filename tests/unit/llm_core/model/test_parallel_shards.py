"""Shards of all ranks partition the model and keep quantised formats."""

from __future__ import annotations

import pytest
import torch

from llm_core.errors import ModelLoadError
from llm_core.loading.weights import weight_shapes
from llm_core.model.parallel.shards import ShardedWeights, column_range, head_rows, shard_config
from llm_core.quant.codes import GroupedCodes
from llm_core.quant.formats import to_float
from llm_core.quant.gguf_blocks import BlockTensor
from tests.support.random_llama import random_weights, tiny_config


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_shards_partition_the_model(num_ranks: int, tie: bool) -> None:
    config = tiny_config(
        num_kv_heads=4, attention_bias=True, qk_norm=True, post_norms=True, tie_embeddings=tie
    )
    weights = random_weights(config)
    ranks = [
        ShardedWeights(weights, config, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)
    ]
    shapes = weight_shapes(shard_config(config, num_ranks))
    for name, shape in shapes.items():
        whole = weights["embedding" if name == "head" and tie else name]
        parts = [to_float(rank[name]) for rank in ranks]
        if name == "head":
            assert parts[0].shape[0] == head_rows(config.vocab_size, num_ranks)
            assert torch.equal(torch.cat(parts), whole)
        elif parts[0].shape == whole.shape:
            assert all(torch.equal(part, whole) for part in parts), f"{name} is whole"
        else:
            assert parts[0].shape == shape
            axis = 0 if parts[0].shape[1:] == whole.shape[1:] else 1
            assert torch.equal(torch.cat(parts, axis), whole), name
    assert set(ranks[0]) == set(shapes) and len(ranks[0]) == len(shapes)


@pytest.mark.parametrize(
    "changes",
    [{"num_kv_heads": 1}, {"num_heads": 3, "num_kv_heads": 3}, {"intermediate_size": 95}],
)
def test_indivisible_models_are_rejected(changes: dict[str, int]) -> None:
    with pytest.raises(ModelLoadError, match="is not a multiple of it"):
        shard_config(tiny_config(**changes), 2)


def test_column_slices_aligned_with_groups_stay_quantised() -> None:
    blocks = torch.randint(0, 255, (3, 4, 18), dtype=torch.uint8)
    blocks[..., :2] = torch.tensor([0.5], dtype=torch.float16).view(torch.uint8)
    block = BlockTensor("Q4_0", blocks)
    part = column_range(block, 64, 128)
    assert isinstance(part, BlockTensor)
    assert torch.equal(to_float(part), to_float(block)[:, 64:])

    codes = torch.randint(-127, 127, (3, 128), dtype=torch.int8)
    grouped = GroupedCodes(codes, torch.rand(3, 4), torch.rand(3, 4), 8, 32)
    part = column_range(grouped, 32, 64)
    assert isinstance(part, GroupedCodes)
    assert torch.equal(to_float(part), to_float(grouped)[:, 32:64])

    part = column_range(grouped, 16, 64)  # within a group
    assert isinstance(part, torch.Tensor)
    assert torch.equal(part, to_float(grouped)[:, 16:64])
