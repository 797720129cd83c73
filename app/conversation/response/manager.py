"""The responses in one conversation: at most one runs, and the last one may still be heard.

Those beside the conversation are in ``side_responses``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from app.clock import Clock
from app.conversation.context_compaction import tend
from app.conversation.events import PlaybackCut, ResponseDone, Sink, TurnTraced
from app.conversation.history import History
from app.conversation.input.user_turn import UserTurn
from app.conversation.input.word_timestamps import WordTimestamps
from app.conversation.response.eager import EagerGeneration
from app.conversation.response.pipeline import ResponsePipeline
from app.conversation.response.spec import ResponseRequest
from app.conversation.services import Services
from app.conversation.session_config import SessionConfig
from app.conversation.tasks import Tasks
from app.conversation.turn_taking import Action, AudioStarted, ResponseFinished, TurnTaking
from app.logging_setup import turn_fields, turn_id
from app.observe import TurnTrace
from llm_core import ChatMessage

log = logging.getLogger(__name__)


class ResponseManager:
    """Starts them, silences them, and tells how they ended."""

    def __init__(
        self,
        session_id: str,
        services: Services,
        config: SessionConfig,
        sink: Sink,
        clock: Clock,
        tasks: Tasks,
        *,
        history: History,
        hearing: UserTurn,
        ahead: EagerGeneration,
        dialog: TurnTaking,
        word_times: WordTimestamps,
        perform: Callable[[list[Action]], Awaitable[None]],
    ) -> None:
        """``dialog`` hears of what becomes of a response; ``perform`` does what it says to that,
        once nothing else happens on the floor."""
        self.running: ResponsePipeline | None = None
        self.last: ResponsePipeline | None = None
        """The one that began last: the running one, if there is one."""
        self._session_id = session_id
        self._services = services
        self._config = config
        self._sink = sink
        self._clock = clock
        self._tasks = tasks
        self._history = history
        self._hearing = hearing
        self._ahead = ahead
        self._dialog = dialog
        self._word_times = word_times
        self._perform = perform
        self._task: asyncio.Task[None]  # of the one that began last

    def follow(self, config: SessionConfig) -> None:
        """Use a changed configuration from now on. A running response keeps the old one."""
        self._config = config

    @property
    def is_playing(self) -> bool:
        """The player still has some of an answer to play."""
        return self.last is not None and self.last.is_playing

    # --- made and run ---

    def prompt(self) -> list[ChatMessage]:
        """What the model would answer now."""
        return ResponseRequest().messages(self._history, self._config, self._services.tools)

    def make(
        self, request: ResponseRequest, messages: list[ChatMessage] | None = None
    ) -> ResponsePipeline:
        """A response that is not begun. ``messages`` None: as ``request`` has them."""
        asked = request.asked(
            *(self._history, self._config, self._services.tools, self._session_id),
            messages=messages,
        )
        return ResponsePipeline(
            *(self._services, self._clock, self._sink, self._history, asked),
            prefilled=self._ahead.work,
        )

    async def start(self, request: ResponseRequest, heard: TurnTrace | None) -> None:
        """Answer now, if need be with what is held. ``heard``: the record of the spoken turn that
        is answered; None: there is none."""
        turn = None
        self._ahead.put_off()
        if request == ResponseRequest():
            turn = await self._ahead.take(self._config, self.prompt())
        else:
            await self._ahead.discard()
        if turn is None:
            turn = self.make(request)
        if heard is not None:
            turn.trace.join(heard)
        else:
            turn.trace.begin_typed(self._clock.now_ns())
            if self._services.settings.record:
                turn.trace.record()
        turn.trace.facts.update(self._ahead.take_wasted())
        turn.trace.facts["wasted_transcripts"] = self._hearing.take_num_discarded()
        turn.on_audio_started = partial(self._on_audio_started, turn)
        turn.on_sound = self._hearing.note_playback
        self.running = self.last = turn
        self._task = self._tasks.start(self._run(turn))

    async def _run(self, turn: ResponsePipeline) -> None:
        turn_id.set(turn.trace.turn_id)
        try:
            await turn.run()
            if turn.response.status != "cancelled":
                await self._word_times.wait_until_sent()
        finally:
            # Also of a turn that the end of the call cuts short.
            traced = turn.trace.to_dict()
            self._services.traces.add(traced, turn.trace.audio)
        actions: list[Action] = []
        # A stopped turn has given up the floor already; another one may have it by now. The floor
        # is free before the client hears of the end, so that it may ask again at once.
        if self.running is turn:
            self.running = None
            actions = self._dialog.feed(ResponseFinished())
            if self._ahead.is_idle:
                tending = tend(self._services, self._config, self._history)
                self._ahead.do(tending, can_wait=True)
        await self._sink(ResponseDone(turn.response))
        log.info("turn ended", extra=turn_fields(self._services.settings, traced))
        if self._config.send_traces:
            await self._sink(TurnTraced(traced))
        if actions:  # else whoever stopped this turn holds the floor and waits for us
            await self._perform(actions)

    def _on_audio_started(self, turn: ResponsePipeline) -> None:
        if self.running is turn:
            self._dialog.feed(AudioStarted())

    # --- silenced ---

    async def stop(self, reason: str) -> None:
        """Be silent at once. Returns when the client knows how the running response ended."""
        turn, self.running = self.running, None
        if turn is None:
            await self.cut_playback()
            return
        turn.stop(reason)
        await self._silence()
        await asyncio.wait([self._task])

    async def cut_playback(self) -> None:
        """Be silent at once, although the last response has ended by itself."""
        if self.last is not None:
            self.last.cut_to_heard()
            await self._silence()

    async def hold(self) -> None:
        """Be silent at once; the answer may go on where it stopped."""
        assert self.running is not None, "an answer that sounds is running"
        if self.running.hold():
            await self._silence(may_go_on=True)

    def release(self) -> None:
        """Go on with the answer that is held, if it has not ended."""
        if self.running is not None:
            self._tasks.start(self.running.release())

    async def _silence(self, *, may_go_on: bool = False) -> None:
        self._hearing.note_playback_stopped()
        await self._sink(PlaybackCut(may_go_on))

    async def close(self) -> None:
        """The call is over, and all tasks have ended: one of them perhaps before its first step."""
        if self.running is None:
            return
        await self.running.discard()
        if self.running.trace.end_if_open(self._clock.now_ns()):
            self._services.traces.add(self.running.trace.to_dict())
