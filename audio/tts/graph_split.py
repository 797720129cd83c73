"""Split a Piper voice's ONNX graph, so that audio can stream before all of it is synthesized.

A VITS voice (Kim, Kong and Son, 2021, arXiv:2106.06103) has three stages: text encoder and duration
predictor, with an output of about 86 frames a second (`front`); a flow from these to latents
(`flow`); a convolutional decoder from latents to samples. Only the first needs the whole text. The
others have a bounded receptive field, their halo: run on some of the frames with the halo on both
sides, they give exactly the samples of a full run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from audio.errors import ModelError

# Names of the first layers of decoder and flow in exported graphs.
_DECODER_WEIGHT = "dec.conv_pre.weight"
_FLOW_PREFIX = "/flow/"


@dataclass(frozen=True, slots=True)
class Part:
    """A serialised model with a receptive field of ``halo`` frames on each side."""

    model: bytes
    inputs: tuple[str, ...]
    halo: int = 0


@dataclass(frozen=True, slots=True)
class VoiceParts:
    """The stages: ``front`` -> (frames, mask) -> ``flow`` -> latents -> ``decoder`` -> samples.

    ``hop_len``: samples per frame.
    """

    front: Part
    flow: Part
    decoder: Part
    hop_len: int


def split_voice(path: Path) -> VoiceParts:
    """Split the voice in ``path``. Raises ModelError when it is not a Piper voice."""
    try:
        model = onnx.load(str(path))
    except (DecodeError, OSError, ValueError) as error:
        raise ModelError(f"{path} is not a readable ONNX voice: {error}") from error
    graph = model.graph
    if not graph.node or not graph.output:
        raise ModelError(f"{path} is not a readable ONNX voice: its graph is empty")
    given = {item.name for item in (*graph.input, *graph.initializer)}
    if missing := {"input", "input_lengths", "scales"} - given:
        raise ModelError(f"{path} is not a Piper voice: it has no input {sorted(missing)[0]!r}")
    latents = next((n.input[0] for n in graph.node if _DECODER_WEIGHT in n.input), None)
    frames = _flow_inputs(graph, latents) if latents is not None else None
    if latents is None or frames is None:
        raise ModelError(
            f"{path} is not a Piper voice: it has no flow and decoder as VITS has them"
        )
    output = graph.output[0].name
    flow_halo, _ = _halo(_between(graph, frames, [latents]), frames)
    decoder_halo, hop_len = _halo(_between(graph, [latents], [output]), [latents])
    front = _part(model, [], frames[:1], 0)
    flow = _part(model, frames, [latents], flow_halo)
    decoder = _part(model, [latents], [output], decoder_halo)
    allowed = {*frames, latents, "sid"}
    if surplus := {*flow.inputs, *decoder.inputs} - allowed:
        raise ModelError(f"{path}: its decoder needs {sorted(surplus)[0]!r} beside the latents")
    return VoiceParts(front, flow, decoder, hop_len)


def _flow_inputs(graph: GraphProto, latents: str) -> list[str] | None:
    """Names of the flow's inputs (frames, mask); None when the graph has no such flow.

    The flow runs in reverse: its first node flips the channels of the frames.
    """
    made_by = {name: node for node in graph.node for name in node.output}
    inside = [n for n in _between(graph, [], [latents]) if n.name.startswith(_FLOW_PREFIX)]
    if not inside:
        return None
    mask_node = made_by[latents]  # frames * mask
    masks = [n for n in mask_node.input if not made_by[n].name.startswith(_FLOW_PREFIX)]
    first = inside[0].input[0]
    return [first, masks[0]] if len(masks) == 1 and first in made_by else None


def _between(graph: GraphProto, start: Sequence[str], end: Sequence[str]) -> list[NodeProto]:
    """The nodes between ``start`` and ``end`` in the order of the graph."""
    made_by = {name: index for index, node in enumerate(graph.node) for name in node.output}
    waiting, seen, needed = list(end), set(start), set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if (index := made_by.get(name)) is not None:
            needed.add(index)
            waiting += graph.node[index].input
    return [graph.node[index] for index in sorted(needed)]


def _part(model: ModelProto, start: list[str], end: list[str], halo: int) -> Part:
    graph = model.graph
    nodes = _between(graph, start, end)
    used = {name for node in nodes for name in node.input}
    inputs = [item for item in graph.input if item.name in used]
    inputs += [_float_value(name) for name in start if name in used]
    weights = [tensor for tensor in graph.initializer if tensor.name in used]
    outputs = [_float_value(name) for name in end]
    part = helper.make_graph(nodes, "part", inputs, outputs, weights)
    whole = helper.make_model(part, opset_imports=model.opset_import, ir_version=model.ir_version)
    return Part(whole.SerializeToString(), tuple(item.name for item in inputs), halo)


def _float_value(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


def _halo(nodes: Iterable[NodeProto], start: Sequence[str]) -> tuple[int, int]:
    """Receptive field in frames on each side, and upsampling factor, of consecutive nodes.

    A convolution adds (kernel - 1) / 2 * dilation steps, a transposed one kernel / stride / 2,
    counted in frames at the rate of its input.
    """
    reach = dict.fromkeys(start, 0.0)
    rates = dict.fromkeys(start, 1)
    for node in nodes:
        known = [name for name in node.input if name in reach]
        if not known:
            continue
        halo, rate = max(reach[n] for n in known), max(rates[n] for n in known)
        sizes = {a.name: a.ints[0] for a in node.attribute if a.ints}
        if node.op_type == "Conv":
            steps = (sizes["kernel_shape"] - 1) * sizes.get("dilations", 1) / 2
            halo += steps / rate
        elif node.op_type == "ConvTranspose":
            stride = sizes.get("strides", 1)
            halo += sizes["kernel_shape"] / stride / 2 / rate
            rate *= stride
        for name in node.output:
            reach[name], rates[name] = halo, rate
    return math.ceil(max(reach.values())), max(rates.values())
