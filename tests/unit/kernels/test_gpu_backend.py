"""Availability, compilation, launching and tuning of the GPU kernels."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from kernels.gpu import device, is_interpreted, launch, load_ops, unavailable_reason
from kernels.gpu.launch import cdiv, num_splits, parts_of_a_wave, power_of_2
from kernels.gpu.tuning import Config, Tuner
from tests.support.paths import ROOT

SLOW: Config = {"BLOCK": 16, "num_warps": 4}
FAST: Config = {"BLOCK": 32, "num_warps": 4}
HUGE: Config = {"BLOCK": 64, "num_warps": 4}


def run_python(script: str, **env: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout


def test_importing_needs_no_triton() -> None:
    script = """
import sys
sys.modules["triton"] = None  # what importing a package that is absent meets
import kernels, kernels.gpu, llm_core
assert kernels.gpu.load_ops("oracle").rms_norm
try:
    kernels.gpu.load_ops("triton")
except ImportError as error:
    print("refused:", error)
"""
    assert "refused: " in run_python(script)


def test_unavailable_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_interpreted() and unavailable_reason() is None
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert unavailable_reason() == "there is no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert unavailable_reason() == ("Tesla T4 has compute capability 7.5, expected 8.0 or higher")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert unavailable_reason() is None
    monkeypatch.setitem(sys.modules, "triton", None)
    assert unavailable_reason() == "triton is not installed"


def test_transformers_is_not_misled_by_our_package_name() -> None:
    """It looks for a distribution called kernels, and must not take ours for it."""
    from transformers.utils.import_utils import is_kernels_available

    assert not is_kernels_available()


def test_both_implementations_have_all_operations() -> None:
    from kernels.gpu.ops import GpuOps

    names = {name for name in vars(GpuOps) if not name.startswith("_")}
    for half in ("triton", "oracle"):
        module: Any = load_ops(half)  # type: ignore[arg-type]
        assert names == set(module.__all__)


def test_every_kernel_passes_the_compilers_front_end() -> None:
    """Types and shapes, for an H200; ``python -m tests.support.gpu_compile`` goes on to machine
    code."""
    command = [sys.executable, "-m", "tests.support.gpu_compile", "--front-end"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    compiled = set(result.stdout.split())
    sources = (path.read_text() for path in (ROOT / "kernels" / "gpu").rglob("*.py"))
    kernels = {
        line.split("(")[0].removeprefix("def ")
        for source in sources
        for line in source.splitlines()
        if line.startswith("def ") and line.split("(")[0].endswith("_kernel")
    }
    assert len(kernels) > 10
    assert kernels == compiled, "each kernel is launched by tests.support.gpu_compile"


@pytest.mark.parametrize("form", ["bf16", "int4", "fp8"])
def test_a_layer_of_a_decode_step_is_nine_kernels(form: str) -> None:
    """As an H200 would run it: rotation, two of attention, a product, norm, two products, norm, a
    product. Each gap between kernels is a time in which no weight is read."""
    script = f"""
from bench.gpu.compile import compile_model, compile_on_launch
launched = []
compile_on_launch(90, 132, print, lambda what: launched.append(what.split()[0]))
for num_layers in (1, 2):
    launched.clear()
    compile_model({form!r}, is_smoke=True, num_layers=num_layers)
    print(*launched)
