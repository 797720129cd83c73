"""One client of the Realtime API: its events in, the session's events out.

Knows nothing of the transport: the same handler serves a WebSocket and a data channel.
"""

from __future__ import annotations

import asyncio
import binascii
import logging
import secrets
import time
from collections.abc import Callable

import msgspec

from app.api import realtime_events as ev
from app.api.realtime_session import (
    Names,
    SessionParams,
    SessionState,
    check_voice,
    model_not_found,
    to_config,
    to_wire,
)
from app.api.realtime_wire import Speaker, Wire, WireMapper, error_event, item_object, server_event
from app.conversation.events import Item, OutputAudio, Part, SessionEvent, Sink
from app.conversation.ids import new_id
from app.conversation.services import Services
from app.conversation.session import Session
from app.conversation.session_config import SessionConfig
from app.errors import AudioInputError, ClientError, ParleyError
from app.logging_setup import session_id
from app.transports.base import ChannelClosed, EventChannel

logger = logging.getLogger(__name__)

MakeSession = Callable[[Services, SessionConfig, Sink], Session]

# A multiple of 4, so that every slice is whole; takes 0.3 ms to decode (2-core x86, 2.1 GHz).
_BASE64_SLICE_CHARS = 64 * 1024


class RealtimeConnection:
    """From connect to close. ``model`` is the name that the client asked for."""

    def __init__(
        self,
        channel: EventChannel,
        services: Services,
        model: str,
        *,
        make_session: MakeSession = Session,
    ) -> None:
        self._channel = channel
        self._services = services
        self._names = Names.of(services.settings)
        self._state = SessionState(services.settings, self._names, model)
        self._mapper = WireMapper(f"conv_{secrets.token_hex(10)}", self._speaker())
        self._make_session = make_session
        self._client_heard_voice = False

    async def run(self) -> None:
        """Serve until the channel closes; nothing of the session is left when this returns."""
        model = self._state.params.model or ""
        if not self._names.is_model(model):
            await self._send_error(model_not_found(model, "model"), None)
            await self._channel.close(1008, "model_not_found")
            return
        session = self._make_session(self._services, self._config(), self._sink)
        session_id.set(session.id)
        logger.info("session opened", extra={"model": model})
        started_s = time.monotonic()
        await self._send(server_event("session.created", session=self._session_object(session)))
        try:
            await self._watch_and_serve(session)
        except ExceptionGroup as errors:
            await self._send(_internal_error(errors, None))
            await self._channel.close(1011, "internal error")
        finally:
            await session.close()
            logger.info(
                "session closed", extra={"duration_s": round(time.monotonic() - started_s, 1)}
            )

    async def _watch_and_serve(self, session: Session) -> None:
        """Both at once. Raises ExceptionGroup when the session's own loop fails."""
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(session.run(), name="session loop")
            await self._serve(session)
            watching.cancel()

    async def _serve(self, session: Session) -> None:
        while True:
            try:
                message = await self._receive()
            except ChannelClosed as closed:
                logger.info("channel closed", extra={"code": closed.code, "reason": closed.reason})
                return
            except TimeoutError:
                idle_timeout_s = self._services.settings.idle_timeout_s
                reason = f"no message from the client for {idle_timeout_s:g} s"
                await self._send(error_event("invalid_request_error", "session_idle", reason))
                await self._channel.close(1001, reason)
                return
            await self._handle(session, message, time.monotonic_ns())

    async def _receive(self) -> str | bytes:
        """The client's next message. Raises ChannelClosed, or TimeoutError when it is idle."""
        async with asyncio.timeout(self._services.settings.idle_timeout_s):
            return await self._channel.receive()

    async def _handle(self, session: Session, message: str | bytes, received_ns: int) -> None:
        """One client event. Whatever goes wrong is answered with an error; the session goes on."""
        client_event_id = None
        try:
            data = ev.parse_message(message)
            client_event_id = ev.event_id_of(data)
            await self._dispatch(session, ev.parse_event(data), received_ns)
        except ClientError as error:
            await self._send_error(error, client_event_id)
        except Exception as error:
            # The boundary: a fault of ours in one event must not end the caller's conversation.
            await self._send(_internal_error(error, client_event_id))

    async def _dispatch(self, session: Session, event: ev.ClientEvent, received_ns: int) -> None:
        match event:
            case ev.AudioAppend():
                await self._append(session, event.audio, received_ns)
            case ev.AudioCommit():
                await session.commit_audio()
            case ev.AudioClear():
                await session.clear_audio()
            case ev.SessionUpdate():
                await self._update(session, event)
            case ev.ItemCreate():
                await session.add_item(_to_item(event.item), event.previous_item_id)
            case ev.ItemRetrieve():
                item = item_object(session.get_item(event.item_id))
                await self._send(server_event("conversation.item.retrieved", item=item))
            case ev.ItemDelete():
                await session.delete_item(event.item_id)
            case ev.ItemTruncate():
                await session.truncate_item(event.item_id, event.content_index, event.audio_end_ms)
            case ev.ResponseCreate():
                await self._respond(session, event.response or ev.ResponseParams())
            case ev.ResponseCancel():
                await session.cancel_response(event.response_id)
            case ev.OutputClear():
                await self._clear_output(session)
            case _:
                raise AssertionError(f"no handler for {type(event).__name__}")

    async def _clear_output(self, session: Session) -> None:
        raise ClientError(
            "output_audio_buffer.clear is for WebRTC calls: over a WebSocket the client plays the "
            "audio itself.",
            code="unsupported_value",
            param="type",
        )

    async def _append(self, session: Session, audio: str, received_ns: int) -> None:
        payload = await decode_base64(audio)
        fmt = session.config.input_format
        # Before anything is taken, so that a bad event changes nothing.
        if len(payload) % fmt.sample_len:
            raise AudioInputError(
                f"Invalid 'audio': an odd number of bytes ({len(payload)}). Each sample of "
                "audio/pcm is two bytes, little-endian.",
                param="audio",
            )
        second = fmt.rate * fmt.sample_len
        for start in range(0, len(payload), second):
            await session.append_audio(payload[start : start + second], received_ns)

    async def _update(self, session: Session, event: ev.SessionUpdate) -> None:
        params = self._state.merged(event.session, voice_locked=self._client_heard_voice)
        await session.update(self._config(params))
        self._state.params = params
        self._mapper.speaker = self._speaker()
        await self._send(server_event("session.updated", session=self._session_object(session)))

    async def _respond(self, session: Session, params: ev.ResponseParams) -> None:
        output = params.audio.output if params.audio else None
        if output is not None and output.voice is not None:
            check_voice(self._names, output.voice, "response.audio.output.voice")
        await session.create_response(
            modality=params.output_modalities[0] if params.output_modalities else None,
            instructions=params.instructions,
            max_output_tokens=params.max_output_tokens,
            metadata=params.metadata,
        )

    async def _sink(self, event: SessionEvent) -> None:
        if isinstance(event, OutputAudio):
            self._client_heard_voice = True
        for wire in self._mapper.to_wire(event):
            await self._send(wire)

    async def _send(self, event: Wire) -> None:
        try:
            await self._channel.send(msgspec.json.encode(event).decode())
        except ChannelClosed:
            # The receiving side hears of it as well, and ends the session.
            logger.debug("not sent, the channel is closed", extra={"event": event["type"]})

    async def _send_error(self, error: ClientError, client_event_id: str | None) -> None:
        logger.info("client error", extra={"code": error.code, "param": error.param})
        await self._send(
            error_event(
                "invalid_request_error",
                error.code,
                error.message,
                param=error.param,
                client_event_id=client_event_id,
            )
        )

    def _config(self, params: SessionParams | None = None) -> SessionConfig:
        """``params`` (None: those in force) in the conversation's terms."""
        return to_config(params or self._state.params)

    def _session_object(self, session: Session) -> Wire:
        return to_wire(session.id, self._state.params)

    def _speaker(self) -> Speaker:
        output = self._state.params.audio.output
        return Speaker(output.format.to_wire(), output.voice)


