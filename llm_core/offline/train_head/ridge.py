"""Where training starts: the best linear guess at the target's next final hidden state.

Ridge regression from the (normalised) features of position i and the embedding of token i + 1 to
the final hidden state of position i + 1, in closed form: seconds for what gradient steps from a
random start need many minutes for. Attention and feed-forward start as the target's last layer
with their output projections at zero, so they add nothing until they have learnt something.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from llm_core.config import ModelConfig
from llm_core.offline.train_head.examples import Example
from llm_core.quant import Weight, to_float
from llm_core.speculative import HeadConfig, TargetRows, pairs_to_halves

_PENALTY = 1e-3  # of a parameter, as a share of the mean square of the inputs
_CHUNK = 64  # conversations at a time


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target, as far as a start needs it."""

    config: ModelConfig
    weights: Mapping[str, Weight]
    rows: TargetRows


def ridge_start(
    config: HeadConfig, examples: Sequence[Example], teacher: Teacher
) -> dict[str, torch.Tensor]:
    """All tensors of an EAGLE-3 head with the three projections, by their names in files."""
    assert config.has_embedding_proj and config.has_hidden_proj and config.normalises_features
    hidden, num_features = config.hidden_size, config.num_features
    solution = _regressed(config, examples, teacher)
    features_part, embedding_part = torch.split(solution, [num_features, hidden], 1)

    # A draft after a draft: from the guess itself instead of the features.
    gram, cross = torch.zeros(hidden, hidden), torch.zeros(hidden, hidden)
    squares, products = torch.zeros(hidden), torch.zeros(hidden)
    firsts = _rows(config, examples, teacher.rows, step=0)
    seconds = _rows(config, examples, teacher.rows, step=1)
    for (x, y), (x_next, y_next) in zip(firsts, seconds, strict=True):
        guess = x @ solution.T
        direction = functional.rms_norm(guess, (hidden,), eps=config.rms_eps)
        squares += direction.square().sum(0)
        products += (direction * y).sum(0)
        rest = y_next - x_next[:, num_features:] @ embedding_part.T
        gram.addmm_(guess.T, guess)
        cross.addmm_(guess.T, rest)
    tensors = {
        "fc.weight": features_part.contiguous(),
        "embedding_proj.weight": embedding_part.contiguous(),
        "hidden_proj.weight": _solve(gram, cross).T.contiguous(),
        # What makes of the guess's direction the hidden state itself, channel by channel.
        "norm.weight": products / squares.clamp_min(1e-9),
    }
    return tensors | last_layer(config, teacher)


def eagle1_start(
    config: HeadConfig, examples: Sequence[Example], teacher: Teacher
) -> dict[str, torch.Tensor]:
    """All tensors of an EAGLE-1 head. It has no norm before attention: the target's goes into the
    projections."""
    hidden = config.hidden_size
    features_part, embedding_part = torch.split(_regressed(config, examples, teacher), hidden, 1)
    tensors = {
        "fc.weight": torch.cat([embedding_part, features_part], 1),
        "fc.bias": torch.zeros(hidden),
    }
    layer = last_layer(config, teacher)
    norm = layer["midlayer.hidden_norm.weight"]
    for name, value in layer.items():
        if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
            tensors[name.replace("midlayer", "layers.0")] = value[:, hidden:] * norm
        elif "input_layernorm" not in name and "hidden_norm" not in name:
            tensors[name.replace("midlayer", "layers.0")] = value
    return tensors


def _undone_final_norm(teacher: Teacher) -> torch.Tensor:
    """float32 [H]: a final hidden state times this is the residual stream, but for its length."""
    final = to_float(teacher.weights["final_norm"])
    floor = 0.1 * final.abs().mean()
    return final.sign() / final.abs().clamp_min(floor)


def last_layer(config: HeadConfig, teacher: Teacher) -> dict[str, torch.Tensor]:
    """Attention and feed-forward of the target's last layer, adding nothing."""
    last, hidden = teacher.config.num_layers - 1, config.hidden_size

    def get(name: str) -> torch.Tensor:
        return to_float(teacher.weights[f"layers.{last}.{name}"])

    def widened(name: str, num_heads: int | None) -> torch.Tensor:
        # The embedding's half starts at nothing: the target's layer has no such input.
        weight = get(name)
        if num_heads is not None:
            weight = pairs_to_halves(weight, num_heads)
        return torch.cat([torch.zeros_like(weight), weight], 1)

    undo = _undone_final_norm(teacher)
    return {
        "midlayer.self_attn.q_proj.weight": widened("query", config.num_heads),
        "midlayer.self_attn.k_proj.weight": widened("key", config.num_kv_heads),
        "midlayer.self_attn.v_proj.weight": widened("value", None),
        "midlayer.self_attn.o_proj.weight": torch.zeros(hidden, config.query_size),
        "midlayer.mlp.gate_proj.weight": get("gate"),
        "midlayer.mlp.up_proj.weight": get("up"),
        "midlayer.mlp.down_proj.weight": torch.zeros(hidden, config.intermediate_size),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": get("attention_norm") * undo,
        "midlayer.post_attention_layernorm.weight": get("ffn_norm") * undo,
    }


def _regressed(config: HeadConfig, examples: Sequence[Example], teacher: Teacher) -> torch.Tensor:
    """float32 [H, K * H + H]: final hidden states from features and embedding."""
    width = config.num_features + config.hidden_size
    gram, cross = torch.zeros(width, width), torch.zeros(width, config.hidden_size)
    for x, y in _rows(config, examples, teacher.rows, step=0):
        gram.addmm_(x.T, x)
        cross.addmm_(x.T, y)
    return _solve(gram, cross).T.contiguous()


def _rows(
    config: HeadConfig, examples: Sequence[Example], target: TargetRows, *, step: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(inputs [A, K * H + H], final hidden state that follows [A, H]) of the anchors that have two
    steps, ``step`` places further, some conversations at a time."""
    hidden = config.hidden_size
    for first in range(0, len(examples), _CHUNK):
        inputs, outputs = [], []
        for example in examples[first : first + _CHUNK]:
            at = example.anchors[example.num_steps >= 2] + step
            taps = example.features[at].float().view(len(at), len(config.feature_layers), hidden)
            if config.normalises_features:
                taps = functional.rms_norm(taps, (hidden,), eps=config.rms_eps)
            taps = taps.flatten(1)
            inputs.append(torch.cat([taps, target.embed(example.token_ids[at + 1])], 1))
            outputs.append(example.features[at + 1, -hidden:].float())
        yield torch.cat(inputs), torch.cat(outputs)


def _solve(gram: torch.Tensor, cross: torch.Tensor) -> torch.Tensor:
    """(gram + penalty) \\ cross; each input's penalty follows its own scale."""
    scale = gram.diagonal().clamp_min(1e-9)
    damped = gram + torch.diag(_PENALTY * scale)
    solution: torch.Tensor = torch.linalg.solve(damped.double(), cross.double())
    return solution.float()
