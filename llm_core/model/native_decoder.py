"""The compiled decoder: one call of the C library per step.

Weights are packed as 4- or 8-bit codes with a scale per 32 inputs; weights stored as floats are
quantised to 8 bits. Activations are quantised to 8 bits at each product, as in llama.cpp.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence

import torch

from kernels.native import Library, PackedMatrix
from kernels.native import library as native
from kernels.native.library import Result
from llm_core.batch import MAXIMA_BLOCK, ForwardBatch, ForwardResult, Segment
from llm_core.config import ModelConfig
from llm_core.model.kv_cache import KvCache
from llm_core.model.rope import rope_tables
from llm_core.quant import Weight, pack_gated, pack_stacked, to_float, to_grouped

_CACHE_TYPES = {torch.float32: native.F32, torch.bfloat16: native.BF16, torch.int8: native.INT8}
_FLOAT_TYPES = {torch.float32: native.F32, torch.bfloat16: native.BF16, torch.float16: native.F16}
_ERRORS = {
    Result.NO_MEMORY: "no memory for the step's buffers",
    Result.BAD_TOKEN: "a token id is outside the vocabulary",
    Result.BAD_LOGIT_ROW: "a logit row is outside the batch",
    Result.BAD_BLOCK: "a block id is outside the KV pool",
    Result.BAD_SEGMENT: "a segment is empty, beyond the context, or the row counts disagree",
    Result.BAD_AUX_LAYER: "a feature layer is outside the model",
    Result.BAD_TREE: (
        f"a tree has more than {native.MAX_TREE_ROWS} rows, or a row's parent is not before it"
    ),
}


def unsupported_reason(config: ModelConfig) -> str | None:
    """The reason why the compiled decoder cannot run a model of this shape; None if it can."""
    if config.head_dim % 8 != 0:
        return f"head_dim {config.head_dim} is not a multiple of 8"
    if config.group_size > native.MAX_QUERIES:
        return (
            f"{config.group_size} query heads share a key/value head, at most {native.MAX_QUERIES}"
        )
    return None


class SegmentArrays:
    """Segments of a batch as C arrays; the addresses are valid as long as this object.

    ``segments``: pn_segment [num_segments]; ``parents``: int32 [num_rows]; ``block_ids``: int32, of
    all segments one after another.
    """

    def __init__(self, segments: Sequence[Segment], block_size: int, num_more: int = 0) -> None:
        """Each segment's blocks must hold ``num_more`` positions after its end. Raises IndexError
        for too few blocks, or a tree whose number of parents differs from its length."""
        fields: list[int] = []
        block_ids: list[int] = []
        parents: list[int] = []
        for segment in segments:
            if len(segment.block_ids) * block_size < segment.end + num_more:
                raise IndexError(f"{segment} has too few blocks for its positions")
            if segment.parents is not None and len(segment.parents) != segment.length:
                raise IndexError(f"{segment} is a tree of another number of rows")
            # In the order of native.Segment, whose constructor would take three times as long.
            fields += [segment.start, segment.length, len(block_ids), segment.is_tree]
            fields.append(segment.skipped)
            block_ids += segment.block_ids
            parents += segment.parents or range(-1, segment.length - 1)
        # A single array, and not numpy's: it is built anew, with cold caches, in every step.
        self._numbers = array("i", fields + parents + block_ids)
        self.segments = self._numbers.buffer_info()[0]
        self.parents = self.segments + self._numbers.itemsize * len(fields)
        self.block_ids = self.parents + self._numbers.itemsize * len(parents)


def cache_struct(cache: KvCache) -> native.Cache:
    """The pn_cache of ``cache``, which must outlive it."""
    return native.Cache(
        cache.data.data_ptr(),
        None if cache.scales is None else cache.scales.data_ptr(),
        cache.data.shape[2],
        _CACHE_TYPES[cache.data.dtype],
        cache.block_size,
    )


def raise_if_failed(result: int) -> None:
    """Raises MemoryError or IndexError for a pn_result other than PN_OK."""
    if result != Result.OK:
        error = MemoryError if result == Result.NO_MEMORY else IndexError
        raise error(_ERRORS[Result(result)])


class NativeDecoder:
    """``TorchDecoder`` in compiled code. ``weights`` is read once, entry by entry, and not kept."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        library: Library,
        *,
        num_threads: int,
        max_context: int,
    ) -> None:
        """``unsupported_reason(config)`` must be None. Raises ValueError for weights that are not
        finite, MemoryError, and NativeUnavailableError if threads cannot be started."""
        reason = unsupported_reason(config)
        assert reason is None, reason
        self.config = config
        self.library = library
        self._functions = library.functions
        self._session = None
        self._feature_layers = array("i")
        self._cache: tuple[KvCache, native.Cache] | None = None
        self._num_blocks = -(-config.vocab_size // MAXIMA_BLOCK)
        assert MAXIMA_BLOCK == native.MAXIMA_BLOCK
        self._tensors: list[torch.Tensor] = []  # referenced by the structures
        self._matrices: list[PackedMatrix] = []
        self.pool = library.pool(num_threads)
        self._memory = library.memory()
        tables = rope_tables(config, max_context)
        rotations = [self._floats(torch.view_as_real(table)) for table in tables.tables]
        self._layers = (native.Layer * config.num_layers)()
        # Embedding and head come first: a matrix exists twice while it is packed, and the largest
        # ones do not raise the peak of memory as long as no layers are packed.
        self.struct = self._make_model(weights, max_context)
        for index in range(config.num_layers):
            self._fill_layer(weights, index)
            self._layers[index].rotations = rotations[tables.layer_table[index]]
        self._session = self._functions.pn_session_create(self.pool.handle, self.struct)
        if not self._session:
            raise MemoryError("no memory for the decoder's buffers")

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of packed matrices; a decode step reads all but an untied embedding."""
        return self._memory.num_bytes

    @property
    def weight_format(self) -> str:
        """Formats of the packed layers and head, such as ``int4+int8 head``."""
        bits = {m.struct.bits for m in self._matrices[-4 * self.config.num_layers :]}
        layers = "/".join(f"int{b}" for b in sorted(bits))
        head = f"int{self.struct.head.bits}"
        return layers if layers == head else f"{layers}+{head} head"

    def set_feature_layers(self, layers: tuple[int, ...]) -> None:
        """See ``backend.Model``."""
        assert all(0 <= layer <= self.config.num_layers for layer in layers), "no such layer"
        self._feature_layers = array("i", layers)

    def forward(self, batch: ForwardBatch, cache: KvCache) -> ForwardResult:
        """Logits of ``batch.logit_rows``, features of all rows; writes their keys and values.

        Raises IndexError for indices outside their range, MemoryError.
        """
        segments = SegmentArrays(batch.segments, cache.block_size)
        token_ids, logit_rows = batch.token_ids.contiguous(), batch.logit_rows.contiguous()
        assert token_ids.dtype == logit_rows.dtype == torch.int64
        num_rows, hidden_size = token_ids.shape[0], self.config.hidden_size
        num_logits = logit_rows.shape[0]
        logits = torch.empty(num_logits, self.config.vocab_size)
        block_maxima = torch.empty(num_logits, self._num_blocks)
        features = None
        if self._cache is None or self._cache[0] is not cache:
            self._cache = cache, cache_struct(cache)
        if batch.wants_features and len(self._feature_layers):
            features = torch.empty(num_rows, len(self._feature_layers) * hidden_size)
        call = native.Batch(
            token_ids=token_ids.data_ptr(),
            logit_rows=logit_rows.data_ptr(),
            segments=segments.segments,
            parents=segments.parents,
            block_ids=segments.block_ids,
            aux_layers=self._feature_layers.buffer_info()[0],
            logits=logits.data_ptr(),
            features=None if features is None else features.data_ptr(),
            block_maxima=block_maxima.data_ptr(),
            num_rows=num_rows,
            num_logits=num_logits,
            num_segments=len(batch.segments),
            num_aux_layers=0 if features is None else len(self._feature_layers),
        )
        raise_if_failed(self._functions.pn_forward(self._session, self._cache[1], call))
        return ForwardResult(logits, features, block_maxima=block_maxima)

    def head_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """float32 [N, hidden_size]: dequantised rows of the output head."""
        rows = torch.empty(token_ids.shape[0], self.config.hidden_size)
        for row, token in zip(rows, token_ids.tolist(), strict=True):
            assert 0 <= token < self.config.vocab_size
            self._functions.pn_matrix_row(self.struct.head, token, row.data_ptr())
        return rows

    def start_profile(self) -> None:
        """Starts measuring the time of phases, which costs some 20 us per step."""
        self._profile = self._functions.pn_session_profile(self._session, 1)

    def profile_us(self) -> dict[str, float]:
        """Microseconds by kind of phase since ``start_profile``, for the kinds that ran."""
        names = self.library.phase_names()
        times = {name: self._profile[i] / 1e3 for i, name in enumerate(names)}
        return {name: time for name, time in times.items() if time > 0}

    def __del__(self) -> None:
        if getattr(self, "_session", None):
            self._functions.pn_session_destroy(self._session)

    def _fill_layer(self, weights: Mapping[str, Weight], index: int) -> None:
        config, layer = self.config, self._layers[index]

        def get(*names: str) -> list[Weight]:
            return [weights[f"layers.{index}.{name}"] for name in names]

        def norm(name: str) -> int:
            return self._floats(to_float(get(name)[0]))

        qkv = self._keep(pack_stacked(self._memory, get("query", "key", "value")))
        if config.attention_bias:
            biases = get("query_bias", "key_bias", "value_bias")
            qkv.set_bias(torch.cat([to_float(bias) for bias in biases]))
        layer.query_key_value = qkv.struct
        layer.attention_output = self._keep(
            pack_stacked(self._memory, get("attention_output"))
        ).struct
        layer.gate_up = self._keep(pack_gated(self._memory, *get("gate", "up"))).struct
        layer.down = self._keep(pack_stacked(self._memory, get("down"))).struct
        layer.attention_norm, layer.ffn_norm = norm("attention_norm"), norm("ffn_norm")
        if config.post_norms:
            layer.attention_post_norm = norm("attention_post_norm")
            layer.ffn_post_norm = norm("ffn_post_norm")
        if config.qk_norm:
            layer.query_norm, layer.key_norm = norm("query_norm"), norm("key_norm")
        layer.window = config.window_of(index) or 0

    def _make_model(self, weights: Mapping[str, Weight], max_context: int) -> native.Model:
        config = self.config
        model = native.Model(
            layers=ctypes.cast(self._layers, ctypes.POINTER(native.Layer)),
            final_norm=self._floats(to_float(weights["final_norm"])),
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            inner_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            max_context=max_context,
            activation={"silu": native.SILU, "gelu_tanh": native.GELU_TANH}[config.activation],
            rms_eps=config.rms_eps,
            embedding_scale=config.embedding_scale,
            score_scale=config.score_scale,
            attention_softcap=config.attention_softcap or 0.0,
            logit_softcap=config.logit_softcap or 0.0,
        )
        head_name = "embedding" if config.tie_embeddings else "head"
        model.head = self._keep(pack_stacked(self._memory, [weights[head_name]])).struct
        if config.tie_embeddings:
            model.embedding_matrix = model.head
            return model
        embedding = weights["embedding"]
        if to_grouped(embedding) is None and isinstance(embedding, torch.Tensor):
            kept = embedding.contiguous()
            self._tensors.append(kept)
            model.embedding, model.embedding_type = kept.data_ptr(), _FLOAT_TYPES[kept.dtype]
        else:
            model.embedding_matrix = self._keep(pack_stacked(self._memory, [embedding])).struct
        return model

    def _keep(self, matrix: PackedMatrix) -> PackedMatrix:
        self._matrices.append(matrix)
        return matrix

    def _floats(self, values: torch.Tensor) -> int:
        """The address of ``values`` in float32, valid as long as this object."""
        kept = values.float().contiguous()
        self._tensors.append(kept)
        return kept.data_ptr()
