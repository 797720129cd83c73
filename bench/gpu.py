"""Everything that needs a GPU to be known, on one card, in at most eight minutes.

    python bench/gpu.py [--json gpu.json] [--minutes 8] [--only SECTION ...]
    python bench/gpu.py --smoke     # all of it in Triton's interpreter, tiny: for finding mistakes

Sections, in order of what is lost if time runs out: the card's ceilings; the decoder against the
CPU's; each kernel against its oracle on fresh random inputs, and its time against its floor; decode
steps, prompts and verification of a Llama-3-8B-shaped model with random weights. A section that
fails is reported, and the rest goes on. Needs torch with CUDA, triton, and 40 GB of GPU memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if "--smoke" in sys.argv:  # read by Triton when kernels are defined
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.gpu_kernels import SMOKE_SIZES, Case, Sizes, cases, difference, moved
from bench.gpu_models import LLAMA_3_8B, SMOKE_MODEL, BenchModel, Form, compare_with_cpu
from kernels.gpu import load_ops, measuring, unavailable_reason
from llm_core.cuda_graphs import CudaCapture

Row = dict[str, Any]
_FLUSH_BYTES = 256 << 20  # written between two runs, so that nothing is read from a cache
_NUM_TIMED = 15
_MODEL_SECONDS = 75  # a model is not begun with less than this left
_GRACE_S = 8  # for what was begun in time


@dataclass
class Bench:
    """The device, the time that is left, and what was found."""

    is_smoke: bool
    deadline: float
    ops: Any = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    found: dict[str, Any] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    copy_bytes_per_s: float = 0.0
    flops_per_s: float = 0.0

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def write(self, path: Path | None) -> None:
        """What was found so far."""
        if path is not None:
            found = {**self.found, "errors": self.errors}
            path.write_text(json.dumps(found, indent=1), encoding="utf-8")

    def end_at_deadline(self, path: Path | None) -> None:
        """Whatever hangs then (a compilation, a kernel that does not end) ends with the process."""

        def end() -> None:
            self.errors.append("the time was up before all was measured")
            self.write(path)
            print("FAILED the time was up before all was measured", file=sys.stderr, flush=True)
            os._exit(3)

        timer = threading.Timer(self.left_s + _GRACE_S, end)
        timer.daemon = True
        timer.start()

    def section(self, name: str, run: Callable[[], Any], least_s: float = 5.0) -> None:
        """Runs a part, if there is time for it; its failure is noted and nothing more."""
        if self.left_s < least_s and not self.is_smoke:
            self.errors.append(f"{name}: left out, {self.left_s:.0f} s are left")
            return
        start = time.monotonic()
        try:
            self.found[name] = run()
        except Exception as error:
            self.errors.append(f"{name}: {type(error).__name__}: {error}")
            traceback.print_exc()
        print(f"-- {name}: {time.monotonic() - start:.0f} s, {self.left_s:.0f} s left", flush=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def time_s(self, run: Callable[[], object], *, flush: bool = True) -> float:
        """The median time of ``run`` on the device; on the CPU that of one run."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        for _ in range(3):
            run()
        cache = torch.empty(_FLUSH_BYTES if flush else 1, dtype=torch.int8, device=self.device)
        pairs = []
        for _ in range(_NUM_TIMED):
            # Writing over the cache also keeps the device busy while ``run`` is being launched.
            cache.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3

    def wall_s(self, run: Callable[[], object], count: int) -> float:
        """The median time of ``run`` as the caller sees it; ``run`` waits for its result."""
        times = []
        for _ in range(1 if self.is_smoke else count):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def capture(self) -> CudaCapture | None:
        return CudaCapture() if self.device.type == "cuda" else None


def ceilings(bench: Bench) -> Row:
    """What the card copies and multiplies, measured with torch."""
    size = 1 << (20 if bench.is_smoke else 30)
    source = torch.zeros(size, dtype=torch.int8, device=bench.device)
    target = torch.empty_like(source)
    bench.copy_bytes_per_s = 2 * size / bench.time_s(lambda: target.copy_(source))
    n = 64 if bench.is_smoke else 8192
    a, b = (torch.randn(n, n, device=bench.device).bfloat16() for _ in range(2))
    bench.flops_per_s = 2 * n**3 / bench.time_s(lambda: a @ b)
    return {
        "copy_gb_per_s": bench.copy_bytes_per_s / 1e9,
        "bf16_tflop_per_s": bench.flops_per_s / 1e12,
    }


