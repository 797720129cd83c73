"""Entry points of the offline jobs: perplexity, quantisation, distillation, prompt shortening and
training of draft heads.

Each job runs in the calling thread and imports torch when it is called. All raise LlmError:
ModelLoadError for unreadable files, InvalidRequestError for options that cannot be met.
"""

from __future__ import annotations

from collections.abc import Callable

from llm_core.offline.options import (
    DistillOptions,
    DistillReport,
    HeadProgress,
    PerplexityOptions,
    PerplexityReport,
    Progress,
    QuantizeOptions,
    QuantizeReport,
    ShortenOptions,
    ShortenReport,
    TrainHeadOptions,
    TrainHeadReport,
)


def measure_perplexity(options: PerplexityOptions, progress: Progress) -> PerplexityReport:
    """Measures the perplexity of a text."""
    from llm_core.offline.perplexity_job import measure

    return measure(options, progress)


def quantize_model(options: QuantizeOptions, progress: Progress) -> QuantizeReport:
    """Writes a quantised copy of a model as a Hugging Face directory; measures both."""
    from llm_core.offline.quantize.job import quantize

    return quantize(options, progress)


def distill_model(options: DistillOptions, progress: Progress) -> DistillReport:
    """Prunes, trains and writes a smaller copy of a model as a Hugging Face directory."""
    from llm_core.offline.distill import distill

    return distill(options, progress)


def shorten_text(options: ShortenOptions, progress: Progress) -> ShortenReport:
    """Drops sentences of a text that will be part of prompts."""
    from llm_core.offline.shorten import shorten

    return shorten(options, progress)


def train_head(
    options: TrainHeadOptions, progress: Progress, on_training: Callable[[HeadProgress], None]
) -> TrainHeadReport:
    """Generates conversations with a model and trains a draft head for it on them."""
    from llm_core.offline.train_head.job import train

    return train(options, progress, on_training)
