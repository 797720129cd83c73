"""What loading a model takes at its peak and in the end, in a process of its own (Linux)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# Imports everything first, and loads once a tiny model, so that what is measured is the model.
# VmHWM is the largest resident size so far; writing 5 to clear_refs makes it the present one.
PROGRAM = """
import ctypes, gc, json, sys
from pathlib import Path
from llm_core.loading.model_weights import open_weights
from llm_core.model.backend import RunnerOptions
from llm_core.model.runner import ModelRunner

def status_bytes(name):  # of this program's memory; ru_maxrss would count what forked it, too
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

def load(path, weight_format, backend):
    with open_weights(path) as model:
        options = RunnerOptions(
            backend=backend, weight_format=weight_format, num_blocks=4, max_context=64
        )
        return ModelRunner(model.config, model.weights, options)

def measured(path, weight_format, backend):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    runner = load(path, weight_format, backend)
    after, peak = status_bytes("VmRSS"), status_bytes("VmHWM")
    return {"final": after - before, "peak": peak - before}

tiny, *cases = sys.argv[1:]
for backend in {case.split("=")[1] for case in cases}:
    load(tiny, "auto" if backend == "native" else "float32", backend)
for case in cases:
    path, backend, weight_format = case.split("=")
    print(json.dumps(measured(path, weight_format, backend)), flush=True)
"""


def measured(tiny: Path, cases: list[str]) -> list[dict[str, int]]:
    """Bytes above what was there before: "final" and "peak", for each of ``cases``, which are
    PATH=BACKEND=FORMAT. ``tiny`` is a model of no size."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny), *cases],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
