"""Signatures of the GPU operations, implemented by ``triton_ops`` and by ``oracle``.

Names of sizes: T rows of a step, B sequences, H hidden_size, D head_dim, N and K a weight's outputs
and inputs. A ragged batch is described by ``query_starts`` int32 [B + 1]: sequence b has the rows
[query_starts[b], query_starts[b + 1]) of the step, possibly none; ``starts`` int32 [B] is the
position of its first row, i.e. the number of its cached positions. Rows that belong to no sequence
are not written.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from kernels.gpu.attention.pages import KvPages
from kernels.gpu.matmul.weights import GpuWeight
from kernels.gpu.sampling.inputs import SamplingInputs

GateName = Literal["silu", "gelu_tanh"]


class GpuOps(Protocol):
    """Every operation; activations are float32, bfloat16 or float16, sums are float32."""

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """x [T, H] / sqrt(mean(x^2) + eps) * weight [H], in ``out_dtype`` or x's."""

    def add_rms_norm_(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        post_weight: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """residual [T, H] += x [T, H] in place, then the RMS norm of the sum.

        x may be parts [P, T, H] (of ``matmul_parts``), which are added up first. ``post_weight``
        [H]: x is normed with it before it is added (Gemma's post-norms). The sum is normed before
        it is rounded to the residual's dtype; the result has ``out_dtype``, or x's.
        """

    def rope_store(
        self,
        qkv: torch.Tensor,
        rotations: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        pages: KvPages,
        *,
        num_heads: int,
        bias: torch.Tensor | None = None,
        query_norm: torch.Tensor | None = None,
        key_norm: torch.Tensor | None = None,
        eps: float = 0.0,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Rotated queries [T, num_heads, D]; keys (rotated) and values go into ``pages``.

        qkv [T, (num_heads + 2 * num_kv_heads) * D], a row is queries, keys, values; or parts of it
        [P, T, ...], which are added up. Queries have ``out_dtype``, or qkv's. Then, in this
        order: ``bias`` of the row's width; RMS norm over D of queries and keys with ``query_norm``
        and ``key_norm`` [D]; rotation by ``rotations`` float32 [num_positions, D / 2, 2] (cosine
        and sine, perhaps times a factor) at ``positions`` int32 or int64 [T]. Row t is kept at
        position ``slots[t]`` (int32 or int64) of the pool; nothing is kept where it is negative.
        """

    def decode_attention(
        self,
        query: torch.Tensor,
        pages: KvPages,
        block_tables: torch.Tensor,
        lengths: torch.Tensor,
        *,
        max_length: int,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        """One row a sequence: query [B, num_heads, D] over the first ``lengths`` (int32 [B])
        positions, of which the row's own is the last. Length 0 gives zeros.

        block_tables int32 [B, max_blocks]; ``max_length`` is at least the largest length.
        """

    def prefill_attention(
        self,
        query: torch.Tensor,
        pages: KvPages,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        starts: torch.Tensor,
        *,
        max_query_len: int,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        """Causal attention of chunks: query [T, num_heads, D], whose keys are already in ``pages``.

        ``max_query_len`` is at least the most rows of a sequence.
        """

    def tree_attention(
        self,
        query: torch.Tensor,
        pages: KvPages,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        starts: torch.Tensor,
        positions: torch.Tensor,
        ancestors: torch.Tensor,
        *,
        max_query_len: int,
        max_length: int,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        """Rows of drafted trees: row r of sequence b lies at its position starts[b] + r, and sees
        all positions before starts[b], its ancestors and itself.

        ``ancestors`` int32 [T, W], W = ceil(max_query_len / 32), is what ``ancestor_bits`` makes:
        bit j % 32 of word j // 32 tells whether row j of the same sequence is seen. ``positions``
        int32 or int64 [T]: the rotary positions (start + depth), by which ``window`` counts.
        ``max_length`` is at least the largest start + rows.
        """

    def ancestor_bits(
        self, parents: torch.Tensor, query_starts: torch.Tensor, *, max_query_len: int
    ) -> torch.Tensor:
        """parents int32 [T] (row of the same sequence, less than its own; -1: child of the prefix)
        -> int32 [T, ceil(max_query_len / 32)], each row's own bit set too. Rows that belong to no
        sequence get 0."""

    def matmul(
        self,
        x: torch.Tensor,
        weight: GpuWeight,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """x [T, K] times the transposed weight [N, K], + bias [N] -> [T, N]."""

    def matmul_parts(self, x: torch.Tensor, weight: GpuWeight) -> torch.Tensor:
        """The same, as parts [P, T, N] whose sum it is, for an operation that takes parts: a
        product of few rows is split over the device, and so needs no kernel that adds. float32
        where P is not 1, else float32 or x's dtype."""

    def matmul_gated(
        self, x: torch.Tensor, weight: GpuWeight, gate: GateName = "silu"
    ) -> torch.Tensor:
        """``gated`` of ``matmul``: x [T, K], weight [2 * I, K] -> [T, I], in x's dtype."""

    def gated(self, gate_up: torch.Tensor, gate: GateName = "silu") -> torch.Tensor:
        """gate_up [T, 2 * I] -> act(gate) * up [T, I]."""

    def embed(
        self,
        table: torch.Tensor,
        token_ids: torch.Tensor,
        scale: float,
        *,
        sources: torch.Tensor | None = None,
        chosen: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Rows ``token_ids`` (int32 or int64 [T]) of table [vocab, H], times ``scale``, in
        ``out_dtype`` or the table's. An id outside the vocabulary (a row that only fills a bucket)
        gives zeros.

        ``sources`` int32 [T] and ``chosen`` int64 [N], both or neither: where ``sources`` is not
        negative, the id is ``chosen[source]`` instead, as the step before this one chose it.
        """

    def sample(
        self,
        logits: torch.Tensor,
        inputs: SamplingInputs,
        *,
        allowed: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """int64 [B], the beginning of ``out`` if that is given: the token of each row of logits
        [B, vocab]; -1 where they are unusable (NaN, +inf, or nothing allowed).

        Top-k, then top-p of what it left (of equal logits at an edge the smaller ids), then min-p,
        drawn with the random number of (seed, position) in the order of ids. ``allowed`` int32 [B,
        ceil(vocab / 32)] is a guide's mask, a bit a token.
        """

    def move_rows(
        self,
        data: torch.Tensor,
        scales: torch.Tensor | None,
        sources: torch.Tensor,
        targets: torch.Tensor,
    ) -> None:
        """Moves KV of all layers: data [num_layers, 2 * num_kv_heads, num_positions, D] and scales
        [num_layers, 2 * num_kv_heads, num_positions], position sources[b, i] to targets[b, i].

        Both int64 [B, R]; entries with a negative source are skipped. Within a sequence all are
        read before any is written; different sequences touch different positions.
        """
