"""A turn model: its features are Whisper's, its file is looked at, its word is used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from transformers import WhisperFeatureExtractor

from app.conversation.session_config import TurnDetection
from audio.endpointing.smart_turn import NUM_FRAMES, NUM_MELS, SmartTurnModel
from audio.errors import ModelError
from audio.frame import SPEECH_RATE, Samples
from tests.support.fakes import ScriptedEngine, silence, voice
from tests.support.session_call import call


def tiny_model(path: Path, *, num_frames: int = NUM_FRAMES, sigmoid: bool = True) -> Path:
    """Finished is who was louder in the last frames than before: mean of the end, less the mean."""
    nodes = [
        helper.make_node("Slice", ["input_features", "from", "to", "axis"], ["end"]),
        helper.make_node("ReduceMean", ["end"], ["end_mean"], axes=[1, 2], keepdims=0),
        helper.make_node("ReduceMean", ["input_features"], ["mean"], axes=[1, 2], keepdims=0),
        helper.make_node("Sub", ["end_mean", "mean"], ["louder"]),
        helper.make_node("Mul", ["louder", "gain"], ["scaled"]),
        helper.make_node("Sigmoid" if sigmoid else "Identity", ["scaled"], ["logits"]),
    ]

    def constant(name: str, values: list[int] | float) -> onnx.TensorProto:
        array = np.array(values, np.int64 if isinstance(values, list) else np.float32)
        return onnx.numpy_helper.from_array(array, name)

    graph = helper.make_graph(
        nodes,
        "turn",
        [
            helper.make_tensor_value_info(
                "input_features", TensorProto.FLOAT, ["n", NUM_MELS, num_frames]
            )
        ],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n"])],
        [
            constant("from", [num_frames - 50]),
            constant("to", [num_frames]),
            constant("axis", [2]),
            constant("gain", 20.0),
        ],
    )
    opset = [helper.make_opsetid("", 15)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


def noise(seconds: float) -> Samples:
    rng = np.random.default_rng(1)
    return rng.normal(0, 0.1, int(seconds * SPEECH_RATE)).astype(np.float32)


@pytest.mark.parametrize("seconds", [0.0, 0.5, 3.0, 8.0, 11.0])
def test_features_are_those_of_whisper(tmp_path: Path, seconds: float) -> None:
    model = SmartTurnModel(tiny_model(tmp_path / "turn.onnx"))
    samples = noise(seconds)
    last = samples[-8 * SPEECH_RATE :]
    padded = np.concatenate((np.zeros(8 * SPEECH_RATE - len(last), np.float32), last))
    extractor = WhisperFeatureExtractor(chunk_length=8)
    expected = extractor(padded, sampling_rate=SPEECH_RATE, do_normalize=True, return_tensors="np")[
        "input_features"
    ][0]
    found = model.features(samples)
    assert found.shape == expected.shape == (NUM_MELS, NUM_FRAMES)
    np.testing.assert_allclose(found, expected, atol=2e-3)


def test_the_probability_is_the_networks(tmp_path: Path) -> None:
    model = SmartTurnModel(tiny_model(tmp_path / "turn.onnx"))
    quiet = np.zeros(SPEECH_RATE, np.float32)
    assert model.probability(np.concatenate((quiet, noise(0.5)))) > 0.9
    assert model.probability(np.concatenate((noise(4.0), quiet))) < 0.1


def test_what_is_no_turn_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_bytes(b"no")
    for path in (tmp_path / "text.onnx", tmp_path / "missing.onnx"):
        with pytest.raises(ModelError, match=path.name):
            SmartTurnModel(path)
    with pytest.raises(ModelError, match=r"expected one input \[n, 80, 800\]"):
        SmartTurnModel(tiny_model(tmp_path / "other.onnx", num_frames=3_000))
    raw = SmartTurnModel(tiny_model(tmp_path / "raw.onnx", sigmoid=False))
    with pytest.raises(ModelError, match="is no probability"):
        raw.probability(np.concatenate((np.zeros(SPEECH_RATE, np.float32), noise(0.5))))


@pytest.mark.parametrize(("probability", "num_turns"), [(0.98, 2), (0.02, 1)])
async def test_its_word_decides_how_long_a_pause_may_be(probability: float, num_turns: int) -> None:
    class Sure:
        def probability(self, samples: Samples) -> float:
            assert len(samples) > SPEECH_RATE // 4
            return probability

    heard = (
        ("I would like a dog.", "And a cat.") if num_turns == 2 else ("I would like a dog.",) * 3
    )
    engine = ScriptedEngine("Fine.")
    engine.end_logprob = -5.0
    detection = TurnDetection(kind="semantic_vad")
    async with call(engine, *heard, turn_detection=detection) as c:
        object.__setattr__(c.services, "turn_model", Sure())
        await c.hear(voice(0.6) + silence(0.6))
        await c.hear(voice(0.6) + silence(1.5))
        await c.clock.advance(5)
        asked = [m for m in c.messages() if m.role == "user"]
        assert len(asked) == num_turns
