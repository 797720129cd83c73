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

        x may be parts [P, T, H] (of ``matmul_parts``), which are summed first. ``post_weight`` [H]:
        weight of an RMS norm of x before the addition (Gemma's post-norms). The norm is of the sum
        before rounding to the residual's dtype; the result has ``out_dtype``, or x's dtype.
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
        """Returns rotated queries [T, num_heads, D]; stores rotated keys, and values, in ``pages``.

        qkv [T, (num_heads + 2 * num_kv_heads) * D] has rows of queries, keys, values; or parts
        [P, T, ...], which are summed. Queries have ``out_dtype``, or qkv's dtype. Applied in this
        order: ``bias`` of the row's width; RMS norm over D of queries and keys with ``query_norm``
        and ``key_norm`` [D]; rotation by ``rotations`` float32 [num_positions, D / 2, 2] (cosine
        and sine, optionally scaled) at ``positions`` int32 or int64 [T]. Row t is stored at
        position ``slots[t]`` (int32 or int64) of the pool; not at all if that is negative.
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
        """One row per sequence: query [B, num_heads, D] over the first ``lengths`` (int32 [B])
        positions, the last of which is the row's own. Length 0 gives zeros.

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
        """Causal attention of prompt chunks: query [T, num_heads, D], with keys already stored.

        ``max_query_len`` is at least the number of rows of any sequence.
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
        """Attention of draft trees: row r of sequence b is stored at position starts[b] + r, and
        sees all positions before starts[b], its ancestors and itself.

        ``ancestors`` int32 [T, W], W = ceil(max_query_len / 32), is the result of
        ``ancestor_bits``: bit j % 32 of word j // 32 is set if row j of the same sequence is seen.
        ``positions`` int32 or int64 [T]: the RoPE positions (start + depth), to which ``window``
        refers. ``max_length`` is at least the largest start + rows.
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
        """Partial products [P, T, N] whose sum is ``matmul``, for operations that accept parts, so
        that split-K products of few rows need no kernel that sums. float32 if P > 1, else float32
        or x's dtype."""

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
        ``out_dtype`` or the table's. An id outside the vocabulary (padding)
        gives zeros.

        ``sources`` int32 [T] and ``chosen`` int64 [N], both or neither: if a source is not
        negative, the id is ``chosen[source]`` instead, the token that the previous step sampled.
        """

    def sample(
        self,
        logits: torch.Tensor,
        inputs: SamplingInputs,
        *,
        allowed: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Samples a token for each row of logits [B, vocab]: int64 [B], a prefix of ``out`` if
        given; -1 for unusable logits (NaN, +inf, or no token allowed).

        Top-k, then top-p of the remaining tokens (of equal logits at a threshold the smaller ids),
        then min-p; sampled in the order of ids with the random number of (seed, position).
        ``allowed`` int32 [B, ceil(vocab / 32)] is a grammar's bit mask.
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

        Both int64 [B, R]; entries with a negative source are skipped. Within a sequence all rows
        are read before any is written; different sequences must use different positions.
        """
