"""A client that speaks a recording into a Realtime server, at the pace of a mouth.

It behaves as a telephone or browser would: a microphone that never stops (silence follows the
recording), a player that falls silent when the caller speaks again, and no more knowledge of the
server than the protocol gives.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit, urlunsplit

import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidStatus,
    InvalidURI,
)

from app import __version__
from app.clients.recording import RATE, Pcm, Recording, VoicedFrames
from app.clients.talk_log import Event, LoggedTurn, ProtocolError, TalkLog, Verdict
from app.clock import Clock, MonotonicClock
from app.errors import AudioInputError, ParleyError
from audio.codecs import to_pcm16
from audio.errors import AudioError
from audio.files import read_audio
from audio.resample import StreamResampler
from audio.vad import VadModel

CHUNK_MS = 20
CHUNK_SAMPLES = RATE * CHUNK_MS // 1000
RESAMPLE_BLOCK_S = 10
SILENCE_S = 1
HANDSHAKE_TIMEOUT_S = 10.0
MAX_EVENT_BYTES = 16 * 1024 * 1024
# What OpenSSL says when the answer to its greeting is HTTP.
NO_TLS_REASONS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
NS_PER_S = 1_000_000_000
# Without the key itself: it must not end up in a log or on a shared screen.
INVALID_KEY = (
    "the API key has invalid characters: no spaces, line breaks, control characters or letters "
    "beyond ASCII can be in one"
)


class TalkError(ParleyError):
    """The conversation did not come about, or broke off."""

    code = "talk_failed"


class NoSpeechError(TalkError):
    """The server heard nothing that it could answer."""

    code = "no_speech"


class NoReplyError(TalkError):
    """The server fell silent although an answer was due."""

    code = "no_reply"


class ConnectError(TalkError):
    """There is no Realtime server that would talk to us."""

    code = "cannot_connect"


@dataclass(frozen=True)
class CallerAudio:
    """A recording ready to be spoken: 24 kHz mono, where it holds a voice, and the file's rate."""

    path: Path
    pcm: Pcm
    voiced: VoicedFrames
    source_rate: int

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.pcm.size / RATE


@dataclass(frozen=True)
class TalkResult:
    """What came of one recording. ``turns`` is in order; answers that failed are among them."""

    audio: CallerAudio
    turns: list[LoggedTurn]
    recording: Recording
    errors: list[str]
    gaps_ms: list[float | None]
    silenced_at: list[int] = field(default_factory=list)
    num_rejoined: int = 0

    @property
    def reply_audio(self) -> list[Pcm]:
        """All replies, as played."""
        return [piece.pcm for turn in self.turns for piece in turn.pieces]

    def to_dict(self) -> dict[str, Any]:
        """The result for programs. Times of the whole are those of the last answered turn."""
        turns = [_turn_dict(turn, gap) for turn, gap in zip(self.turns, self.gaps_ms, strict=True)]
        last = turns[-1]
        return {
            "file": str(self.audio.path),
            "audio_s": self.audio.duration_s,
            "transcript": " ".join(turn["transcript"] for turn in turns if turn["transcript"]),
            "reply": " ".join(turn["reply"] for turn in turns if turn["reply"]),
            "reply_audio_s": sum(turn["reply_audio_s"] for turn in turns),
            "voice_to_voice_ms": last["voice_to_voice_ms"],
            "gap_in_recording_ms": last["gap_in_recording_ms"],
            "stages_ms": last["stages_ms"],
            "status": last["status"],
            "turns": turns,
        }


def _turn_dict(turn: LoggedTurn, gap_ms: float | None) -> dict[str, Any]:
    trace = turn.trace or {}
    return {
        "transcript": turn.transcript,
        "reply": turn.reply,
        "reply_audio_s": turn.reply_samples / RATE,
        "voice_to_voice_ms": trace.get("voice_to_voice_ms"),
        "gap_in_recording_ms": gap_ms,
        "stages_ms": trace.get("stages_ms"),
        "status": turn.status,
        "response_id": turn.response_id,
        "failure": turn.failure or None,
        "facts": trace.get("facts"),
    }


