"""The streaming side of voice activity detection, with a network that shows what it was given."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from audio.errors import ModelError
from audio.vad import CONTEXT_SAMPLES, WINDOW_SAMPLES, VadModel, VadStream


class RecordingModel:
    """Answers with the number of runs that the state has seen, and keeps the inputs."""

    def __init__(self) -> None:
        self.inputs: list[np.ndarray] = []

    def run(
        self, window: np.ndarray, h: np.ndarray, c: np.ndarray
    ) -> tuple[float, np.ndarray, np.ndarray]:
        self.inputs.append(window.copy())
        return float(h[0, 0, 0]), h + 1, c - 1


def stream() -> tuple[VadStream, RecordingModel]:
    model = RecordingModel()
    return VadStream(cast(VadModel, model)), model


@given(st.lists(st.integers(0, 1_500), max_size=12))
def test_any_cutting_gives_the_same_windows_with_their_context(sizes: list[int]) -> None:
    x = np.arange(1, sum(sizes) + 1, dtype=np.float32)
    vad, model = stream()
    probabilities = [p for chunk in np.split(x, np.cumsum(sizes)) for p in vad.detect(chunk)]
    num_windows = x.size // WINDOW_SAMPLES
    assert probabilities == list(range(num_windows))  # the state went along
    padded = np.concatenate((np.zeros(CONTEXT_SAMPLES, np.float32), x))
    for i, window in enumerate(model.inputs):
        start = i * WINDOW_SAMPLES
        expected = padded[start : start + CONTEXT_SAMPLES + WINDOW_SAMPLES]
        np.testing.assert_array_equal(window[0], expected)
    assert vad.num_samples_seen == x.size
    assert vad.num_samples_scored == num_windows * WINDOW_SAMPLES


def test_reset_starts_a_new_stream() -> None:
    vad, model = stream()
    vad.detect(np.ones(WINDOW_SAMPLES + 100, np.float32))
    vad.reset()
    assert (vad.num_samples_seen, vad.num_samples_scored) == (0, 0)
    assert vad.detect(np.full(WINDOW_SAMPLES, 0.5, np.float32)) == [0.0]
    assert (model.inputs[-1][0, :CONTEXT_SAMPLES] == 0).all()
    assert (model.inputs[-1][0, CONTEXT_SAMPLES:] == 0.5).all()


def test_two_callers_on_one_model_do_not_mix() -> None:
    model = RecordingModel()
    one, two = VadStream(cast(VadModel, model)), VadStream(cast(VadModel, model))
    window = np.zeros(WINDOW_SAMPLES, np.float32)
    assert one.detect(window) == [0.0]
    assert one.detect(window) == [1.0]
    assert two.detect(window) == [0.0]


def test_a_broken_model_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"cannot load the voice activity model .*broken\.onnx"):
        VadModel(tmp_path / "broken.onnx")
    with pytest.raises(ModelError, match=r"cannot load the voice activity model .*none\.onnx"):
        VadModel(tmp_path / "none.onnx")
