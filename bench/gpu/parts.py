"""The parts of ``bench.gpu.run``: what each of its processes measures."""

from __future__ import annotations

import gc
import json
import platform
import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.gpu.kernel_cases import SMOKE_SIZES, Case, Sizes, cases, difference, moved
from bench.gpu.models import LLAMA_3_8B, SMOKE_MODEL, BenchModel, Form, compare_with_cpu
from kernels.gpu import GpuOps, load_ops, measuring
from kernels.gpu.device import has_dependent_launch
from llm_core.batch import ForwardBatch, Launched
from llm_core.model.gpu.graphs import CudaCapture

Row = dict[str, Any]
_FLUSH_BYTES = 256 << 20  # written between two runs, so that nothing is read from a cache
_LEAST_S = 3.0  # with less left no piece is begun
_NUM_TIMED = 15
_NUM_REPEATS = 8
_CHAIN_LEN = 200
DECODER_LIMIT = 1e-3  # of float32 logits
_REPLAY_LIMIT = 0.1  # of |logits|: attention is split otherwise, through all layers of bfloat16


class DeviceLostError(Exception):
    """The device does not answer any more: this process can measure nothing else."""


@dataclass
class Bench:
    """The device, the time that is left, and what was found: written to ``path`` after each row."""

    is_smoke: bool
    deadline: float
    path: Path | None
    ops: GpuOps
    device: torch.device
    found: dict[str, Any] = field(default_factory=dict)
    errors: list[Row] = field(default_factory=list)
    copy_bytes_per_s: float = 0.0
    flops_per_s: float = 0.0
    skip_cases: int = 0
    is_tuned: bool = True

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def write(self) -> None:
        """What was found so far, whole or not at all."""
        if self.path is not None:
            temporary = self.path.with_suffix(".part")
            temporary.write_text(
                json.dumps({**self.found, "errors": self.errors}, indent=1), encoding="utf-8"
            )
            temporary.replace(self.path)

    def fail(self, where: str, error: BaseException | str) -> None:
        """Notes what went wrong, with its traceback."""
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        trace = "" if isinstance(error, str) else "".join(traceback.format_exception(error))
        self.errors.append({"where": where, "error": text[:2000], "traceback": trace[-6000:]})
        print(f"FAILED {where}: {text[:500]}", flush=True)
        self.write()

    def attempt(self, where: str, run: Callable[[], object]) -> None:
        """Runs a piece if there is time; its failure is noted and nothing more, unless the device
        is lost: raises DeviceLostError then."""
        if self.left_s < _LEAST_S and not self.is_smoke:
            self.fail(where, f"left out, {self.left_s:.0f} s are left")
            return
        try:
            run()
            self.wait()
        except DeviceLostError:
            raise
        # Whatever a card, its driver or a compiler can think of: the rest is still worth its time.
        except Exception as error:
            self.fail(where, error)
            self._check_device()
        self.write()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wait(self) -> None:
        """Until the device is done: an error is then told here, not later."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _check_device(self) -> None:
        try:
            self.wait()
            torch.zeros(8, device=self.device).sum().item()
        except RuntimeError as error:
            raise DeviceLostError(str(error)) from error

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
            start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start_event.record()
            run()
            end_event.record()
            pairs.append((start_event, end_event))
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

    def measuring(self) -> AbstractContextManager[None]:
        """Launch configurations are measured inside, if they are to be."""
        return measuring() if self.is_tuned else nullcontext()

    def capture(self) -> CudaCapture | None:
        return CudaCapture() if self.device.type == "cuda" else None


def card(bench: Bench) -> None:
    """What it is, what it copies and multiplies, and whether the decoder is right on it."""
    bench.attempt("machine", lambda: _machine(bench))
    bench.attempt("ceilings", lambda: _ceilings(bench))
    bench.attempt("decoder", lambda: _decoder(bench))
    if bench.device.type == "cuda":
        bench.attempt("launches", lambda: _launches(bench))


def _machine(bench: Bench) -> None:
    import triton

    is_cuda = bench.device.type == "cuda"
    found: Row = {
        "device": torch.cuda.get_device_name() if is_cuda else "Triton's interpreter",
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    if is_cuda:
        properties = torch.cuda.get_device_properties(bench.device)
        found["capability"] = [properties.major, properties.minor]
        found["multiprocessors"] = properties.multi_processor_count
        found["memory_gb"] = properties.total_memory / 1e9
        found["dependent_launch"] = has_dependent_launch(bench.device)
    bench.found["machine"] = found
    print(json.dumps(found), flush=True)


def _ceilings(bench: Bench) -> None:
    """With torch's own copy and product."""
    size = 1 << (20 if bench.is_smoke else 30)
    source = torch.randint(127, (size,), dtype=torch.int8, device=bench.device)
    target = torch.empty_like(source)
    bench.copy_bytes_per_s = 2 * size / bench.time_s(lambda: target.copy_(source))
    n = 64 if bench.is_smoke else 8192
    a, b = (torch.randn(n, n, device=bench.device).bfloat16() for _ in range(2))
    bench.flops_per_s = 2 * n**3 / bench.time_s(lambda: a @ b)
    words = torch.zeros(1 << 18, dtype=torch.int32, pin_memory=bench.device.type == "cuda")
    bench.found["ceilings"] = {
        "copy_gb_per_s": bench.copy_bytes_per_s / 1e9,
        "bf16_tflop_per_s": bench.flops_per_s / 1e12,
        "host_to_device_1mb_us": bench.time_s(lambda: words.to(bench.device, non_blocking=True))
        * 1e6,
    }
    print(json.dumps(bench.found["ceilings"]), flush=True)


