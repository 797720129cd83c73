"""The decoder on a GPU: the mathematics of ``Decoder`` in the operations of ``kernels.gpu``.

The residual stream is float32, all other activations ``dtype``. A step's input reaches the device
in one copy; steps of few rows are replayed from CUDA graphs (``cuda_graphs``). Each group of
segments of a kind has its own attention kernel::

    one row                    decode_attention    split over long contexts
    up to 64 rows, or a tree   tree_attention      drafts to verify, the last of a prompt
    more                       prefill_attention   a prompt's chunk

With tensor parallelism every rank runs this on its share of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch

from kernels.gpu import GpuOps, GpuWeight, KvPages
from llm_core.batch import ForwardBatch, ForwardResult, Segment
from llm_core.config import ModelConfig
from llm_core.cuda_batch import MAX_TREE_ROWS, StepLayout, StepTensors, layout_of, pack
from llm_core.cuda_graphs import (
    MAX_ROWS,
    Capture,
    StepGraphs,
    StepShape,
    decode_shapes,
    shape_for,
)
from llm_core.cuda_weights import GpuFormat, format_name, gpu_weight, num_bytes
from llm_core.kv_cache import KvCache
from llm_core.parallel.group import Alone, Collectives
from llm_core.parallel.shards import head_rows
from llm_core.quant.formats import Weight, stack_rows, to_float
from llm_core.rope import rope_tables

_WARM_UP_ROWS = 512


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Neighbouring segments, and rows, of one kind; no segment has more than ``max_rows`` rows or
    ends beyond ``max_length`` positions."""

    kind: Literal["decode", "tree", "prefill"]
    segments: slice
    rows: slice
    max_rows: int
    max_length: int


@dataclass(frozen=True, slots=True)
class PackedStep:
    """What all ranks are told of a step. ``words`` int32 on the CPU; ``shape`` None: no graph.

    Of its rows ``num_rows`` are no padding, and of its rows of logits ``num_logit_rows``.
    """

    words: torch.Tensor
    layout: StepLayout
    shape: StepShape | None
    num_rows: int
    num_logit_rows: int
    wants_features: bool


@dataclass(frozen=True, slots=True)
class _GraphState:
    """What stays in place for a shape: its input, and where its results go."""

    shape: StepShape
    layout: StepLayout
    words: torch.Tensor
    logits: torch.Tensor
    features: torch.Tensor


class _Layer:
    """One layer's weights, on the device."""

    def __init__(
        self, model: TritonDecoder, weights: Mapping[str, Weight], index: int, form: GpuFormat
    ) -> None:
        def matrix(*names: str) -> GpuWeight:
            stacked = stack_rows([weights[f"layers.{index}.{name}"] for name in names])
            return gpu_weight(stacked, form, model.dtype, model.device)

        def vector(*names: str, present: bool = True) -> torch.Tensor | None:
            if not present:
                return None
            values = [to_float(weights[f"layers.{index}.{name}"]) for name in names]
            return torch.cat(values).to(model.device)

        config = model.config
        self.attention_norm = _present(vector("attention_norm"))
        self.query_key_value = matrix("query", "key", "value")
        self.bias = vector("query_bias", "key_bias", "value_bias", present=config.attention_bias)
        self.query_norm = vector("query_norm", present=config.qk_norm)
        self.key_norm = vector("key_norm", present=config.qk_norm)
        self.attention_output = matrix("attention_output")
        self.attention_post_norm = vector("attention_post_norm", present=config.post_norms)
        self.ffn_norm = _present(vector("ffn_norm"))
        self.gate_up = matrix("gate", "up")
        self.down = matrix("down")
        self.ffn_post_norm = vector("ffn_post_norm", present=config.post_norms)

    @property
    def matrices(self) -> tuple[GpuWeight, ...]:
        return self.query_key_value, self.attention_output, self.gate_up, self.down


def _present(vector: torch.Tensor | None) -> torch.Tensor:
    assert vector is not None
    return vector


