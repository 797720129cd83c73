"""The job of ``quantize_model``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from llm_core.config import ModelConfig
from llm_core.errors import InvalidRequestError
from llm_core.loading import ModelWeights, OpenModel, layer_shapes, open_model, open_weights
from llm_core.offline.options import Progress, QuantizeOptions, QuantizeReport
from llm_core.offline.perplexity import Likelihood, likelihood, windows_of
from llm_core.offline.quantize.export import Container, Exported, check_target, export_model
from llm_core.offline.quantize.gptq import DAMPING
from llm_core.offline.quantize.layers import LayerMethod, LayerRecipe, quantize_layers
from llm_core.offline.quantize.rounding import GridSpec, RoundedMatrix
from llm_core.offline.texts import exact_runner, held_out, text_windows
from llm_core.offline.trainable_decoder import TrainableDecoder
from llm_core.quant import Bits, Weight

_USUAL_GROUPS = (128, 64, 32)


def quantize(options: QuantizeOptions, progress: Progress) -> QuantizeReport:
    """Runs the job. Raises LlmError."""
    started_s = time.monotonic()
    check_target(options.out_dir)
    with open_model(options.model_path) as opened:
        config = opened.model.config
        if options.group is None:
            options = replace(options, group=_default_group(config, options))
        _check_shapes(config, options)
        calibration, evaluation = _texts(opened, options, progress)
        note = _source_note(opened.model)
        before = _likelihood(options, opened.model, evaluation, partial(progress, "before"))
        model = TrainableDecoder(config, opened.model.weights, calibration.shape[1])
    exported = _quantized(model, calibration, options, progress)
    export_model(options.out_dir, options.model_path, exported)
    del model, exported
    with open_weights(options.out_dir) as written:
        after = _likelihood(options, written, evaluation, partial(progress, "after"))
    return QuantizeReport(
        perplexity_before=before.perplexity,
        perplexity_after=after.perplexity,
        num_eval_tokens=before.num_tokens,
        source_note=note,
        size_bytes=directory_bytes(options.out_dir),
        wall_s=time.monotonic() - started_s,
    )


def directory_bytes(directory: Path) -> int:
    """Total size of its files."""
    return sum(path.stat().st_size for path in directory.iterdir() if path.is_file())


def _check_shapes(config: ModelConfig, options: QuantizeOptions) -> None:
    """Raises InvalidRequestError when the method's file format cannot hold the matrices."""
    if options.method in ("int8", "fp8"):
        widths = {shape[1] for shape in layer_shapes(config).values() if len(shape) == 2}
        if options.method == "int8" and any(w % _group_len(options, w) for w in widths):
            raise InvalidRequestError(
                f"groups of {options.group} do not divide the matrices' inputs "
                f"({', '.join(map(str, sorted(widths)))}), as INT8 files need; -1 (a row) does"
            )
        return
    per_word = 32 // options.bits
    matrices = {name: shape for name, shape in layer_shapes(config).items() if len(shape) == 2}
    for name, (num_out, num_in) in matrices.items():
        if num_out % per_word or num_in % per_word:
            raise InvalidRequestError(
                f"{name} is {num_out} x {num_in}: the files need multiples of {per_word} for "
                f"{options.bits}-bit codes"
            )
        if options.method == "awq" and num_in % _group_len(options, num_in):
            raise InvalidRequestError(
                f"{name} has {num_in} inputs, which groups of {options.group} do not divide, as "
                f"AWQ files need; {_largest_group(config)} would do"
            )


def _default_group(config: ModelConfig, options: QuantizeOptions) -> int:
    """The largest usual size that fits; for INT8 the smallest one, which is nearly lossless."""
    return _largest_group(config, (32,) if options.method == "int8" else _USUAL_GROUPS)


def _largest_group(config: ModelConfig, sizes: tuple[int, ...] = _USUAL_GROUPS) -> int:
    """The first of ``sizes`` that divides the inputs of all matrices, else -1."""
    widths = {shape[1] for shape in layer_shapes(config).values() if len(shape) == 2}
    return next((size for size in sizes if not any(width % size for width in widths)), -1)


def _texts(
    opened: OpenModel, options: QuantizeOptions, progress: Progress
) -> tuple[torch.Tensor, torch.Tensor]:
    """(calibration windows, evaluation windows)."""
    evaluation = None
    if options.eval_text is not None:
        ids = opened.tokenizer.encode(options.eval_text)
        evaluation = windows_of(ids, options.window_len)
    if evaluation is not None and options.method in ("rtn", "int8", "fp8"):
        return evaluation[:1], evaluation  # data-free
    windows = text_windows(opened, options, partial(progress, "text"))
    return held_out(windows) if evaluation is None else (windows, evaluation)


def _likelihood(
    options: QuantizeOptions, model: ModelWeights, windows: torch.Tensor, on_window: Any
) -> Likelihood:
    length = windows.shape[1]
    runner = exact_runner(
        model, str(options.model_path), length, options.num_threads, weight_format="float32"
    )
    return likelihood(runner, windows, on_window)


def _quantized(
    model: TrainableDecoder, calibration: torch.Tensor, options: QuantizeOptions, progress: Progress
) -> Exported:
    rounded: Mapping[str, RoundedMatrix] = {}
    if options.method != "fp8":
        is_int8 = options.method == "int8"
        spec = GridSpec(
            cast(Bits, 8 if is_int8 else options.bits),
            _group_len(options, _widest(model.config)),
            options.is_symmetric or is_int8,
        )
        recipe = LayerRecipe(
            cast(LayerMethod, "rtn" if is_int8 else options.method),
            spec,
            options.act_order,
            clips=options.method in ("gptq", "awq"),  # the others are data-free
        )
        try:
            rounded = quantize_layers(model, calibration, recipe, partial(progress, "layers"))
        except ValueError as error:
            raise InvalidRequestError(f"cannot be quantised: {error}") from error
    container = cast(Container, "gptq" if options.method == "rtn" else options.method)
    return Exported(
        model.config, model.named_weights(), container, rounded, _settings(container, options)
    )


def _group_len(options: QuantizeOptions, num_in: int) -> int:
    assert options.group is not None, "chosen at the start"
    return num_in if options.group == -1 else options.group


def _widest(config: ModelConfig) -> int:
    return max(shape[-1] for shape in layer_shapes(config).values())


def _settings(container: Container, options: QuantizeOptions) -> dict[str, Any]:
    """quantization_config."""
    if container == "gptq":
        return {
            "quant_method": "gptq",
            "bits": options.bits,
            "group_size": options.group,
            "sym": options.is_symmetric,
            # Groups are contiguous whatever the order of rounding was (quantize.gptq).
            "desc_act": False,
            "static_groups": options.method == "gptq" and options.act_order,
            "true_sequential": True,
            "damp_percent": DAMPING,
            "checkpoint_format": "gptq",
            "lm_head": False,
        }
    if container == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": options.group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
    is_grouped = container == "int8" and options.group != -1
    weights = {
        "num_bits": 8,
        "type": "int" if container == "int8" else "float",
        "symmetric": True,
        "strategy": "group" if is_grouped else "channel",
        "group_size": options.group if is_grouped else None,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if container == "int8" else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def _source_note(model: ModelWeights) -> str:
    """The name of the source and the format of its matrices."""
    weight: Weight = model.weights["layers.0.down"]
    if isinstance(weight, torch.Tensor):
        return f"{model.name}: {str(weight.dtype).removeprefix('torch.')} weights"
    kind = getattr(weight, "kind", "integer codes")
    return f"{model.name}: already quantised ({kind}); its values, as float32, are the source"