def _launches(bench: Bench) -> None:
    """Microseconds of a small kernel in a chain that is replayed, each of which reads what the one
    before it wrote: launched early, where the card can, and when that one has ended."""
    from kernels.gpu import launch

    x, weight = (torch.randn(1, 4096, device=bench.device) for _ in range(2))

    def chain() -> None:
        made = x
        for _ in range(_CHAIN_LEN):
            made = bench.ops.rms_norm(made, weight[0], 1e-5)

    can = has_dependent_launch(bench.device)
    found: Row = {}
    for name, is_early in (("early_us", can), ("waiting_us", False)):
        with mock.patch.object(launch, "has_dependent_launch", lambda _, early=is_early: early):
            graph = CudaCapture()(chain)
        found[name] = bench.time_s(graph.replay, flush=False) / _CHAIN_LEN * 1e6
    bench.found["launches"] = found
    print(json.dumps(found), flush=True)


def _decoder(bench: Bench) -> None:
    """Steps of a small float32 model, eager and replayed, against the CPU's decoder."""
    found = compare_with_cpu(bench.ops, bench.device, bench.capture(), is_smoke=bench.is_smoke)
    bench.found["decoder"] = found
    print(json.dumps(found), flush=True)
    wrong = {name: error for name, error in found.items() if not error < DECODER_LIMIT}
    if wrong:
        bench.fail("decoder", f"it does not equal the CPU's: {wrong}")


def kernels(bench: Bench) -> None:
    """Every case; one that fails does not end the others. ``skip_cases`` were tried before."""
    oracle = load_ops("oracle")
    rows: list[Row] = []
    bench.found["kernels"] = rows
    makers = cases(SMOKE_SIZES if bench.is_smoke else Sizes())
    for number, make in enumerate(makers):
        if number < bench.skip_cases:
            continue
        rows.append({"case": number, "kernel": f"case {number}", "ok": False})
        bench.write()  # if it never returns, the next process goes on behind it

        def run(row: Row = rows[-1], make: Callable[[], Case] = make) -> None:
            case = make()
            row["kernel"] = case.name
            row.update(_kernel(bench, oracle, case))

        bench.attempt(f"kernel case {number}", run)
        row = rows[-1]
        figures = " ".join(f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, float))
        print(f"{row['kernel']:44s} {'ok ' if row['ok'] else 'BAD'} {figures}", flush=True)
        if "difference" in row and not row["ok"]:
            bench.fail(row["kernel"], f"it does not equal its oracle: {row['difference']:.3g}")


