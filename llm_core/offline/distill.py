"""The job of ``distill_model``: depth pruning, then knowledge distillation.

Pruning keeps layers spaced evenly over the teacher, including the first and the last. The student
is then trained by distillation (Hinton, Vinyals, Dean 2015) towards the teacher's distribution of
each next token, on text that the teacher generated or on a given one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional

from llm_core.config import ModelConfig
from llm_core.errors import InvalidRequestError
from llm_core.loading import open_model
from llm_core.offline.cpu_features import multiplies_bfloat16
from llm_core.offline.options import Agreement, DistillOptions, DistillReport, Progress
from llm_core.offline.quantize.export import Exported, check_target, export_model
from llm_core.offline.quantize.job import directory_bytes
from llm_core.offline.texts import held_out, text_windows
from llm_core.offline.trainable_decoder import TrainableDecoder

_WARM_UP_SHARE = 0.1
_MAX_GRADIENT_NORM = 1.0
_FINAL_LEARNING_RATE_SHARE = 0.1


def distill(options: DistillOptions, progress: Progress) -> DistillReport:
    """Runs the job. Raises LlmError."""
    started_s = time.monotonic()
    check_target(options.out_dir)
    with open_model(options.model_path) as opened:
        kept = kept_layers(opened.model.config.num_layers, options.num_layers)
        windows = text_windows(opened, options, partial(progress, "text"))
        teacher = TrainableDecoder(opened.model.config, opened.model.weights, options.window_len)
    torch.set_num_threads(options.num_threads)
    student = pruned(teacher, kept)
    training, evaluation = held_out(windows)
    before, teacher_perplexity = agreement(teacher, student, evaluation)
    train_student(teacher, student, training, options, partial(progress, "training"))
    after, _ = agreement(teacher, student, evaluation)
    if not math.isfinite(after.divergence):
        raise InvalidRequestError("training diverged: choose a smaller learning rate")
    weights = {name: value.detach() for name, value in student.named_weights().items()}
    export_model(options.out_dir, options.model_path, Exported(student.config, weights))
    return DistillReport(
        before=before,
        after=after,
        teacher_perplexity=teacher_perplexity,
        kept_layers=kept,
        size_bytes=directory_bytes(options.out_dir),
        wall_s=time.monotonic() - started_s,
    )


def kept_layers(num_teacher_layers: int, num_layers: int) -> tuple[int, ...]:
    """Indices of the teacher's layers to keep. Raises InvalidRequestError unless they are fewer."""
    if not 1 <= num_layers < num_teacher_layers:
        raise InvalidRequestError(
            f"num_layers is {num_layers}, expected 1 to {num_teacher_layers - 1}: fewer than the "
            f"{num_teacher_layers} of the model"
        )
    if num_layers == 1:
        return (0,)
    step = (num_teacher_layers - 1) / (num_layers - 1)
    return tuple(round(index * step) for index in range(num_layers))


def pruned(teacher: TrainableDecoder, kept: tuple[int, ...]) -> TrainableDecoder:
    """A student with copies of those layers; embedding, head and final norm are shared."""
    config = _pruned_config(teacher.config, kept)
    weights: dict[str, torch.Tensor] = dict(teacher.shared)
    for index, source in enumerate(kept):
        layer = teacher.layers[source].weights
        weights |= {f"layers.{index}.{name}": value.clone() for name, value in layer.items()}
    return TrainableDecoder(config, weights, teacher.max_context)


def _pruned_config(config: ModelConfig, kept: tuple[int, ...]) -> ModelConfig:
    sliding = config.layer_is_sliding
    is_sliding = tuple(sliding[layer] for layer in kept) if sliding else ()
    return replace(config, num_layers=len(kept), layer_is_sliding=is_sliding)


def train_student(
    teacher: TrainableDecoder,
    student: TrainableDecoder,
    windows: torch.Tensor,
    options: DistillOptions,
    on_step: Callable[[int, int], None],
) -> None:
    """Trains the student's layers (not embedding, head and final norm) on int64 windows [S, T].

    AdamW with linear warm-up and a cosine schedule down to a tenth of the learning rate. Matrix
    products are in bfloat16 where the CPU supports them; weights, sums and optimiser in float32.
    """
    parameters = [value for layer in student.layers for value in layer.weights.values()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(
        parameters, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    rate_share = partial(_rate_share, num_steps=options.num_steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_share)
    batches = _batches(windows, options.batch_size, options.seed)
    is_bfloat16 = multiplies_bfloat16()
    for step in range(options.num_steps):
        batch = next(batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16):
            with torch.no_grad():
                target = teacher.logits(teacher.hidden(batch)).float().log_softmax(-1)
            predicted = student.logits(student.hidden(batch)).float().log_softmax(-1)
        loss = functional.kl_div(
            predicted.flatten(0, 1), target.flatten(0, 1), log_target=True, reduction="batchmean"
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, _MAX_GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        on_step(step + 1, options.num_steps)
    for parameter in parameters:
        parameter.requires_grad_(False)


def _rate_share(step: int, num_steps: int) -> float:
    warm_up = max(1, int(_WARM_UP_SHARE * num_steps))
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, num_steps - warm_up)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return _FINAL_LEARNING_RATE_SHARE + (1 - _FINAL_LEARNING_RATE_SHARE) * cosine


def _batches(windows: torch.Tensor, batch_size: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless; every epoch has its own order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(windows), generator=generator)
        for indices in torch.split(order, batch_size):
            yield windows[indices]


def agreement(
    teacher: TrainableDecoder, student: TrainableDecoder, windows: torch.Tensor
) -> tuple[Agreement, float]:
    """The agreement of both over int64 windows [S, T], and the teacher's perplexity."""
    divergence = same = 0.0
    nll: Mapping[str, list[float]] = {"teacher": [], "student": []}
    num_rows = 0
    with torch.inference_mode():
        for window in torch.split(windows, 1):
            exact = teacher.logits(teacher.hidden(window))[0].log_softmax(-1)
            other = student.logits(student.hidden(window))[0].log_softmax(-1)
            divergence += float((exact.exp() * (exact - other)).sum())
            same += float((exact.argmax(-1) == other.argmax(-1)).sum())
            num_rows += len(exact)
            for name, logprobs in (("teacher", exact), ("student", other)):
                token_logprobs = logprobs[:-1].gather(1, window[0, 1:].unsqueeze(1))
                nll[name].append(-float(token_logprobs.mean()))
    teacher_ppl, student_ppl = (
        math.exp(min(700.0, sum(nll[name]) / len(windows))) for name in ("teacher", "student")
    )
    return Agreement(divergence / num_rows, same / num_rows, student_ppl), teacher_ppl
