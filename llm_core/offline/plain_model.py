"""The decoder once more, over whole sequences, on float32 weights that may be changed or trained.

The engine's decoder packs its weights and writes into caches. Here nothing is packed, gradients
flow, and a layer can be run stage by stage, so that a quantiser sees what enters each matrix after
all matrices before it have been quantised. Tests hold it to the engine's decoder.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from kernels import reference
from kernels.kv_runs import causal_mask
from llm_core.config import ModelConfig
from llm_core.loading import layer_shapes
from llm_core.model import RopeTables, rope_tables
from llm_core.quant import Weight, to_float


class PlainLayer:
    """One block; ``weights`` by the names of ``layer_shapes``, float32, replaced at will.

    All tensors are [S, T, ...]: sequences that begin at position 0, side by side.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, torch.Tensor],
        table: torch.Tensor,
        window: int | None,
    ) -> None:
        self.weights = weights
        self._config = config
        self._table = table
        self._window = window

    def attention_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """What query, key and value are multiplied with."""
        return self._norm("attention_norm", hidden)

    def attended(self, x: torch.Tensor) -> torch.Tensor:
        """attention_input [S, T, H] -> what the output projection is multiplied with."""
        config, length = self._config, x.shape[1]
        query = self._turned(self._heads("query", x), "query_norm", length)
        key = self._turned(self._heads("key", x), "key_norm", length)
        value = self._heads("value", x)
        key, value = (t.repeat_interleave(config.group_size, 2) for t in (key, value))
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        mask = causal_mask(0, length, self._window)
        scale, cap = config.score_scale, config.attention_softcap
        if cap is None:
            result = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=scale
            )
        else:
            scores = cap * torch.tanh(query @ key.transpose(-1, -2) * scale / cap)
            result = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value
        return result.transpose(1, 2).flatten(2)

    def after_attention(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The residual stream with attention's output added."""
        output = functional.linear(attended, self.weights["attention_output"])
        return hidden + self._post_norm("attention_post_norm", output)

    def ffn_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """What gate and up are multiplied with."""
        return self._norm("ffn_norm", hidden)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """ffn_input [S, T, H] -> what the down projection is multiplied with."""
        gate_up = torch.cat(
            [functional.linear(x, self.weights[name]) for name in ("gate", "up")], -1
        )
        is_silu = self._config.activation == "silu"
        return reference.swiglu(gate_up) if is_silu else reference.geglu(gate_up)

    def after_ffn(self, hidden: torch.Tensor, gated: torch.Tensor) -> torch.Tensor:
        """The residual stream with the feed-forward output added."""
        output = functional.linear(gated, self.weights["down"])
        return hidden + self._post_norm("ffn_post_norm", output)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, T, H] -> [S, T, H]."""
        hidden = self.after_attention(hidden, self.attended(self.attention_input(hidden)))
        return self.after_ffn(hidden, self.gated(self.ffn_input(hidden)))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return reference.rms_norm(x, self.weights[name], self._config.rms_eps)

    def _post_norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._norm(name, x) if name in self.weights else x

    def _heads(self, name: str, x: torch.Tensor) -> torch.Tensor:
        values = functional.linear(x, self.weights[name], self.weights.get(f"{name}_bias"))
        return values.view(*x.shape[:2], -1, self._config.head_dim)

    def _turned(self, heads: torch.Tensor, norm: str, length: int) -> torch.Tensor:
        heads = self._post_norm(norm, heads)
        pairs = torch.view_as_complex(heads.view(*heads.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self._table[:length]).flatten(-2)


class PlainModel:
    """A whole model; reads ``weights`` (as in ``weight_shapes``) into float32 at once.

    ``shared`` holds embedding, final_norm and, unless it is the embedding, head.
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Weight], max_context: int
    ) -> None:
        self.config = config
        self.max_context = max_context
        ropes = rope_tables(config, max_context)
        names = ("embedding", "final_norm", *(() if config.tie_embeddings else ("head",)))
        self.shared = {name: to_float(weights[name]) for name in names}
        self.layers = [
            _read_layer(config, weights, index, ropes) for index in range(config.num_layers)
        ]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [S, T] -> float32 [S, T, H]."""
        return functional.embedding(token_ids, self.shared["embedding"]) * (
            self.config.embedding_scale
        )

    def hidden(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [S, T] -> the residual stream after all layers."""
        hidden = self.embed(token_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] after all layers -> [..., vocab_size]."""
        normed = reference.rms_norm(hidden, self.shared["final_norm"], self.config.rms_eps)
        logits = functional.linear(normed, self.shared.get("head", self.shared["embedding"]))
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def named_weights(self) -> dict[str, torch.Tensor]:
        """All weights by the names of ``weight_shapes``."""
        named = dict(self.shared)
        for index, layer in enumerate(self.layers):
            named |= {f"layers.{index}.{name}": value for name, value in layer.weights.items()}
        return named


def _read_layer(
    config: ModelConfig, weights: Mapping[str, Weight], index: int, ropes: RopeTables
) -> PlainLayer:
    values = {name: to_float(weights[f"layers.{index}.{name}"]) for name in layer_shapes(config)}
    return PlainLayer(config, values, ropes.of_layer(index), config.window_of(index))