def _kernel(bench: Bench, oracle: GpuOps, case: Case) -> Row:
    # The oracle runs on the CPU: nothing that may be wrong with the card is in what is expected.
    expected_inputs, inputs = moved(case.inputs, "cpu"), moved(case.inputs, bench.device)
    expected = case.run(oracle, expected_inputs) + case.written(expected_inputs)
    start = time.perf_counter()
    outputs = case.run(bench.ops, inputs)
    bench.wait()
    took_s = time.perf_counter() - start
    result = outputs + case.written(inputs)
    error = max(difference(r, e) for r, e in zip(result, expected, strict=True))
    if not bench.is_smoke:
        with bench.measuring():
            case.run(bench.ops, inputs)
        took_s = bench.time_s(lambda: case.run(bench.ops, inputs))
    bytes_s = case.cost.num_bytes / bench.copy_bytes_per_s
    return {
        "ok": error <= case.limit,
        "difference": error,
        "us": took_s * 1e6,
        "gb_per_s": case.cost.num_bytes / took_s / 1e9,
        "tflop_per_s": case.cost.num_flops / took_s / 1e12,
        "share_of_floor": case.cost.floor_s(bench.copy_bytes_per_s, bench.flops_per_s) / took_s,
        "bound": "memory" if bytes_s > case.cost.num_flops / bench.flops_per_s else "arithmetic",
        "mb": case.cost.num_bytes / 1e6,
    }


def model(bench: Bench, form: Form) -> None:
    """Decode steps at several batch sizes, verification of trees of drafts, and prompts."""
    config = SMOKE_MODEL if bench.is_smoke else LLAMA_3_8B
    context = 10 if bench.is_smoke else 1024
    batches: tuple[int, ...] = (1, 8, 64)
    if bench.is_smoke:
        batches = (1, 2) if form == "bf16" else (2,)
    result: Row = {"decode": [], "verify": [], "prefill": []}
    bench.found[form] = result
    made = BenchModel(
        *(config, form, bench.ops, bench.device, bench.capture()),
        num_sequences=batches[-1],
        sequence_len=context + 64,
    )
    result["weights"] = made.decoder.weight_format
    result["weight_gb"] = made.decoder.num_weight_bytes / 1e9
    # What a goal depends on comes first.
    for count in batches:
        bench.attempt(
            f"{form} decode {count}",
            lambda count=count: result["decode"].append(  # type: ignore[misc]
                _decode(bench, made, count, context, is_brief=bench.is_smoke and count > 1)
            ),
        )
    if form == "bf16" or not bench.is_smoke:  # else the same code once more
        bench.attempt(f"{form} verify", lambda: _verification(bench, made, context, result))
        for length in (3,) if bench.is_smoke else (1024, 8192):
            bench.attempt(
                f"{form} prompt {length}",
                lambda length=length: result["prefill"].append(_prefill(bench, made, length)),  # type: ignore[misc]
            )
    if bench.device.type == "cuda":
        from kernels.gpu.tuning import TUNER

        result["tuned"] = TUNER.chosen
        # The profiler last: what it does with a driver is not ours.
        bench.attempt(f"{form} profile", lambda: result.update(kernels_of_a_step=_profile(made)))
    print(json.dumps({**result, "tuned": None}, indent=1), flush=True)


def _decode(bench: Bench, made: BenchModel, count: int, context: int, *, is_brief: bool) -> Row:
    """``is_brief``: a step is enough, for looking for mistakes."""
    batch = made.batch(count, context - 1, 1, tree=False, chooses=True)
    logits_too = made.batch(count, context - 1, 1, tree=False)
    if not bench.is_smoke:
        with bench.measuring():
            for _ in range(4):  # recorded at the third time
                made.decoder.forward(batch, made.cache)
    wall_s = bench.wall_s(lambda: made.decoder.forward(batch, made.cache), 25)
    if is_brief:
        return {"batch": count, "step_ms": wall_s * 1e3}
    _same_again(bench, made, logits_too, f"decode {count}")
    with_logits_s = bench.wall_s(lambda: made.decoder.forward(logits_too, made.cache), 25)
    step = made.decoder.pack(batch, made.cache)
    device_s = bench.time_s(lambda: made.decoder.run(step, made.cache), flush=False)
    num_bytes = made.decoder.num_weight_bytes + made.kv_bytes(count * context)
    floor_s = num_bytes / bench.copy_bytes_per_s
    overlapped_s = _overlapped_s(bench, made, count, context)
    row = {
        "batch": count,
        "step_ms": wall_s * 1e3,
        "step_with_logits_ms": with_logits_s * 1e3,
        "overlapped_ms": overlapped_s * 1e3,
        "device_ms": device_s * 1e3,
        "floor_ms": floor_s * 1e3,
        "share_of_floor": floor_s / wall_s,
        "overlapped_share_of_floor": floor_s / overlapped_s,
        "device_share_of_floor": floor_s / device_s,
        "tokens_per_s": count / overlapped_s,
    }
    print(json.dumps(row), flush=True)
    return row


