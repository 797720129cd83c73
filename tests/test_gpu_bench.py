"""``bench/gpu.py`` runs from end to end, so that no typing error wastes a card's time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(600)  # seconds on a quiet machine; the interpreter gets what others leave
def test_the_whole_script_runs_in_the_interpreter(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    command = [sys.executable, "-W", "error", "bench/gpu.py", "--smoke", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["errors"] == []
    assert set(found) == {
        *("machine", "ceilings", "decoder", "kernels", "bf16", "int4", "fp8", "errors")
    }
    assert len(found["kernels"]) == 27 and all(row["ok"] for row in found["kernels"])
    assert all(error < 1e-4 for error in found["decoder"].values())
    for form in ("bf16", "int4", "fp8"):
        assert len(found[form]["decode"]) == 2
        assert found[form]["weights"] == {"bf16": "bfloat16"}.get(form, form)
        assert all(row["step_ms"] > 0 for row in found[form]["decode"])
    assert len(found["bf16"]["verify"]) == 2 and len(found["bf16"]["prefill"]) == 1