def _internal_error(error: Exception, client_event_id: str | None) -> Wire:
    """Log ``error`` under a number that the client is told; a ParleyError is told as it is."""
    if isinstance(error, ParleyError):
        logger.error("event failed: %s", error.message, extra={"code": error.code})
        code, message = error.code, error.message
    else:
        reference = secrets.token_hex(6)
        logger.error("internal error", exc_info=error, extra={"reference": reference})
        code, message = "server_error", f"Internal error. Reference for the log: {reference}."
    return error_event("server_error", code, message, client_event_id=client_event_id)


def _to_item(item: ev.MessageItem) -> Item:
    parts = [Part(part.type, part.words) for part in item.content]
    return Item(item.id or new_id("item"), item.role, parts)


async def decode_base64(text: str) -> bytes:
    """Strict base64 (RFC 4648, section 4), in slices that let other callers run in between.

    Raises ClientError for anything else: other characters, line breaks, missing padding, nothing.
    """
    if len(text) % 4 or not text:
        raise _bad_base64(f"its length is {len(text)}, not a multiple of 4" if text else "no bytes")
    slices = []
    for start in range(0, len(text), _BASE64_SLICE_CHARS):
        if start:
            await asyncio.sleep(0)
        part = text[start : start + _BASE64_SLICE_CHARS]
        try:
            decoded = binascii.a2b_base64(part, strict_mode=True)
        except ValueError as error:
            raise _bad_base64(str(error)) from error
        # Padding belongs to the end of the whole; the decoder looks at one slice, and skips "====".
        is_last = start + len(part) == len(text)
        num_padding = len(part[-2:]) - len(part[-2:].rstrip("=")) if is_last else 0
        if len(decoded) != len(part) // 4 * 3 - num_padding:
            raise _bad_base64("misplaced padding")
        slices.append(decoded)
    return slices[0] if len(slices) == 1 else b"".join(slices)


def _bad_base64(why: str) -> ClientError:
    return ClientError(
        f"Invalid 'audio'. Expected base64-encoded audio bytes, but got an invalid value: {why}.",
        code="invalid_value",
        param="audio",
    )
