"""A model that computes as if on a device: what it chooses is known to it at once, and to the host
when that asks. See fakes.py for the others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.gpu import load_ops
from llm_core.batch import ForwardBatch, ForwardResult
from llm_core.model.backend import DeviceSampler, Model
from llm_core.model.kv_cache import KvCache
from llm_core.model.runner import ModelRunner

ORACLE = load_ops("oracle")


@dataclass
class LateStep:
    """Counts itself as in flight until it is asked for."""

    model: LateModel
    made: ForwardResult
    is_known: bool = False

    def result(self) -> ForwardResult:
        assert not self.is_known, "a step is learnt of once"
        assert self.model.in_flight[0] is self, "steps are learnt of in order"
        self.is_known = True
        self.model.in_flight.pop(0)
        return self.made


class LateModel:
    """``DeviceSampler`` around another model. Fails where a row's token is one that the host could
    not know and that no step before chose, and where more than two steps are in flight."""

    def __init__(self, model: Model) -> None:
        self.in_flight: list[LateStep] = []
        self.most_in_flight = 0
        self.num_kept_rows = 0
        self._model = model
        self._tokens = torch.zeros(0, dtype=torch.int64)
        self._vocab_size = 0

    def set_vocab_size(self, vocab_size: int) -> None:
        assert not self.in_flight
        self._vocab_size = vocab_size

    def set_feature_layers(self, layers: tuple[int, ...]) -> None:
        self._model.set_feature_layers(layers)

    def forward(self, batch: ForwardBatch, cache: KvCache) -> ForwardResult:
        return self.launch(batch, cache).result()

    def launch(self, batch: ForwardBatch, cache: KvCache) -> LateStep:
        choices, token_ids = batch.choices, batch.token_ids.clone()
        if choices is not None:
            rows = (choices.sources >= 0).nonzero().flatten()
            assert bool((token_ids[rows] < 0).all()), "what the host knows is not asked for"
            token_ids[rows] = self._tokens[choices.sources[rows].long()]
        assert bool((token_ids >= 0).all()), "a row's token is known to nobody"
        made = self._model.forward(replace(batch, token_ids=token_ids, choices=None), cache)
        if choices is not None:
            tokens = ORACLE.sample(made.logits[:, : self._vocab_size], choices.inputs)
            kept = torch.tensor(choices.keeps, dtype=torch.int64)
            tokens[kept] = 0  # means nothing
            made = replace(made, logits=made.logits[kept], tokens=tokens)
            self._tokens = tokens
            self.num_kept_rows += len(choices.keeps)
        step = LateStep(self, made)
        self.in_flight.append(step)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        assert len(self.in_flight) <= 2, "one runs, and one waits for it"
        return step


def make_late(runner: ModelRunner) -> LateModel:
    """Lets a runner's model be late."""
    model = LateModel(runner._model)
    runner._model = model
    assert isinstance(model, DeviceSampler) and runner.samples_on_device
    return model
