"""Compiles every GPU kernel for a card that need not be there, with the arguments that its wrapper
gives it.

    python -m tests.support.gpu_compile # to machine code: a table of what each kernel uses
    python -m tests.support.gpu_compile --front-end  # types and shapes only, a few seconds
    python -m tests.support.gpu_compile --capability 80

The interpreter runs kernels as NumPy and lets pass what a compiler refuses: types that differ
between branches, shapes that are no powers of two, conversions that a card does not have. Launches
are turned into compilations; nothing runs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # read when Triton is imported

import torch
import triton

from bench.gpu.compile import check_front_end, compile_on_launch
from kernels.gpu import (
    GpuWeight,
    KvPages,
    SamplingInputs,
    load_ops,
    pack_float8,
    pack_int4,
    pack_int8,
)

OPS = load_ops("triton")
HALF = torch.bfloat16
NUM_ROWS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 32, 8, 128
NUM_MULTIPROCESSORS = 132  # of an H200: loops are split as they are there


def launch_row_kernels() -> None:
    x, weight = torch.zeros(NUM_ROWS, 4096, dtype=HALF), torch.zeros(4096, dtype=HALF)
    OPS.rms_norm(x, weight, 1e-5)
    OPS.add_rms_norm_(x, x, weight, 1e-5, post_weight=weight)
    OPS.gated(x)
    OPS.gated(x, "gelu_tanh")
    ids = torch.zeros(NUM_ROWS, dtype=torch.int32)
    OPS.embed(x, ids, 2.0, sources=ids, chosen=ids.long(), out_dtype=torch.float32)


def launch_attention(kv_dtype: torch.dtype, *, is_plain: bool) -> None:
    """``is_plain``: without soft cap, window, bias and norms."""
    data = torch.zeros(2 * NUM_KV_HEADS, 256, HEAD_DIM).to(kv_dtype)
    scales = torch.zeros(2 * NUM_KV_HEADS, 256) if kv_dtype.itemsize == 1 else None
    pages = KvPages(data, scales, 16)
    zeros = torch.zeros(NUM_ROWS, dtype=torch.int32)
    qkv = torch.zeros(NUM_ROWS, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, dtype=HALF)
    table = torch.zeros(64, HEAD_DIM // 2, 2)
    norm = None if is_plain else torch.zeros(HEAD_DIM)
    query = OPS.rope_store(
        *(qkv, table, zeros, zeros.long(), pages),
        num_heads=NUM_HEADS,
        bias=None if is_plain else torch.zeros(qkv.shape[1]),
        query_norm=norm,
        key_norm=norm,
    )
    options: dict[str, Any] = {"scale": 0.1}
    if not is_plain:
        options |= {"softcap": 30.0, "window": 1024}
    tables = torch.zeros(NUM_ROWS, 32, dtype=torch.int32)
    edges = torch.arange(NUM_ROWS + 1, dtype=torch.int32)
    OPS.decode_attention(query, pages, tables, zeros, max_length=8192, **options)
    OPS.prefill_attention(query, pages, tables, edges, zeros, max_query_len=512, **options)
    bits = OPS.ancestor_bits(zeros, edges, max_query_len=8)
    OPS.tree_attention(
        *(query, pages, tables, edges, zeros, zeros, bits),
        max_query_len=8,
        max_length=8192,
        **options,
    )
    moved = torch.zeros(2, 8, dtype=torch.int64)
    OPS.move_rows(data[None], None if scales is None else scales[None], moved, moved)


def launch_matmuls(*, has_float8: bool) -> None:
    num_out, num_in = 256, 4096
    codes = torch.zeros(num_out, num_in, dtype=torch.uint8)
    scale, scales_32, scales_128 = (
        torch.ones(num_out, n) for n in (1, num_in // 32, num_in // 128)
    )
    weights: list[GpuWeight] = [
        pack_int4(codes, scales_128, None, 128),
        pack_int4(codes, scales_32, scales_32, 32),
        pack_int8(codes.view(torch.int8), scale[:, 0]),
        pack_int8(codes, scales_32, None, 32),
        codes.to(HALF),
    ]
    if has_float8:
        weights.append(pack_float8(codes.to(torch.float8_e4m3fn), scale[:, 0]))
    for weight in weights:
        for num_rows in (1, 300):
            OPS.matmul(torch.zeros(num_rows, num_in, dtype=HALF), weight)
        OPS.matmul_gated(torch.zeros(NUM_ROWS, num_in, dtype=HALF), weight)


def launch_sampling() -> None:
    numbers = torch.ones(NUM_ROWS)
    inputs = SamplingInputs(
        *(numbers, numbers.int(), numbers, numbers, numbers.long(), numbers.long())
    )
    allowed = torch.zeros(NUM_ROWS, 128256 // 32, dtype=torch.int32)
    OPS.sample(torch.zeros(NUM_ROWS, 128256), inputs, allowed=allowed)


def launch_all(capability: int) -> None:
    launch_row_kernels()
    kv_dtypes = [HALF, torch.int8]
    has_float8 = capability >= 89
    if has_float8:
        kv_dtypes.append(torch.float8_e4m3fn)
    for index, kv_dtype in enumerate(kv_dtypes):
        launch_attention(kv_dtype, is_plain=index == 0)
    launch_matmuls(has_float8=has_float8)
    launch_sampling()


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack: what is spilled lies there) of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [re.search(rf"{name}:(\d+)", text) for name in ("REG", "STACK")]
    assert all(found), text
    return int(found[0][1]), int(found[1][1])  # type: ignore[index]


def report_row(name: str, compiled: Any) -> None:
    if compiled is None:
        print(name, flush=True)
        return
    ptx = compiled.asm["ptx"]
    registers, stack = resources(compiled.asm["cubin"])
    counts = [len(re.findall(p, ptx)) for p in (r"wgmma\.mma_async", r"mma\.sync", r"cp\.async\.c")]
    meta = compiled.metadata
    print(
        f"| {name} | {meta.num_warps} | {registers} | {stack} | {meta.shared} | "
        f"{counts[0]} | {counts[1]} | {counts[2]} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--front-end", action="store_true")
    parser.add_argument("--capability", type=int, default=90)
    options = parser.parse_args()
    if options.front_end:
        triton.compiler.compile = check_front_end
    else:
        print("| kernel | warps | registers | stack | shared bytes | wgmma | mma | cp.async |")
        print("|---|---|---|---|---|---|---|---|")
    compile_on_launch(options.capability, NUM_MULTIPROCESSORS, report_row)
    launch_all(options.capability)


if __name__ == "__main__":
    sys.exit(main())
