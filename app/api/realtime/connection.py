"""One session of the Realtime API: its client's events in, the session's events out.

Knows nothing of the transport: the same handler serves a WebSocket and a data channel. Further
clients may attach to a running session; they see and may do all that the first one does.
"""

from __future__ import annotations

import asyncio
import binascii
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from app.access import RateLimiter
from app.api.http.json_input import parse_aside
from app.api.model_names import Names, check_voice, model_not_found
from app.api.realtime import client_events as ev
from app.api.realtime.server_events import (
    Speaker,
    Wire,
    WireMapper,
    error_event,
    item_object,
    rate_limits_event,
    server_event,
)
from app.api.realtime.session_params import SessionParams, SessionState, to_config, to_wire
from app.api.realtime.tools import check_tools, tools_of
from app.api.validation import checked
from app.conversation import (
    Item,
    OutOfBandResponses,
    OutputAudio,
    Part,
    ResponseRequest,
    Services,
    Session,
    SessionConfig,
    SessionEvent,
    Sink,
    ToolCall,
    ToolContext,
    ToolOutput,
    new_id,
)
from app.errors import AudioInputError, ClientError, ParleyError
from app.logging_setup import session_id
from app.transports.base import AudioOut, ChannelClosed, EventChannel

logger = logging.getLogger(__name__)

MakeSession = Callable[[Services, SessionConfig, Sink], Session]

# A multiple of 4, so that every slice is whole; takes 0.3 ms to decode (2-core x86, 2.1 GHz).
_BASE64_SLICE_CHARS = 64 * 1024
_MAX_ATTACHED = 4


