"""EAGLE heads in PyTorch: the reference for the compiled head, the fallback where that does not
support a head, and the form that is trained.

``heads.config`` has the formulas. Query and key weights are kept in RoPE's interleaved order; files
have them in the published order of halves. All steps of the layer are differentiable; matrix
products may be computed in bfloat16 (autocast, in training), everything else is float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels import select_backend
from kernels.kv_runs import tree_mask
from llm_core.batch import Segment, tree_depths
from llm_core.config import ModelConfig
from llm_core.model import KvCache, rope_tables
from llm_core.quant import Weight, float_rows
from llm_core.speculative.heads.base import HeadBatch, HeadResult
from llm_core.speculative.heads.config import HeadConfig

LAYER = "midlayer."
_ATTENTION = f"{LAYER}self_attn."
_MLP = f"{LAYER}mlp."


@dataclass(frozen=True, slots=True)
class TargetEmbeddings:
    """The target's embedding and output head, both [vocab_size, H], which a head shares."""

    embedding: Weight
    lm_head: Weight
    embedding_scale: float = 1.0

    @classmethod
    def of(cls, config: ModelConfig, weights: Mapping[str, Weight]) -> TargetEmbeddings:
        """From the target's weights, named as in ``loading.weights``."""
        embedding = weights["embedding"]
        lm_head = embedding if config.tie_embeddings else weights["head"]
        return cls(embedding, lm_head, config.embedding_scale)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> float32 [T, H]."""
        return float_rows(self.embedding, token_ids) * self.embedding_scale

    def lm_head_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [V] -> float32 [V, H]: the output head for some tokens."""
        return float_rows(self.lm_head, token_ids)


