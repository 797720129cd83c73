"""A Realtime client whose audio travels beside its events: over a media track, not in base64.

The server is the one that plays here, so it says when the sound of a response starts, stops or is
cleared, and cuts the conversation to what was heard without being told.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace

import msgspec

from app.api.realtime import MakeSession, RealtimeConnection
from app.api.realtime_session import SessionParams
from app.api.realtime_wire import server_event
from app.conversation.events import (
    OutputAudio,
    OutputDone,
    PlaybackCut,
    ResponseDone,
    ResponseStarted,
    SessionEvent,
)
from app.conversation.services import Services
from app.conversation.session import Session
from app.conversation.session_config import SessionConfig
from app.errors import ClientError
from app.transports.audio_port import AudioPort, Cut
from app.transports.base import ChannelClosed, EventChannel


class CallConnection(RealtimeConnection):
    """From the offer to the end of the call. ``initial``: session settings that came with it.

    Raises ClientError when ``initial`` cannot be honoured.
    """

    def __init__(
        self,
        channel: EventChannel,
        audio: AudioPort,
        services: Services,
        model: str,
        *,
        initial: SessionParams | None = None,
        make_session: MakeSession = Session,
    ) -> None:
        super().__init__(channel, services, model, make_session=make_session)
        self._audio = audio
        # A session is driven by one at a time: the client's events, or its audio.
        self._turnstile = asyncio.Lock()
        self._session: Session | None = None
        self._running: set[str] = set()  # responses that are not done
        self._cuts: list[Cut] = []  # to be told when their responses are done
        self._active_s = time.monotonic()
        self._told_full = False
        if initial is not None:
            self._state.params = self._state.merged(initial, voice_locked=False)
            self._mapper.speaker = self._speaker()

    def greeting(self) -> str:
        """What a client is told first when it comes back to a call that was interrupted."""
        assert self._session is not None
        created = server_event("session.created", session=self._session_object(self._session))
        return msgspec.json.encode(created).decode()

    async def _watch_and_serve(self, session: Session) -> None:
        self._session = session
        async with asyncio.TaskGroup() as group:
            beside = [
                group.create_task(session.run(), name="session loop"),
                group.create_task(self._listen(session), name="call audio"),
                group.create_task(self._tell_playback(), name="call playback"),
            ]
            await self._serve(session)
            for task in beside:
                task.cancel()

    async def _receive(self) -> str | bytes:
        """A caller who speaks or is spoken to is not idle, though no event comes from the client.

        Raises ChannelClosed or TimeoutError.
        """
        idle_timeout_s = self._services.settings.idle_timeout_s
        while True:
            left_s = self._active_s + idle_timeout_s - time.monotonic()
            try:
                async with asyncio.timeout(max(left_s, 0.0)):
                    message = await self._channel.receive()
            except TimeoutError:
                if self._active_s + idle_timeout_s <= time.monotonic():
                    raise
            else:
                self._active_s = time.monotonic()
                return message

    async def _handle(self, session: Session, message: str | bytes, received_ns: int) -> None:
        async with self._turnstile:
            await super()._handle(session, message, received_ns)

    async def _append(self, session: Session, audio: str, received_ns: int) -> None:
        raise ClientError(
            "input_audio_buffer.append is for WebSockets: this call's audio comes over its media "
            "track.",
            code="unsupported_value",
            param="type",
        )

    async def _listen(self, session: Session) -> None:
        """The caller's audio into the session, for as long as there is a call."""
        while True:
            try:
                chunk = await self._audio.receive()
            except ChannelClosed:
                return
            async with self._turnstile:
                try:
                    await session.append_audio(chunk.payload, chunk.received_ns)
                    self._told_full = False
                except ClientError as error:  # a full buffer, with nobody who commits it
                    if not self._told_full:
                        self._told_full = True
                        await self._send_error(error, None)

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

    async def _clear_output(self, session: Session) -> None:
        with contextlib.suppress(ClientError):  # nothing is being generated any more
            await session.cancel_response(None)
        await self._cut()

    async def _cut(self) -> None:
        """Silence; and what was not heard is taken out of the conversation."""
        cut = self._audio.clear()
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
            assert self._session is not None
            with contextlib.suppress(ClientError):  # the client has deleted it meanwhile
                await self._session.truncate_item(cut.item_id, 0, cut.heard_ms)

    async def _sink(self, event: SessionEvent) -> None:
        self._active_s = time.monotonic()
        match event:
            case OutputAudio():
                self._client_heard_voice = True
                await self._audio.play(event.response_id, event.item_id, event.audio)
                await self._send_playback()
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
