"""The decoder as one call of compiled code a step: same weights, same results, no Python inside.

Weights become packed codes of 4 or 8 bits with a scale for 32 inputs; those that are stored as
floats are rounded to 8 bits. Activations are rounded to 8 bits at each product, as llama.cpp does.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence

import torch

from kernels.native import Library, PackedMatrix
from kernels.native import library as native
from llm_core.batch import MAXIMUM_LEN, ForwardBatch, ForwardResult, Segment
from llm_core.config import ModelConfig
from llm_core.model.kv_cache import KvCache
from llm_core.model.rope import rope_tables
from llm_core.quant import Weight, pack_gated, pack_stacked, to_float, to_grouped

_MAX_GROUP_SIZE = 48  # query heads of one key/value head: MAX_QUERIES of attention.c
_CACHE_TYPES = {torch.float32: native.F32, torch.bfloat16: native.BF16, torch.int8: native.INT8}
_FLOAT_TYPES = {torch.float32: native.F32, torch.bfloat16: native.BF16, torch.float16: native.F16}
_ERRORS = {
    1: "no memory for the step's buffers",
    2: "a token id is outside the vocabulary",
    3: "a logit row is outside the batch",
    4: "a block id is outside the KV pool",
    5: "a segment is empty, beyond the context, or the row counts disagree",
    6: "a feature layer is outside the model",
    7: f"a tree has more than {native.MAX_TREE_ROWS} rows, or a row's parent is not before it",
}


def unsupported_reason(config: ModelConfig) -> str | None:
    """Why the compiled decoder cannot run a model of this shape; None if it can."""
    if config.head_dim % 8 != 0:
        return f"head_dim {config.head_dim} is not a multiple of 8"
    if config.group_size > _MAX_GROUP_SIZE:
        return f"{config.group_size} query heads share a key/value head, at most {_MAX_GROUP_SIZE}"
    return None


class SegmentArrays:
    """Segments as the C code reads them: the addresses of ``fields`` int32 [S, 5], ``parents`` of
    all rows, and ``block_ids`` of all, valid as long as this object. Raises IndexError where their
    numbers do not fit."""

    def __init__(self, segments: Sequence[Segment], block_size: int, num_more: int = 0) -> None:
        """``num_more`` positions behind each segment's end must be in its blocks too."""
        fields: list[int] = []
        block_ids: list[int] = []
        parents: list[int] = []
        for segment in segments:
            if len(segment.block_ids) * block_size < segment.end + num_more:
                raise IndexError(f"{segment} has too few blocks for its positions")
            if segment.parents is not None and len(segment.parents) != segment.length:
                raise IndexError(f"{segment} is a tree of another number of rows")
            fields += [segment.start, segment.length, len(block_ids), segment.is_tree]
            fields.append(segment.skipped)
            block_ids += segment.block_ids
            parents += segment.parents or range(-1, segment.length - 1)
        # One array, and not of numpy: a step makes it anew, with caches that are cold.
        self._numbers = array("i", fields + parents + block_ids)
        self.fields = self._numbers.buffer_info()[0]
        self.parents = self.fields + self._numbers.itemsize * len(fields)
        self.block_ids = self.parents + self._numbers.itemsize * len(parents)


def cache_struct(cache: KvCache) -> native.Cache:
    """The cache as the C code sees it."""
    return native.Cache(
        cache.data.data_ptr(),
        None if cache.scales is None else cache.scales.data_ptr(),
        cache.data.shape[2],
        _CACHE_TYPES[cache.data.dtype],
        cache.block_size,
    )


def raise_if_failed(result: int) -> None:
    """Raises MemoryError or IndexError for a pn_result that is not PN_DONE."""
    if result != 0:
        raise (MemoryError if result == 1 else IndexError)(_ERRORS[result])


class NativeDecoder:
    """``Decoder`` in compiled code. ``weights`` is read once, entry by entry, and not kept."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        library: Library,
        *,
        num_threads: int,
        max_context: int,
    ) -> None:
        """The caller has asked ``unsupported_reason``. Raises ValueError for weights that are not
        finite, MemoryError, NativeUnavailableError if threads cannot be started."""
        reason = unsupported_reason(config)
        assert reason is None, reason
        self.config = config
        self.library = library
        self._functions = library.functions
        self._session = None
        self._taps = array("i")
        self._cache: tuple[KvCache, native.Cache] | None = None
        self._num_maxima = -(-config.vocab_size // MAXIMUM_LEN)
        assert MAXIMUM_LEN == native.MAXIMUM_LEN
        self._tensors: list[torch.Tensor] = []  # what the structures point at
        self._matrices: list[PackedMatrix] = []
        self.pool = library.pool(num_threads)
        self._memory = library.memory()
        tables = rope_tables(config, max_context)
        rotations = [self._floats(torch.view_as_real(table)) for table in tables.tables]
        self._layers = (native.Layer * config.num_layers)()
        # Embedding and head come first: the largest matrices are there twice while they are packed,
        # which costs nothing while the layers are not there yet.
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
        """What the layers' weights and the head are packed as."""
        bits = {m.struct.bits for m in self._matrices[-4 * self.config.num_layers :]}
        layers = "/".join(f"int{b}" for b in sorted(bits))
        head = f"int{self.struct.head.bits}"
        return layers if layers == head else f"{layers}+{head} head"

    def set_feature_layers(self, layers: tuple[int, ...]) -> None:
        """See ``model_choice.Model``."""
        assert all(0 <= layer <= self.config.num_layers for layer in layers), "no such layer"
        self._taps = array("i", layers)

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
        maxima = torch.empty(num_logits, self._num_maxima)
        features = None
        if self._cache is None or self._cache[0] is not cache:
            self._cache = cache, cache_struct(cache)
        if batch.wants_features and len(self._taps):
            features = torch.empty(num_rows, len(self._taps) * hidden_size)
        call = native.Batch(
            token_ids=token_ids.data_ptr(),
            logit_rows=logit_rows.data_ptr(),
            segments=segments.fields,
            parents=segments.parents,
            block_ids=segments.block_ids,
            taps=self._taps.buffer_info()[0],
            logits=logits.data_ptr(),
            features=None if features is None else features.data_ptr(),
            maxima=maxima.data_ptr(),
            num_rows=num_rows,
            num_logits=num_logits,
            num_segments=len(batch.segments),
            num_taps=0 if features is None else len(self._taps),
        )
        raise_if_failed(self._functions.pn_forward(self._session, self._cache[1], call))
        return ForwardResult(logits, features, maxima=maxima)

    def head_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """float32 [N, hidden_size]: rows of the output head, as they are packed."""
        rows = torch.empty(token_ids.shape[0], self.config.hidden_size)
        for row, token in zip(rows, token_ids.tolist(), strict=True):
            assert 0 <= token < self.config.vocab_size
            self._functions.pn_matrix_row(self.struct.head, token, row.data_ptr())
        return rows

    def start_profile(self) -> None:
        """From now on time is added up by kind of phase; reading the clock costs some 20 us."""
        self._profile = self._functions.pn_session_profile(self._session, 1)

    def profile_us(self) -> dict[str, float]:
        """Microseconds by kind of phase since ``start_profile``, of those that ran."""
        times = {name: self._profile[i] / 1e3 for i, name in enumerate(native.PHASE_KINDS)}
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
        """The address of ``values`` in float32, kept as long as this object."""
        kept = values.float().contiguous()
        self._tensors.append(kept)
        return kept.data_ptr()