def kernels(bench: Bench) -> list[Row]:
    """Every case; one that fails does not end the others."""
    oracle = load_ops("oracle")
    rows: list[Row] = []
    bench.found["kernels"] = rows  # kept if a later one hangs
    for make in cases(SMOKE_SIZES if bench.is_smoke else Sizes()):
        if bench.left_s < 3 * _MODEL_SECONDS and not bench.is_smoke:
            bench.errors.append("kernels: not all, to leave time for the models")
            break
        case = make()
        try:
            rows.append(_kernel(bench, oracle, case))
        except Exception as error:
            bench.errors.append(f"{case.name}: {type(error).__name__}: {error}")
            rows.append({"kernel": case.name, "ok": False})
        row = rows[-1]
        print(
            f"{row['kernel']:44s} {'ok ' if row['ok'] else 'BAD'}"
            + " ".join(f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, float)),
            flush=True,
        )
    wrong = [row["kernel"] for row in rows if not row["ok"]]
    if wrong:
        bench.errors.append(f"kernels that do not equal their oracle: {', '.join(wrong)}")
    return rows


def _kernel(bench: Bench, oracle: Any, case: Case) -> Row:
    expected_inputs, inputs = moved(case.inputs, "cpu"), moved(case.inputs, bench.device)
    expected = case.run(oracle, expected_inputs) + case.written(expected_inputs)
    start = time.perf_counter()
    outputs = case.run(bench.ops, inputs)
    took_s = time.perf_counter() - start
    result = outputs + case.written(inputs)
    error = max(difference(r, e) for r, e in zip(result, expected, strict=True))
    if not bench.is_smoke:
        with measuring():
            case.run(bench.ops, inputs)
        took_s = bench.time_s(lambda: case.run(bench.ops, inputs))
    floor_s = case.cost.floor_s(bench.copy_bytes_per_s, bench.flops_per_s)
    return {
        "kernel": case.name,
        "ok": error <= case.limit,
        "difference": error,
        "us": took_s * 1e6,
        "gb_per_s": case.cost.num_bytes / took_s / 1e9,
        "tflop_per_s": case.cost.num_flops / took_s / 1e12,
        "share_of_floor": floor_s / took_s,
    }


def model(bench: Bench, form: Form) -> Row:
    """Decode steps at several batch sizes, prompts, and verification of trees of drafts."""
    config = SMOKE_MODEL if bench.is_smoke else LLAMA_3_8B
    context = 10 if bench.is_smoke else 1024
    batches = (1, 2) if bench.is_smoke else (1, 8, 64)
    made = BenchModel(
        *(config, form, bench.ops, bench.device, bench.capture()),
        num_sequences=batches[-1],
        sequence_len=context + 64,
    )
    with measuring():
        made.decoder.warm_up(made.cache, batches[-1])
    result: Row = {"weights": made.decoder.weight_format}
    bench.found[form] = result
    result["weight_gb"] = made.decoder.num_weight_bytes / 1e9
    result["decode"] = [_decode(bench, made, count, context) for count in batches]
    if bench.is_smoke and form != "bf16":
        return result  # the rest would be the same code once more
    result["verify"] = _verification(bench, made, context)
    prompts = (3,) if bench.is_smoke else (1024, 8192)
    result["prefill"] = [_prefill(bench, made, length) for length in prompts]
    print(json.dumps(result, indent=1), flush=True)
    return result


def _decode(bench: Bench, made: BenchModel, count: int, context: int) -> Row:
    batch = made.batch(count, context - 1, 1, tree=False)
    wall_s = bench.wall_s(lambda: made.decoder.forward(batch, made.cache), 25)
    step = made.decoder.pack(batch, made.cache)
    device_s = bench.time_s(lambda: made.decoder.run(step, made.cache), flush=False)
    num_bytes = made.decoder.num_weight_bytes + made.kv_bytes(count * context)
    floor_s = num_bytes / bench.copy_bytes_per_s
    return {
        "batch": count,
        "step_ms": wall_s * 1e3,
        "device_ms": device_s * 1e3,
        "floor_ms": floor_s * 1e3,
        "share_of_floor": floor_s / wall_s,
        "device_share_of_floor": floor_s / device_s,
        "tokens_per_s": count / wall_s,
    }


