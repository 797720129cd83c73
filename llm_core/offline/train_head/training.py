"""The training loop of a draft head, resumable from a checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from llm_core.errors import ModelLoadError
from llm_core.loading import SafetensorsFile, write_safetensors
from llm_core.offline.options import HeadProgress
from llm_core.offline.train_head.examples import Example, batches
from llm_core.offline.train_head.objective import Objective, accepted_lengths
from llm_core.offline.train_head.training_time_test import StepOutput

_INITIALISED_BY_RIDGE = ("fc.weight", "embedding_proj.weight", "hidden_proj.weight")
_WARM_UP_STEPS = 80
_MAX_GRADIENT_NORM = 1.0
_BETAS = (0.9, 0.95)
_SMOOTHING = 0.98
_STEP_SHARES = (1.0, 0.4, 0.4, 0.4)  # of the anchors, by step: ``eagle_outputs``
DEPTH = len(_STEP_SHARES)  # of the chains that are trained and measured
_BATCH_ANCHORS = 512
_LEARNING_RATE = 5e-4
_RIDGE_LEARNING_RATE = 1.5e-4
_SAVE_EVERY_S = 120.0
_MEASURE_EVERY_S = 300.0

RunSteps = Callable[[Sequence[Example], Sequence[float], torch.Generator], list[StepOutput]]
"""(batch, share of the anchors by step, generator) -> the outputs of the steps"""


class TrainableHead(Protocol):
    """A head whose ``weights`` are trained."""

    weights: dict[str, torch.Tensor]

    def draft_logits(self, output: torch.Tensor) -> torch.Tensor:
        """[A, H] -> [A, draft_vocab_size]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """``train_s``: seconds of training, including those before a restart; the learning rate follows
    a cosine over them, to zero. ``is_bfloat16``: matrix products in bfloat16; weights, sums and the
    optimiser in float32."""

    train_s: float
    seed: int
    is_bfloat16: bool


