"""Work on whole models, for whoever starts it and waits: perplexity, quantising, distilling,
shortening prompts.

Everything runs in the calling process and thread. The functions load torch when they are called.
All raise LlmError: ModelLoadError for files, InvalidRequestError for what cannot be done.
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
    """Reads the text through the model."""
    from llm_core.offline.perplexity_job import measure

    return measure(options, progress)


def quantize_model(options: QuantizeOptions, progress: Progress) -> QuantizeReport:
    """Writes a quantised copy of a model as a Hugging Face directory and measures both."""
    from llm_core.offline.quantize.job import quantize

    return quantize(options, progress)


def distill_model(options: DistillOptions, progress: Progress) -> DistillReport:
    """Prunes, trains and writes a smaller copy of a model as a Hugging Face directory."""
    from llm_core.offline.distill import distill

    return distill(options, progress)


def shorten_text(options: ShortenOptions, progress: Progress) -> ShortenReport:
    """Leaves sentences out of a text that is to go into prompts."""
    from llm_core.offline.shorten import shorten

    return shorten(options, progress)


def train_head(
    options: TrainHeadOptions, progress: Progress, on_training: Callable[[HeadProgress], None]
) -> TrainHeadReport:
    """Lets a model talk to itself and trains a head that drafts for it."""
    from llm_core.offline.train_head.job import train

    return train(options, progress, on_training)
