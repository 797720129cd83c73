"""The decoder: one, configurable, for all model families. Pre-norm, RoPE, grouped queries, SwiGLU.

Rows of all segments go through every matmul together; only attention looks at segments. Query,
key and value projections are one matmul, and so are gate and up: at one row each operation costs
microseconds of dispatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels import Backend
from kernels.attention import KvRun, first_visible
from kernels.reference import rope_table
from llm_core.batch import ForwardBatch, Segment
from llm_core.config import ModelConfig
from llm_core.kv_cache import KvCache
from llm_core.quant.formats import BlockTensor, Weight, stack_rows, to_float
from llm_core.quant.linear import FormatChoice, Linear, WeightFormat


@dataclass(frozen=True, slots=True)
class _Visible:
    """What one segment's rows attend to: for each layer the cached runs, and the mask over them."""

    runs: tuple[tuple[KvRun, ...], ...]
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Span:
    """One segment of a batch: its rows, and what they see."""

    rows: slice
    full: _Visible


@dataclass(frozen=True, slots=True)
class _Step:
    """What attention needs of a batch: where its rows are kept, int64 [T], and what they see."""

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

        def norm_weight(name: str) -> torch.Tensor:
            return to_float(weights[prefix + name])

        self.attention_norm = backend.make_rms_norm(norm_weight("attention_norm"), config.rms_eps)
        self.query_key_value = linear("query", "key", "value")
        self.attention_output = linear("attention_output")
        self.ffn_norm = backend.make_rms_norm(norm_weight("ffn_norm"), config.rms_eps)
        self.gate_up = linear("gate", "up")
        self.down = linear("down")


class Decoder:
    """Weights in place, ready to run. ``weights`` is read once, entry by entry, and not kept."""

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
        self._layers = [
            _Layer(config, weights, f"layers.{index}.", formats.layers, backend)
            for index in range(config.num_layers)
        ]
        self._final_norm = backend.make_rms_norm(to_float(weights["final_norm"]), config.rms_eps)
        self._head = Linear(weights["embedding" if config.tie_embeddings else "head"], formats.head)
        self._attention_scale = config.head_dim**-0.5
        self._rotations = rope_table(max_context, config.head_dim, config.rope_theta)

    def forward(self, batch: ForwardBatch, cache: KvCache) -> torch.Tensor:
        """float32 logits [R, vocab_size] of ``batch.logit_rows``; writes the rows' keys and values.

        Call under inference mode. Sources: Touvron et al. 2023 (Llama), Ainslie et al. 2023 (GQA).
        """
        step = _Step(cache, cache.positions(batch), self._spans(batch, cache))
        rotations = torch.cat([self._rotations[s.start : s.end] for s in batch.segments])
        hidden = self._embed(batch.token_ids)
        last_layer = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            normed = layer.attention_norm(hidden)
            attended = self._attend(layer.query_key_value(normed), rotations, step, index)
            if index == last_layer:  # beyond here rows do not meet: keep only those asked for
                attended = attended.index_select(0, batch.logit_rows)
                hidden = hidden.index_select(0, batch.logit_rows)
            hidden.add_(layer.attention_output(attended))
            gate_up = layer.gate_up(layer.ffn_norm(hidden))
            hidden.add_(layer.down(self._backend.swiglu(gate_up)))
        return self._head(self._final_norm(hidden))

    def _spans(self, batch: ForwardBatch, cache: KvCache) -> list[_Span]:
        spans = []
        row = 0
        for segment in batch.segments:
            rows = slice(row, row + segment.length)
            spans.append(_Span(rows, self._visible(segment, cache, None)))
            row += segment.length
        return spans

    def _visible(self, segment: Segment, cache: KvCache, window: int | None) -> _Visible:
        first = first_visible(segment.start, window)
        mask = self._backend.attention_mask(segment.start, segment.length, window)
        return _Visible(cache.runs(segment.block_ids, first, segment.end), mask)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """float32 [T, hidden_size], a fresh tensor."""
        if isinstance(self._embedding, BlockTensor):
            return self._embedding.rows(token_ids).dequantize()
        return self._embedding.index_select(0, token_ids).float()

    def _attend(
        self, qkv: torch.Tensor, rotations: torch.Tensor, step: _Step, layer: int
    ) -> torch.Tensor:
        """qkv [T, query_size + 2 * kv_size] -> attention's result [T, query_size]."""
        config = self.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        # heads of a row: | query: num_heads | key: num_kv_heads | value: num_kv_heads |
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, config.head_dim)
        self._backend.apply_rope_(heads[:, : num_heads + num_kv_heads], rotations)
        query, key_value = heads[:, :num_heads], heads[:, num_heads:].transpose(0, 1)
        step.cache.write(layer, step.positions, key_value)
        result = torch.empty(heads.shape[0], num_heads, config.head_dim)
        for span in step.spans:
            visible = span.full
            self._backend.attention_(
                query[span.rows],
                visible.runs[layer],
                visible.mask,
                result[span.rows],
                scale=self._attention_scale,
            )
        return result.view(-1, config.query_size)
