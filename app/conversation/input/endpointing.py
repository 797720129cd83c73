"""Semantic endpointing of a pause: collects the features and returns the endpointing delay.

The language model that will reply also gives the probability that a message ends where the caller
paused. That costs little more than the prefill of the message, which is needed anyway.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import aclosing

from app.conversation.input.turn_audio import TurnAudio
from app.conversation.services import Services
from app.conversation.session_config import TurnDetection
from app.routing import LlmEngine
from audio.asr import Transcript
from audio.endpointing import Prosody, SmartTurnModel, measure_prosody, semantic
from audio.errors import ModelError
from llm_core import (
    ChatMessage,
    LlmError,
    OptionFields,
    RequestTimeoutError,
    SamplingParams,
    TextDelta,
)

log = logging.getLogger(__name__)

# A later result does not help: the delay is decided without it.
_TIMEOUT_S = 0.4
_MARKS = " .?!,;:-\u2013\u2014\u2026"
# Control tokens have no bytes; after the text of a message only its end is likely.
_END_TOKENS = frozenset((b".", b"?", b"!", b""))
_ONE_TOKEN = SamplingParams(max_tokens=1, min_tokens=1, logprobs=20, continue_last=True)


async def endpointing_delay_ms(
    services: Services,
    detection: TurnDetection,
    messages: list[ChatMessage],
    audio: TurnAudio,
    transcript: Transcript,
) -> int:
    """Silence in ms that ends the turn. ``messages`` end with the caller's words so far.

    ``audio``: the turn, with its speech offset. ``transcript``: of those words, with the
    recogniser's end-of-turn features.
    """
    words = messages[-1].content
    completeness = semantic.classify_completeness(words)
    acoustic = asyncio.get_running_loop().run_in_executor(
        services.workers, _acoustic_features, audio, services.turn_model
    )
    end_logprob = None
    if completeness in (semantic.Completeness.OPEN, *semantic.FINISHED):
        end_logprob = await end_of_turn_logprob(services.engine, messages)
    prosody, smart_turn = await acoustic
    evidence = semantic.Evidence(
        words,
        prosody,
        end_logprob,
        smart_turn,
        transcript.punctuation,
        transcript.end_of_turn_logit,
    )
    delay_ms = semantic.endpointing_delay_ms(evidence, detection.eagerness)
    if log.isEnabledFor(logging.DEBUG):  # the score is computed only for the log
        log.debug(
            "pause judged",
            extra={
                "completeness": completeness.value,
                "end_logprob": end_logprob,
                "end_odds": transcript.end_of_turn_logit,
                "turn_model": smart_turn,
                "score": semantic.end_of_turn_probability(evidence),
                "wait_ms": delay_ms,
            },
        )
    return delay_ms


def _acoustic_features(
    audio: TurnAudio, turn_model: SmartTurnModel | None
) -> tuple[Prosody, float | None]:
    """Prosody and the smart-turn model's probability. Runs in a worker thread."""
    assert audio.speech_offset is not None, "speech has paused"
    prosody = measure_prosody(audio.samples, audio.speech_offset)
    try:
        return prosody, None if turn_model is None else turn_model.probability(audio.samples)
    except ModelError as error:
        # Only one feature is missing.
        log.warning("the end of the turn was judged without the turn model: %s", error)
        return prosody, None


async def end_of_turn_logprob(
    engine: LlmEngine, messages: list[ChatMessage], timeout_s: float = _TIMEOUT_S
) -> float | None:
    """Natural log-probability that the last message ends after its last word.

    None when the model does not reply within ``timeout_s``, or fails.
    """
    last = messages[-1]
    bare = ChatMessage(last.role, last.content.rstrip(_MARKS))
    if not bare.content:
        return None
    try:
        async with asyncio.timeout(timeout_s):
            options = OptionFields(
                deadline_ns=time.monotonic_ns() + int(timeout_s * 1e9),
                timeout_ms=int(timeout_s * 1000),
                overflow="drop_oldest",
            )
            events = engine.generate([*messages[:-1], bare], _ONE_TOKEN, **options)
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, TextDelta) and event.logprobs:
                        top = event.logprobs[0].top
                        ends = sum(math.exp(t.logprob) for t in top if t.token in _END_TOKENS)
                        return math.log(max(ends, 1e-6))
    except (TimeoutError, RequestTimeoutError):
        log.info("the model did not judge the end of the turn in time")
    except LlmError as error:
        # Only one feature is missing; the response meets the same error and reports it.
        log.info("the end of the turn was judged without the model: %s", error)
    return None
