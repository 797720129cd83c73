"""Token windows for calibration, training and evaluation, and the runners that compute them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from llm_core.errors import InvalidRequestError
from llm_core.loading import ModelWeights, OpenModel
from llm_core.messages import EngineConfig
from llm_core.model import ModelRunner
from llm_core.offline.options import DistillOptions, QuantizeOptions
from llm_core.offline.perplexity import windows_of
from llm_core.offline.self_text import NUM_STREAMS, write_conversations

_HELD_OUT_DIVISOR = 8  # one of 8 windows, and at least one, is held out


def text_windows(
    opened: OpenModel,
    options: QuantizeOptions | DistillOptions,
    on_progress: Callable[[int, int], None],
) -> torch.Tensor:
    """int64 [S, window_len]: windows spaced evenly over ``options.text`` or, if it is None,
    conversations that the model generates. Raises InvalidRequestError when the text is too short
    for two windows."""
    num_windows, window_len = options.num_windows, options.window_len
    if options.text is not None:
        windows = windows_of(opened.tokenizer.encode(options.text), window_len)
        if len(windows) < 2:
            raise InvalidRequestError(
                f"the text fills one window of {window_len} tokens, at least two are needed"
            )
        if len(windows) > num_windows:
            windows = windows[torch.linspace(0, len(windows) - 1, num_windows).long()]
        on_progress(1, 1)
        return windows
    runner = generation_runner(
        opened.model, str(options.model_path), window_len, options.num_threads
    )
    return write_conversations(
        runner,
        opened.tokenizer,
        opened.template,
        num_conversations=num_windows,
        length=window_len,
        seed=options.seed,
        on_progress=on_progress,
    )


def held_out(windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(windows to calibrate or train with, held-out windows) of at least two."""
    count = max(1, len(windows) // _HELD_OUT_DIVISOR)
    return windows[:-count], windows[-count:]


def generation_runner(
    model: ModelWeights, model_path: str, length: int, num_threads: int
) -> ModelRunner:
    """The fastest available runner, with KV blocks for NUM_STREAMS sequences of ``length``."""
    _check_length(model, length)
    rounded = -(-length // 16) * 16
    config = EngineConfig(
        model_path=model_path,
        num_threads=num_threads,
        max_sequences=NUM_STREAMS,
        max_context=length,
        kv_cache_tokens=max(64, NUM_STREAMS * rounded),
    )
    return ModelRunner.of(model, config)


def exact_runner(
    model: ModelWeights, model_path: str, length: int, num_threads: int, weight_format: str
) -> ModelRunner:
    """A runner for one sequence of ``length``: PyTorch with weights in ``weight_format``, or the
    engine's own choice for "auto"."""
    _check_length(model, length)
    config = EngineConfig(
        model_path=model_path,
        num_threads=num_threads,
        max_sequences=1,
        max_context=length,
        backend="auto" if weight_format == "auto" else "torch",
    )
    return ModelRunner.of(model, config, weight_format=weight_format)


def _check_length(model: ModelWeights, length: int) -> None:
    if length > model.config.context_len:
        raise InvalidRequestError(
            f"windows of {length} tokens are longer than the model's context of "
            f"{model.config.context_len}"
        )
