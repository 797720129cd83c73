"""What is kept of the encoder's outputs, and the rule that reads it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from audio.asr.turn_end_probe import PROBES_DIR, TurnEndProbe, pool_encoder_outputs

WIDTH = 3


def outputs(length: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Row i is (i, i, i)."""
    return np.repeat(np.arange(length, dtype=np.float32)[:, None], WIDTH, axis=1)


def test_the_parts_lie_around_the_end_of_the_audio() -> None:
    tail = pool_encoder_outputs(
        outputs(500), 400
    )  # 4 s of audio in 10 s of context: output 200 is behind it
    assert tail.dtype == np.float32
    assert tail.reshape(4, WIDTH)[:, 0].tolist() == [
        np.arange(150, 184).mean(),
        np.arange(184, 196).mean(),
        np.arange(196, 200).mean(),
        np.arange(200, 210).mean(),
    ]


@given(st.integers(1, 1_500), st.integers(0, 4_000))
def test_audio_of_any_length_has_a_tail(num_outputs: int, num_frames: int) -> None:
    tail = pool_encoder_outputs(outputs(num_outputs), num_frames)
    assert tail.shape == (4 * WIDTH,)
    assert np.isfinite(tail).all()
    assert tail.min() >= 0 and tail.max() <= num_outputs - 1


def model(directory: Path, content: bytes) -> str:
    (directory / "model.bin").write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def test_a_rule_is_found_by_the_weights_it_was_fitted_to(tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.mkdir()
    digest = model(tmp_path, b"some weights")
    assert TurnEndProbe.load(tmp_path, rules) is None
    size = len(b"some weights")
    rule = {"model_bytes": size, "bias": 0.5, "weights": [1.0, -2.0]}
    (rules / f"{digest}.json").write_text(json.dumps(rule))
    found = TurnEndProbe.load(tmp_path, rules)
    assert found is not None
    assert found.logit(np.array([2.0, 1.0], np.float32)) == pytest.approx(0.5)
    model(tmp_path, b"other weights")
    assert TurnEndProbe.load(tmp_path, rules) is None


def test_rules_that_are_shipped_fit_a_tail_of_their_model() -> None:
    shipped = sorted(PROBES_DIR.glob("*.json"))
    assert shipped
    for path in shipped:
        assert len(path.stem) == hashlib.sha256().digest_size * 2
        rule = json.loads(path.read_text())
        assert np.isfinite([rule["bias"], *rule["weights"]]).all()
        assert len(rule["weights"]) % 4 == 0
