"""Has the caller finished? Asks the language model, and puts all signs together.

The model that will answer also knows how likely a message is to end where the caller paused. Asking
it costs hardly more than reading the message, which has to be done in any case.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import aclosing

from app.conversation.services import Services
from app.conversation.session_config import TurnDetection
from app.routing import LlmEngine
from audio.asr import Transcript
from audio.endpointing import Prosody, TurnModel, find_voice_end, measure_end, semantic
from audio.errors import ModelError
from audio.frame import Samples
from llm_core import (
    ChatMessage,
    LlmError,
    OptionFields,
    RequestTimeoutError,
    SamplingParams,
    TextDelta,
)

log = logging.getLogger(__name__)

# Later than this the answer does not help: the wait is decided without it.
_TIMEOUT_S = 0.4
_MARKS = " .?!,;:-\u2013\u2014\u2026"
# Control tokens have no bytes; after a message's text only its end is likely.
_ENDS = frozenset((b".", b"?", b"!", b""))
_ASK = SamplingParams(max_tokens=1, min_tokens=1, logprobs=20, continue_last=True)


async def silence_ms(
    services: Services,
    detection: TurnDetection,
    messages: list[ChatMessage],
    samples: Samples,
    voiced_len: int,
    transcript: Transcript,
) -> int:
    """How much silence ends the turn. ``messages`` end with the caller's words so far.

    ``samples`` float32 [n] at 16 kHz are the turn; the VAD's voice ends at ``voiced_len``.
    ``transcript``: of those words, with what the recogniser made of their end.
    """
    words = messages[-1].content
    completeness = semantic.judge(words)
    sound = asyncio.get_running_loop().run_in_executor(
        services.workers, _prosody, samples, voiced_len, services.turn_model
    )
    end_logprob = None
    if completeness in (semantic.Completeness.OPEN, *semantic.FINISHED):
        end_logprob = await end_of_turn_logprob(services.engine, messages)
    prosody, heard = await sound
    evidence = semantic.Evidence(
        words, prosody, end_logprob, heard, transcript.end_marks, transcript.end_odds
    )
    wait_ms = semantic.silence_ms(evidence, detection.eagerness)
    if log.isEnabledFor(logging.DEBUG):  # else the score would be computed twice for nothing
        log.debug(
            "pause judged",
            extra={
                "completeness": completeness.value,
                "end_logprob": end_logprob,
                "end_odds": transcript.end_odds,
                "turn_model": heard,
                "score": semantic.score(evidence),
                "wait_ms": wait_ms,
            },
        )
    return wait_ms


def _prosody(
    samples: Samples, voiced_len: int, turn_model: TurnModel | None
) -> tuple[Prosody, float | None]:
    """Runs in a worker thread: how the voice ended, and what the turn model makes of it."""
    prosody = measure_end(samples, find_voice_end(samples, voiced_len))
    try:
        return prosody, None if turn_model is None else turn_model.probability(samples)
    except ModelError as error:
        # Only a sign is missing.
        log.warning("the end of the turn was judged without the turn model: %s", error)
        return prosody, None


async def end_of_turn_logprob(
    engine: LlmEngine, messages: list[ChatMessage], timeout_s: float = _TIMEOUT_S
) -> float | None:
    """Natural log-probability that the last message ends after its last word.

    None when the model does not say in time.
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
            events = engine.generate([*messages[:-1], bare], _ASK, **options)
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, TextDelta) and event.logprobs:
                        top = event.logprobs[0].top
                        ends = sum(math.exp(t.logprob) for t in top if t.token in _ENDS)
                        return math.log(max(ends, 1e-6))
    except (TimeoutError, RequestTimeoutError):
        log.info("the model did not judge the end of the turn in time")
    except LlmError as error:
        # Only a sign is missing; the turn itself meets the same error and reports it.
        log.info("the end of the turn was judged without the model: %s", error)
    return None