class RealtimeConnection:
    """From connect to close. ``model`` is the name that the client asked for.

    ``opening``: a session configuration to begin with, as the JSON values of a ``session.update``.
    ``audio_out``: where the transport carries audio apart from the events. Then answers are played
    there, the caller's audio comes by ``append_audio``, and it is for the transport to notice a
    peer that has gone quiet. ``pace`` is awaited with the length of each message. ``is_beta``: the
    client was made for the API's beta, and waits for ``conversation.item.created``.
    """

    def __init__(
        self,
        channel: EventChannel,
        services: Services,
        model: str,
        *,
        make_session: MakeSession = Session,
        opening: dict[str, Any] | None = None,
        audio_out: AudioOut | None = None,
        pace: RateLimiter | None = None,
        is_beta: bool = False,
    ) -> None:
        self._pace = pace
        self._is_beta = is_beta
        self._channel = channel
        self._attached: list[EventChannel] = []
        self._opening = opening or {}
        self._audio_out = audio_out
        self._session: Session | None = None
        self._side: OutOfBandResponses | None = None
        # Events come from several clients, and audio beside them; the session takes one at a time.
        self._turnstile = asyncio.Lock()
        self._conversation = services.tools.conversation or ToolContext()
        self._services = replace(services, tools=services.tools.of(self._conversation))
        self._names = Names.of(services.settings, services.recognition.languages)
        server_tools = services.tools.names
        self._state = SessionState(services.settings, self._names, model, server_tools)
        self._mapper = WireMapper(f"conv_{secrets.token_hex(10)}", self._speaker())
        self._make_session = make_session
        self._client_heard_voice = False
        self._expires_at_s = 0

    async def run(self) -> None:
        """Serve until the channel closes; nothing of the session is left when this returns."""
        try:
            self._open()
        except ClientError as error:
            await self._refuse(error)
            return
        session = self._make_session(self._services, self._config(), self._sink)
        session_id.set(session.id)
        try:
            await session.prepare_tools(session.config, "session.tools")
        except BaseException as error:
            await session.close()
            if not isinstance(error, ClientError):
                raise
            await self._refuse(error)
            return
        self._conversation.session_id = session.id
        logger.info(
            "session opened",
            extra={
                "model": self._state.params.model,
                "conversation": self._mapper.conversation_id,
            },
        )
        started_s = time.monotonic()
        self._expires_at_s = int(time.time() + self._services.settings.max_session_s)
        await self._send(server_event("session.created", session=self._session_object(session)))
        self._session = session
        self._side = side = OutOfBandResponses(self._services, self._sink, session.id)
        try:
            await self._watch_and_serve(session)
        except ExceptionGroup as errors:
            await self._send(_internal_error(errors, None))
            await self._channel.close(1011, "internal error")
        finally:
            async with self._turnstile:  # an attached client's event is handled to its end
                self._session = None
            await side.close()
            await session.close()
            for channel in [*self._attached]:
                await channel.close(1000, "the call has ended")
            logger.info(
                "session closed", extra={"duration_s": round(time.monotonic() - started_s, 1)}
            )

    async def attach(self, channel: EventChannel) -> None:
        """Serve a further client of the running session until either of them ends.

        Raises ClientError when the session is not running, or has too many clients already.
        """
        session = self._session
        if session is None or len(self._attached) >= _MAX_ATTACHED:
            why = "has ended" if session is None else f"has {_MAX_ATTACHED} attached clients"
            raise ClientError(f"The call {why}.", code="call_not_available", param="call_id")
        self._attached.append(channel)
        session_id.set(session.id)
        logger.info("client attached", extra={"clients": 1 + len(self._attached)})
        try:
            created = server_event("session.created", session=self._session_object(session))
            self._owe(await self._send_to([channel], created))
            await self._serve(session, channel, None)
        finally:
            self._attached.remove(channel)

    async def append_audio(self, payload: bytes, received_ns: int) -> None:
        """The caller's audio from a transport that carries it apart from the events.

        In the session's input format. Raises ClientError; before and after the session: ignored.
        """
        async with self._turnstile:
            if self._session is not None:
                await self._session.append_audio(payload, received_ns)

    @property
    def is_busy(self) -> bool:
        """The caller or the assistant is in the middle of something."""
        session, side = self._session, self._side
        return session is not None and (not session.is_idle or (side is not None and bool(side)))

    def _open(self) -> None:
        """Check what the session begins with. Raises ClientError."""
        model = self._state.params.model or ""
        if not self._names.is_model(model):
            raise model_not_found(self._names, model, "model")
        opening = checked(self._opening, SessionParams, "session")
        self._state.params = self._state.merged(opening, voice_locked=False)
        self._mapper.speaker = self._speaker()

    async def _refuse(self, error: ClientError) -> None:
        await self._send_error(self._channel, error, None)
        await self._channel.close(1008, error.code)

    async def _watch_and_serve(self, session: Session) -> None:
        """Both at once. Raises ExceptionGroup when the session's own loop fails."""
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(session.run(), name="session loop")
            await self._serve_within_limit(session)
            watching.cancel()

    async def _serve_within_limit(self, session: Session) -> None:
        idle_s = self._services.settings.idle_timeout_s if self._audio_out is None else None
        try:
            async with asyncio.timeout(self._services.settings.max_session_s) as limit:
                await self._serve(session, self._channel, idle_s)
        except TimeoutError:
            if not limit.expired():
                raise
            await self._expire()

    async def _expire(self) -> None:
        reason = f"the session has lasted {self._services.settings.max_session_s:g} s, its limit"
        await self._send(error_event("invalid_request_error", "session_expired", reason))
        await self._channel.close(1001, reason)

    async def _serve(
        self, session: Session, channel: EventChannel, idle_timeout_s: float | None
    ) -> None:
        while True:
            try:
                async with asyncio.timeout(idle_timeout_s):
                    message = await channel.receive()
            except ChannelClosed as closed:
                logger.info("channel closed", extra={"code": closed.code, "reason": closed.reason})
                return
            except TimeoutError:
                reason = f"no message from the client for {idle_timeout_s:g} s"
                await self._send(error_event("invalid_request_error", "session_idle", reason))
                await channel.close(1001, reason)
                return
            received_ns = time.monotonic_ns()
            if self._pace is not None:
                await self._pace(len(message))
            await self._handle(session, channel, message, received_ns)
            if self._session is None:  # what an attached client starts now, nobody would end
                return

    async def _handle(
        self, session: Session, channel: EventChannel, message: str | bytes, received_ns: int
    ) -> None:
        """One client event. Whatever goes wrong is answered with an error; the session goes on."""
        client_event_id = None
        try:
            # Before the turnstile: the others' events need not wait for a long message.
            event, client_event_id = await parse_aside(ev.read_event, message)
            async with self._turnstile:
                if self._session is None:
                    return
                if isinstance(event, ClientError):
                    raise event
                await self._dispatch(session, event, received_ns)
        except ClientError as error:
            await self._send_error(channel, error, client_event_id)
        except Exception as error:
            # The boundary: a fault of ours in one event must not end the caller's conversation.
            await self._send_to([channel], _internal_error(error, client_event_id))

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
                await self._reply(server_event("conversation.item.retrieved", item=item))
            case ev.ItemDelete():
                await session.delete_item(event.item_id)
            case ev.ItemTruncate():
                await session.truncate_item(
                    event.item_id,
                    event.content_index,
                    event.audio_end_ms,
                    may_extend=self._audio_out is None,  # else the transport knows what was played
                )
            case ev.ResponseCreate():
                await self._respond(session, event.response or ev.ResponseParams())
            case ev.ResponseCancel():
                if not (self._side and event.response_id and self._side.cancel(event.response_id)):
                    await session.cancel_response(event.response_id)
            case ev.OutputClear():
                await self._clear_output()
            case _:
                raise AssertionError(f"no handler for {type(event).__name__}")

    async def _clear_output(self) -> None:
        if self._audio_out is None:
            raise ClientError(
                "output_audio_buffer.clear is for WebRTC calls: over a WebSocket the client "
                "plays the audio itself.",
                code="unsupported_value",
                param="type",
            )
        await self._audio_out.clear()

    async def _append(self, session: Session, audio: str, received_ns: int) -> None:
        if self._audio_out is not None:
            raise ClientError(
                "In a call the caller's audio comes over its own track, not as "
                "input_audio_buffer.append.",
                code="unsupported_value",
                param="type",
            )
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
        config = self._config(params)
        if config.calling != session.config.calling:
            await session.prepare_tools(config, "session.tools")
        await session.update(config)
        self._state.params = params
        self._mapper.speaker = self._speaker()
        await self._reply(server_event("session.updated", session=self._session_object(session)))

    async def _respond(self, session: Session, params: ev.ResponseParams) -> None:
        output = params.audio.output if params.audio else None
        if output is not None and output.voice is not None:
            check_voice(self._names, output.voice, "response.audio.output.voice")
        tools = None if params.tools is None else tools_of(params.tools)
        check_tools(
            session.config.tools if tools is None else tools,
            params.tool_choice,
            self._services.tools.names,
            "response",
        )
        if tools:
            choice = params.tool_choice or session.config.tool_choice
            config = replace(session.config, tools=tools, tool_choice=choice)
            await session.prepare_tools(config, "response.tools")
        request = ResponseRequest(
            modality=params.output_modalities[0] if params.output_modalities else None,
            instructions=params.instructions,
            max_output_tokens=params.max_output_tokens,
            metadata=params.metadata,
            tools=tools,
            tool_choice=params.tool_choice,
            items=None if params.input is None else self._input(session, params.input),
        )
        if params.conversation == "none":
            assert self._side is not None
            self._side.start(request, session.history, session.config)
        else:
            await session.create_response(request)

    def _input(self, session: Session, given: list[ev.InputItem]) -> tuple[Item, ...]:
        """The items that a response is to answer. Raises ClientError."""
        return tuple(
            session.get_item(item.id) if isinstance(item, ev.ItemReference) else _to_item(item)
            for item in given
        )

    async def _sink(self, event: SessionEvent) -> None:
        if isinstance(event, OutputAudio):
            self._client_heard_voice = True
            if self._audio_out is not None:
                await self._audio_out.play(event)
                return
        for wire in self._mapper.to_wire(event):
            await self._send(wire)
            if wire["type"] == "conversation.item.added" and self._is_beta:
                await self._send(wire | server_event("conversation.item.created"))
            elif wire["type"] == "response.created" and self._pace is not None:
                await self._send(rate_limits_event(self._pace.state()))

    async def _send(self, event: Wire) -> None:
        """To all clients of the session."""
        await self._send_to([self._channel, *self._attached], event)

    async def _reply(self, event: Wire) -> None:
        """As ``_send``; for what may be far longer than the event that it answers. Its length
        counts against the rate of messages: the next one is read later."""
        self._owe(await self._send_to([self._channel, *self._attached], event))

    def _owe(self, num_bytes: int) -> None:
        if self._pace is not None:
            self._pace.owe(num_bytes)

    async def _send_to(self, channels: list[EventChannel], event: Wire) -> int:
        """Returns the length of what was sent, summed over ``channels``."""
        text = msgspec.json.encode(event).decode()
        for channel in channels:
            try:
                await channel.send(text)
            except ChannelClosed:
                # The receiving side hears of it as well, and ends the session.
                logger.debug("not sent, the channel is closed", extra={"event": event["type"]})
        return len(text) * len(channels)

    async def _send_error(
        self, channel: EventChannel, error: ClientError, client_event_id: str | None
    ) -> None:
        logger.info("client error", extra={"code": error.code, "param": error.param})
        await self._send_to(
            [channel],
            error_event(
                "invalid_request_error",
                error.code,
                error.message,
                param=error.param,
                client_event_id=client_event_id,
            ),
        )

    def _config(self, params: SessionParams | None = None) -> SessionConfig:
        """``params`` (None: those in force) in the conversation's terms."""
        return to_config(params or self._state.params)

    def _session_object(self, session: Session) -> Wire:
        return to_wire(session.id, self._state.params, self._expires_at_s)

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


def _to_item(item: ev.ClientItem) -> Item:
    item_id = item.id or new_id("item")
    match item:
        case ev.FunctionCallItem():
            call = ToolCall(item.call_id or new_id("call"), item.name, item.arguments)
            return Item(item_id, "assistant", call=call)
        case ev.FunctionOutputItem():
            return Item(item_id, "tool", output=ToolOutput(item.call_id, item.output))
        case _:
            parts = [Part(part.type, part.words) for part in item.content]
            return Item(item_id, item.role, parts)


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
