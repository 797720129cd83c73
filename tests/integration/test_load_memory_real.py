"""Loading the embedded model takes little more than it keeps."""

from __future__ import annotations

from pathlib import Path

from tests.support.hf_models import save_model
from tests.support.load_memory import measured


def test_the_embedded_models_peak(llm_model_path: Path, tmp_path: Path) -> None:
    """Packed codes of 4 and 8 bits; float16; float32 (whose embedding stays as in the file)."""
    save_model(tmp_path / "tiny", "llama")
    runs = {"native=auto": 80e6, "torch=float16": 250e6, "torch=float32": 500e6}
    sizes = measured(tmp_path / "tiny", [f"{llm_model_path}={run}" for run in runs])
    assert len(sizes) == len(runs)
    for size, (run, least) in zip(sizes, runs.items(), strict=True):
        print(f"{run}: final {size['final'] / 1e6:.1f} MB, peak {size['peak'] / 1e6:.1f} MB")
        assert size["final"] > least, (run, size)  # it is all there
        assert size["peak"] < 1.3 * size["final"], (run, size)
