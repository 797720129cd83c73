"""Responses out of band: beside the conversation, read or written by nobody else.

A client asks for them to classify, to summarise, to greet; several may run at once, and beside the
conversation's own. The caller's voice does not interrupt them.
"""

from __future__ import annotations

from app.clock import MonotonicClock
from app.conversation.events import ResponseDone, Sink
from app.conversation.history import History
from app.conversation.response.pipeline import ResponsePipeline
from app.conversation.response.spec import ResponseRequest
from app.conversation.services import Services
from app.conversation.session_config import SessionConfig
from app.conversation.tasks import Tasks
from app.errors import ClientError

MAX_RUNNING = 4


class OutOfBandResponses:
    """Those of one session."""

    def __init__(self, services: Services, sink: Sink, session_id: str) -> None:
        self._services = services.for_conversation(session_id)
        self._sink = sink
        self._session_id = session_id
        self._clock = MonotonicClock()
        self._running: dict[str, ResponsePipeline] = {}  # by the ids of their responses
        self._tasks = Tasks(session_id)  # those whose end is being told among them

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
        turn = ResponsePipeline(
            self._services, self._clock, self._sink, History(), asked, prefilled=None
        )
        self._running[turn.response.id] = turn
        self._tasks.start(self._run(turn))

    def cancel(self, response_id: str) -> bool:
        """Stop the one with this id; False if there is none."""
        turn = self._running.get(response_id)
        if turn is not None:
            turn.stop("client_cancelled")
        return turn is not None

    async def close(self) -> None:
        """Stop all; returns when nothing is left."""
        await self._tasks.close()
        for turn in self._running.values():  # their tasks were cancelled before the first step
            await turn.discard()
            if turn.trace.end_if_open(self._clock.now_ns()):
                self._services.traces.add(turn.trace.to_dict())

    async def _run(self, turn: ResponsePipeline) -> None:
        try:
            await turn.run()
        finally:
            # Before the client hears of the end, so that it may ask for another one at once. The
            # record is kept also of one that the end of the session cuts short.
            del self._running[turn.response.id]
            self._services.traces.add(turn.trace.to_dict())
        await self._sink(ResponseDone(turn.response))
