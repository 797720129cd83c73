"""What holds the model's replies to the tools of a conversation, and readies the engine for it.

Compiling a guide takes tens of milliseconds, and some cannot be compiled at all. Both show when
tools are declared, not when the caller waits for an answer.
"""

from __future__ import annotations

import asyncio
import logging

from app.conversation.session_config import SessionConfig, ToolChoice
from app.conversation.tools import ToolBox, choice_after_results
from app.errors import ClientError
from app.routing import LlmEngine
from llm_core import Guide, InvalidRequestError, LlmError, RegexGuide, ToolGuide, ToolSpec

log = logging.getLogger(__name__)

IN_WORDS = RegexGuide(pattern=r"[^<{\s][^<]*")
"""A reply that holds no call and is not empty: models that have called go on calling, if they
can."""

# An engine that is being started again, or is that busy, is not waited for.
_PATIENCE_S = 8.0


def tool_guide(specs: tuple[ToolSpec, ...], choice: ToolChoice, config: SessionConfig) -> ToolGuide:
    """A reply that may, or must, call one of ``specs``."""
    return ToolGuide(
        tools=tuple(spec for spec in specs if choice.name in (None, spec.name)),
        required=choice.kind in ("required", "function"),
        parallel=config.parallel_tool_calls,
    )


async def prepare_guides(
    engine: LlmEngine, tools: ToolBox, config: SessionConfig, param: str
) -> None:
    """Ready the engine for the replies of an answer under ``config``. Raises ClientError, naming
    ``param``, when the tools that the client declares there cannot be followed."""
    specs = tools.specs(config)
    if not specs:
        return
    choices = (config.tool_choice, choice_after_results(config.tool_choice))
    first, *others = dict.fromkeys(tool_guide(specs, choice, config) for choice in choices)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await engine.prepare_guide(first)
            rest: list[Guide] = [*others, IN_WORDS]
            await asyncio.gather(*(engine.prepare_guide(guide) for guide in rest))
    except InvalidRequestError as error:
        if config.tools:
            message = f"Invalid value for '{param}': {error}."
            raise ClientError(message, code="invalid_value", param=param) from error
        log.error("the server's own tools cannot be followed: %s", error)
    except (LlmError, TimeoutError) as error:
        # Only a head start is lost; the response meets what is wrong with the engine.
        log.info("guides are not prepared: %s", str(error) or "the engine is busy")
