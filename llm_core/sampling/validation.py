"""Validation of sampling parameters, before a request is admitted."""

from __future__ import annotations

import math

from llm_core.errors import InvalidRequestError
from llm_core.messages import SamplingParams

MAX_LOGPROBS = 20
_MAX_STOP_STRINGS = 16
_MAX_STOP_CHARS = 256
_MAX_BIASES = 1024
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


def validate_params(params: SamplingParams, *, vocab_size: int) -> None:
    """Raises InvalidRequestError, naming the parameter. The guide is checked by ``guided``."""
    for name in ("temperature", "top_p", "min_p", *_PENALTIES):
        if not math.isfinite(getattr(params, name)):
            raise InvalidRequestError(f"{name}: must be a finite number")
    for name, value, is_good, expected in _checks(params):
        if not is_good:
            raise InvalidRequestError(f"{name}: must be {expected}, got {value}")
    for text in params.stop:
        if not 1 <= len(text) <= _MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"stop: each string must have 1 to {_MAX_STOP_CHARS} characters, got {len(text)}"
            )
    if params.min_tokens and params.guide is not None:
        raise InvalidRequestError("min_tokens: a guide says itself where the reply may end")
    _check_biases(params.logit_bias, vocab_size)


def _checks(params: SamplingParams) -> tuple[tuple[str, float, bool, str], ...]:
    num_logprobs = params.logprobs or 0
    return (
        ("max_tokens", params.max_tokens, params.max_tokens >= 1, "at least 1"),
        ("min_tokens", params.min_tokens, params.min_tokens >= 0, "0 or more"),
        (
            "min_tokens",
            params.min_tokens,
            params.min_tokens <= params.max_tokens,
            f"at most max_tokens ({params.max_tokens})",
        ),
        ("temperature", params.temperature, params.temperature >= 0.0, "0 or more"),
        ("top_k", params.top_k, params.top_k >= 0, "0 (off) or more"),
        ("top_p", params.top_p, 0.0 < params.top_p <= 1.0, "above 0 and at most 1"),
        ("min_p", params.min_p, 0.0 <= params.min_p <= 1.0, "between 0 and 1"),
        (
            "repetition_penalty",
            params.repetition_penalty,
            # Beyond, single precision makes logits of it that are none.
            0.01 <= params.repetition_penalty <= 100,
            "between 0.01 and 100",
        ),
        *(
            (name, value, -2.0 <= value <= 2.0, "between -2 and 2")
            for name, value in (
                ("frequency_penalty", params.frequency_penalty),
                ("presence_penalty", params.presence_penalty),
            )
        ),
        (
            "logprobs",
            num_logprobs,
            0 <= num_logprobs <= MAX_LOGPROBS,
            f"between 0 and {MAX_LOGPROBS}",
        ),
        (
            "stop",
            len(params.stop),
            len(params.stop) <= _MAX_STOP_STRINGS,
            f"at most {_MAX_STOP_STRINGS} strings",
        ),
    )


def _check_biases(biases: dict[int, float], vocab_size: int) -> None:
    if len(biases) > _MAX_BIASES:
        raise InvalidRequestError(
            f"logit_bias: must name at most {_MAX_BIASES} tokens, got {len(biases)}"
        )
    for token_id, bias in biases.items():
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"logit_bias: token {token_id} is outside the vocabulary of {vocab_size} tokens"
            )
        if not -100.0 <= bias <= 100.0:
            raise InvalidRequestError(
                f"logit_bias: must be between -100 and 100, got {bias} for token {token_id}"
            )
