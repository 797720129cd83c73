"""``ops.GpuOps`` by Triton kernels. Importing this module imports Triton."""

from __future__ import annotations

from kernels.gpu.attention.ancestors import ancestor_bits
from kernels.gpu.attention.prefill import prefill_attention
from kernels.gpu.attention.split import decode_attention, tree_attention
from kernels.gpu.embed import embed
from kernels.gpu.matmul.dispatch import matmul, matmul_gated, matmul_parts
from kernels.gpu.matmul.gated import gated
from kernels.gpu.move_rows import move_rows
from kernels.gpu.norm import add_rms_norm_, rms_norm
from kernels.gpu.rope_store import rope_store
from kernels.gpu.sampling.kernels import sample

__all__ = [
    "add_rms_norm_",
    "ancestor_bits",
    "decode_attention",
    "embed",
    "gated",
    "matmul",
    "matmul_gated",
    "matmul_parts",
    "move_rows",
    "prefill_attention",
    "rms_norm",
    "rope_store",
    "sample",
    "tree_attention",
]
