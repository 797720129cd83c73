"""Initial weights of a head: ridge regression of the target's next final hidden state.

From the (normalised) features of position i and the embedding of token i + 1 to the final hidden
state of position i + 1, in closed form: seconds instead of many minutes of gradient steps from
random weights. Attention and feed-forward start as the target's last layer with output projections
of zero, so that they contribute nothing at first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from llm_core.config import ModelConfig
from llm_core.offline.train_head.examples import Example
from llm_core.quant import Weight, to_float
from llm_core.speculative import HeadConfig, TargetEmbeddings, normalized_features, pairs_to_halves

_PENALTY = 1e-3  # relative to the mean square of each input
_CHUNK = 64  # conversations processed at once


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target model."""

    config: ModelConfig
    weights: Mapping[str, Weight]
    embeddings: TargetEmbeddings


def eagle3_initial_tensors(
    config: HeadConfig, examples: Sequence[Example], teacher: Teacher
) -> dict[str, torch.Tensor]:
    """All tensors of an EAGLE-3 head that has our three additions, by their names in files."""
    assert config.has_embedding_proj and config.has_hidden_proj and config.normalises_features
    hidden, num_features = config.hidden_size, config.num_features
    solution = _regressed(config, examples, teacher)
    features_part, embedding_part = torch.split(solution, [num_features, hidden], 1)

    # Later drafts: from the head's own prediction instead of the features.
    gram, cross = torch.zeros(hidden, hidden), torch.zeros(hidden, hidden)
    squares, products = torch.zeros(hidden), torch.zeros(hidden)
    firsts = _rows(config, examples, teacher.embeddings, step=0)
    seconds = _rows(config, examples, teacher.embeddings, step=1)
    for (x, y), (x_next, y_next) in zip(firsts, seconds, strict=True):
        predicted = x @ solution.T
        direction = functional.rms_norm(predicted, (hidden,), eps=config.rms_eps)
        squares += direction.square().sum(0)
        products += (direction * y).sum(0)
        rest = y_next - x_next[:, num_features:] @ embedding_part.T
        gram.addmm_(predicted.T, predicted)
        cross.addmm_(predicted.T, rest)
    tensors = {
        "fc.weight": features_part.contiguous(),
        "embedding_proj.weight": embedding_part.contiguous(),
        "hidden_proj.weight": _solve(gram, cross).T.contiguous(),
        # Per channel, the least-squares factor from the normalised prediction to the hidden state.
        "norm.weight": products / squares.clamp_min(1e-9),
    }
    return tensors | last_layer(config, teacher)


def eagle1_initial_tensors(
    config: HeadConfig, examples: Sequence[Example], teacher: Teacher
) -> dict[str, torch.Tensor]:
    """All tensors of an EAGLE-1 head. It has no norm before attention: the target's norm weights
    are folded into the projections."""
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


def _inverse_final_norm(teacher: Teacher) -> torch.Tensor:
    """float32 [H]: times a final hidden state gives the residual stream, up to scale."""
    final = to_float(teacher.weights["final_norm"])
    floor = 0.1 * final.abs().mean()
    return final.sign() / final.abs().clamp_min(floor)


def last_layer(config: HeadConfig, teacher: Teacher) -> dict[str, torch.Tensor]:
    """Attention and feed-forward of the target's last layer, with output projections of zero."""
    last, hidden = teacher.config.num_layers - 1, config.hidden_size

    def get(name: str) -> torch.Tensor:
        return to_float(teacher.weights[f"layers.{last}.{name}"])

    def widened(name: str, num_heads: int | None) -> torch.Tensor:
        # Zeros for the embedding's half: the target's layer has no such input.
        weight = get(name)
        if num_heads is not None:
            weight = pairs_to_halves(weight, num_heads)
        return torch.cat([torch.zeros_like(weight), weight], 1)

    inverse_norm = _inverse_final_norm(teacher)
    return {
        "midlayer.self_attn.q_proj.weight": widened("query", config.num_heads),
        "midlayer.self_attn.k_proj.weight": widened("key", config.num_kv_heads),
        "midlayer.self_attn.v_proj.weight": widened("value", None),
        "midlayer.self_attn.o_proj.weight": torch.zeros(hidden, config.query_size),
        "midlayer.mlp.gate_proj.weight": get("gate"),
        "midlayer.mlp.up_proj.weight": get("up"),
        "midlayer.mlp.down_proj.weight": torch.zeros(hidden, config.intermediate_size),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": get("attention_norm") * inverse_norm,
        "midlayer.post_attention_layernorm.weight": get("ffn_norm") * inverse_norm,
    }


def _regressed(config: HeadConfig, examples: Sequence[Example], teacher: Teacher) -> torch.Tensor:
    """float32 [H, K * H + H]: regression of final hidden states on features and embedding."""
    width = config.num_features + config.hidden_size
    gram, cross = torch.zeros(width, width), torch.zeros(width, config.hidden_size)
    for x, y in _rows(config, examples, teacher.embeddings, step=0):
        gram.addmm_(x.T, x)
        cross.addmm_(x.T, y)
    return _solve(gram, cross).T.contiguous()


def _rows(
    config: HeadConfig, examples: Sequence[Example], target: TargetEmbeddings, *, step: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(inputs [A, K * H + H], next final hidden states [A, H]) at ``step`` positions after the
    anchors that have two steps, for some conversations at a time."""
    hidden = config.hidden_size
    for first in range(0, len(examples), _CHUNK):
        inputs, outputs = [], []
        for example in examples[first : first + _CHUNK]:
            at = example.anchors[example.num_steps >= 2] + step
            features = normalized_features(config, example.features[at].float())
            inputs.append(torch.cat([features, target.embed(example.token_ids[at + 1])], 1))
            outputs.append(example.features[at + 1, -hidden:].float())
        yield torch.cat(inputs), torch.cat(outputs)


def _solve(gram: torch.Tensor, cross: torch.Tensor) -> torch.Tensor:
    """(gram + penalty) \\ cross, with a penalty proportional to each input's scale."""
    scale = gram.diagonal().clamp_min(1e-9)
    damped = gram + torch.diag(_PENALTY * scale)
    solution: torch.Tensor = torch.linalg.solve(damped.double(), cross.double())
    return solution.float()
