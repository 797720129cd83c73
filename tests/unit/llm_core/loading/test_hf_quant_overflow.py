"""Quantised files with finite parts whose weights overflow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llm_core.errors import ModelLoadError
from llm_core.loading.hf.model import open_hf_model
from llm_core.quant.formats import to_float
from tests.unit.llm_core.loading.test_hf_quant import FORMS, UP, damaged
from tests.unit.llm_core.loading.test_hf_quant import forms as forms  # a fixture


@pytest.mark.parametrize("form", FORMS)
def test_scales_that_overflow_weights_are_rejected(
    forms: dict[str, Path],
    tmp_path: Path,
    form: str,
) -> None:
    """What comes out is finite, or an error that names the tensor."""
    tensors = load_file(forms[form] / "model.safetensors")
    name = next(n for n in tensors if n.startswith(UP) and "scale" in n)
    largest = torch.finfo(tensors[name].dtype).max
    directory = damaged(forms[form], tmp_path, lambda t: t.update({name: t[name].sign() * largest}))
    try:
        with open_hf_model(directory) as opened:
            for weight in opened.weights.values():
                assert bool(to_float(weight).isfinite().all())
    except ModelLoadError as error:
        assert "up_proj" in str(error)
