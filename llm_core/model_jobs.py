"""Work on whole models, for whoever starts it and waits: perplexity, quantising, distilling.

Everything runs in the calling process and thread. The functions load torch when they are called.
All raise LlmError: ModelLoadError for files, InvalidRequestError for what cannot be done.
"""

from __future__ import annotations

from collections.abc import Callable

from llm_core.job_options import (
    DistillOptions,
    DistillReport,
    HeadProgress,
    PerplexityOptions,
    PerplexityReport,
    Progress,
    QuantizeOptions,
    QuantizeReport,
    TrainHeadOptions,
    TrainHeadReport,
)


def measure_perplexity(options: PerplexityOptions, progress: Progress) -> PerplexityReport:
    """Reads the text through the model."""
    from llm_core.compress.measure import measure

    return measure(options, progress)


def quantize_model(options: QuantizeOptions, progress: Progress) -> QuantizeReport:
    """Writes a quantised copy of a model as a Hugging Face directory and measures both."""
    from llm_core.compress.quantize import quantize

    return quantize(options, progress)


def distill_model(options: DistillOptions, progress: Progress) -> DistillReport:
    """Prunes, trains and writes a smaller copy of a model as a Hugging Face directory."""
    from llm_core.compress.distill import distill

    return distill(options, progress)


def train_head(
    options: TrainHeadOptions, progress: Progress, on_training: Callable[[HeadProgress], None]
) -> TrainHeadReport:
    """Lets a model talk to itself and trains a head that drafts for it."""
    from llm_core.speculative.train.job import train

    return train(options, progress, on_training)