"""
    one, two = (line.split() for line in run_python(script, PYTHONPATH=str(ROOT)).splitlines())
    assert len(two) - len(one) == 9
    assert len(one) == 2 + 9 + 1 + 4, "embedding, norm; the head; the sampler"


def test_dependent_launches_wait_before_accessing_memory() -> None:
    """But for weights, which nothing writes: their beginning is fetched ahead."""
    num_early = 0
    constant = "row_at", "packed_ptr", "scale_at", "zero_at", "weight_ptr", "scale_ptr"
    for path in (ROOT / "kernels" / "gpu").rglob("*.py"):
        for function in ast.parse(path.read_text()).body:
            if not isinstance(function, ast.FunctionDef) or not function.name.endswith("_kernel"):
                continue
            if "EARLY" not in [argument.arg for argument in function.args.args]:
                continue
            num_early += 1
            lines = [ast.unparse(statement) for statement in function.body]
            before = lines[: lines.index("wait_for_inputs(EARLY)")]
            assert not any("tl.store" in line or "return" in line for line in before)
            for line in before:
                for place in re.findall(r"(?:tl\.load|prefetch)\((\w+)", line):
                    assert place in constant, f"{function.name} reads {place} before it waits"
    assert num_early == 13


@pytest.mark.parametrize(
    ("capability", "switch", "wanted"),
    [((9, 0), "1", True), ((8, 0), "1", False), ((9, 0), "0", False)],
)
def test_dependent_launch_by_capability(
    capability: tuple[int, int], switch: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setenv(device.SWITCH, switch)
    ask = device.has_dependent_launch.__wrapped__
    assert ask(torch.device("cuda", 0)) is wanted and ask(torch.device("cpu")) is False


def choose(tuner: Tuner, *, ran: list[int] | None = None) -> Config:
    def run(config: Config) -> None:
        assert ran is not None
        if config == HUGE:
            raise OutOfResources(300_000, 200_000, "shared memory")
        ran.append(config["BLOCK"])

    candidates = (SLOW, HUGE, FAST)
    return tuner.choose("matmul", (64, "bf16"), candidates, None if ran is None else run)


def make_tuner(path: Path | None, device_name: str, ran: list[int]) -> Tuner:
    """Without a device: the larger the block that was run, the less time it took."""

    def time_ms(run: Callable[[], None]) -> float:
        run()
        return 1.0 / ran[-1]

    return Tuner(path, device_name, time_ms)


def test_tuning_is_measured_once_and_persisted(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "gpu.json"
    ran: list[int] = []
    tuner = make_tuner(path, "card A", ran)
    assert choose(tuner) == SLOW, "the first candidate where nothing was measured"
    assert choose(tuner, ran=ran) == SLOW
    assert ran == [], "nothing is measured outside of a warm-up"
    with tuner.measuring():
        assert choose(tuner, ran=ran) == FAST
        assert ran == [16, 16, 32, 32], "compiled, then measured; what does not fit is passed over"
        assert choose(tuner, ran=ran) == FAST
        assert len(ran) == 4
    assert choose(Tuner(path, "card A")) == FAST
    assert choose(Tuner(path, "card B")) == SLOW, "each card has its own"
    other = make_tuner(path, "card B", ran)
    with other.measuring():
        choose(other, ran=ran)
    (name_a, name_b) = sorted(json.loads(path.read_text()))
    assert name_a.startswith("card A, triton ") and name_b.startswith("card B, triton ")
    assert [file.name for file in path.parent.iterdir()] == ["gpu.json"], (
        "no temporary file is left"
    )


@pytest.mark.parametrize(
    "contents", ["", "{", "[]", '{"card, triton": 3}', '{"card": {"k": "v"}}', "\\udc80"]
)
def test_a_corrupt_tuning_file_is_logged_and_ignored(
    tmp_path: Path, contents: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(contents)
    assert choose(Tuner(path, "card")) == SLOW
    assert "is not used" in caplog.text


def test_an_unwritable_tuning_file_is_logged_and_configurations_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []
    is_directory = tmp_path / "gpu.json"
    is_directory.mkdir()
    below_a_file = tmp_path / "file" / "gpu.json"
    below_a_file.parent.write_text("")
    for path in (is_directory, below_a_file):
        caplog.clear()
        tuner = make_tuner(path, "card", ran)
        with tuner.measuring():
            choose(tuner, ran=ran)
        assert choose(tuner) == FAST
        assert f"the tuning file {path} cannot be written" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "gpu.json"], "nothing temporary"


def test_configurations_of_other_versions_are_ignored(tmp_path: Path) -> None:
    tuner = Tuner(None, "card")
    tuner.put("matmul", (64, "bf16"), {"BLOCK": 99, "num_warps": 4})
    assert choose(tuner) == SLOW
    tuner.put("matmul", (64, "bf16"), FAST)
    assert choose(tuner) == FAST
    tuner.clear()
    assert choose(tuner) == SLOW


def test_a_configuration_that_does_not_fit_is_replaced() -> None:
    """As for wide heads on a card with little shared memory; it is looked for once."""
    ran: list[int] = []

    def run(config: Config) -> None:
        ran.append(config["BLOCK"])
        if config["BLOCK"] > limit:
            raise OutOfResources(300_000, 200_000, "shared memory")

    tiny: Config = {"BLOCK": 8, "num_warps": 1}
    limit = 16
    tuner = Tuner(None, "card")
    for _ in range(2):
        tuner.launch("matmul", (64,), (HUGE, FAST, SLOW), run, (tiny,))
    assert ran == [64, 64, 32, 16, 16], "the first that fits, and then at once"
    assert tuner.chosen == {"matmul 64": dict(SLOW)}
    limit = 8
    tuner.launch("matmul", (65,), (HUGE,), run, (tiny,))
    assert ran[-1] == 8
    limit = 4
    with pytest.raises(RuntimeError, match="no launch configuration of matmul 66 fits"):
        tuner.launch("matmul", (66,), (HUGE,), run, (tiny,))
    with tuner.measuring():
        tuner._time_ms = lambda run: 0.0
        with pytest.raises(RuntimeError, match="no launch configuration of matmul 67 fits"):
            tuner.launch("matmul", (67,), (HUGE,), run)


def test_nothing_is_measured_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    tuner = make_tuner(None, "card", ran)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with tuner.measuring():
        assert choose(tuner, ran=ran) == SLOW and ran == []
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        assert choose(tuner, ran=ran) == FAST


def test_work_is_split_to_fill_a_device() -> None:
    cpu = torch.device("cpu")  # the interpreter: 16
    assert num_splits(1, 100, cpu, most=64) == 32
    assert num_splits(8, 100, cpu, most=64) == 4
    assert num_splits(1, 3, cpu, most=64) == 3
    assert num_splits(1, 100, cpu, most=8) == 8
    assert num_splits(1000, 100, cpu, most=64) == 1
    assert num_splits(1, 0, cpu, most=64) == 1
    # An H200's share of 64 tiles: as many as are wanted, but no second wave.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "num_multiprocessors", lambda device: 132)
        assert parts_of_a_wave(64, 2, 4, 99, cpu, most=8) == 5
        assert parts_of_a_wave(64, 9, 2, 99, cpu, most=8) == 4
        assert parts_of_a_wave(64, 9, 9, 3, cpu, most=8) == 3
        assert parts_of_a_wave(64, 9, 9, 99, cpu, most=4) == 4
        assert parts_of_a_wave(2004, 2, 4, 99, cpu, most=8) == 1
    assert (cdiv(5, 4), cdiv(8, 4), power_of_2(5), power_of_2(8)) == (2, 2, 8, 8)
