"""A head over conversations as it will run when it drafts: EAGLE-3's training-time test.

Step 0 has the target's features everywhere. Step j starts j places behind an anchor with the head's
own output of step j - 1; it sees step 0's keys up to the anchor, and its own of steps 1 to j, as
in a chain of drafts whose first rows are real (arXiv 2503.01840, section 3).
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
    """One step of a batch: the head's ``output`` [A, H] for ``words`` int64 [A] (the tokens that
    were said there), and ``final_hidden`` [A, H], the target's state that says them.
    ``rows`` int64 [A]: which of step 0's anchors these are."""

    output: torch.Tensor
    words: torch.Tensor
    final_hidden: torch.Tensor
    rows: torch.Tensor


@dataclass(slots=True)
class _Open:
    """One conversation in the middle of its steps; rows are those of its anchors that go on."""

    example: Example
    key_value: _KeyValue  # step 0's, all rows
    own: list[_KeyValue]  # of steps 1, 2, ..., a row an anchor
    anchors: torch.Tensor
    num_steps: torch.Tensor
    rows: torch.Tensor


def unrolled(
    head: EagleHead,
    batch: Sequence[Example],
    shares: Sequence[float],
    generator: torch.Generator,
) -> list[StepOutput]:
    """``len(shares)`` steps; step j runs for a random share ``shares[j]`` of those anchors of step
    j - 1 whose answer goes on (1.0: all of them)."""
    hidden_size = head.config.hidden_size
    sizes = [len(example.token_ids) - 2 for example in batch]
    features = torch.cat([e.features[:n].float() for e, n in zip(batch, sizes, strict=True)])
    tokens = torch.cat([example.token_ids[1:-1] for example in batch])
    positions = torch.cat([torch.arange(n) for n in sizes])
    residual, x = head.entered(head.hidden_of_features(features), head.embed(tokens))
    keys, values = head.key_value(x, head.rotations[positions])
    starts = torch.tensor([0, *sizes]).cumsum(0)[:-1].tolist()
    at = torch.cat([e.anchors + start for e, start in zip(batch, starts, strict=True)])
    query = head.query(x[at], head.rotations[positions[at]])

    opened, row = [], 0
    for example, key, value in zip(
        batch, torch.split(keys, sizes), torch.split(values, sizes), strict=True
    ):
        count = len(example.anchors)
        rows = torch.arange(row, row + count)
        opened.append(_Open(example, (key, value), [], example.anchors, example.num_steps, rows))
        row += count
    outputs = []
    attended = _attend_all(query, opened)
    output = head.output(residual[at], attended)
    outputs.append(_step_output(output, opened, 0, hidden_size))
    for step in range(1, len(shares)):
        kept = _keep_some(opened, step, shares[step], generator)
        if len(kept) == 0:
            break
        output = output[kept]
        places = torch.cat([o.anchors for o in opened]) + step
        tokens = torch.cat([o.example.token_ids[o.anchors + step + 1] for o in opened])
        residual, x = head.entered(head.hidden_of_output(output), head.embed(tokens))
        rotations = head.rotations[places]
        query = head.query(x, rotations)
        keys, values = head.key_value(x, rotations)
        counts = [len(o.anchors) for o in opened]
        for o, key, value in zip(
            opened, torch.split(keys, counts), torch.split(values, counts), strict=True
        ):
            o.own.append((key, value))
        output = head.output(residual, _attend_all(query, opened))
        outputs.append(_step_output(output, opened, step, hidden_size))
    return outputs


def medusa_outputs(heads: MedusaHeads, batch: Sequence[Example]) -> list[StepOutput]:
    """What each of Medusa's heads makes of the anchors whose answers reach so far."""
    hidden_size = heads.config.hidden_size
    outputs = []
    for k in range(heads.config.num_medusa_heads):
        opened, row = [], 0
        for example in batch:
            goes_on = (example.num_steps > k).nonzero().squeeze(1)
            anchors, rows = example.anchors[goes_on], goes_on + row
            row += len(example.anchors)
            opened.append(_Open(example, _NO_KEYS, [], anchors, example.num_steps[goes_on], rows))
        final = [o.example.features[o.anchors, -hidden_size:].float() for o in opened]
        outputs.append(_step_output(heads.output(torch.cat(final), k), opened, k, hidden_size))
    return outputs


def _step_output(
    output: torch.Tensor, opened: Sequence[_Open], step: int, hidden_size: int
) -> StepOutput:
    words = torch.cat([o.example.token_ids[o.anchors + step + 2] for o in opened])
    final = [o.example.features[o.anchors + step + 1, -hidden_size:].float() for o in opened]
    rows = torch.cat([o.rows for o in opened])
    return StepOutput(output, words, torch.cat(final), rows)


def _keep_some(
    opened: Sequence[_Open], step: int, share: float, generator: torch.Generator
) -> torch.Tensor:
    """Drops anchors that end or are not drawn; int64: which rows of the last step remain."""
    kept, first = [], 0
    for o in opened:
        goes_on = o.num_steps > step
        if share < 1.0:
            goes_on &= torch.rand(len(goes_on), generator=generator) < share
        index = goes_on.nonzero().squeeze(1)
        kept.append(index + first)
        first += len(goes_on)
        o.anchors, o.num_steps, o.rows = o.anchors[index], o.num_steps[index], o.rows[index]
        o.own = [(key[index], value[index]) for key, value in o.own]
    return torch.cat(kept)


def _attend_all(query: torch.Tensor, opened: Sequence[_Open]) -> torch.Tensor:
    """[A, query_size]; sequences do not see each other."""
    parts = torch.split(query, [len(o.anchors) for o in opened])
    return torch.cat([_attend(q, o) for q, o in zip(parts, opened, strict=True)])


def _attend(query: torch.Tensor, o: _Open) -> torch.Tensor:
    """query [A, num_heads, head_dim] -> [A, num_heads * head_dim]."""
    key, value = o.key_value
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    shape = (num_kv_heads, num_heads // num_kv_heads, num_rows)
    # [kv head, query heads that share it, row, head_dim]
    grouped = query.view(num_rows, *shape[:2], head_dim).permute(1, 2, 0, 3) * head_dim**-0.5
    past = (grouped.flatten(1, 2) @ key.permute(1, 2, 0)).float().view(*shape, len(key))
    hides = torch.arange(len(key)) > o.anchors.unsqueeze(1)
    scores = [past.masked_fill(hides, float("-inf"))]
    for own_key, _ in o.own:
        scores.append((grouped * own_key.transpose(0, 1).unsqueeze(1)).sum(-1, keepdim=True))
    weights = torch.cat(scores, -1).softmax(-1)
    seen = weights[..., : len(key)].flatten(1, 2) @ value.transpose(0, 1)
    result: torch.Tensor = seen.float().view(*shape, head_dim)
    for step, (_, own_value) in enumerate(o.own):
        weight = weights[..., len(key) + step].unsqueeze(-1)
        result = result + weight * own_value.transpose(0, 1).unsqueeze(1)
    return result.permute(2, 0, 1, 3).flatten(1)
