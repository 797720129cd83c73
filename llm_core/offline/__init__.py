"""Offline jobs on whole models: perplexity, quantisation, distillation, training of draft heads."""

from llm_core.offline.jobs import (
    distill_model,
    measure_perplexity,
    quantize_model,
    shorten_text,
    train_head,
)
from llm_core.offline.options import (
    Agreement,
    DistillOptions,
    DistillReport,
    HeadProgress,
    PerplexityOptions,
    PerplexityReport,
    Progress,
    QuantizeMethod,
    QuantizeOptions,
    QuantizeReport,
    ShortenOptions,
    ShortenReport,
    TrainHeadOptions,
    TrainHeadReport,
)

__all__ = [
    "Agreement",
    "DistillOptions",
    "DistillReport",
    "HeadProgress",
    "PerplexityOptions",
    "PerplexityReport",
    "Progress",
    "QuantizeMethod",
    "QuantizeOptions",
    "QuantizeReport",
    "ShortenOptions",
    "ShortenReport",
    "TrainHeadOptions",
    "TrainHeadReport",
    "distill_model",
    "measure_perplexity",
    "quantize_model",
    "shorten_text",
    "train_head",
]