def load_caller_audio(path: Path, vad: VadModel, *, max_s: float | None = None) -> CallerAudio:
    """Reads any audio file that ``audio.files.reader`` can read.

    Raises AudioInputError when it cannot, when there is nothing in it, or more than ``max_s``
    seconds.
    """
    try:
        samples, rate = read_audio(path, max_s=max_s)
    except AudioError as error:
        raise AudioInputError(error.message) from error
    if samples.size == 0:
        raise AudioInputError(f"{path} is empty: it holds no audio")
    resampler = StreamResampler(rate, RATE)
    block = rate * RESAMPLE_BLOCK_S
    pieces = [
        to_pcm16(resampler.process(samples[start : start + block]))
        for start in range(0, samples.size, block)
    ]
    pieces.append(to_pcm16(resampler.flush()))
    pcm = np.concatenate(pieces)
    # Marks count in samples of the recording, 24 kHz, whatever the file has. The microphone goes on
    # after the file, in silence, and so does what is recorded of it.
    heard = np.pad(pcm.astype(np.float32) / np.float32(32768.0), (0, RATE * SILENCE_S))
    voiced = VoicedFrames(heard, RATE, vad)
    return CallerAudio(path, pcm, voiced, rate)


def realtime_url(address: str) -> str:
    """The WebSocket URL of a server given as ``http(s)://``, ``ws(s)://`` or ``host:port``.

    A path that does not lead to the endpoint yet is completed. Raises ConnectError when the
    address makes no sense.
    """
    parts = urlsplit(address if "://" in address else f"http://{address}")
    scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(parts.scheme)
    try:
        valid = scheme is not None and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if scheme is None or not valid:
        raise ConnectError(
            f"'{address}' is not a server address: expected something like "
            "http://127.0.0.1:8080 or wss://example.org/v1/realtime"
        )
    path = parts.path.rstrip("/")
    if not path.endswith("/realtime"):
        path += "/realtime" if path.endswith("/v1") else "/v1/realtime"
    return urlunsplit((scheme, parts.netloc, path, parts.query, ""))


def is_valid_key(api_key: str) -> bool:
    """Whether an HTTP header can carry this key."""
    return api_key.isascii() and api_key.isprintable() and " " not in api_key


