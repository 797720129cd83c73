"""Training-time test (EAGLE-3, arXiv 2503.01840, section 3): runs a head as it runs when drafting.

Step 0 has the target's features at all positions. Step j computes the position j after each anchor
from the head's own output of step j - 1; it attends to step 0's keys up to the anchor and to its
own of steps 1 to j, like a chain of drafts after a prefilled text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llm_core.offline.train_head.examples import Example
from llm_core.speculative import EagleHead, MedusaHeads

_KeyValue = tuple[torch.Tensor, torch.Tensor]
_NO_KEYS: _KeyValue = (torch.empty(0), torch.empty(0))


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One step of a batch. ``output`` float32 [A, H]: the head's outputs. ``labels`` int64 [A]: the
    tokens to predict. ``final_hidden`` float32 [A, H]: the target's final hidden states that
    predict the labels. ``anchor_index`` int64 [A]: positions among step 0's anchors."""

    output: torch.Tensor
    labels: torch.Tensor
    final_hidden: torch.Tensor
    anchor_index: torch.Tensor


@dataclass(slots=True)
class _ActiveExample:
    """One conversation between steps; ``anchors``, ``num_steps`` and ``anchor_index`` [A] are those
    of the anchors that take part in the current step."""

    example: Example
    key_value: _KeyValue  # of step 0, all positions
    draft_key_values: list[_KeyValue]  # of steps 1, 2, ..., one row for each anchor
    anchors: torch.Tensor
    num_steps: torch.Tensor
    anchor_index: torch.Tensor


def eagle_outputs(
    head: EagleHead,
    batch: Sequence[Example],
    shares: Sequence[float],
    generator: torch.Generator,
) -> list[StepOutput]:
    """The outputs of ``len(shares)`` steps. Step j runs for a random share ``shares[j]`` (1.0: all)
    of the anchors of step j - 1 whose answer goes on."""
    hidden_size = head.config.hidden_size
    sizes = [len(example.token_ids) - 2 for example in batch]
    features = torch.cat([e.features[:n].float() for e, n in zip(batch, sizes, strict=True)])
    tokens = torch.cat([example.token_ids[1:-1] for example in batch])
    positions = torch.cat([torch.arange(n) for n in sizes])
    residual, x = head.layer_input(features, tokens, from_target=True)
    keys, values = head.key_value(x, head.rotations[positions])
    starts = torch.tensor([0, *sizes]).cumsum(0)[:-1].tolist()
    at = torch.cat([e.anchors + start for e, start in zip(batch, starts, strict=True)])
    query = head.query(x[at], head.rotations[positions[at]])

    active, first = [], 0
    for example, key, value in zip(
        batch, torch.split(keys, sizes), torch.split(values, sizes), strict=True
    ):
        count = len(example.anchors)
        index = torch.arange(first, first + count)
        active.append(
            _ActiveExample(example, (key, value), [], example.anchors, example.num_steps, index)
        )
        first += count
    outputs = []
    output = head.layer_output(residual[at], _attend_all(query, active))
    outputs.append(_step_output(output, active, 0, hidden_size))
    for step in range(1, len(shares)):
        kept = _drop_anchors(active, step, shares[step], generator)
        if len(kept) == 0:
            break
        output = output[kept]
        positions = torch.cat([a.anchors for a in active]) + step
        tokens = torch.cat([a.example.token_ids[a.anchors + step + 1] for a in active])
        residual, x = head.layer_input(output, tokens, from_target=False)
        rotations = head.rotations[positions]
        query = head.query(x, rotations)
        keys, values = head.key_value(x, rotations)
        counts = [len(a.anchors) for a in active]
        for a, key, value in zip(
            active, torch.split(keys, counts), torch.split(values, counts), strict=True
        ):
            a.draft_key_values.append((key, value))
        output = head.layer_output(residual, _attend_all(query, active))
        outputs.append(_step_output(output, active, step, hidden_size))
    return outputs


