"""The decoder on a GPU: ``TorchDecoder`` in the operations of ``kernels.gpu``.

The residual stream is float32, all other activations ``dtype``. A step's input is copied to the
device at once; steps of few rows are replayed from CUDA graphs (``graphs``). The attention kernel
depends on the number of rows of a segment::

    one row                    decode_attention    split over long contexts
    up to 64 rows, or a tree   tree_attention      drafts to verify, the end of a prompt
    more                       prefill_attention   a prompt chunk

With tensor parallelism every rank runs this on its share of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kernels.gpu import GpuOps, GpuWeight, KvPages
from llm_core.batch import ForwardBatch, ForwardResult, Launched, Segment, TokenChoices
from llm_core.config import ModelConfig
from llm_core.model.gpu.graphs import (
    MAX_ROWS,
    Capture,
    Graph,
    StepGraphs,
    StepShape,
    decode_shapes,
    shape_for,
)
from llm_core.model.gpu.layer import GpuLayer
from llm_core.model.gpu.packed_batch import StepLayout, StepTensors, layout_of, pack
from llm_core.model.gpu.staging import StagingRing
from llm_core.model.gpu.step import (
    AttentionGroup,
    LaunchedStep,
    PackedStep,
    StepOutputs,
    attention_groups,
    padded_layout,
    shape_groups,
)
from llm_core.model.gpu.torch_parts import TorchParts
from llm_core.model.gpu.weights import GpuFormat, format_name, gpu_weight, num_bytes
from llm_core.model.kv_cache import KvCache
from llm_core.model.parallel.group import Alone, Collectives, PendingSum, Summed
from llm_core.model.parallel.shards import head_rows
from llm_core.model.rope import rope_tables
from llm_core.quant import Weight, to_float

# Rows of one segment, one for each variant of the attention and matmul kernels.
_WARM_UP_ROWS = (2, 8, 20, 40, 100, 512)
_MAX_TOKENS = 4096  # sampled in a step


@dataclass(frozen=True, slots=True)
class _GraphState:
    """Static input and output buffers of a recorded shape."""

    shape: StepShape
    layout: StepLayout
    words: torch.Tensor
    logits: torch.Tensor
    features: torch.Tensor


class TritonDecoder:
    """The decoder on a GPU. ``weights`` is read once, entry by entry, and not kept."""

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
        overlap_rows: int = 0,
        parts: TorchParts | None = None,
    ) -> None:
        """``config`` and ``weights`` are this rank's share (``parallel.shards``). ``capture`` None:
        no CUDA graphs. ``overlap_rows``: steps with at least this many rows are computed in two
        halves, so that the all-reduce of one overlaps with computing the other (0: never).
        ``parts``: operations left to torch, optionally compiled.
        """
        self.config = config
        self.device = device
        self.dtype = dtype
        self.max_context = max_context
        self.ops = ops
        self._capture = capture
        self._collectives: Collectives = collectives or Alone()
        self._overlap_rows = overlap_rows if self._collectives.num_ranks > 1 else 0
        self._parts = parts or TorchParts()
        self._staging = StagingRing.of(device)
        self._vocab_size = config.vocab_size
        # Tokens sampled by the last step, for the next step's input.
        self._tokens = torch.zeros(_MAX_TOKENS, dtype=torch.int64, device=device)
        self._embedding = to_float(weights["embedding"]).to(device=device, dtype=dtype)
        self._layers = [
            GpuLayer(config, weights, index, weight_format, dtype, device)
            for index in range(config.num_layers)
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
        """Formats of the layers' weights and the head, such as ``int4+int8 head``."""
        names = {format_name(matrix) for layer in self._layers for matrix in layer.matrices}
        layers, head = "/".join(sorted(names)), format_name(self._head)
        return layers if layers == head else f"{layers}+{head} head"

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of matrices that a decode step reads: all but an untied embedding."""
        matrices = [matrix for layer in self._layers for matrix in layer.matrices]
        return sum(map(num_bytes, [*matrices, self._head]))

    def set_feature_layers(self, layers: tuple[int, ...]) -> None:
        """See ``backend.Model``."""
        assert all(0 <= layer <= len(self._layers) for layer in layers), "no such layer"
        self._feature_layers = layers
        self._record_again()  # recorded graphs compute the old features

    def set_vocab_size(self, vocab_size: int) -> None:
        """See ``backend.DeviceSampler``."""
        assert 0 < vocab_size <= self.config.vocab_size, "the tokenizer has more tokens"
        if vocab_size != self._vocab_size:
            self._vocab_size = vocab_size
            self._record_again()

    def _record_again(self) -> None:
        cache, self._cache = self._cache, None
        if cache is not None and self._num_warm:
            self.warm_up(cache, self._num_warm)

    def forward(self, batch: ForwardBatch, cache: KvCache) -> ForwardResult:
        """Logits of ``batch.logit_rows``, and features, on the CPU; writes keys and values.

        Call under inference mode. Raises ValueError for a tree of more than 64 rows.
        """
        return self.launch(batch, cache).result()

    def launch(self, batch: ForwardBatch, cache: KvCache) -> Launched:
        """Starts ``forward``, see ``backend.DeviceSampler``."""
        step = self.pack(batch, cache)
        return self.fetch(step, batch.choices, self.run(step, cache))

    def warm_up(self, cache: KvCache, max_sequences: int) -> None:
        """Records decode steps of up to ``max_sequences`` sequences, and compiles the kernels of
        prompt chunks, overwriting the first blocks of the pool. Without CUDA graphs (as under the
        interpreter) it does nothing."""
        self._bind(cache)
        if self._graphs is None:
            return
        self._num_warm = max_sequences
        for shape in decode_shapes(max_sequences, self.max_context):
            self._graphs.record(shape)
        longest = min(self.max_context, cache.num_blocks * cache.block_size)
        for num_rows in sorted({min(rows, longest) for rows in _WARM_UP_ROWS}):
            segment = Segment(tuple(range(-(-num_rows // cache.block_size))), 0, num_rows)
            tokens = torch.zeros(num_rows, dtype=torch.int64)
            self.forward(ForwardBatch(tokens, (segment,), torch.tensor([num_rows - 1])), cache)

    def pack(self, batch: ForwardBatch, cache: KvCache) -> PackedStep:
        """Packs a batch for ``run``, padded to the shape of its graph if it has one."""
        layout, shape = layout_of(batch, cache.block_size), None
        if self._capture is not None:
            lengths = [segment.length for segment in batch.segments]
            longest = max(segment.end for segment in batch.segments)
            shape = shape_for(lengths, longest, self.max_context)
        num_rows, num_logit_rows = layout.num_rows, layout.num_logit_rows
        if shape is not None:
            layout = padded_layout(shape, cache.block_size)
        words = self._staging.acquire(layout.num_words)
        pack(batch, layout, cache.block_size, words)
        return PackedStep(
            *(words, layout, shape, num_rows, num_logit_rows),
            wants_features=batch.wants_features,
            samples=batch.choices is not None,
        )

    def run(self, step: PackedStep, cache: KvCache) -> StepOutputs:
        """Runs a packed step asynchronously. All ranks run the same steps."""
        self._bind(cache)
        if step.shape is not None and self._graphs is not None:
            shape = step.shape
            if self._graphs.is_ready(shape):
                state = self._graphs.replay(shape, lambda state: self._fill(state.words, step))
                return StepOutputs(state.logits, state.features, self._tokens[: shape.num_rows])
            groups = shape_groups(shape)
        else:
            groups = attention_groups(step)
        words = torch.empty_like(step.words, device=self.device)
        self._fill(words, step)
        inputs = StepTensors.of(words, step.layout)
        feature_layers = self._feature_layers if step.wants_features else ()
        logits, features = self._compute(inputs, groups, feature_layers, samples=step.samples)
        tokens = self._tokens[: logits.shape[0]] if step.samples else None
        return StepOutputs(logits, features, tokens)

    def _fill(self, target: torch.Tensor, step: PackedStep) -> None:
        target.copy_(step.words, non_blocking=True)
        self._staging.record_copy(step.words)

    def fetch(self, step: PackedStep, choices: TokenChoices | None, made: StepOutputs) -> Launched:
        """Starts copying the outputs of ``run`` to the host, without padding: logits, or with
        ``choices`` the sampled tokens and the logits of ``choices.keeps``."""
        logits, features, tokens = made.logits[: step.num_logit_rows], made.features, None
        if choices is not None:
            assert made.tokens is not None, "a step with choices samples"
            rows = [logits[row : row + 1] for row in choices.keeps]
            logits = torch.cat(rows) if rows else logits[:0]
            tokens = self._to_host(made.tokens[: step.num_logit_rows])
        result = ForwardResult(
            self._to_host(logits),
            self._to_host(features[: step.num_rows])
            if step.wants_features and features is not None
            else None,
            tokens,
        )
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return LaunchedStep(result, done)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        is_cuda = self.device.type == "cuda" and tensor.numel() > 0
        # Pinned memory of torch's caching allocator, which tracks pending copies.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_cuda)
        return host.copy_(tensor, non_blocking=is_cuda)

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
            # Shared by all graphs, as only one runs at a time: a row of logits has half a megabyte,
            # and there are dozens of graphs.
            num_features = len(self._feature_layers) * self.config.hidden_size
            self._results = tuple(
                torch.empty(MAX_ROWS, width, device=self.device)
                for width in (self.config.vocab_size, num_features)
            )
            self._graphs = StepGraphs(self._record, self._make_state, self._run_state)

    def _record(self, run: Callable[[], None]) -> Graph:
        """Records ``run``, preserving the tokens of the last step: recording runs it first,
        possibly in the middle of a reply."""
        assert self._capture is not None
        tokens = self._tokens.clone()
        graph = self._capture(run)
        self._tokens.copy_(tokens)
        return graph

    def _make_state(self, shape: StepShape) -> _GraphState:
        assert self._cache is not None
        layout = padded_layout(shape, self._cache.block_size)
        words = torch.zeros(layout.num_words, dtype=torch.int32, device=self.device)
        fields = StepTensors.of(words, layout)
        for field in (fields.slots, fields.sources):  # padding only
            field.fill_(-1)
        logits, features = (result[: shape.num_rows] for result in self._results)
        return _GraphState(shape, layout, words, logits, features)

    def _run_state(self, state: _GraphState) -> None:
        inputs = StepTensors.of(state.words, state.layout)
        groups = shape_groups(state.shape)
        logits, features = self._compute(inputs, groups, self._feature_layers, samples=True)
        state.logits.copy_(logits)
        if features is not None:
            state.features.copy_(features)

    def _compute(
        self,
        inputs: StepTensors,
        groups: Sequence[AttentionGroup],
        feature_layers: tuple[int, ...],
        *,
        samples: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits float32 [R, vocab_size] and features float32 [T, K * hidden_size] on the device;
        with ``samples`` also writes ``_tokens``. Does not synchronise, so it can be recorded."""
        ops, config, logit_rows = self.ops, self.config, inputs.logit_rows
        ancestors = {
            group.max_rows: inputs.ancestors[:, : -(-group.max_rows // 32)].contiguous()
            for group in groups
            if group.kind == "tree"
        }
        residual = ops.embed(
            self._embedding,
            inputs.token_ids,
            config.embedding_scale,
            sources=inputs.sources if samples else None,
            chosen=self._tokens if samples else None,
            out_dtype=torch.float32,
        )
        first_norm = self._layers[0].attention_norm
        normed = ops.rms_norm(residual, first_norm, config.rms_eps, out_dtype=self.dtype)
        projected = ops.matmul_parts(normed, self._layers[0].query_key_value)
        last_layer = len(self._layers) - 1
        keeps_all_rows = any(layer >= last_layer for layer in feature_layers)
        hidden_states: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self._layers):
            query = ops.rope_store(
                projected,
                self._rotations[index],
                inputs.positions,
                inputs.slots,
                self._pages[index],
                num_heads=config.num_heads,
                bias=layer.bias,
                query_norm=layer.query_norm,
                key_norm=layer.key_norm,
                eps=config.rms_eps,
                out_dtype=self.dtype,
            )
            attended = self._attend(query, inputs, groups, ancestors, index)
            attended = attended.reshape(-1, config.query_size)
            if index == last_layer and not keeps_all_rows:  # from here on rows are independent
                attended = attended.index_select(0, logit_rows)
                residual = residual.index_select(0, logit_rows)
            projected = self._finish_layer(attended, residual, index)
            if index in feature_layers:
                hidden_states[index] = residual.clone()
        normed = projected  # after the last layer it is the final norm
        hidden_states[len(self._layers)] = normed.float()
        if keeps_all_rows:
            normed = normed.index_select(0, logit_rows)
        logits = self._gathered(ops.matmul(normed, self._head, out_dtype=torch.float32))
        if config.logit_softcap is not None and logits.shape[0]:
            logits = self._parts.capped(logits, config.logit_softcap)
        if samples and logits.shape[0]:
            ops.sample(logits[:, : self._vocab_size], inputs.choices, out=self._tokens)
        features = None
        if feature_layers:
            features = torch.cat([hidden_states[layer] for layer in feature_layers], 1)
        return logits, features

    def _finish_layer(
        self, attended: torch.Tensor, residual: torch.Tensor, index: int
    ) -> torch.Tensor:
        """Computes a layer from its attention output [T, query_size] to the next layer's
        projections (possibly parts) or, for the last layer, the final norm. Updates ``residual``
        [T, hidden_size].

        Rows are independent here, so many rows are processed in two halves: the all-reduce of one
        overlaps with computing the other.
        """
        ops, eps, layer = self.ops, self.config.rms_eps, self._layers[index]
        halves = self._halves(attended.shape[0])
        sums = [self._start_sum(attended[rows], layer.attention_output) for rows in halves]
        for number, rows in enumerate(halves):
            normed = ops.add_rms_norm_(
                residual[rows],
                sums[number].wait(),
                layer.ffn_norm,
                eps,
                post_weight=layer.attention_post_norm,
                out_dtype=self.dtype,
            )
            gated = ops.matmul_gated(normed, layer.gate_up, self.config.activation)
            sums[number] = self._start_sum(gated, layer.down)
        is_last = index == len(self._layers) - 1
        weight = self._final_norm if is_last else self._layers[index + 1].attention_norm
        project = ops.matmul_parts if len(halves) == 1 else ops.matmul
        results = []
        for number, rows in enumerate(halves):
            normed = ops.add_rms_norm_(
                residual[rows],
                sums[number].wait(),
                weight,
                eps,
                post_weight=layer.ffn_post_norm,
                out_dtype=self.dtype,
            )
            if not is_last:
                normed = project(normed, self._layers[index + 1].query_key_value)
            results.append(normed)
        return results[0] if len(results) == 1 else torch.cat(results)

    def _halves(self, num_rows: int) -> list[slice]:
        if self._overlap_rows == 0 or num_rows < max(2, self._overlap_rows):
            return [slice(0, num_rows)]
        middle = num_rows // 2
        return [slice(0, middle), slice(middle, num_rows)]

    def _start_sum(self, x: torch.Tensor, weight: GpuWeight) -> PendingSum:
        if self._collectives.num_ranks == 1:
            return Summed(self.ops.matmul_parts(x, weight))  # the next operation adds them up
        return self._collectives.start_sum(self.ops.matmul(x, weight))

    def _gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """All-gathers the logits of all ranks' parts of the vocabulary."""
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
