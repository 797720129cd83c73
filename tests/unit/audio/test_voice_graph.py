"""A voice's graph taken apart: what depends on what, and how far a frame is seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from audio.errors import ModelError
from audio.tts.graph_split import split_voice
from audio.tts.vits import VitsSession

CHANNELS = 4
FLOW_KERNEL, PRE_KERNEL, LAST_KERNEL = 5, 7, 3
STRIDE = 4


def weights(name: str, *shape: int) -> onnx.TensorProto:
    rng = np.random.default_rng(len(name))
    return numpy_helper.from_array(rng.normal(0, 0.3, shape).astype(np.float32), name)


def tiny_voice(path: Path, *, decoder_weight: str = "dec.conv_pre.weight") -> Path:
    """The shape of a VITS voice: ids -> frames -> flow (a mask at its end) -> decoder."""

    def conv(name: str, source: str, weight: str, kernel: int, dilation: int = 1) -> onnx.NodeProto:
        pad = (kernel - 1) // 2 * dilation
        return helper.make_node(
            "Conv",
            [source, weight],
            [f"{name}_out"],
            name,
            kernel_shape=[kernel],
            dilations=[dilation],
            pads=[pad, pad],
        )

    nodes = [
        helper.make_node("Cast", ["input"], ["ids"], "/enc/Cast", to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["ids", "axis"], ["one_channel"], "/enc/Unsqueeze"),
        helper.make_node("ReduceSum", ["scales"], ["scale"], "/enc/ReduceSum", keepdims=0),
        helper.make_node("Mul", ["one_channel", "scale"], ["scaled"], "/enc/Mul"),
        helper.make_node("Conv", ["scaled", "enc.weight"], ["frames"], "/enc/Conv"),
        helper.make_node("Shape", ["input_lengths"], ["ones_shape"], "/Shape"),
        helper.make_node("Expand", ["one", "ones_shape"], ["mask"], "/Expand"),
        helper.make_node("Neg", ["frames"], ["turned"], "/flow/flows.6/Neg"),
        conv("/flow/flows.6/Conv", "turned", "flow.weight", FLOW_KERNEL),
        helper.make_node("Mul", ["/flow/flows.6/Conv_out", "mask"], ["latents"], "/Mul_7"),
        conv("/dec/conv_pre/Conv", "latents", decoder_weight, PRE_KERNEL),
        helper.make_node(
            "ConvTranspose",
            ["/dec/conv_pre/Conv_out", "up.weight"],
            ["up"],
            "/dec/ups.0",
            kernel_shape=[2 * STRIDE],
            strides=[STRIDE],
            pads=[STRIDE // 2, STRIDE // 2],
        ),
        conv("/dec/last", "up", "last.weight", LAST_KERNEL, 2),
        helper.make_node("Tanh", ["/dec/last_out"], ["output"], "/dec/Tanh"),
    ]
    int64, floats = TensorProto.INT64, TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "voice",
        [
            helper.make_tensor_value_info("input", int64, [1, "n"]),
            helper.make_tensor_value_info("input_lengths", int64, [1]),
            helper.make_tensor_value_info("scales", floats, [3]),
        ],
        [helper.make_tensor_value_info("output", floats, [1, 1, "samples"])],
        [
            weights("enc.weight", CHANNELS, 1, 1),
            weights("flow.weight", CHANNELS, CHANNELS, FLOW_KERNEL),
            weights(decoder_weight, CHANNELS, CHANNELS, PRE_KERNEL),
            weights("up.weight", CHANNELS, 2, 2 * STRIDE),
            weights("last.weight", 1, 2, LAST_KERNEL),
            numpy_helper.from_array(np.array([1], np.int64), "axis"),
            numpy_helper.from_array(np.array([1.0], np.float32), "one"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
    return path


def test_how_far_a_frame_is_seen(tmp_path: Path) -> None:
    parts = split_voice(tiny_voice(tmp_path / "voice.onnx"))
    assert parts.front.inputs == ("input", "scales")
    assert parts.flow.inputs == ("frames", "mask")
    assert parts.decoder.inputs == ("latents",)
    assert parts.hop_len == STRIDE
    assert parts.flow.halo == (FLOW_KERNEL - 1) // 2
    # 3 frames of the first layer, 1 of the transposed one, 2 steps of a quarter frame.
    assert parts.decoder.halo == 5


@pytest.mark.parametrize("num_frames", [1, 3, 10, 40, 100])
def test_parts_of_the_frames_give_the_samples_of_the_whole(tmp_path: Path, num_frames: int) -> None:
    path = tiny_voice(tmp_path / "voice.onnx")
    ids = np.random.default_rng(1).integers(1, 40, 90)
    scales = np.array([0.1, 0.2, 0.3], np.float32)
    lengths = np.array([len(ids)], np.int64)
    whole = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed = {"input": ids[None], "input_lengths": lengths, "scales": scales}
    expected = whole.run(None, feed)[0].reshape(-1)
    utterance = VitsSession(path).open(ids.tolist(), scales.tolist(), None)
    taken = []
    while not utterance.is_over:
        taken.append(utterance.decode_frames(num_frames))
    np.testing.assert_allclose(np.concatenate(taken), expected, atol=1e-5)


def test_what_is_no_voice_is_refused_by_name(tmp_path: Path) -> None:
    other = tiny_voice(tmp_path / "other.onnx", decoder_weight="head.weight")
    with pytest.raises(ModelError, match=r"other\.onnx is not a Piper voice"):
        split_voice(other)
    (tmp_path / "torn.onnx").write_bytes(other.read_bytes()[:300])
    (tmp_path / "text.onnx").write_bytes(b"x")
    (tmp_path / "empty.onnx").write_bytes(b"")
    for name in ("torn", "text", "empty"):
        with pytest.raises(ModelError, match=rf"{name}\.onnx is not a readable ONNX voice"):
            split_voice(tmp_path / f"{name}.onnx")
    with pytest.raises(ModelError, match="not a readable ONNX voice"):
        split_voice(tmp_path / "missing.onnx")
