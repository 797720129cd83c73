"""A compiled EAGLE-3 head, which drafts a whole chain in one call.

Weights become 8-bit codes with a scale for each 32 inputs, and activations are rounded to 8 bits
before each product, as in ``NativeDecoder``, whose threads and embedding the head shares. Returning
to Python between two drafts would take as long as a draft.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kernels.native import PackedMatrix
from kernels.native import library as native
from llm_core.model import (
    KvCache,
    NativeDecoder,
    SegmentArrays,
    cache_struct,
    raise_if_failed,
    rope_tables,
    unsupported_reason,
)
from llm_core.quant import pack_gated, pack_stacked
from llm_core.scheduling import DraftTree
from llm_core.speculative.drafters.base import DraftRequest
from llm_core.speculative.drafters.tree_expansion import HEAD_COUPLING
from llm_core.speculative.heads.base import HeadBatch, HeadResult
from llm_core.speculative.heads.config import HeadConfig
from llm_core.speculative.heads.eagle import LAYER, halves_to_pairs, target_ids

_MIN_TEMPERATURE = 0.05  # below it, drafts are greedy


def unsupported_head_reason(config: HeadConfig) -> str | None:
    """The reason why compiled code does not support this head; None if it does."""
    if config.kind != "eagle3":
        return f"heads of kind {config.kind} run in PyTorch only"
    return unsupported_reason(config.layer(context_len=1))


class NativeEagleHead:
    """A ``ChainHead`` for a compiled target."""

    def __init__(
        self,
        config: HeadConfig,
        tensors: Mapping[str, torch.Tensor],
        target: NativeDecoder,
        *,
        max_context: int,
    ) -> None:
        """``tensors`` as in a head's file, with checked shapes; they are packed, not kept.
        ``unsupported_head_reason`` must be None. Raises ValueError for weights that are not finite
        and as ``eagle.target_ids``, MemoryError."""
        reason = unsupported_head_reason(config)
        assert reason is None, reason
        assert config.hidden_size == target.config.hidden_size
        self.config = config
        self._target = target
        self._functions = target.library.functions
        self._session = None
        self._cache: tuple[KvCache, native.Cache] | None = None
        self._memory = target.library.memory()
        self._kept: list[PackedMatrix | torch.Tensor] = []  # referenced by the C structure
        self._target_ids = target_ids(config, tensors).contiguous()
        self._layer = config.layer(max_context)
        self._struct = self._make_struct(tensors, max_context)
        self._session = self._functions.pn_draft_session_create(target.pool.handle, self._struct)
        if not self._session:
            raise MemoryError("no memory for the head's buffers")

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's layers whose hidden states are the features, concatenated."""
        return self.config.feature_layers

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 [draft vocabulary], ascending: the target's token for each draft token."""
        return self._target_ids

    @property
    def num_weight_bytes(self) -> int:
        """Size of the packed matrices; a draft reads all but the projection of features."""
        return self._memory.num_bytes

    def make_cache(self, num_blocks: int, block_size: int) -> KvCache:
        """A KV cache of zeros."""
        cache = KvCache(self._layer, num_blocks, block_size)
        cache.data.zero_()
        return cache

    def forward(self, batch: HeadBatch, cache: KvCache) -> HeadResult:
        """Computes a batch and writes its KV to the cache. Raises IndexError for indices out of
        range, MemoryError."""
        segments = SegmentArrays(batch.segments, cache.block_size)
        num_outputs = batch.output_rows.shape[0]
        result = HeadResult(
            logits=torch.empty(num_outputs, self.config.draft_vocab_size),
            states=torch.empty(num_outputs, self.config.hidden_size),
        )
        self._run(
            batch,
            cache,
            segments,
            logits=result.logits.data_ptr(),
            out_states=result.states.data_ptr(),
        )
        return result

    def draft_chains(
        self, batch: HeadBatch, cache: KvCache, requests: Sequence[DraftRequest]
    ) -> list[DraftTree]:
        """As ``ChainHead``; raises as ``forward``."""
        num_segments = len(batch.segments)
        room = min(len(s.block_ids) * cache.block_size - s.end for s in batch.segments)
        limits = [min(r.shape.max_depth, r.shape.max_drafts, room + 1) for r in requests]
        assert num_segments == len(requests) and min(limits) > 0
        num_steps = max(limits) - 1
        segments = SegmentArrays(batch.segments, cache.block_size, num_steps)
        num_drafts = (num_steps + 1) * num_segments
        uniforms = array("f", [-1.0]) * num_drafts
        choices = (native.DraftChoice * num_segments)()
        for i, request in enumerate(requests):
            params = request.params
            for step, uniform in enumerate(request.uniforms[: num_steps + 1]):
                uniforms[step * num_segments + i] = uniform
            # Positional, in the order of the C fields: keywords would double the time of this loop.
            choices[i] = native.DraftChoice(
                max(params.temperature * HEAD_COUPLING.temperature_scale, _MIN_TEMPERATURE),
                params.top_p,
                params.min_p,
                request.shape.min_path_probability,
                request.shape.min_expand_probability,
                # top_k 1 makes colder requests greedy.
                1 if params.temperature < _MIN_TEMPERATURE else params.top_k,
                limits[i],
            )
        tokens = array("q", [0]) * num_drafts  # [num_steps + 1][num_segments], as ``uniforms``
        probabilities = array("f", [0.0]) * num_drafts
        lengths = array("i", [0]) * num_segments
        max_siblings = min(native.MAX_SIBLINGS, self.config.draft_vocab_size - 1)
        num_siblings = min(max_siblings, max(r.shape.siblings for r in requests))
        siblings = array("q", [0]) * (num_drafts * num_siblings)
        sibling_probabilities = array("f", [0.0]) * (num_drafts * num_siblings)
        self._run(
            batch,
            cache,
            segments,
            choices=choices,
            u_values=uniforms.buffer_info()[0],
            out_tokens=tokens.buffer_info()[0],
            out_probabilities=probabilities.buffer_info()[0],
            out_siblings=siblings.buffer_info()[0],
            out_sibling_probabilities=sibling_probabilities.buffer_info()[0],
            num_siblings=num_siblings,
            out_lengths=lengths.buffer_info()[0],
            num_steps=num_steps,
            u_bandwidth=HEAD_COUPLING.bandwidth,
        )
        trees = []
        for i, n in enumerate(lengths):
            chain, probs = tokens[i::num_segments][:n], probabilities[i::num_segments][:n]
            count = min(num_siblings, requests[i].shape.siblings)
            parents = list(range(-1, n - 1))
            # The chain comes first: where it is accepted, no KV has to be moved.
            for depth in range(n if count else 0):
                at = (depth * num_segments + i) * num_siblings
                chain += siblings[at : at + count]
                probs += sibling_probabilities[at : at + count]
                parents += [depth - 1] * count
            trees.append(DraftTree(tuple(chain), tuple(parents), tuple(probs)))
        return trees

    def __del__(self) -> None:
        if getattr(self, "_session", None):
            self._functions.pn_draft_session_destroy(self._session)

    def _run(
        self, batch: HeadBatch, cache: KvCache, segments: SegmentArrays, **options: Any
    ) -> None:
        width = self.config.num_features if batch.from_target else self.config.hidden_size
        states = batch.states.contiguous()
        token_ids, output_rows = batch.token_ids.contiguous(), batch.output_rows.contiguous()
        assert states.dtype == torch.float32 and states.shape == (token_ids.shape[0], width)
        assert token_ids.dtype == output_rows.dtype == torch.int64
        call = native.DraftBatch(
            token_ids=token_ids.data_ptr(),
            features=states.data_ptr() if batch.from_target else None,
            states=None if batch.from_target else states.data_ptr(),
            output_rows=output_rows.data_ptr(),
            segments=segments.segments,
            parents=segments.parents,
            block_ids=segments.block_ids,
            num_rows=token_ids.shape[0],
            num_outputs=output_rows.shape[0],
            num_segments=len(batch.segments),
            **options,
        )
        if self._cache is None or self._cache[0] is not cache:
            self._cache = cache, cache_struct(cache)
        raise_if_failed(self._functions.pn_draft(self._session, self._cache[1], call))

    def _make_struct(
        self, tensors: Mapping[str, torch.Tensor], max_context: int
    ) -> native.DraftModel:
        config, layer = self.config, LAYER

        def matrix(*names: str) -> native.Matrix:
            weights = [tensors[f"{name}.weight"].float() for name in names]
            return self._keep(pack_stacked(self._memory, weights)).struct

        def optional(name: str, *, is_present: bool) -> native.Matrix:
            return matrix(name) if is_present else native.Matrix()

        def norm(name: str) -> int:
            return self._address(tensors[f"{name}.weight"].float())

        def in_pairs(name: str, num_heads: int) -> torch.Tensor:
            return halves_to_pairs(tensors[f"{layer}self_attn.{name}.weight"].float(), num_heads)

        qkv = [
            in_pairs("q_proj", config.num_heads),
            in_pairs("k_proj", config.num_kv_heads),
            tensors[f"{layer}self_attn.v_proj.weight"].float(),
        ]
        gate, up = (tensors[f"{layer}mlp.{name}_proj.weight"].float() for name in ("gate", "up"))
        lm_head = (
            tensors["lm_head.weight"].float()
            if config.has_lm_head
            else self._target.head_rows(self._target_ids)
        )
        table = rope_tables(self._layer, max_context).of_layer(0)
        return native.DraftModel(
            # Packed in the order in which a draft reads them.
            features=matrix("fc"),
            hidden_proj=optional("hidden_proj", is_present=config.has_hidden_proj),
            embedding_proj=optional("embedding_proj", is_present=config.has_embedding_proj),
            query_key_value=self._keep(pack_stacked(self._memory, qkv)).struct,
            attention_output=matrix(f"{layer}self_attn.o_proj"),
            gate_up=self._keep(pack_gated(self._memory, gate, up)).struct,
            down=matrix(f"{layer}mlp.down_proj"),
            head=self._keep(pack_stacked(self._memory, [lm_head])).struct,
            embedding_norm=norm(f"{layer}input_layernorm"),
            hidden_norm=norm(f"{layer}hidden_norm"),
            ffn_norm=norm(f"{layer}post_attention_layernorm"),
            final_norm=norm("norm"),
            rotations=self._address(torch.view_as_real(table).float()),
            target_ids=self._target_ids.data_ptr(),
            target=native.pointer(self._target.struct),
            num_features=config.num_features,
            normalises_features=config.normalises_features,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            inner_size=config.intermediate_size,
            draft_vocab_size=config.draft_vocab_size,
            max_context=max_context,
            rms_eps=config.rms_eps,
            score_scale=self._layer.score_scale,
        )

    def _keep(self, matrix: PackedMatrix) -> PackedMatrix:
        self._kept.append(matrix)
        return matrix

    def _address(self, values: torch.Tensor) -> int:
        kept = values.contiguous()
        self._kept.append(kept)
        return kept.data_ptr()