class Training:
    """A training run. ``head.weights`` are trained in place."""

    def __init__(
        self,
        head: TrainableHead,
        run_steps: RunSteps,
        objective: Objective,
        options: TrainingOptions,
        *,
        state_path: Path,
        embedding_rms: float,
    ) -> None:
        """Resumes from the checkpoint at ``state_path`` if there is one; a run that was complete
        starts again from its weights. ``embedding_rms``: of the target's embedding; the learning
        rate of its projection is inversely proportional. Raises ModelLoadError for a checkpoint
        that is damaged or of another head."""
        self.head = head
        self._run_steps = run_steps
        self._objective = objective
        self._options = options
        self._state_path = state_path
        self._index = objective.draft_index()
        self.step = self.num_anchors = self.epoch = 0
        self.elapsed_s = 0.0
        for weight in head.weights.values():
            weight.requires_grad_(True)
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [weight], "lr": self._rate(name, embedding_rms)}
                for name, weight in head.weights.items()
            ],
            betas=_BETAS,
            weight_decay=0.0,
            fused=True,
        )
        self._peaks = [group["lr"] for group in self._optimizer.param_groups]
        if state_path.exists():
            self._restore()

    def run(
        self,
        load: Callable[[], Sequence[Example]],
        held_out: Sequence[Example],
        on_progress: Callable[[HeadProgress], None],
    ) -> None:
        """Trains until ``train_s`` are over. ``load`` is called in each epoch: the corpus may have
        grown."""
        options = self._options
        generator = torch.Generator().manual_seed(options.seed + self.step)
        rates = [0.0] * DEPTH
        loss_mean, saved_s, measured_s = 0.0, self.elapsed_s, self.elapsed_s
        weight = 0.0
        while self.elapsed_s < options.train_s:
            examples = load()
            for batch in batches(examples, _BATCH_ANCHORS, options.seed + 1000 * self.epoch):
                started = time.monotonic()
                loss, step_rates = self._train_step(batch, generator)
                weight = _SMOOTHING * weight + 1 - _SMOOTHING
                loss_mean += (loss - loss_mean) * (1 - _SMOOTHING) / weight
                for j, rate in enumerate(step_rates):
                    rates[j] += (rate - rates[j]) * (1 - _SMOOTHING) / weight
                self.elapsed_s += time.monotonic() - started
                measured = None
                if self.elapsed_s - measured_s > _MEASURE_EVERY_S:
                    measured_s = self.elapsed_s
                    measured = self.measure(held_out)
                if self.elapsed_s - saved_s > _SAVE_EVERY_S:
                    saved_s = self.elapsed_s
                    self.save()
                on_progress(self._progress(loss_mean, rates, measured))
                if self.elapsed_s >= options.train_s:
                    break
            else:
                self.epoch += 1
        self.save()

    def measure(self, held_out: Sequence[Example]) -> tuple[float, float]:
        """Accepted lengths of chains of DEPTH on (near-greedy, other) answers; nan without any."""
        generator = torch.Generator()
        result = []
        for is_greedy in (True, False):
            chosen = [e for e in held_out if (e.temperature < 0.3) == is_greedy]
            tokens = num_steps = 0
            with torch.no_grad():
                for batch in batches(chosen, _BATCH_ANCHORS, 0):
                    matches = []
                    for output in self._run_steps(batch, (1.0,) * DEPTH, generator):
                        drafted = self.head.draft_logits(output.output).argmax(-1)
                        is_accepted = drafted == self._index[output.labels]
                        matches.append((output.anchor_index, is_accepted))
                    more = accepted_lengths(batch, matches, DEPTH)
                    tokens, num_steps = tokens + more[0], num_steps + more[1]
            result.append(tokens / num_steps if num_steps else math.nan)
        return result[0], result[1]

    def save(self) -> None:
        """Writes weights and the optimiser's state, atomically."""
        tensors = {
            "counts": torch.tensor([self.step, self.epoch, self.num_anchors]),
            "elapsed_s": torch.tensor([self.elapsed_s], dtype=torch.float64),
            "target_ids": self._objective.target_ids,
        }
        for name, weight in self.head.weights.items():
            tensors[f"weight.{name}"] = weight.detach()
            state = self._optimizer.state.get(weight)
            if state:
                tensors[f"mean.{name}"] = state["exp_avg"]
                tensors[f"square.{name}"] = state["exp_avg_sq"]
        partial = self._state_path.with_suffix(".partial")
        self._state_path.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(partial, tensors)
        partial.replace(self._state_path)

    def _restore(self) -> None:
        with SafetensorsFile(self._state_path) as file, torch.no_grad():
            if "target_ids" not in file.tensors or not torch.equal(
                file.read("target_ids"), self._objective.target_ids
            ):
                raise ModelLoadError(
                    f"{self._state_path.name}: is of a head with other words; begin with the same "
                    "head as then, or remove it to begin again"
                )
            for name, weight in self.head.weights.items():
                entry = file.tensors.get(f"weight.{name}")
                if entry is None or entry.shape != tuple(weight.shape):
                    raise ModelLoadError(
                        f"{self._state_path.name}: holds no {name} of shape {tuple(weight.shape)}: "
                        "it is of another head; remove it to begin again"
                    )
                weight.copy_(file.read(f"weight.{name}"))
                if f"mean.{name}" in file.tensors:
                    self._optimizer.state[weight] = {
                        "step": torch.tensor(float(file.read("counts")[0])),
                        "exp_avg": file.read(f"mean.{name}"),
                        "exp_avg_sq": file.read(f"square.{name}"),
                    }
            self.step, self.epoch, self.num_anchors = file.read("counts").tolist()
            self.elapsed_s = float(file.read("elapsed_s")[0])
            if self.elapsed_s >= self._options.train_s:  # complete: start again from there
                self.elapsed_s, self.step = 0.0, 0

    def _train_step(
        self, batch: Sequence[Example], generator: torch.Generator
    ) -> tuple[float, list[float]]:
        share = self._rate_share()
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * share
        total = torch.zeros(())
        rates = []
        with torch.autocast("cpu", torch.bfloat16, enabled=self._options.is_bfloat16):
            for j, output in enumerate(self._run_steps(batch, _STEP_SHARES, generator)):
                logits = self.head.draft_logits(output.output)
                loss, is_accepted = self._objective.loss(j, output, logits, self._index)
                total = total + loss
                rates.append(float(is_accepted.float().mean()))
        self._optimizer.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(self.head.weights.values()), _MAX_GRADIENT_NORM)
        self._optimizer.step()
        self.step += 1
        self.num_anchors += sum(len(example.anchors) for example in batch)
        return float(total.detach()), rates

    def _rate(self, name: str, embedding_rms: float) -> float:
        if name not in _INITIALISED_BY_RIDGE:
            return _LEARNING_RATE
        rate = _RIDGE_LEARNING_RATE
        # AdamW's step size does not depend on the scale of the input.
        return rate / embedding_rms if name == "embedding_proj.weight" else rate

    def _rate_share(self) -> float:
        warm_up = min(1.0, (self.step + 1) / _WARM_UP_STEPS)
        done = min(1.0, self.elapsed_s / self._options.train_s)
        return warm_up * 0.5 * (1 + math.cos(math.pi * done))

    def _progress(
        self, loss: float, rates: Sequence[float], measured: tuple[float, float] | None
    ) -> HeadProgress:
        return HeadProgress(
            step=self.step,
            epoch=self.epoch,
            elapsed_s=self.elapsed_s,
            num_anchors=self.num_anchors,
            loss=loss,
            acceptance=tuple(rates),
            held_out=measured,
            done=min(1.0, self.elapsed_s / self._options.train_s),
        )
