"""``bench/gpu/run.py`` runs from end to end, so that no typing error wastes a card's time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import run
from bench.gpu.parts import Bench, DeviceLostError
from kernels.gpu import load_ops
from kernels.gpu.device import SWITCH
from tests.support.paths import ROOT


@pytest.mark.timeout(600)  # seconds on a quiet machine; the interpreter gets what others leave
def test_the_whole_script_runs_in_the_interpreter(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    command = [sys.executable, "-W", "error", "-m", "bench.gpu.run", "--smoke", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert list(tmp_path.iterdir()) == [path], "what parts left is in the whole's file"
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["errors"] == []
    assert set(found) == {
        *("machine", "ceilings", "decoder", "kernels", "bf16", "int4", "fp8", "errors"),
        *("goals", "compiled_ahead"),
    }
    assert found["compiled_ahead"] == [0], "a step of a model without memory"
    assert len(found["kernels"]) == 31 and all(row["ok"] for row in found["kernels"])
    assert all(error < 1e-4 for error in found["decoder"].values())
    for form in ("bf16", "int4", "fp8"):
        assert len(found[form]["decode"]) == (2 if form == "bf16" else 1)
        assert found[form]["weights"] == {"bf16": "bfloat16"}.get(form, form)
        assert all(row["step_ms"] > 0 for row in found[form]["decode"])
    assert len(found["bf16"]["verify"]) == 2 and len(found["bf16"]["prefill"]) == 1
    assert found["goals"][0]["met"] is not None, "compared, if not met"
    assert "share of the memory floor" in done.stdout


def test_torch_triton_and_numpy_are_enough() -> None:
    """A machine with a card may have nothing else of what Parley needs."""
    kept, new = set[str](), {"torch", "triton", "numpy", "setuptools"}
    while new:
        kept |= new
        new = {need for name in new for need in requirements(name)} - kept
    others = {
        module
        for module, names in packages_distributions().items()
        if not kept & {canonical(name) for name in names}
    } - {path.name for path in ROOT.iterdir()}
    assert "msgspec" in others and "torch" not in others
    script = (
        f"import sys; sys.modules |= dict.fromkeys({sorted(others)}); "
        f"sys.path.insert(0, {str(ROOT)!r}); import bench.gpu.run, bench.gpu.models"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT / "docs", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def canonical(name: str) -> str:
    return name.lower().replace("_", "-")


def requirements(name: str) -> Iterator[str]:
    """Of an installed distribution, without extras; of another one, none."""
    try:
        lines = requires(name) or []
    except PackageNotFoundError:
        return
    for line in lines:
        found = re.match(r"[A-Za-z0-9_-]+", line)
        if found is not None and "extra ==" not in line:
            yield canonical(found[0])


def options(folder: Path, **changes: Any) -> Namespace:
    given = {"minutes": 8.0, "json": folder / "all.json", "smoke": True, "only": None}
    return Namespace(**{**given, **changes})


def parts_with(folder: Path, script: str, **changes: Any) -> run.Parts:
    """Parts whose processes run ``script`` instead; ``path`` is where they write, ``arguments``
    what they were told."""
    head = "import json, sys\narguments = sys.argv[1:]\n"
    head += "path = arguments[arguments.index('--json') + 1]\n"
    program = folder / "part.py"
    program.write_text(head + script)
    parts = run.Parts(options(folder, **changes), folder)
    parts.program = (str(program),)
    return parts


def test_a_part_that_crashes_keeps_what_it_found(tmp_path: Path) -> None:
    crash = """
import os
found = {"bf16": {"decode": [{"batch": 8}]}, "errors": [{"where": "x", "error": "bad"}]}
json.dump(found, open(path, "w"))
os.abort()
"""
    parts = parts_with(tmp_path, crash)
    parts.run("bf16")
    assert parts.found["bf16"] == {"decode": [{"batch": 8}]}
    assert [error["error"] for error in parts.errors] == [
        "bad",
        "its process ended with status -6",
    ]
    kept = json.loads((tmp_path / "all.json").read_text())
    assert kept["bf16"] == parts.found["bf16"] and len(kept["errors"]) == 2


@pytest.mark.parametrize("errors", [{}, {"trees": 1.0}, {"trees": float("nan"), "mixed": 0.0}])
def test_a_wrong_decoder_is_tried_again_without_early_launches(
    tmp_path: Path, errors: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder that is wrong, or never came to an end, until the switch is set."""
    script = f"""
import os
wrong = os.environ.get({SWITCH!r}) != "0"
found = {{"decoder": {errors} if wrong else {{"trees": 1e-6}}}} if {errors} or not wrong else {{}}
errors = [{{"where": "decoder", "error": "wrong"}}] * wrong
json.dump({{**found, "errors": errors}}, open(path, "w"))
"""
    parts = parts_with(tmp_path, script.replace("nan", "float('nan')"))
    monkeypatch.setenv(SWITCH, "1")
    run.run_card(parts, lambda: None)
    assert parts.found["decoder"] == {"trees": 1e-6}
    assert len(parts.errors) == 1, "what went wrong is said"
    assert os.environ[SWITCH] == "0"