class TalkClient:
    """One connection, one conversation; ``speak`` may be called again to continue it."""

    def __init__(self, connection: ClientConnection, clock: Clock) -> None:
        """Use ``open_talk``."""
        self._connection = connection
        self._clock = clock
        self._log: TalkLog | None = None
        self._start_ns = 0
        self._has_traces = False
        loop = asyncio.get_running_loop()
        self._opening: dict[str, asyncio.Future[Event]] = {
            name: loop.create_future() for name in ("session.created", "session.updated")
        }
        self._receiver = asyncio.create_task(self._receive(), name="talk-receiver")

    async def open_session(self) -> None:
        """Waits for the session and asks for traces. Raises ConnectError when there is none."""
        created = await self._opened("session.created")
        if created["type"] == "error":
            raise ConnectError(f"the server refused the session: {_message(created)}")
        await self._send(
            {"type": "session.update", "session": {"type": "realtime", "parley": {"trace": True}}}
        )
        updated = await self._opened("session.updated")
        # Another Realtime server may refuse what it does not know: the talk goes on without stages.
        self._has_traces = updated["type"] == "session.updated"

    async def _opened(self, name: str) -> Event:
        """The event of this name, or the error that came instead."""
        event = self._opening[name]
        either: set[asyncio.Future[Any]] = {event, self._receiver}
        await asyncio.wait(either, timeout=HANDSHAKE_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if event.done():
            return event.result()
        if self._receiver.done():
            self._receiver.result()
        raise ConnectError(f"the server accepted the call but sent no {name} event")

    async def close(self) -> None:
        """Ends the conversation. Safe to call twice."""
        await self._connection.close()
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)

    async def speak(
        self,
        audio: CallerAudio,
        *,
        timeout_s: float,
        on_tick: Callable[[float, TalkLog], None] = lambda spoken_s, log: None,
    ) -> TalkResult:
        """Says the recording and listens until the server has answered and been quiet.

        ``on_tick(seconds since the start, log)`` is called every 20 ms. Raises NoSpeechError when
        the server is silent for ``timeout_s`` after the recording because it heard nothing,
        NoReplyError when an answer was due, TalkError when the connection breaks.
        """
        recording = Recording(audio.pcm)
        log = TalkLog(recording, expects_traces=self._has_traces)
        timeout_samples = round(timeout_s * RATE)
        self._start_ns = self._clock.now_ns()
        self._log = log
        try:
            verdict = Verdict.WAIT
            sent = 0
            while verdict is Verdict.WAIT:
                await self._send_chunk(audio.pcm, sent)
                sent += CHUNK_SAMPLES
                if sent >= audio.pcm.size:
                    verdict = log.verdict(self._now(), timeout_samples)
                on_tick(self._now() / RATE, log)
        finally:
            self._log = None
        raise_unless_finished(verdict, log, audio, timeout_s)
        turns = [turn for turn in log.turns if turn.response_id]
        gaps = [log.gap_ms(turn, audio.voiced.last_before) for turn in turns]
        return TalkResult(
            audio, turns, recording, log.errors, gaps, log.silenced_at, log.num_rejoined
        )

    async def _send_chunk(self, pcm: Pcm, start: int) -> None:
        """Sends 20 ms from ``start`` on, when their last sample has been spoken; then silence."""
        due_ns = self._start_ns + (start + CHUNK_SAMPLES) * NS_PER_S // RATE
        # Late is late: the schedule is kept, so that what follows is on time again.
        await self._clock.sleep(max(due_ns - self._clock.now_ns(), 0) / NS_PER_S)
        if self._receiver.done():
            self._receiver.result()
        chunk = pcm[start : start + CHUNK_SAMPLES]
        if chunk.size < CHUNK_SAMPLES:
            chunk = np.pad(chunk, (0, CHUNK_SAMPLES - chunk.size))
        payload = base64.b64encode(chunk.astype("<i2", copy=False).tobytes()).decode("ascii")
        await self._send_text(f'{{"type":"input_audio_buffer.append","audio":"{payload}"}}')

    def _now(self) -> int:
        """Samples since the caller began to speak."""
        return (self._clock.now_ns() - self._start_ns) * RATE // NS_PER_S

    async def _receive(self) -> None:
        """Takes events for as long as the connection lives; ends by raising TalkError."""
        try:
            async for message in self._connection:
                await self._take(parse_event(message))
        except ConnectionClosed:
            pass  # reported below, as an orderly close is
        raise self._closed()

    def _closed(self) -> TalkError:
        code, reason = self._connection.close_code, self._connection.close_reason
        return TalkError(
            f"the server closed the connection (code {code}{': ' + reason if reason else ''})"
        )

    async def _take(self, event: Event) -> None:
        for name, opened in self._opening.items():
            if not opened.done() and event["type"] in (name, "error"):
                opened.set_result(event)
                return
        if self._log is None:
            return
        try:
            answers = self._log.feed(event, self._now())
        except ProtocolError as error:
            raise TalkError(f"the server broke the protocol: {error}") from error
        for answer in answers:
            await self._send(answer)

    async def _send(self, event: Event) -> None:
        await self._send_text(json.dumps(event))

    async def _send_text(self, text: str) -> None:
        try:
            await self._connection.send(text)
        except ConnectionClosed as error:
            raise self._closed() from error


