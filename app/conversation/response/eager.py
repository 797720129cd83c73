"""Work done ahead of certainty: prompts read and answers begun before the caller has finished.

At most one piece of work runs, and at most one answer is held. What turns out to be for nothing is
stopped, and counted, so that its cost can be seen.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from app.conversation.response.llm_stream import length_options
from app.conversation.response.pipeline import ResponsePipeline
from app.conversation.session_config import SessionConfig
from app.errors import RecognitionError
from app.routing import LlmEngine
from llm_core import ChatMessage, LlmError

log = logging.getLogger(__name__)


class EagerGeneration:
    """One caller's work in advance."""

    def __init__(self) -> None:
        self._work: asyncio.Task[None] | None = None
        self._can_wait = False  # the work
        self._replaced: set[asyncio.Task[None]] = set()  # cancelled, and not over yet
        self._answer: ResponsePipeline | None = None
        self._wasted_answers = 0
        self._wasted_tokens = 0

    @property
    def work(self) -> asyncio.Task[None] | None:
        """What the next answer should wait for, unless it is the one that asks."""
        return None if self._can_wait or self._work is asyncio.current_task() else self._work

    @property
    def is_idle(self) -> bool:
        """No work is running."""
        return self._work is None or self._work.done()

    def do(self, work: Coroutine[Any, Any, None], *, can_wait: bool = False) -> None:
        """Run ``work`` instead of what runs now. Its failure is its own: it only saves time.

        ``can_wait``: it is for later turns, and ``put_off`` ends it.
        """
        if self._work is not None and not self._work.done():
            self._work.cancel()
            self._replaced.add(self._work)
            self._work.add_done_callback(self._replaced.discard)
        self._can_wait = can_wait
        self._work = asyncio.create_task(work)
        self._work.add_done_callback(_note_failure)

    def put_off(self) -> None:
        """An answer is asked for: work that can wait must not hold it up. What the model has read
        by now it need not read again."""
        if self._can_wait and self._work is not None:
            self._work.cancel()

    async def hold(self, answer: ResponsePipeline) -> None:
        """Begin an answer that may be wanted soon, in place of the one that is held now."""
        await self.discard()
        self._answer = answer
        answer.start()

    async def take(
        self, config: SessionConfig, messages: list[ChatMessage]
    ) -> ResponsePipeline | None:
        """The held answer, if it answers just these messages under this configuration.

        Any other is discarded.
        """
        answer = self._answer
        if (
            answer is not None
            and answer.config == config
            and answer.messages == messages
            and not answer.has_ended  # before it was wanted: it failed
        ):
            self._answer = None
            return answer
        await self.discard()
        return None

    async def discard(self) -> None:
        """Forget the held answer; returns when nothing of it is left."""
        answer, self._answer = self._answer, None
        if answer is not None:
            await answer.discard()
            self._wasted_answers += 1
            self._wasted_tokens += answer.trace.facts.get("completion_tokens", 0)

    async def close(self) -> None:
        """Stop everything; returns when nothing is left."""
        running = set(self._replaced)
        if self._work is not None:
            self._work.cancel()
            running.add(self._work)
        if running:
            await asyncio.wait(running)
        await self.discard()

    def take_wasted(self) -> dict[str, int]:
        """What was for nothing since the last call, as facts for a trace."""
        facts = {"wasted_answers": self._wasted_answers, "wasted_tokens": self._wasted_tokens}
        self._wasted_answers = self._wasted_tokens = 0
        return facts


async def warm(engine: LlmEngine, config: SessionConfig, messages: list[ChatMessage]) -> None:
    """Let the model read ``messages``, so that an answer to them begins sooner."""
    try:
        await engine.prefill(messages, **length_options(config))
    except LlmError as error:
        # Only a head start is lost; the turn itself meets the same error and reports it.
        log.info("prefill in advance failed: %s", error)


def _note_failure(task: asyncio.Task[None]) -> None:
    """A recogniser that fails is reported by whoever needs its words; all else is a fault."""
    if not task.cancelled() and (error := task.exception()) is not None:
        level = logging.INFO if isinstance(error, RecognitionError) else logging.ERROR
        log.log(level, "work in advance failed: %s", error, exc_info=error)