class TritonDecoder:
    """``Decoder`` on a GPU. ``weights`` is read once, entry by entry, and not kept."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        ops: GpuOps,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_context: int,
        weight_format: GpuFormat = "auto",
        capture: Capture | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        """``config`` and ``weights`` are this rank's share (``parallel.shards``); ``capture`` None:
        no graphs."""
        self.config = config
        self.device = device
        self.dtype = dtype
        self.max_context = max_context
        self.ops = ops
        self._capture = capture
        self._collectives: Collectives = collectives or Alone()
        self._embedding = to_float(weights["embedding"]).to(device=device, dtype=dtype)
        self._layers = [
            _Layer(self, weights, index, weight_format) for index in range(config.num_layers)
        ]
        self._final_norm = to_float(weights["final_norm"]).to(device)
        head = weights["embedding" if config.tie_embeddings else "head"]
        self._head = (
            self._embedding
            if config.tie_embeddings
            and isinstance(head, torch.Tensor)
            and weight_format not in ("int8", "fp8")
            else gpu_weight(head, weight_format, dtype, device)
        )
        ropes = rope_tables(config, max_context)
        tables = [torch.view_as_real(t.squeeze(1)).contiguous().to(device) for t in ropes.tables]
        self._rotations = [tables[index] for index in ropes.layer_table]
        self._feature_layers: tuple[int, ...] = ()
        self._cache: KvCache | None = None
        self._pages: list[KvPages] = []
        self._graphs: StepGraphs[_GraphState] | None = None
        self._results: tuple[torch.Tensor, ...] = ()
        self._num_warm = 0  # sequences for which decode steps are recorded

    @property
    def weight_format(self) -> str:
        """What the layers' weights and the head are kept as."""
        names = {format_name(matrix) for layer in self._layers for matrix in layer.matrices}
        layers, head = "/".join(sorted(names)), format_name(self._head)
        return layers if layers == head else f"{layers}+{head} head"

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of matrices that a decode step reads: all but an embedding that is no head."""
        matrices = [matrix for layer in self._layers for matrix in layer.matrices]
        return sum(map(num_bytes, [*matrices, self._head]))

    def set_feature_layers(self, layers: tuple[int, ...]) -> None:
        """See ``model_choice.Model``."""
        assert all(0 <= layer <= len(self._layers) for layer in layers), "no such layer"
        self._feature_layers = layers
        cache, self._cache = self._cache, None  # what was recorded computes other features
        if cache is not None and self._num_warm:
            self.warm_up(cache, self._num_warm)

    def forward(self, batch: ForwardBatch, cache: KvCache) -> ForwardResult:
        """Logits of ``batch.logit_rows``, and features, on the CPU; writes keys and values.

        Call under inference mode. Raises ValueError for a tree of more than 64 rows. Sources: those
        of ``Decoder``.
        """
        step = self.pack(batch, cache)
        return self.result(step, *self.run(step, cache))

    def warm_up(self, cache: KvCache, max_sequences: int) -> None:
        """Records decode steps of up to ``max_sequences`` sequences, so that none waits for it, and
        has kernels compiled for a prompt's chunk, which is written into the pool's first blocks.
        Nothing without graphs: what is interpreted is not compiled."""
        self._bind(cache)
        if self._graphs is None:
            return
        self._num_warm = max_sequences
        for shape in decode_shapes(max_sequences, self.max_context):
            self._graphs.record(shape)
        num_rows = min(_WARM_UP_ROWS, self.max_context, cache.num_blocks * cache.block_size)
        segment = Segment(tuple(range(-(-num_rows // cache.block_size))), 0, num_rows)
        tokens = torch.zeros(num_rows, dtype=torch.int64)
        self.forward(ForwardBatch(tokens, (segment,), torch.tensor([num_rows - 1])), cache)

    def pack(self, batch: ForwardBatch, cache: KvCache) -> PackedStep:
        """A step for ``run``, with the padding that its graph needs if it has one."""
        layout, shape = layout_of(batch, cache.block_size), None
        if self._capture is not None:
            lengths = [segment.length for segment in batch.segments]
            longest = max(segment.end for segment in batch.segments)
            shape = shape_for(lengths, longest, self.max_context)
        num_rows, num_logit_rows = layout.num_rows, layout.num_logit_rows
        if shape is not None:
            layout = _layout(shape, cache.block_size)
        words = torch.empty(
            layout.num_words, dtype=torch.int32, pin_memory=self.device.type == "cuda"
        )
        pack(batch, layout, cache.block_size, words)
        return PackedStep(words, layout, shape, num_rows, num_logit_rows, batch.wants_features)

    def run(self, step: PackedStep, cache: KvCache) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes a packed step, without waiting: logits and features on the device, perhaps with
        padding. All ranks do, and all get the same. They hold until the next step."""
        self._bind(cache)
        if step.shape is not None and self._graphs is not None:
            shape = step.shape
            if self._graphs.is_ready(shape):
                state = self._graphs.replay(shape, lambda state: _fill(state.words, step.words))
                return state.logits, state.features
            groups = shape_groups(shape)
        else:
            groups = attention_groups(step)
        words = step.words.to(self.device, non_blocking=True)
        inputs = StepTensors.of(words, step.layout)
        taps = self._feature_layers if step.wants_features else ()
        return self._compute(inputs, groups, taps)

    def result(
        self, step: PackedStep, logits: torch.Tensor, features: torch.Tensor | None
    ) -> ForwardResult:
        """What ``run`` made, on the CPU and without padding; waits for the device."""
        wanted = [logits[: step.num_logit_rows]]
        if step.wants_features and features is not None:
            wanted.append(features[: step.num_rows])
        if self.device.type == "cuda":
            wanted = [_to_host(tensor) for tensor in wanted]
            torch.cuda.current_stream(self.device).synchronize()
        return ForwardResult(*wanted)

    def _bind(self, cache: KvCache) -> None:
        if cache is self._cache:
            return
        self._cache = cache
        scales = [None] * len(self._layers) if cache.scales is None else cache.scales.unbind(0)
        self._pages = [
            KvPages(data, scale, cache.block_size)
            for data, scale in zip(cache.data.unbind(0), scales, strict=True)
        ]
        if self._capture is not None:
            # All graphs leave their results here: as they take turns, their own memory can be the
            # same. A row of logits is half a megabyte, and there are dozens of graphs.
            num_features = len(self._feature_layers) * self.config.hidden_size
            self._results = tuple(
                torch.empty(MAX_ROWS, width, device=self.device)
                for width in (self.config.vocab_size, num_features)
            )
            self._graphs = StepGraphs(self._capture, self._make_state, self._run_state)

    def _make_state(self, shape: StepShape) -> _GraphState:
        assert self._cache is not None
        layout = _layout(shape, self._cache.block_size)
        words = torch.zeros(layout.num_words, dtype=torch.int32, device=self.device)
        StepTensors.of(words, layout).slots.fill_(-1)  # all is padding
        logits, features = (result[: shape.num_rows] for result in self._results)
        return _GraphState(shape, layout, words, logits, features)

    def _run_state(self, state: _GraphState) -> None:
        inputs = StepTensors.of(state.words, state.layout)
        groups = shape_groups(state.shape)
        logits, features = self._compute(inputs, groups, self._feature_layers)
        state.logits.copy_(logits)
        if features is not None:
            state.features.copy_(features)

    def _compute(
        self, inputs: StepTensors, groups: Sequence[AttentionGroup], taps: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits float32 [R, vocab_size] and features float32 [T, K * hidden_size], on the device.

        Waits for nothing, so that it can be recorded.
        """
        ops, config = self.ops, self.config
        slots, logit_rows = inputs.slots.long(), inputs.logit_rows.long()
        ancestors = {
            group.max_rows: inputs.ancestors[:, : -(-group.max_rows // 32)].contiguous()
            for group in groups
            if group.kind == "tree"
        }
        embedded = ops.embed(self._embedding, inputs.token_ids.long(), config.embedding_scale)
        residual = embedded.float()
        normed = ops.rms_norm(embedded, self._layers[0].attention_norm, config.rms_eps)
        last_layer = len(self._layers) - 1
        all_go_on = any(layer >= last_layer for layer in taps)
        tapped: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self._layers):
            query = ops.rope_store(
                ops.matmul(normed, layer.query_key_value),
                self._rotations[index],
                inputs.positions,
                slots,
                self._pages[index],
                num_heads=config.num_heads,
                bias=layer.bias,
                query_norm=layer.query_norm,
                key_norm=layer.key_norm,
                eps=config.rms_eps,
            )
            attended = self._attend(query, inputs, groups, ancestors, index)
            attended = attended.reshape(-1, config.query_size)
            if index == last_layer and not all_go_on:  # beyond here rows do not meet
                attended = attended.index_select(0, logit_rows)
                residual = residual.index_select(0, logit_rows)
            output = ops.matmul(attended, layer.attention_output)
            self._collectives.all_reduce_(output)
            normed = ops.add_rms_norm_(
                residual,
                output,
                layer.ffn_norm,
                config.rms_eps,
                post_weight=layer.attention_post_norm,
            )
            gated = ops.gated(ops.matmul(normed, layer.gate_up), config.activation)
            output = ops.matmul(gated, layer.down)
            self._collectives.all_reduce_(output)
            is_last = index == last_layer
            normed = ops.add_rms_norm_(
                residual,
                output,
                self._final_norm if is_last else self._layers[index + 1].attention_norm,
                config.rms_eps,
                post_weight=layer.ffn_post_norm,
            )
            if index in taps:
                tapped[index] = residual.clone()
        tapped[len(self._layers)] = normed.float()
        if all_go_on:
            normed = normed.index_select(0, logit_rows)
        logits = self._gathered(ops.matmul(normed, self._head, out_dtype=torch.float32))
        if config.logit_softcap is not None:
            logits.div_(config.logit_softcap).tanh_().mul_(config.logit_softcap)
        return logits, torch.cat([tapped[layer] for layer in taps], 1) if taps else None

    def _gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """This rank's part of the words -> all ranks'; the last one may have fewer."""
        num_ranks = self._collectives.num_ranks
        if num_ranks == 1:
            return logits
        num_missing = head_rows(self.config.vocab_size, num_ranks) - logits.shape[1]
        padded = torch.nn.functional.pad(logits, (0, num_missing))
        return self._collectives.gather_columns(padded)[:, : self.config.vocab_size]

    def _attend(
        self,
        query: torch.Tensor,
        inputs: StepTensors,
        groups: Sequence[AttentionGroup],
        ancestors: Mapping[int, torch.Tensor],
        layer: int,
    ) -> torch.Tensor:
        """query [T, num_heads, head_dim] -> the same shape."""
        config, pages, parts = self.config, self._pages[layer], []
        scale, softcap = config.score_scale, config.attention_softcap
        window = config.window_of(layer)
        for group in groups:
            tables = inputs.block_tables[group.segments]
            if group.kind == "decode":
                result = self.ops.decode_attention(
                    query[group.rows],
                    pages,
                    tables,
                    inputs.ends[group.segments],
                    max_length=group.max_length,
                    scale=scale,
                    softcap=softcap,
                    window=window,
                )
                parts.append(result)
                continue
            row_starts = inputs.row_starts[group.segments.start : group.segments.stop + 1]
            starts = inputs.starts[group.segments]
            if group.kind == "tree":
                result = self.ops.tree_attention(
                    query,
                    pages,
                    tables,
                    row_starts,
                    starts,
                    inputs.positions,
                    ancestors[group.max_rows],
                    max_query_len=group.max_rows,
                    max_length=group.max_length,
                    scale=scale,
                    softcap=softcap,
                    window=window,
                )
            else:
                result = self.ops.prefill_attention(
                    query,
                    pages,
                    tables,
                    row_starts,
                    starts,
                    max_query_len=group.max_rows,
                    scale=scale,
                    softcap=softcap,
                    window=window,
                )
            parts.append(result[group.rows])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def attention_groups(step: PackedStep) -> list[AttentionGroup]:
    """The runs of segments that one kernel serves, from the words of a step without padding."""
    fields = StepTensors.of(step.words, step.layout)
    bounds, ends = fields.row_starts.tolist(), fields.ends.tolist()
    kinds = [_kind(stop - start) for start, stop in pairwise(bounds)]
    groups = []
    first = 0
    for index in range(1, len(kinds) + 1):
        if index < len(kinds) and kinds[index] == kinds[first]:
            continue
        lengths = [stop - start for start, stop in pairwise(bounds[first : index + 1])]
        groups.append(
            AttentionGroup(
                kinds[first],
                slice(first, index),
                slice(bounds[first], bounds[index]),
                max(lengths),
                max(ends[first:index]),
            )
        )
        first = index
    return groups


def shape_groups(shape: StepShape) -> list[AttentionGroup]:
    """The one group of a padded step."""
    kind = _kind(shape.rows_each)
    assert kind != "prefill", "a prompt's chunk has no shape"
    everything = slice(0, shape.num_sequences), slice(0, shape.num_rows)
    return [AttentionGroup(kind, *everything, shape.rows_each, shape.max_length)]


def _kind(num_rows: int) -> Literal["decode", "tree", "prefill"]:
    if num_rows == 1:
        return "decode"
    return "tree" if num_rows <= MAX_TREE_ROWS else "prefill"


def _layout(shape: StepShape, block_size: int) -> StepLayout:
    """All rows may want logits."""
    width = -(-shape.max_length // block_size)
    return StepLayout(shape.num_rows, shape.num_sequences, shape.num_rows, width)


def _fill(target: torch.Tensor, words: torch.Tensor) -> None:
    target.copy_(words, non_blocking=True)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
