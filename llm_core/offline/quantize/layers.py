"""Layer-by-layer quantisation, each matrix calibrated with the inputs that it will have in use.

The stages of a layer follow the forward pass: query/key/value, attention's output, gate/up, down.
The inputs of a stage are computed with everything before it already quantised, so that later stages
compensate for the errors of earlier ones; a single forward pass suffices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from llm_core.config import ModelConfig
from llm_core.offline.quantize.awq import awq_round, search_scales
from llm_core.offline.quantize.clipping import clipped_grid
from llm_core.offline.quantize.gptq import gptq
from llm_core.offline.quantize.rounding import GridSpec, RoundedMatrix, on_grid, round_to_nearest
from llm_core.offline.trainable_decoder import TrainableDecoder, TrainableLayer

LayerMethod = Literal["rtn", "gptq", "awq"]
_SEQUENCES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class LayerRecipe:
    """The method for the matrices of a layer. ``act_order`` applies to GPTQ only. ``clips``: grids
    are clipped where that reduces the error on the calibration text (never AWQ's of query and key,
    nor GPTQ's without act-order); rounding to nearest then needs the text, too."""

    method: LayerMethod
    spec: GridSpec
    act_order: bool = True
    clips: bool = True

    @property
    def is_data_free(self) -> bool:
        """True if no calibration text is used."""
        return self.method == "rtn" and not self.clips


@dataclass(frozen=True, slots=True)
class _Statistics:
    """Statistics of a stage's inputs: H = X X^T [K, K], and the mean of |x| [K]."""

    hessian: torch.Tensor
    magnitude: torch.Tensor


def quantize_layers(
    model: TrainableDecoder,
    token_ids: torch.Tensor,
    recipe: LayerRecipe,
    on_layer: Callable[[int, int], None],
) -> dict[str, RoundedMatrix]:
    """Quantises all matrices in the layers of ``model``; returns them by their names.

    The model's weights are replaced by the dequantised ones; AWQ also changes norms and the biases
    of values. ``token_ids`` int64 [S, T] is the calibration text. ``on_layer(done, total)`` is
    called after each.
    """
    rounded: dict[str, RoundedMatrix] = {}
    with torch.inference_mode():
        hidden = None if recipe.is_data_free else model.embed(token_ids)
        for index, layer in enumerate(model.layers):
            quantizer = _LayerQuantizer(model.config, layer, recipe)
            hidden = quantizer.run(hidden)
            rounded |= {f"layers.{index}.{name}": m for name, m in quantizer.rounded.items()}
            on_layer(index + 1, len(model.layers))
    return rounded


class _LayerQuantizer:
    def __init__(self, config: ModelConfig, layer: TrainableLayer, recipe: LayerRecipe) -> None:
        self.rounded: dict[str, RoundedMatrix] = {}
        self._config = config
        self._layer = layer
        self._recipe = recipe

    def run(self, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """Quantises the layer; the residual stream [S, T, H] -> that after the layer. None for
        data-free methods."""
        layer = self._layer
        if hidden is None:
            for names in (("query", "key", "value"), ("attention_output",), ("gate", "up")):
                self._quantize(names, None)
            self._quantize(("down",), None)
            return None
        x = self._stage(("query", "key", "value"), _each(layer.attention_input, hidden))
        x = self._stage(("attention_output",), _each(layer.attention, x))
        hidden = _each(layer.add_attention, hidden, x)
        x = self._stage(("gate", "up"), _each(layer.ffn_input, hidden))
        x = self._stage(("down",), _each(layer.gated_ffn, x))
        return _each(layer.add_ffn, hidden, x)

    def _stage(self, names: tuple[str, ...], x: torch.Tensor) -> torch.Tensor:
        """Quantises the matrices whose input is x [S, T, K]; returns x, rescaled by AWQ."""
        rows = x.flatten(0, 1)
        statistics = _Statistics(rows.T @ rows, rows.abs().mean(0))
        scales = self._quantize(names, statistics)
        return x if scales is None else x / scales

    def _quantize(
        self, names: tuple[str, ...], statistics: _Statistics | None
    ) -> torch.Tensor | None:
        """Quantises the named matrices as one; returns the divisors of their input, if any."""
        recipe, weights = self._recipe, self._layer.weights
        stacked = torch.cat([weights[name] for name in names])
        scales = None
        if statistics is None:
            matrix = round_to_nearest(stacked, recipe.spec)
        elif recipe.method == "rtn":
            matrix = on_grid(
                stacked, recipe.spec, clipped_grid(stacked, statistics.hessian, recipe.spec)
            )
        elif recipe.method == "gptq":
            matrix = gptq(
                stacked,
                statistics.hessian,
                recipe.spec,
                act_order=recipe.act_order,
                clips=recipe.clips,
            )
        else:
            scales = search_scales(
                stacked,
                statistics.hessian,
                statistics.magnitude,
                recipe.spec,
                shared_by=self._value_of_input() if names == ("attention_output",) else None,
            )
            hessian = statistics.hessian / torch.outer(scales, scales)
            # As in the paper: attention scores are products of two such rows.
            clips = recipe.clips and "query" not in names
            matrix = awq_round(stacked * scales, hessian, recipe.spec, clip=clips)
            self._divide_source(names, scales)
        start = 0
        for name in names:
            end = start + len(weights[name])
            self._replace(name, matrix.rows(start, end))
            start = end
        return scales

    def _replace(self, name: str, matrix: RoundedMatrix) -> None:
        self.rounded[name] = matrix
        self._layer.weights[name] = matrix.values()

    def _divide_source(self, names: tuple[str, ...], scales: torch.Tensor) -> None:
        """Divides the input of the scaled matrices: folds 1 / ``scales`` into its producer."""
        weights = self._layer.weights
        if names == ("attention_output",):
            index = self._value_of_input()
            of_values = torch.empty(self._config.kv_size).index_copy_(0, index, scales)
            self._replace("value", self.rounded["value"].with_rows_divided(of_values))
            if "value_bias" in weights:
                weights["value_bias"] = weights["value_bias"] / of_values
        elif names == ("down",):
            self._replace("up", self.rounded["up"].with_rows_divided(scales))
        else:
            norm = "attention_norm" if "query" in names else "ffn_norm"
            weights[norm] = weights[norm] / scales

    def _value_of_input(self) -> torch.Tensor:
        """int64 [query_size]: for each input of attention's output, its row of ``value``."""
        config = self._config
        rows = torch.arange(config.kv_size).view(config.num_kv_heads, 1, config.head_dim)
        return rows.expand(-1, config.group_size, -1).flatten()


def _each(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """Applies ``function`` to a few sequences at a time: its intermediate tensors are large."""
    parts = [torch.split(tensor, _SEQUENCES_AT_ONCE) for tensor in inputs]
    return torch.cat([function(*part) for part in zip(*parts, strict=True)])
