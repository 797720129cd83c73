"""A decoder over whole sequences with float32 weights that can be trained or replaced.

Distillation and quantisation cannot use ``model.torch_decoder.TorchDecoder``, even with float32
weights, for three reasons:

- It is not differentiable. The residual stream, biases, query/key norms, RoPE, soft caps and the
  gated activation are updated in place; attention writes into preallocated tensors and reads keys
  and values from a cache that was written without gradients. It runs under inference mode only.
- Its weights cannot be replaced. ``Linear`` packs stacked copies (query/key/value, gate/up) and
  norm weights are captured in closures, all at construction. The quantiser replaces single
  matrices, norms and biases between two stages of a layer.
- A layer is not callable stage by stage. GPTQ and AWQ need the input of each matrix, computed after
  all earlier matrices have been quantised.

Out-of-place operations in the engine's decoder would slow down every step of serving on PyTorch, so
the two stay apart. tests/unit/llm_core/offline/test_compress.py compares them for every family.
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


class TrainableLayer:
    """One layer; ``weights`` float32 by the names of ``layer_shapes``, which may be replaced.

    Activations are [S, T, ...]: S sequences that start at position 0.
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
        """The input of the query, key and value projections [S, T, H]."""
        return self._norm("attention_norm", hidden)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """``attention_input`` -> the input of the output projection [S, T, query_size]."""
        config, length = self._config, x.shape[1]
        query = self._rotated(self._heads("query", x), "query_norm", length)
        key = self._rotated(self._heads("key", x), "key_norm", length)
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

    def add_attention(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The residual stream plus attention's output."""
        output = functional.linear(attended, self.weights["attention_output"])
        return hidden + self._post_norm("attention_post_norm", output)

    def ffn_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """The input of the gate and up projections [S, T, H]."""
        return self._norm("ffn_norm", hidden)

    def gated_ffn(self, x: torch.Tensor) -> torch.Tensor:
        """``ffn_input`` -> the input of the down projection [S, T, intermediate_size]."""
        gate_up = torch.cat(
            [functional.linear(x, self.weights[name]) for name in ("gate", "up")], -1
        )
        is_silu = self._config.activation == "silu"
        return reference.swiglu(gate_up) if is_silu else reference.geglu(gate_up)

    def add_ffn(self, hidden: torch.Tensor, gated: torch.Tensor) -> torch.Tensor:
        """The residual stream plus the feed-forward output."""
        output = functional.linear(gated, self.weights["down"])
        return hidden + self._post_norm("ffn_post_norm", output)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, T, H] -> [S, T, H]."""
        hidden = self.add_attention(hidden, self.attention(self.attention_input(hidden)))
        return self.add_ffn(hidden, self.gated_ffn(self.ffn_input(hidden)))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return reference.rms_norm(x, self.weights[name], self._config.rms_eps)

    def _post_norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._norm(name, x) if name in self.weights else x

    def _heads(self, name: str, x: torch.Tensor) -> torch.Tensor:
        values = functional.linear(x, self.weights[name], self.weights.get(f"{name}_bias"))
        return values.view(*x.shape[:2], -1, self._config.head_dim)

    def _rotated(self, heads: torch.Tensor, norm: str, length: int) -> torch.Tensor:
        heads = self._post_norm(norm, heads)
        pairs = torch.view_as_complex(heads.view(*heads.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self._table[:length]).flatten(-2)


class TrainableDecoder:
    """A whole model; converts ``weights`` (named as in ``weight_shapes``) to float32.

    ``shared`` holds embedding, final_norm and, unless it is tied to the embedding, head.
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
        """int64 [S, T] -> the residual stream after all layers, float32 [S, T, H]."""
        hidden = self.embed(token_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The residual stream after all layers [..., H] -> [..., vocab_size]."""
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
) -> TrainableLayer:
    values = {name: to_float(weights[f"layers.{index}.{name}"]) for name in layer_shapes(config)}
    return TrainableLayer(config, values, ropes.of_layer(index), config.window_of(index))