def head_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every floating-point tensor of a head's file."""
    hidden, inner = config.hidden_size, config.intermediate_size
    if config.kind == "medusa":
        shapes: dict[str, tuple[int, ...]] = {}
        for index in range(config.num_medusa_heads):
            shapes[f"medusa_head.{index}.0.linear.weight"] = (hidden, hidden)
            shapes[f"medusa_head.{index}.0.linear.bias"] = (hidden,)
        return shapes | _lm_head_shape(config)
    is_eagle3 = config.kind == "eagle3"
    width = 2 * hidden if is_eagle3 else hidden  # of attention's input
    shapes = {
        "fc.weight": (hidden, config.num_features if is_eagle3 else 2 * hidden),
        f"{_ATTENTION}q_proj.weight": (config.query_size, width),
        f"{_ATTENTION}k_proj.weight": (config.kv_size, width),
        f"{_ATTENTION}v_proj.weight": (config.kv_size, width),
        f"{_ATTENTION}o_proj.weight": (hidden, config.query_size),
        f"{_MLP}gate_proj.weight": (inner, hidden),
        f"{_MLP}up_proj.weight": (inner, hidden),
        f"{_MLP}down_proj.weight": (hidden, inner),
        f"{LAYER}post_attention_layernorm.weight": (hidden,),
    }
    if not is_eagle3:
        return {name.replace(LAYER, "layers.0."): shape for name, shape in shapes.items()} | {
            "fc.bias": (hidden,)
        }
    shapes |= {
        f"{LAYER}input_layernorm.weight": (hidden,),
        f"{LAYER}hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if config.has_embedding_proj:
        shapes["embedding_proj.weight"] = (hidden, hidden)
    if config.has_hidden_proj:
        shapes["hidden_proj.weight"] = (hidden, hidden)
    return shapes | _lm_head_shape(config)


def _lm_head_shape(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    if not config.has_lm_head:
        return {}
    return {"lm_head.weight": (config.draft_vocab_size, config.hidden_size)}


def target_ids(config: HeadConfig, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """int64 [draft_vocab_size], ascending: the target's token for each draft token.

    Raises ValueError when ``d2t`` leads outside the vocabulary or does not ascend.
    """
    ids = torch.arange(config.draft_vocab_size)
    if config.has_draft_vocab:
        ids = ids + tensors["d2t"].to(torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise ValueError("d2t leads outside the target's vocabulary")
    if not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError("d2t does not name ascending tokens of the target")
    return ids


def halves_to_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorders rows of each head [num_heads * head_dim, K] from halves (j, j + head_dim / 2), the
    published order, to the pairs (2j, 2j + 1) that our RoPE rotates."""
    halves = weight.view(num_heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def pairs_to_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The inverse of ``halves_to_pairs``."""
    pairs = weight.view(num_heads, -1, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def normalized_features(config: HeadConfig, features: torch.Tensor) -> torch.Tensor:
    """Features [T, K * H], each of the K parts divided by its RMS where the configuration says
    so."""
    if not config.normalises_features:
        return features
    parts = features.view(-1, len(config.feature_layers), config.hidden_size)
    return functional.rms_norm(parts, (config.hidden_size,), eps=config.rms_eps).flatten(-2)


class EagleHead:
    """A ``DraftHead``, EAGLE-3 or EAGLE-1. ``weights``: float32 by the names of ``head_shapes``
    (EAGLE-1's layer under the name of EAGLE-3's), trained in place. ``lm_head`` float32
    [draft vocabulary, H]; ``rotations`` complex [max_context, 1, head_dim / 2]."""

    def __init__(
        self,
        config: HeadConfig,
        tensors: Mapping[str, torch.Tensor],
        target: TargetEmbeddings,
        *,
        max_context: int,
    ) -> None:
        """``tensors`` as in a head's file, with checked shapes. Raises ValueError as
        ``target_ids``."""
        assert config.kind in ("eagle3", "eagle1")
        self.config = config
        self._is_eagle3 = config.kind == "eagle3"
        self._target_ids = target_ids(config, tensors)
        self._target = target
        self.weights = {
            name.replace("layers.0.", LAYER): tensors[name].float() for name in head_shapes(config)
        }
        for name, num_heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
            key = f"{_ATTENTION}{name}.weight"
            self.weights[key] = halves_to_pairs(self.weights[key], num_heads)
        self.lm_head = (
            self.weights.pop("lm_head.weight")
            if "lm_head.weight" in self.weights
            else target.lm_head_rows(self._target_ids)
        )
        self._layer = config.layer(max_context)
        self.rotations = rope_tables(self._layer, max_context).of_layer(0)
        self._backend = select_backend("cpu")

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's layers whose hidden states are the features, concatenated."""
        return self.config.feature_layers

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 [draft vocabulary], ascending: the target's token for each draft token."""
        return self._target_ids

    def make_cache(self, num_blocks: int, block_size: int) -> KvCache:
        """A KV cache of zeros."""
        cache = KvCache(self._layer, num_blocks, block_size)
        cache.data.zero_()
        return cache

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors of the head's file: ``head_shapes``, d2t and t2d."""
        config, result = self.config, {}
        for name, weight in self.weights.items():
            value = weight.detach()
            for part, num_heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
                if name == f"{_ATTENTION}{part}.weight":
                    value = pairs_to_halves(value, num_heads)
            result[name if self._is_eagle3 else name.replace(LAYER, "layers.0.")] = value.clone()
        if config.has_lm_head and self._is_eagle3:
            result["lm_head.weight"] = self.lm_head.detach().clone()
        if config.has_draft_vocab:
            ids = self._target_ids
            result["d2t"] = ids - torch.arange(len(ids))
            result["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
            result["t2d"][ids] = True
        return result

    # The steps of the layer, used by ``forward`` and by training.

    def layer_input(
        self, states: torch.Tensor, token_ids: torch.Tensor, *, from_target: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(residual stream [T, H], attention's input [T, 2H] or, for EAGLE-1, [T, H]). ``states``,
        ``token_ids`` and ``from_target`` as in ``HeadBatch``."""
        embedded = self._target.embed(token_ids)
        if not self._is_eagle3:
            joined = torch.cat([embedded, states], -1)
            weight, bias = self.weights["fc.weight"], self.weights["fc.bias"]
            hidden = functional.linear(joined, weight, bias).float()
            return hidden, hidden
        hidden = states
        if from_target:
            features = normalized_features(self.config, states)
            hidden = functional.linear(features, self.weights["fc.weight"]).float()
        elif self.config.has_hidden_proj:
            hidden = functional.linear(states, self.weights["hidden_proj.weight"]).float()
        if self.config.has_embedding_proj:
            hidden = hidden + functional.linear(embedded, self.weights["embedding_proj.weight"])
        x = [
            self._norm(f"{LAYER}input_layernorm", embedded),
            self._norm(f"{LAYER}hidden_norm", hidden),
        ]
        return hidden, torch.cat(x, -1)

    def query(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """x [T, ...] -> [T, num_heads, head_dim], rotated by ``rotations`` complex
        [T, 1, head_dim / 2]."""
        return self._heads("q_proj", x, rotations)

    def key_value(
        self, x: torch.Tensor, rotations: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, ...] -> keys, rotated, and values, both [T, num_kv_heads, head_dim]."""
        return self._heads("k_proj", x, rotations), self._heads("v_proj", x, None)

    def layer_output(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Attention's result [T, query_size] -> the layer's output [T, H]."""
        y = residual + functional.linear(attended, self.weights[f"{_ATTENTION}o_proj.weight"])
        z = self._norm(f"{LAYER}post_attention_layernorm", y)
        gate, up = (
            functional.linear(z, self.weights[f"{_MLP}{name}_proj.weight"])
            for name in ("gate", "up")
        )
        inner = functional.silu(gate) * up
        return y + functional.linear(inner, self.weights[f"{_MLP}down_proj.weight"])

    def draft_logits(self, output: torch.Tensor) -> torch.Tensor:
        """The layer's output [T, H] -> float32 [T, draft_vocab_size]."""
        if self._is_eagle3:
            output = self._norm("norm", output)
        return functional.linear(output, self.lm_head).float()

    def forward(self, batch: HeadBatch, cache: KvCache) -> HeadResult:
        """Computes a batch and writes its KV to the cache. Call under inference mode."""
        residual, x = self.layer_input(batch.states, batch.token_ids, from_target=batch.from_target)
        rotations = torch.cat([self._rotations(segment) for segment in batch.segments])
        query = self.query(x, rotations)
        key_value = torch.cat(self.key_value(x, rotations), 1).transpose(0, 1)
        positions = cache.positions(batch)
        cache.write(0, positions, key_value)
        attended = torch.empty_like(query)
        row = 0
        for segment in batch.segments:
            rows = slice(row, row + segment.length)
            (runs,) = cache.runs(segment.block_ids, 0, segment.end)
            self._backend.attention_(
                query[rows],
                runs,
                self._mask(segment),
                attended[rows],
                scale=self._layer.score_scale,
            )
            row += segment.length
        wanted = batch.output_rows
        output = self.layer_output(residual[wanted], attended.flatten(1)[wanted])
        return HeadResult(self.draft_logits(output), output)

    def _heads(self, name: str, x: torch.Tensor, rotations: torch.Tensor | None) -> torch.Tensor:
        values = functional.linear(x, self.weights[f"{_ATTENTION}{name}.weight"]).float()
        num_heads = values.shape[-1] // self.config.head_dim
        heads = values.view(len(values), num_heads, self.config.head_dim)
        if rotations is None:
            return heads
        pairs = torch.view_as_complex(heads.view(*heads.shape[:-1], self.config.head_dim // 2, 2))
        return torch.view_as_real(pairs * rotations).flatten(-2)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"]
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_eps)

    def _rotations(self, segment: Segment) -> torch.Tensor:
        if segment.parents is None:
            return self.rotations[segment.start : segment.end]
        return self.rotations[[segment.start + depth for depth in tree_depths(segment.parents)]]

    def _mask(self, segment: Segment) -> torch.Tensor | None:
        if segment.parents is not None and segment.is_tree:
            return tree_mask(segment.start, segment.parents, None)
        return self._backend.attention_mask(segment.start, segment.length, None)
