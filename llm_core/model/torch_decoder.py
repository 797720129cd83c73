"""The decoder in torch, for all model families.

Pre-norm, RoPE, grouped-query attention, gated feed-forward; depending on ``ModelConfig`` also
biases, norms on queries and keys, post-norms, sliding windows, soft caps and a scaled embedding.

The rows of all segments share every matrix product; only attention is per segment. Query, key and
value projections are one product, and so are gate and up, since dispatching an operation takes
microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kernels import Backend
from kernels.kv_runs import KvRun, first_visible, tree_mask
from llm_core.batch import ForwardBatch, ForwardResult, Segment, tree_depths
from llm_core.config import ModelConfig
from llm_core.model.kv_cache import KvCache
from llm_core.model.rope import rope_tables
from llm_core.quant import (
    FormatChoice,
    Linear,
    Weight,
    WeightFormat,
    float_rows,
    stack_rows,
    to_float,
)

Norm = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Visible:
    """The cached runs that a segment attends to, for each layer, and the mask over them."""

    runs: tuple[tuple[KvRun, ...], ...]
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Span:
    """One segment of a batch: its rows, and the positions they see in layers with full and with
    sliding-window attention (None if the model has no such layers)."""

    rows: slice
    full: _Visible | None
    windowed: _Visible | None


@dataclass(frozen=True, slots=True)
class _Step:
    """A batch as attention needs it: pool positions of its rows, int64 [T], and its segments."""

    cache: KvCache
    positions: torch.Tensor
    spans: list[_Span]


class _Layer:
    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        prefix: str,
        weight_format: WeightFormat,
        backend: Backend,
    ) -> None:
        def linear(*names: str) -> Linear:
            return Linear(stack_rows([weights[prefix + name] for name in names]), weight_format)

        def norm(name: str, *, present: bool) -> Norm | None:
            return _norm(backend, config, weights[prefix + name]) if present else None

        self.attention_norm = _norm(backend, config, weights[prefix + "attention_norm"])
        self.query_key_value = linear("query", "key", "value")
        self.bias: torch.Tensor | None = None
        if config.attention_bias:
            names = ("query_bias", "key_bias", "value_bias")
            self.bias = torch.cat([to_float(weights[prefix + name]) for name in names])
        self.query_norm = norm("query_norm", present=config.qk_norm)
        self.key_norm = norm("key_norm", present=config.qk_norm)
        self.attention_output = linear("attention_output")
        self.attention_post_norm = norm("attention_post_norm", present=config.post_norms)
        self.ffn_norm = _norm(backend, config, weights[prefix + "ffn_norm"])
        self.gate_up = linear("gate", "up")
        self.down = linear("down")
        self.ffn_post_norm = norm("ffn_post_norm", present=config.post_norms)


def _norm(backend: Backend, config: ModelConfig, weight: Weight) -> Norm:
    return backend.make_rms_norm(to_float(weight), config.rms_eps)


def _rotations(table: torch.Tensor, segment: Segment) -> torch.Tensor:
    """The rows of a RoPE table for a segment."""
    first = segment.start + segment.skipped
    if segment.parents is None:
        return table[first : first + segment.length]
    return table[[first + depth for depth in tree_depths(segment.parents)]]


class TorchDecoder:
    """A ``backend.Model`` in torch. ``weights`` is read once, entry by entry, and not kept."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        formats: FormatChoice,
        backend: Backend,
        max_context: int,
    ) -> None:
        self.config = config
        self._backend = backend
        self._embedding = weights["embedding"]
        # The largest matrix first: packing it takes most memory, which is free before the layers.
        head = self._embedding if config.tie_embeddings else weights["head"]
        self._head = Linear(head, formats.head)
        del head
        self._layers = [
            _Layer(config, weights, f"layers.{index}.", formats.layers, backend)
            for index in range(config.num_layers)
        ]
        self._final_norm = _norm(backend, config, weights["final_norm"])
        self._ropes = rope_tables(config, max_context)
        self._gated = backend.swiglu if config.activation == "silu" else backend.geglu
        windows = [config.window_of(layer) for layer in range(config.num_layers)]
        self._has_full_layers = None in windows
        self._window = next((window for window in windows if window is not None), None)
        self._feature_layers: tuple[int, ...] = ()

    def set_feature_layers(self, layers: tuple[int, ...]) -> None:
        """See ``backend.Model``."""
        assert all(0 <= layer <= len(self._layers) for layer in layers), "no such layer"
        self._feature_layers = layers

    def forward(self, batch: ForwardBatch, cache: KvCache) -> ForwardResult:
        """Logits of ``batch.logit_rows``, and features; writes the rows' keys and values.

        Call under inference mode. Sources: Touvron et al. 2023 (Llama), Ainslie et al. 2023 (GQA),
        Gemma Team 2024 (Gemma 2).
        """
        step = _Step(cache, cache.positions(batch), self._spans(batch, cache))
        rotations = [
            torch.cat([_rotations(table, segment) for segment in batch.segments])
            for table in self._ropes.tables
        ]
        hidden = self._embed(batch.token_ids)
        last_layer = len(self._layers) - 1
        feature_layers = self._feature_layers if batch.wants_features else ()
        hidden_states: dict[int, torch.Tensor] = {}
        # After the last attention rows are independent, so only the wanted ones are computed.
        keeps_all_rows = any(layer >= last_layer for layer in feature_layers)
        for index, layer in enumerate(self._layers):
            qkv = layer.query_key_value(layer.attention_norm(hidden))
            table = rotations[self._ropes.layer_table[index]]
            attended = self._attend(self._add_bias_and_norm(qkv, layer), table, step, index)
            if index == last_layer and not keeps_all_rows:
                attended = attended.index_select(0, batch.logit_rows)
                hidden = hidden.index_select(0, batch.logit_rows)
            output = layer.attention_output(attended)
            hidden.add_(layer.attention_post_norm(output) if layer.attention_post_norm else output)
            output = layer.down(self._gated(layer.gate_up(layer.ffn_norm(hidden))))
            hidden.add_(layer.ffn_post_norm(output) if layer.ffn_post_norm else output)
            if index in feature_layers:
                hidden_states[index] = hidden.clone()
        normed = self._final_norm(hidden)
        hidden_states[len(self._layers)] = normed
        if keeps_all_rows:
            normed = normed.index_select(0, batch.logit_rows)
        logits = self._head(normed)
        cap = self.config.logit_softcap
        if cap is not None:
            logits.div_(cap).tanh_().mul_(cap)
        features = None
        if feature_layers:
            features = torch.cat([hidden_states[layer] for layer in feature_layers], 1)
        return ForwardResult(logits, features)

    def _spans(self, batch: ForwardBatch, cache: KvCache) -> list[_Span]:
        spans = []
        row = 0
        for segment in batch.segments:
            rows = slice(row, row + segment.length)
            full = self._visible(segment, cache, None) if self._has_full_layers else None
            windowed = self._visible(segment, cache, self._window) if self._window else None
            spans.append(_Span(rows, full, windowed))
            row += segment.length
        return spans

    def _visible(self, segment: Segment, cache: KvCache, window: int | None) -> _Visible:
        first = first_visible(segment.start, window)
        if segment.parents is not None and segment.is_tree:
            mask: torch.Tensor | None = tree_mask(segment.start, segment.parents, window)
        else:
            mask = self._backend.attention_mask(segment.start, segment.length, window)
        return _Visible(cache.runs(segment.block_ids, first, segment.end), mask)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """float32 [T, hidden_size], a new tensor."""
        embedded = float_rows(self._embedding, token_ids)
        scale = self.config.embedding_scale
        return embedded if scale == 1.0 else embedded.mul_(scale)

    def _add_bias_and_norm(self, qkv: torch.Tensor, layer: _Layer) -> torch.Tensor:
        """Applies biases and norms of ``layer`` to qkv [T, query_size + 2 * kv_size], in place."""
        if layer.bias is not None:
            qkv.add_(layer.bias)
        if layer.query_norm and layer.key_norm:
            num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
            heads = qkv.view(-1, num_heads + 2 * num_kv_heads, self.config.head_dim)
            query, key = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
            query.copy_(layer.query_norm(query))
            key.copy_(layer.key_norm(key))
        return qkv

    def _attend(
        self, qkv: torch.Tensor, rotations: torch.Tensor, step: _Step, layer: int
    ) -> torch.Tensor:
        """qkv [T, query_size + 2 * kv_size] -> attention output [T, query_size]."""
        config = self.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        # heads of a row: | query: num_heads | key: num_kv_heads | value: num_kv_heads |
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, config.head_dim)
        self._backend.apply_rope_(heads[:, : num_heads + num_kv_heads], rotations)
        query, key_value = heads[:, :num_heads], heads[:, num_heads:].transpose(0, 1)
        step.cache.write(layer, step.positions, key_value)
        result = torch.empty(heads.shape[0], num_heads, config.head_dim)
        is_windowed = config.window_of(layer) is not None
        for span in step.spans:
            visible = span.windowed if is_windowed else span.full
            assert visible is not None, "every kind of layer has its spans"
            self._backend.attention_(
                query[span.rows],
                visible.runs[layer],
                visible.mask,
                result[span.rows],
                scale=config.score_scale,
                softcap=config.attention_softcap,
            )
        return result.view(-1, config.query_size)
