"""A model's matrices onto a grid, layer by layer, each with the inputs that it will really have.

Within a layer stages follow one another as in a forward pass: query/key/value, attention's output,
gate/up, down. Inputs of a stage are computed with everything before it already rounded, so later
stages can make up for what earlier ones lost; one forward pass does for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from llm_core.config import ModelConfig
from llm_core.offline.plain_model import PlainLayer, PlainModel
from llm_core.offline.quantize.awq import awq_round, search_scales
from llm_core.offline.quantize.clipping import clipped_grid
from llm_core.offline.quantize.gptq import gptq
from llm_core.offline.quantize.rounding import GridSpec, RoundedMatrix, on_grid, round_to_nearest

LayerMethod = Literal["rtn", "gptq", "awq"]
_SEQUENCES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class LayerRecipe:
    """How to round the matrices of a layer. ``act_order`` is GPTQ's alone. ``narrows``: grids are
    narrowed where the calibration text says that this helps (AWQ's of query and key never are, nor
    GPTQ's without act-order); rounding to nearest then reads the text, too."""

    method: LayerMethod
    spec: GridSpec
    act_order: bool = True
    narrows: bool = True

    @property
    def is_blind(self) -> bool:
        """Whether no text is looked at."""
        return self.method == "rtn" and not self.narrows


@dataclass(frozen=True, slots=True)
class _Statistics:
    """Of the inputs of a stage: H = X X^T [K, K], and the mean of |x| [K]."""

    hessian: torch.Tensor
    magnitude: torch.Tensor


def quantize_layers(
    model: PlainModel,
    token_ids: torch.Tensor,
    recipe: LayerRecipe,
    on_layer: Callable[[int, int], None],
) -> dict[str, RoundedMatrix]:
    """Rounds all matrices of ``model`` within its layers; returns them by their names.

    The model's weights are replaced by what the rounded ones mean; AWQ also changes norms and the
    biases of values. ``token_ids`` int64 [S, T] is the calibration text.
    ``on_layer(done, total)`` is called after each.
    """
    rounded: dict[str, RoundedMatrix] = {}
    with torch.inference_mode():
        hidden = None if recipe.is_blind else model.embed(token_ids)
        for index, layer in enumerate(model.layers):
            walk = _LayerWalk(model.config, layer, recipe)
            hidden = walk.run(hidden)
            rounded |= {f"layers.{index}.{name}": m for name, m in walk.rounded.items()}
            on_layer(index + 1, len(model.layers))
    return rounded


class _LayerWalk:
    def __init__(self, config: ModelConfig, layer: PlainLayer, recipe: LayerRecipe) -> None:
        self.rounded: dict[str, RoundedMatrix] = {}
        self._config = config
        self._layer = layer
        self._recipe = recipe

    def run(self, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """The residual stream after the layer; ``hidden`` None: nothing needs to be computed."""
        layer = self._layer
        if hidden is None:
            for names in (("query", "key", "value"), ("attention_output",), ("gate", "up")):
                self._round(names, None)
            self._round(("down",), None)
            return None
        x = self._stage(("query", "key", "value"), _each(layer.attention_input, hidden))
        x = self._stage(("attention_output",), _each(layer.attended, x))
        hidden = _each(layer.after_attention, hidden, x)
        x = self._stage(("gate", "up"), _each(layer.ffn_input, hidden))
        x = self._stage(("down",), _each(layer.gated, x))
        return _each(layer.after_ffn, hidden, x)

    def _stage(self, names: tuple[str, ...], x: torch.Tensor) -> torch.Tensor:
        """Rounds the matrices that are multiplied with x; returns x as it is afterwards."""
        rows = x.flatten(0, 1)
        statistics = _Statistics(rows.T @ rows, rows.abs().mean(0))
        scales = self._round(names, statistics)
        return x if scales is None else x / scales

    def _round(self, names: tuple[str, ...], statistics: _Statistics | None) -> torch.Tensor | None:
        """Rounds the named matrices as one; the divisors of their inputs, if there are any."""
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
                narrows=recipe.narrows,
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
            # The paper does not clip what makes scores: they depend on products of two such rows.
            clips = recipe.narrows and "query" not in names
            matrix = awq_round(stacked * scales, hessian, recipe.spec, clip=clips)
            self._divide_source(names, scales)
        start = 0
        for name in names:
            end = start + len(weights[name])
            self._put(name, matrix.rows(start, end))
            start = end
        return scales

    def _put(self, name: str, matrix: RoundedMatrix) -> None:
        self.rounded[name] = matrix
        self._layer.weights[name] = matrix.values()

    def _divide_source(self, names: tuple[str, ...], scales: torch.Tensor) -> None:
        """Makes what the scaled matrices are multiplied with smaller by ``scales``."""
        weights = self._layer.weights
        if names == ("attention_output",):
            index = self._value_of_input()
            of_values = torch.empty(self._config.kv_size).index_copy_(0, index, scales)
            self._put("value", self.rounded["value"].with_rows_divided(of_values))
            if "value_bias" in weights:
                weights["value_bias"] = weights["value_bias"] / of_values
        elif names == ("down",):
            self._put("up", self.rounded["up"].with_rows_divided(scales))
        else:
            norm = "attention_norm" if "query" in names else "ffn_norm"
            weights[norm] = weights[norm] / scales

    def _value_of_input(self) -> torch.Tensor:
        """int64 [query_size]: the row of ``value`` that each input of attention's output is of."""
        config = self._config
        rows = torch.arange(config.kv_size).view(config.num_kv_heads, 1, config.head_dim)
        return rows.expand(-1, config.group_size, -1).flatten()


def _each(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """``function`` of a few sequences at a time: what it needs in between is large."""
    parts = [torch.split(tensor, _SEQUENCES_AT_ONCE) for tensor in inputs]
    return torch.cat([function(*part) for part in zip(*parts, strict=True)])
