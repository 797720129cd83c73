"""The job of ``measure_perplexity``."""

from __future__ import annotations

from functools import partial

from llm_core.errors import InvalidRequestError
from llm_core.loading import open_model
from llm_core.offline.options import PerplexityOptions, PerplexityReport, Progress
from llm_core.offline.perplexity import likelihood, windows_of
from llm_core.offline.texts import exact_runner


def measure(options: PerplexityOptions, progress: Progress) -> PerplexityReport:
    """Runs the job. Raises LlmError."""
    with open_model(options.model_path) as opened:
        ids = opened.tokenizer.encode(options.text)[: options.max_tokens]
        windows = windows_of(ids, options.window_len)
        try:
            runner = exact_runner(
                opened.model,
                str(options.model_path),
                options.window_len,
                options.num_threads,
                options.weight_format,
            )
        except ValueError as error:  # unknown weight format
            raise InvalidRequestError(str(error)) from error
    result = likelihood(runner, windows, partial(progress, "perplexity"))
    return PerplexityReport(
        result.perplexity, result.num_tokens, runner.info_fields["weight_format"]
    )
