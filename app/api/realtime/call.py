"""A Realtime client whose audio travels beside its events: over a media track, not in base64.

The server is the one that plays here, so it says when the sound of a response starts, stops or is
cleared, and cuts the conversation to what was heard without being told.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import Any

import msgspec

from app.access import RateLimiter
from app.api.realtime.connection import MakeSession, RealtimeConnection
from app.api.realtime.server_events import server_event
from app.api.realtime.session_params import SessionParams
from app.conversation import (
    OutputAudio,
    OutputDone,
    PlaybackCut,
    ResponseDone,
    ResponseStarted,
    Services,
    Session,
    SessionConfig,
    SessionEvent,
)
from app.errors import ClientError
from app.transports.audio_port import AudioPort, Cut
from app.transports.base import ChannelClosed, EventChannel


class CallConnection(RealtimeConnection):
    """From the offer to the end of the call. ``opening``: see ``RealtimeConnection``.

    Raises ClientError when ``model`` or ``opening`` cannot be honoured.
    """

    def __init__(
        self,
        channel: EventChannel,
        audio: AudioPort,
        services: Services,
        model: str,
        *,
        opening: dict[str, Any] | None = None,
        make_session: MakeSession = Session,
        pace: RateLimiter | None = None,
        is_beta: bool = False,
    ) -> None:
        super().__init__(
            channel,
            services,
            model,
            make_session=make_session,
            opening=opening,
            audio_out=self,
            pace=pace,
            is_beta=is_beta,
        )
        self._audio = audio
        self._running: set[str] = set()  # responses that are not done
        self._cuts: list[Cut] = []  # to be told when their responses are done
        self._held: Cut | None = None  # silent for now, and perhaps on again from there
        self._resumed: Cut | None = None  # on again from there
        self._active_s = time.monotonic()
        self._told_full = False
        self._open()

    def greeting(self) -> str:
        """What a client is told first when it comes back to a call that was interrupted."""
        assert self._session is not None
        created = server_event("session.created", session=self._session_object(self._session))
        return msgspec.json.encode(created).decode()

    # --- AudioOut ---

    async def play(self, audio: OutputAudio) -> None:
        """Into the queue of the port; waits while that is full, or the line interrupted."""
        if self._held is not None:
            self._held, self._resumed = None, self._held
        await self._audio.play(audio.response_id, audio.item_id, audio.audio)
        await self._send_playback()

    async def clear(self) -> None:
        """Stop what is being said, and what is being made to be said."""
        if self._session is not None:
            with contextlib.suppress(ClientError):  # nothing is being made any more
                await self._session.cancel_response(None)
        await self._cut()

    # --- the call ---

    async def _watch_and_serve(self, session: Session) -> None:
        async with asyncio.TaskGroup() as group:
            beside = [
                group.create_task(session.run(), name="session loop"),
                group.create_task(self._listen(), name="call audio"),
                group.create_task(self._tell_playback(), name="call playback"),
                group.create_task(self._watch_idle(), name="call idle"),
            ]
            await self._serve_within_limit(session)
            for task in beside:
                task.cancel()

    async def _watch_idle(self) -> None:
        """End a call in which nothing is said for long: packets of silence come all the time."""
        idle_timeout_s = self._services.settings.idle_timeout_s
        while (left_s := self._active_s + idle_timeout_s - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left_s)
        await self._channel.close(1001, f"nothing was said for {idle_timeout_s:g} s")

    async def _listen(self) -> None:
        """The caller's audio into the session, for as long as there is a call."""
        while True:
            try:
                chunk = await self._audio.receive()
            except ChannelClosed:
                return
            try:
                await self.append_audio(chunk.payload, chunk.received_ns)
                self._told_full = False
            except ClientError as error:  # a full buffer, with nobody who commits it
                if not self._told_full:
                    self._told_full = True
                    await self._send_error(self._channel, error, None)

    async def _tell_playback(self) -> None:
        while True:
            try:
                await self._audio.playback_changed()
            except ChannelClosed:
                return
            await self._send_playback()

    async def _send_playback(self) -> None:
        for playback in self._audio.take_playback():
            kind = f"output_audio_buffer.{playback.state}"
            await self._send(server_event(kind, response_id=playback.response_id))

    def _hold(self) -> None:
        """Silence, for now: if the caller does not interrupt, what was not heard comes again."""
        if (cut := self._audio.clear()) is not None:
            self._held = self._since_item_began(cut)

    def _since_item_began(self, cut: Cut) -> Cut:
        """An item that was held counts on from where it went on."""
        if self._resumed is None or self._resumed.item_id != cut.item_id:
            return cut
        return replace(cut, heard_ms=self._resumed.heard_ms + cut.heard_ms)

    async def _cut(self) -> None:
        """Silence; and what was not heard is taken out of the conversation."""
        cut = self._audio.clear()
        cut = self._since_item_began(cut) if cut is not None else self._held
        self._held = None
        await self._send_playback()
        if cut is None:
            return
        await self._send(server_event("output_audio_buffer.cleared", response_id=cut.response_id))
        self._cuts.append(cut)
        await self._truncate()

    async def _truncate(self) -> None:
        """Exactly: by what was sent to the ear, where the session went by the clock."""
        ready = [cut for cut in self._cuts if cut.response_id not in self._running]
        self._cuts = [cut for cut in self._cuts if cut.response_id in self._running]
        for cut in ready:
            if self._session is not None:
                with contextlib.suppress(ClientError):  # the client has deleted it meanwhile
                    # What the session took back while the answer was held was sent, and is gone.
                    kept = self._session.get_item(cut.item_id).content[0].audio_ms
                    heard_ms = min(cut.heard_ms, int(kept))
                    await self._session.truncate_item(cut.item_id, 0, heard_ms)

    async def _sink(self, event: SessionEvent) -> None:
        self._active_s = time.monotonic()
        match event:
            case PlaybackCut(may_go_on=True):
                self._hold()
                return
            case PlaybackCut():
                await self._cut()
                return
            case ResponseStarted():
                self._running.add(event.response.id)
        await super()._sink(event)
        match event:
            case OutputDone():
                self._audio.finish(event.response_id)
            case ResponseDone():
                self._running.discard(event.response.id)
                self._audio.finish(event.response.id)
                await self._truncate()

    def _config(self, params: SessionParams | None = None) -> SessionConfig:
        return replace(
            super()._config(params),
            input_format=self._audio.input_format,
            output_format=self._audio.output_format,
        )