def medusa_outputs(heads: MedusaHeads, batch: Sequence[Example]) -> list[StepOutput]:
    """The output of each Medusa head, as one step each, at the anchors whose answer reaches that
    far."""
    hidden_size = heads.config.hidden_size
    outputs = []
    for k in range(heads.config.num_medusa_heads):
        active, first = [], 0
        for example in batch:
            goes_on = (example.num_steps > k).nonzero().squeeze(1)
            anchors, index = example.anchors[goes_on], goes_on + first
            first += len(example.anchors)
            num_steps = example.num_steps[goes_on]
            active.append(_ActiveExample(example, _NO_KEYS, [], anchors, num_steps, index))
        final = [a.example.features[a.anchors, -hidden_size:].float() for a in active]
        output = heads.head_output(torch.cat(final), k)
        outputs.append(_step_output(output, active, k, hidden_size))
    return outputs


def _step_output(
    output: torch.Tensor, active: Sequence[_ActiveExample], step: int, hidden_size: int
) -> StepOutput:
    labels = torch.cat([a.example.token_ids[a.anchors + step + 2] for a in active])
    final = [a.example.features[a.anchors + step + 1, -hidden_size:].float() for a in active]
    return StepOutput(output, labels, torch.cat(final), torch.cat([a.anchor_index for a in active]))


def _drop_anchors(
    active: Sequence[_ActiveExample], step: int, share: float, generator: torch.Generator
) -> torch.Tensor:
    """Drops anchors whose answer ends and those that are not drawn; int64: the rows of the last
    step that remain."""
    kept, first = [], 0
    for a in active:
        goes_on = a.num_steps > step
        if share < 1.0:
            goes_on &= torch.rand(len(goes_on), generator=generator) < share
        index = goes_on.nonzero().squeeze(1)
        kept.append(index + first)
        first += len(goes_on)
        a.anchors, a.num_steps = a.anchors[index], a.num_steps[index]
        a.anchor_index = a.anchor_index[index]
        a.draft_key_values = [(key[index], value[index]) for key, value in a.draft_key_values]
    return torch.cat(kept)


def _attend_all(query: torch.Tensor, active: Sequence[_ActiveExample]) -> torch.Tensor:
    """query [A, num_heads, head_dim] of all conversations -> [A, query_size]."""
    parts = torch.split(query, [len(a.anchors) for a in active])
    return torch.cat([_attend(q, a) for q, a in zip(parts, active, strict=True)])


def _attend(query: torch.Tensor, a: _ActiveExample) -> torch.Tensor:
    """query [A, num_heads, head_dim] of one conversation -> [A, num_heads * head_dim]."""
    key, value = a.key_value
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    shape = (num_kv_heads, num_heads // num_kv_heads, num_rows)
    # [kv head, query heads of its group, row, head_dim]
    grouped = query.view(num_rows, *shape[:2], head_dim).permute(1, 2, 0, 3) * head_dim**-0.5
    past = (grouped.flatten(1, 2) @ key.permute(1, 2, 0)).float().view(*shape, len(key))
    is_after_anchor = torch.arange(len(key)) > a.anchors.unsqueeze(1)
    scores = [past.masked_fill(is_after_anchor, float("-inf"))]
    for draft_key, _ in a.draft_key_values:
        scores.append((grouped * draft_key.transpose(0, 1).unsqueeze(1)).sum(-1, keepdim=True))
    weights = torch.cat(scores, -1).softmax(-1)
    attended = weights[..., : len(key)].flatten(1, 2) @ value.transpose(0, 1)
    result: torch.Tensor = attended.float().view(*shape, head_dim)
    for step, (_, draft_value) in enumerate(a.draft_key_values):
        weight = weights[..., len(key) + step].unsqueeze(-1)
        result = result + weight * draft_value.transpose(0, 1).unsqueeze(1)
    return result.permute(2, 0, 1, 3).flatten(1)