def _verification(bench: Bench, made: BenchModel, context: int) -> list[Row]:
    """Trees of 1 to 64 rows at ``context``; what a row costs beside the first."""
    rows: list[Row] = []
    for count in (1, 2) if bench.is_smoke else (1, 2, 4, 8, 16, 32, 64):
        batch = made.batch(1, context, count, tree=True)
        if not bench.is_smoke:
            with measuring():
                made.decoder.forward(batch, made.cache)
        # At the third time its shape is recorded.
        wall_s = bench.wall_s(lambda batch=batch: made.decoder.forward(batch, made.cache), 15)  # type: ignore[misc]
        first_s = rows[0]["step_ms"] / 1e3 if rows else wall_s
        rows.append({"rows": count, "step_ms": wall_s * 1e3, "times_one_row": wall_s / first_s})
    return rows


def _prefill(bench: Bench, made: BenchModel, length: int) -> Row:
    """Time to the first row of logits of a cold prompt, in one chunk and in chunks of 512."""

    def chunks(size: int) -> None:
        for start in range(0, length, size):
            rows = min(size, length - start)
            made.decoder.forward(made.batch(1, start, rows, tree=False), made.cache)

    if not bench.is_smoke:
        with measuring():
            chunks(length)
            chunks(512)
    whole_s = bench.wall_s(lambda: chunks(length), 3)
    flops = made.prefill_flops(length)
    return {
        "tokens": length,
        "ttft_ms": whole_s * 1e3,
        "ttft_in_chunks_ms": bench.wall_s(lambda: chunks(512), 3) * 1e3,
        "tflop_per_s": flops / whole_s / 1e12,
        "share_of_flops": flops / bench.flops_per_s / whole_s,
    }


def decoder(bench: Bench) -> dict[str, float]:
    """Steps of a small float32 model, eager and replayed, against the CPU's decoder."""
    found = compare_with_cpu(bench.ops, bench.device, bench.capture(), is_smoke=bench.is_smoke)
    print(json.dumps(found), flush=True)
    wrong = {name: error for name, error in found.items() if not error < 1e-3}
    if wrong:
        bench.errors.append(f"the decoder does not equal the CPU's: {wrong}")
    return found


def machine(bench: Bench) -> Row:
    is_cuda = bench.device.type == "cuda"
    import triton

    return {
        "device": torch.cuda.get_device_name() if is_cuda else "Triton's interpreter",
        "capability": list(torch.cuda.get_device_capability()) if is_cuda else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument("--minutes", type=float, default=8.0, help="at most this long")
    parser.add_argument("--smoke", action="store_true", help="tiny, in Triton's interpreter")
    parser.add_argument("--only", nargs="+", help="of: decoder kernels bf16 fp8 int4")
    arguments = parser.parse_args()
    reason = unavailable_reason()
    if reason is not None:
        print(f"nothing can be measured: {reason} (--smoke needs none)", file=sys.stderr)
        return 2
    bench = Bench(arguments.smoke, time.monotonic() + 60 * arguments.minutes - 2 * _GRACE_S)
    bench.end_at_deadline(arguments.json)
    bench.ops = load_ops("triton")
    if not bench.is_smoke:
        bench.device = torch.device("cuda", torch.cuda.current_device())
    forms: tuple[Form, ...] = ("bf16", "int4", "fp8")
    parts: dict[str, tuple[Callable[[], Any], float]] = {
        "decoder": (lambda: decoder(bench), 20),
        "kernels": (lambda: kernels(bench), 60),
    }
    for form in forms:
        parts[form] = (lambda form=form: model(bench, form), _MODEL_SECONDS)  # type: ignore[misc]
    with torch.inference_mode():
        bench.section("machine", lambda: machine(bench))
        bench.section("ceilings", lambda: ceilings(bench))
        for name, (run, least_s) in parts.items():
            if arguments.only is None or name in arguments.only:
                bench.section(name, run, least_s)
    bench.write(arguments.json)
    print(json.dumps({name: bench.found.get(name) for name in ("machine", "ceilings")}))
    for error in bench.errors:
        print(f"FAILED {error}", file=sys.stderr)
    return 1 if bench.errors else 0


if __name__ == "__main__":
    sys.exit(main())
