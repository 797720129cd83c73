"""Responses out of band: beside the conversation, read or written by nobody else.

A client asks for them to classify, to summarise, to greet; several may run at once, and beside the
conversation's own. The caller's voice does not interrupt them.
"""

from __future__ import annotations

import asyncio
import logging

from app.clock import Clock, MonotonicClock
from app.conversation.events import ResponseDone, Sink
from app.conversation.history import History
from app.conversation.requests import ResponseRequest
from app.conversation.services import Services
from app.conversation.session_config import SessionConfig
from app.conversation.turn import Turn
from app.errors import ClientError

log = logging.getLogger(__name__)

MAX_RUNNING = 4


class SideResponses:
    """Those of one session."""

    def __init__(
        self, services: Services, sink: Sink, session_id: str, clock: Clock | None = None
    ) -> None:
        self._services = services.for_conversation(session_id)
        self._sink = sink
        self._session_id = session_id
        self._clock = clock or MonotonicClock()
        self._running: dict[str, tuple[Turn, asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def start(self, request: ResponseRequest, history: History, config: SessionConfig) -> None:
        """Begin one. Without items of its own it reads ``history``, as it is now.

        Raises ClientError when too many are running.
        """
        if len(self._running) >= MAX_RUNNING:
            raise ClientError(
                f"{MAX_RUNNING} out-of-band responses are running: wait for a response.done",
                code="too_many_active_responses",
            )
        asked = request.asked(
            history, config, self._services.tools, self._session_id, in_conversation=False
        )
        asked.trace.begin_typed(self._clock.now_ns())
        turn = Turn(self._services, self._clock, self._sink, History(), asked, prefilled=None)
        task = asyncio.create_task(self._run(turn), name="side response")
        self._running[turn.response.id] = (turn, task)
        task.add_done_callback(self._note_failure)

    def cancel(self, response_id: str) -> bool:
        """Stop the one with this id; False if there is none."""
        turn, _ = self._running.get(response_id, (None, None))
        if turn is not None:
            turn.stop("client_cancelled")
        return turn is not None

    async def close(self) -> None:
        """Stop all; returns when nothing is left."""
        running = list(self._running.values())
        for _, task in running:
            task.cancel()
        await asyncio.gather(*(task for _, task in running), return_exceptions=True)
        for turn, _ in running:  # a task may have been cancelled before its first step
            await turn.discard()

    async def _run(self, turn: Turn) -> None:
        try:
            await turn.run()
        finally:
            del self._running[turn.response.id]
        await self._sink(ResponseDone(turn.response))
        self._services.traces.add(turn.trace.to_dict())

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an out-of-band response failed", exc_info=error)
