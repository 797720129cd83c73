"""Compiles what ``bench.gpu.run`` will launch, ahead and in many processes: a card's time is dear,
and one process would spend most of it waiting for its compiler.

    python -m bench.gpu.compile --capability 90 --multiprocessors 132 --share 0/12

Launches are turned into compilations, on tensors without memory (of models) or of small sizes that
make the same variants (of single kernels); nothing runs and no GPU is touched. What is compiled
lies in Triton's cache, where a process with the GPU finds it. Each process takes its share.
"""

from __future__ import annotations

import argparse
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"  # read when Triton is imported
import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from bench.gpu.bare_machine import without_client
from kernels.gpu import Float8Weight, GpuWeight, Int4Weight, launch, load_ops
from kernels.gpu.device import SWITCH
from kernels.gpu.matmul import few_rows
from kernels.gpu.tuning import Config, Key, Tuner


class NoDevice:
    """What the just-in-time compiler asks of a driver."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class FrontEndDone(Exception):
    """The kernel's types and shapes are right; what follows is left out."""


def compile_on_launch(
    capability: int,
    num_multiprocessors: int,
    report: Callable[[str, Any], None],
    wants: Callable[[str], bool] = lambda what: True,
) -> None:
    """From now on a launch compiles its kernel for a card that need not be there, if ``wants``
    (asked with all that makes it a variant) says so, and calls ``report(kernel's name, compiled)``.
    """
    driver.set_active(NoDevice(capability))
    launch.num_multiprocessors = lambda device: num_multiprocessors
    has_dependent_launch = capability >= 90 and os.environ.get(SWITCH, "1") != "0"
    launch.has_dependent_launch = lambda device: has_dependent_launch
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = self.fn.__name__
        types = [str(a.dtype) if isinstance(a, torch.Tensor) else type(a).__name__ for a in args]
        if not wants(f"{name} {types} {sorted(options.items())}"):
            return
        try:
            compiled = run(self, *args, grid=grid, warmup=True, **options)
        except FrontEndDone:
            compiled = None
        report(name, compiled)

    JITFunction.run = compile_only


class _EveryCandidate(Tuner):
    """Launches each candidate: measuring will."""

    def launch(
        self,
        kernel: str,
        key: Key,
        candidates: Any,
        run: Callable[[Config], None],
        smaller: Any = (),
    ) -> None:
        for config in candidates:
            run(config)


@contextmanager
def every_candidate() -> Iterator[None]:
    """Inside, a kernel is launched with all of its launch configurations."""
    with mock.patch.object(Tuner, "launch", _EveryCandidate.launch):
        yield