def _same_again(bench: Bench, made: BenchModel, batch: ForwardBatch, where: str) -> None:
    """Replayed steps give the same bits each time, or kernels do not wait for one another; and
    about what the same step gives that is launched kernel by kernel."""
    results = [made.decoder.forward(batch, made.cache).logits for _ in range(1 + _NUM_REPEATS)]
    num_others = sum(not torch.equal(result, results[0]) for result in results)
    if num_others:
        bench.fail(where, f"{num_others} of {_NUM_REPEATS} equal steps gave other bits: a race")
    step = replace(made.decoder.pack(batch, made.cache), shape=None)
    logits = made.decoder.run(step, made.cache).logits[: step.num_logit_rows].cpu()
    error = difference(results[0], logits)
    if not error < _REPLAY_LIMIT:
        bench.fail(where, f"replayed, it differs from the same step launched singly: {error:.3g}")


def _overlapped_s(bench: Bench, made: BenchModel, count: int, context: int) -> float:
    """Of a step, where each is packed and launched while the one before it runs."""
    num_steps = 2 if bench.is_smoke else 40
    flying: Launched | None = None
    start = time.perf_counter()
    for _ in range(num_steps):
        batch = made.batch(count, context - 1, 1, tree=False, chooses=True)
        following = made.decoder.launch(batch, made.cache)
        if flying is not None:
            flying.result()
        flying = following
    if flying is not None:
        flying.result()
    return (time.perf_counter() - start) / num_steps


def _verification(bench: Bench, made: BenchModel, context: int, result: Row) -> None:
    """Trees of 1 to 64 rows at ``context``; what a row costs beside the first."""
    rows: list[Row] = result["verify"]
    for count in (1, 2) if bench.is_smoke else (1, 8, 2, 4, 16, 32, 64):
        batch = made.batch(1, context, count, tree=True, chooses=True)
        if not bench.is_smoke:
            with bench.measuring():
                for _ in range(4):
                    made.decoder.forward(batch, made.cache)
        wall_s = bench.wall_s(lambda batch=batch: made.decoder.forward(batch, made.cache), 15)  # type: ignore[misc]
        first_s = rows[0]["step_ms"] / 1e3 if rows else wall_s
        rows.append({"rows": count, "step_ms": wall_s * 1e3, "times_one_row": wall_s / first_s})
        bench.write()
        if count in (2, 8):
            _same_again(bench, made, made.batch(1, context, count, tree=True), f"verify {count}")


def _prefill(bench: Bench, made: BenchModel, length: int) -> Row:
    """Time to the first token of a cold prompt, in one chunk and in chunks of 512."""

    def chunks(size: int) -> None:
        for start in range(0, length, size):
            rows = min(size, length - start)
            batch = made.batch(1, start, rows, tree=False, chooses=rows > 1)
            made.decoder.forward(batch, made.cache)

    if not bench.is_smoke:
        with bench.measuring():
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


def _profile(made: BenchModel) -> list[Row]:
    """Where a decode step's time goes: microseconds and launches of each kernel, longest first."""
    from torch.profiler import ProfilerActivity, profile

    step = made.decoder.pack(made.batch(1, 1023, 1, tree=False, chooses=True), made.cache)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        made.decoder.run(step, made.cache)
        torch.cuda.synchronize()
    events = [e for e in profiled.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda e: -e.self_device_time_total)
    return [
        {"kernel": e.key[:80], "us": e.self_device_time_total, "launches": e.count}
        for e in events[:20]
    ]