def test_a_part_that_leaves_nothing_is_said(tmp_path: Path) -> None:
    parts = parts_with(tmp_path, "sys.exit(3)")
    parts.run("fp8")
    assert "it left nothing" in parts.errors[0]["error"]
    assert parts.errors[1]["error"] == "its process ended with status 3"


def test_a_part_that_hangs_is_ended(tmp_path: Path) -> None:
    hang = """
import time
json.dump({"int4": {"decode": []}, "errors": []}, open(path, "w"))
time.sleep(600)
"""
    parts = parts_with(tmp_path, hang, smoke=False)
    parts.limits = {"int4": (0.5, 0.1)}
    parts.grace_s = 1.0
    parts.run("int4")
    assert parts.found["int4"] == {"decode": []}
    ended = "ended after 2 s: it hung, or was slow"
    assert [error["error"] for error in parts.errors] == [ended] * 2, "with and without measuring"


@pytest.mark.parametrize("breaks", ["tuned", "always"])
def test_a_model_without_a_step_is_tried_with_the_first_configurations(
    tmp_path: Path, breaks: str
) -> None:
    """A candidate that ends the process must not cost the figures that matter most."""
    script = f"""
import os
works = "--untuned" in arguments and {breaks!r} != "always"
json.dump({{"bf16": {{"decode": [{{"batch": 8}}] * works}}, "errors": []}}, open(path, "w"))
sys.exit(0 if works else 4)
"""
    parts = parts_with(tmp_path, script)
    parts.run("bf16")
    assert len(parts.found["bf16"]["decode"]) == (breaks == "tuned")
    assert len(parts.errors) == (1 if breaks == "tuned" else 2)


def test_kernels_go_on_behind_the_case_that_lost_the_device(tmp_path: Path) -> None:
    """Case 2 ends its process each time it is tried; so does case 4."""
    fragile = """
first = int(arguments[arguments.index("--skip-cases") + 1])
rows = []
for case in range(first, 6):
    ok = case not in (2, 4)
    rows.append({"case": case, "kernel": str(case), "ok": ok})
    if not ok:
        break
json.dump({"kernels": rows, "errors": []}, open(path, "w"))
sys.exit(0 if ok else 4)
"""
    parts = parts_with(tmp_path, fragile)
    parts.run("kernels")
    assert [(row["case"], row["ok"]) for row in parts.found["kernels"]] == [
        *((0, True), (1, True), (2, False), (3, True), (4, False), (5, True))
    ]
    assert len(parts.errors) == 2


def test_what_no_time_is_left_for_is_said(tmp_path: Path) -> None:
    parts = parts_with(tmp_path, "sys.exit(3)", smoke=False, minutes=0.3)
    parts.run("fp8")
    assert "left out" in parts.errors[0]["error"]


def test_goals_are_compared() -> None:
    decode = {"batch": 1, "share_of_floor": 0.7, "overlapped_share_of_floor": 0.76}
    kernel = {"bound": "memory", "share_of_floor": 0.5, "mb": 100.0, "kernel": "k"}
    found = {
        "bf16": {"decode": [decode], "verify": [{"rows": 8, "times_one_row": 1.2}]},
        "kernels": [kernel, {**kernel, "bound": "arithmetic"}, {**kernel, "mb": 1.0}],
    }
    rows = run.goals(found)
    assert [row["met"] for row in rows] == [True, None, False, None, False, False]
    lines = list(run.table(rows))
    assert lines[1].endswith("0.760 met") and lines[2].endswith("not measured")
    assert lines[3].endswith("1.200 MISSED") and "too small to count" in lines[-1]


def test_a_failing_piece_is_noted_and_a_lost_device_ends_the_process(tmp_path: Path) -> None:
    bench = Bench(*(True, 0.0, tmp_path / "part.json", load_ops("oracle"), torch.device("cpu")))

    def bad() -> None:
        raise ValueError("no such luck")

    bench.attempt("a piece", bad)
    (error,) = json.loads((tmp_path / "part.json").read_text())["errors"]
    assert error["error"] == "ValueError: no such luck" and "in bad" in error["traceback"]
    bench.is_smoke = False
    bench.attempt("late", bad)
    assert "left out" in bench.errors[1]["error"]
    bench.is_smoke = True
    bench.wait = lambda: bad_device()  # type: ignore[method-assign]
    with pytest.raises(DeviceLostError):
        bench.attempt("next", bad)


def bad_device() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