class _Shapes(Mapping[str, torch.Tensor]):
    """A model's weights, without memory."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self._shapes = shapes
        self._dtype = dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.empty(self._shapes[name], dtype=self._dtype, device="meta")

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _shape_of(weight: torch.Tensor, form: str) -> GpuWeight:
    """``cuda_weights.gpu_weight`` without memory, as ``gpu_models.RandomWeights`` makes it."""
    num_out, num_in = weight.shape

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if form == "int4":
        packed = empty(num_in // 128, num_out, 32, dtype=torch.int16)
        scale = empty(num_in // 128, num_out, dtype=torch.float16)
        return Int4Weight(packed, scale, scale, 128, num_in)
    if form == "fp8":
        codes = empty(num_out, num_in, dtype=torch.float8_e4m3fn)
        return Float8Weight(codes, empty(num_out, dtype=torch.float32))
    return weight


def compile_model(form: str, *, is_smoke: bool, num_layers: int = 1) -> None:
    """The steps of ``gpu_parts.model``: decoding, verification, and prompts."""
    from dataclasses import replace

    from bench.gpu.models import LLAMA_3_8B, BenchModel
    from llm_core.model.gpu import decoder as gpu_decoder
    from llm_core.model.gpu import layer

    config = replace(LLAMA_3_8B, num_layers=num_layers, vocab_size=128256)
    make = lambda weight, name, dtype, device: _shape_of(weight, form)  # noqa: E731
    with (
        mock.patch.object(gpu_decoder, "gpu_weight", make),
        mock.patch.object(layer, "gpu_weight", make),
    ):
        made = BenchModel(
            *(config, form, load_ops("triton"), torch.device("meta"), None),  # type: ignore[arg-type]
            num_sequences=64,
            sequence_len=1088,
            weights=_Shapes,
        )
    steps = [(count, 1023, 1, False) for count in (1, 8, 64)]
    steps += [(1, 1024, rows, True) for rows in (2, 4, 8, 16, 32, 64)]
    steps += [(1, 0, rows, False) for rows in (512, 1024, 8192)]

    def run(count: int, start: int, rows: int, is_tree: bool) -> None:
        batch = made.batch(count, start, rows, tree=is_tree, chooses=True)
        made.decoder.run(made.decoder.pack(batch, made.cache), made.cache)

    for step in steps[: 1 if is_smoke else None]:
        run(*step)
    # Whichever candidate is the fastest, what takes its parts is ready.
    for num_parts in () if is_smoke else (1, 2, 4):
        with mock.patch.object(few_rows, "parts_of_a_wave", lambda *_, n=num_parts: n):
            run(*steps[0])


def compile_decoder(*, is_smoke: bool) -> None:
    """The steps of ``gpu_models.compare_with_cpu``."""
    from bench.gpu.models import comparison_decoder, comparison_model, comparison_steps
    from llm_core.loading.weights import weight_shapes

    config = comparison_model(is_smoke=is_smoke)
    weights = _Shapes(weight_shapes(config), torch.float32)
    device = torch.device("meta")
    decoder, cache = comparison_decoder(config, weights, load_ops("triton"), device, None)
    for _, batch in comparison_steps(torch.Generator(), is_smoke=is_smoke):
        decoder.run(decoder.pack(batch, cache), cache)


def compile_kernels(*, is_smoke: bool) -> None:
    """The cases of ``gpu_kernels``, in sizes that make the same variants and are soon made."""
    from bench.gpu.kernel_cases import Sizes, cases

    small = Sizes(2048, 16, 4, 128, 2048, 128256, 256, 256, 256, 16, 256, 512)
    for make in cases(small)[: 1 if is_smoke else None]:
        case = make()
        case.run(load_ops("triton"), case.inputs)


def check_front_end(src: Any, target: GPUTarget, options: dict[str, Any], **_: object) -> None:
    """In place of ``triton.compiler.compile``: types and shapes only. Raises FrontEndDone."""
    backend = make_backend(target)
    parsed = backend.parse_options(dict(options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(parsed)
    src.make_ir(target, parsed, functions, backend.get_module_map(), context)
    raise FrontEndDone


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--capability", type=int, required=True)
    parser.add_argument("--multiprocessors", type=int, required=True)
    parser.add_argument("--share", default="0/1", help="N/M: the Nth of M processes")
    every_part = ["card", "bf16", "int4", "kernels", "fp8"]
    parser.add_argument("--parts", nargs="+", choices=every_part, default=every_part)
    parser.add_argument("--smoke", action="store_true", help="one step or case of each part")
    parser.add_argument("--front-end", action="store_true", help="types and shapes only")
    options = parser.parse_args()
    without_client()
    if options.front_end:
        triton.compiler.compile = check_front_end
    share, num_shares = map(int, options.share.split("/"))
    compiled: list[str] = []
    compile_on_launch(
        options.capability,
        options.multiprocessors,
        lambda name, kernel: compiled.append(name),
        lambda what: zlib.crc32(what.encode()) % num_shares == share,
    )
    status = 0
    with torch.inference_mode():
        for part in options.parts:
            try:
                if part == "card":  # where none is measured
                    compile_decoder(is_smoke=options.smoke)
                else:
                    with every_candidate():
                        if part == "kernels":
                            compile_kernels(is_smoke=options.smoke)
                        else:
                            compile_model(part, is_smoke=options.smoke)
            # Ahead of time or not: what does not compile is found, and told, when it is launched.
            except Exception as error:
                print(f"{part} ahead of time: {type(error).__name__}: {error}", file=sys.stderr)
                status = 1
            print(f"share {options.share}: {part}, {len(compiled)} so far", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
