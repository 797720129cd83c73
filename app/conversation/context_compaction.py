"""What is done for a conversation while nobody waits for it: after an answer.

The model's context is short, and making room costs: the prompt has a new beginning then, and all of
it is read again, for seconds. So room for the next turn is made, and the prompt read, while the
caller still listens. Whoever does not wait so long is answered first, and it is done after that
answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from app.conversation.history import History
from app.conversation.response.llm_stream import length_options, oldest_of
from app.conversation.services import Services
from app.conversation.session_config import SessionConfig
from app.routing import LlmEngine
from llm_core import ChatMessage, LlmError, SamplingParams, TextDelta

log = logging.getLogger(__name__)

_NEXT_QUESTION_TOKENS = 256
_PRIORITY = -1  # behind every answer that somebody waits for
_MAX_SUMMARY_TOKENS = 120
_SUMMARISE = (
    "Sum up the conversation below in at most four short sentences. Keep names, numbers, wishes "
    "and what was agreed. Write nothing else."
)


async def tend(services: Services, config: SessionConfig, history: History) -> None:
    """Let the model read the conversation as the next turn will begin it. What there will be no
    room for is forgotten, or summed up if the settings ask for it."""
    if config.retention_ratio == 0:
        return  # nothing may be left out
    try:
        dropped = await _read(services, config, history)
        if not dropped:
            return
        log.info("the model's context has no more room for %d messages", len(dropped))
        if not services.settings.summarise_forgotten:
            history.forget_oldest(dropped)
            return
        # Both at once: who speaks meanwhile ends this, and what is forgotten would be lost.
        summary = await _summary(services.engine, history.summary, dropped)
        history.forget_oldest(dropped)
        history.summary = summary
        await _read(services, config, history)
    except LlmError as error:
        # Only a head start is lost; the next turn meets the same error and reports it.
        log.info("reading ahead failed: %s", error)


async def _read(
    services: Services, config: SessionConfig, history: History
) -> Sequence[ChatMessage]:
    """The messages that there was no room for. Raises LlmError."""
    messages = history.messages(config.instructions, services.tools.specs(config))
    if not messages:
        return ()
    reply_tokens = config.max_output_tokens or services.settings.max_reply_tokens
    options = length_options(config)
    options["priority"] = _PRIORITY
    options["spare_tokens"] = reply_tokens + _NEXT_QUESTION_TOKENS
    result = await services.engine.prefill(messages, **options)
    return oldest_of(messages, result.dropped_messages)


async def _summary(engine: LlmEngine, known: str, dropped: Sequence[ChatMessage]) -> str:
    """Of ``dropped``, and of what was summed up before. Raises LlmError."""
    lines = [f"Earlier: {known}"] if known else []
    lines += [f"{m.role}: {m.content}" for m in dropped if m.content]
    messages = [ChatMessage("system", _SUMMARISE), ChatMessage("user", "\n".join(lines))]
    params = SamplingParams(max_tokens=_MAX_SUMMARY_TOKENS)
    words = [
        event.text
        async for event in engine.generate(
            messages, params, priority=_PRIORITY, overflow="drop_oldest"
        )
        if isinstance(event, TextDelta)
    ]
    return "".join(words).strip()