@asynccontextmanager
async def open_talk(
    address: str, *, api_key: str | None = None, clock: Clock | None = None
) -> AsyncIterator[TalkClient]:
    """A conversation with the server at ``address``. Raises ConnectError when there is none."""
    url = realtime_url(address)
    if api_key is not None and not is_valid_key(api_key):
        raise ConnectError(INVALID_KEY)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        connection = await connect(
            url,
            additional_headers=headers,
            user_agent_header=f"parley/{__version__}",
            max_size=MAX_EVENT_BYTES,
            open_timeout=HANDSHAKE_TIMEOUT_S,
            compression=None,
            # A proxy for the outside world knows nothing of this machine.
            proxy=None if urlsplit(url).hostname in LOCAL_HOSTS else True,
        )
    except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as error:
        raise connect_error(url, error, has_key=api_key is not None) from error
    client = TalkClient(connection, clock or MonotonicClock())
    try:
        await client.open_session()
        yield client
    finally:
        await client.close()


def connect_error(url: str, error: Exception, *, has_key: bool) -> ConnectError:
    """What a caller is told of a connection to ``url`` that failed."""
    if isinstance(error, InvalidStatus):
        status = error.response.status_code
        if status in (401, 403):
            hint = (
                "the server does not accept this API key"
                if has_key
                else "the server asks for an API key: give --api-key or set PARLEY_API_KEY"
            )
            return ConnectError(f"{hint} (HTTP {status} from {url})")
        return ConnectError(f"no Realtime endpoint at {url} (HTTP {status})")
    if isinstance(error, TimeoutError):
        return ConnectError(f"no answer from {url} in {HANDSHAKE_TIMEOUT_S:g} s")
    if isinstance(error, ssl.SSLError) or (
        # Some servers hang up on a greeting that is not HTTP.
        isinstance(error, ConnectionResetError) and url.startswith("wss:")
    ):
        return _tls_error(url, error)
    if isinstance(error, OSError):
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        return ConnectError(f"cannot reach {url}: {reason}")
    return ConnectError(f"{url} does not speak WebSocket: {error}")


def _tls_error(url: str, error: ssl.SSLError | ConnectionResetError) -> ConnectError:
    """An SSLError's errno is OpenSSL's, not the system's."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return ConnectError(
            f"the certificate of {url} is not trusted: {error.verify_message} (if it is your own, "
            "name its file in the environment variable SSL_CERT_FILE)"
        )
    plain = urlunsplit(("http", urlsplit(url).netloc, "", "", ""))
    if isinstance(error, ConnectionResetError | ssl.SSLEOFError):
        return ConnectError(
            f"the server at {url} hung up: perhaps it does not speak TLS; if so, try {plain}"
        )
    if error.reason in NO_TLS_REASONS:
        return ConnectError(f"the server at {url} does not speak TLS: try {plain}")
    return ConnectError(f"no secure connection to {url}: {error.reason or error}")


def raise_unless_finished(
    verdict: Verdict, log: TalkLog, audio: CallerAudio, timeout_s: float
) -> None:
    """Raises NoSpeechError or NoReplyError for a ``verdict`` that says so."""
    name = audio.path.name
    because = f" The server said: {'; '.join(log.errors)}" if log.errors else ""
    if verdict is Verdict.NO_SPEECH:
        raise NoSpeechError(
            f"no speech was found in {name} ({audio.duration_s:.1f} s): the server heard nothing "
            f"to answer, and {timeout_s:g} s of silence did not change that.{because}"
        )
    if verdict is Verdict.NO_WORDS:
        raise NoSpeechError(
            f"no words were recognised in {name} ({audio.duration_s:.1f} s): the server heard "
            f"something like a voice, but nothing that it could answer.{because}"
        )
    if verdict is Verdict.STALLED:
        raise NoReplyError(
            f"the server fell silent for {timeout_s:g} s although an answer to {name} was "
            f"due.{because}"
        )


def parse_event(message: str | bytes) -> Event:
    """A server event. Raises TalkError when it is none."""
    try:
        event = json.loads(message)
    except ValueError as error:
        raise TalkError(f"the server sent something that is not JSON: {error}") from error
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise TalkError("the server sent JSON that is not a Realtime event")
    return cast(Event, event)


def _message(event: Event) -> str:
    error = event.get("error")
    return str(error.get("message")) if isinstance(error, dict) else "no reason given"
