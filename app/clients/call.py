"""A phone provider that speaks a recording into a server's phone bridge, at the pace of a mouth.

The provider's messages go through ``app.clients.phone_providers``. What was understood and said is
learned by attaching to the call as a Realtime client (``?call_id=``), as an operator would; the
sound, and the latency in the recording of both sides, are those of the line.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import random
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from app.clients.phone_providers import (
    PEERS,
    Clear,
    Goodbye,
    Mark,
    Message,
    Peer,
    PeerError,
    Play,
    new_call_id,
)
from app.clients.recording import RATE, Pcm, Recording
from app.clients.talk import (
    LOCAL_HOSTS,
    NS_PER_S,
    CallerAudio,
    ConnectError,
    TalkError,
    TalkResult,
    connect_error,
    parse_event,
    raise_unless_finished,
    realtime_url,
)
from app.clients.talk_log import ProtocolError, TalkLog, Verdict
from app.clock import MonotonicClock
from app.errors import ConfigError
from audio.codecs import decode, encode, to_pcm16
from audio.frame import Samples
from audio.resample import StreamResampler

# The greeting is listened to; when none comes in this time there is none.
_GREETING_BEGINS_S, _GREETING_ENDED_S = 2.0, 0.4
_ATTACH_TIMEOUT_S = 10.0
_HANG_UP_TIMEOUT_S = 5.0
_LOCALHOST = "127.0.0.1"
_SWAPPED = 0.1


@dataclass(frozen=True, slots=True)
class Trouble:
    """What the way to the server does to the caller's frames. ``loss``: share of them.

    ``late_ms``: each is late by up to so much. ``is_shuffled``: some overtake others.
    """

    loss: float = 0.0
    late_ms: float = 0.0
    is_shuffled: bool = False
    seed: int = 0


class _WebSocketLink:
    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    async def send(self, message: Message) -> None:
        await self._connection.send(message)

    async def receive(self) -> Message | None:
        try:
            return await self._connection.recv()
        except ConnectionClosed:
            return None

    async def close(self) -> None:
        await self._connection.close()

    @property
    def farewell(self) -> str:
        return f"code {self._connection.close_code}: {self._connection.close_reason}"


class _TcpLink:
    farewell = "the connection was closed"

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, message: Message) -> None:
        assert isinstance(message, bytes), "TCP carries bytes"
        self._writer.write(message)
        await self._writer.drain()

    async def receive(self) -> Message | None:
        try:
            header = await self._reader.readexactly(3)
            return header + await self._reader.readexactly(int.from_bytes(header[1:], "big"))
        except (asyncio.IncompleteReadError, OSError):
            return None

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class CallClient:
    """One call. Use ``open_call``."""

    def __init__(self, peer: Peer, link: _WebSocketLink | _TcpLink, trouble: Trouble) -> None:
        self.peer = peer
        self.num_marks = 0
        self.has_ended = asyncio.Event()
        """The server has hung up."""
        self._link = link
        self._trouble = trouble
        self._random = random.Random(trouble.seed)
        self._clock = MonotonicClock()
        self._log: TalkLog | None = None
        self._sideband: ClientConnection | None = None
        self._start_ns = self._clock.now_ns()
        self._num_sent = 0
        self._began_ns = 0  # when the first frame began
        self._last_ns = 0  # when the last frame arrives
        self._rest: Samples = np.zeros(0, np.float32)  # less than a frame
        self._way: list[tuple[int, int, Message]] = []  # frames on their way, by arrival
        self._to_line = StreamResampler(RATE, peer.format.rate)
        self._from_line = StreamResampler(peer.format.rate, RATE)
        self._ends_ns = 0  # of what the provider has to play
        self._cleared_at: list[int] = []  # where the server made it fall silent
        self._marks: deque[tuple[int, Mark]] = deque()  # with when they are due
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: Exception | None = None

    async def begin(self) -> None:
        """The call comes in."""
        for message in self.peer.hello():
            await self._send(message)
        self._tasks.append(asyncio.create_task(self._receive(), name="call receiver"))

    async def attach(self, url: str, headers: dict[str, str]) -> None:
        """Hear of what the server makes of the call. Raises TalkError."""
        ends_ns = self._clock.now_ns() + int(_ATTACH_TIMEOUT_S * NS_PER_S)
        while self._clock.now_ns() < ends_ns and not self.has_ended.is_set():
            self._sideband = await _open(f"{url}?call_id={self.peer.call_id}", headers)
            if await _has_session(self._sideband):
                following = self._follow(self._sideband)
                self._tasks.append(asyncio.create_task(following, name="sideband"))
                return
            await self._sideband.close()
            await self._clock.sleep(0.1)  # the call is not there yet
        why = f" ({self._link.farewell})" if self.has_ended.is_set() else ""
        raise ConnectError(f"the server did not take the call{why}")

    async def hear_greeting(self) -> float:
        """Be silent until the server has said hello; seconds of it that were heard."""
        silence = np.zeros(self._frame_samples, np.int16)
        began_ns = self._clock.now_ns()
        while not self.has_ended.is_set():
            await self._send_frame(silence)
            now_ns = self._clock.now_ns()
            quiet_s = (now_ns - max(self._ends_ns, began_ns)) / NS_PER_S
            if quiet_s > (_GREETING_ENDED_S if self._ends_ns else _GREETING_BEGINS_S):
                break
        return max(0, self._ends_ns - began_ns) / NS_PER_S if self._ends_ns else 0.0

    async def press(self, keys: str) -> None:
        """The caller presses keys."""
        for key in keys:
            await self._send(self.peer.key(key))

    async def speak(
        self,
        audio: CallerAudio,
        *,
        timeout_s: float,
        on_tick: Callable[[float, TalkLog], None] = lambda spoken_s, log: None,
    ) -> TalkResult:
        """Says the recording and listens until the server has answered and been quiet.

        Raises NoSpeechError, NoReplyError or TalkError, as ``TalkClient.speak`` does.
        """
        recording = Recording(audio.pcm)
        log = self._log = TalkLog(recording, expects_traces=True)
        self._cleared_at = []
        # The recording begins where the first frame of it does.
        self._start_ns = self._clock.now_ns()
        if self._num_sent:
            self._start_ns = self._began_ns + self._num_sent * self.peer.frame_ms * 1_000_000
        verdict = Verdict.WAIT
        spoken = 0
        while verdict is Verdict.WAIT and not (self.has_ended.is_set() or self._failure):
            chunk = audio.pcm[spoken : spoken + self._frame_samples]
            spoken += self._frame_samples
            await self._send_frame(np.pad(chunk, (0, self._frame_samples - chunk.size)))
            if spoken >= audio.pcm.size:
                verdict = log.verdict(self._now(), round(timeout_s * RATE))
            on_tick(self._now() / RATE, log)
        self._raise_failure()
        if not self.has_ended.is_set() or not any(turn.status for turn in log.turns):
            raise_unless_finished(verdict, log, audio, timeout_s)
        turns = [turn for turn in log.turns if turn.response_id]
        if not turns:
            raise TalkError(f"the server hung up without an answer ({self._link.farewell})")
        gaps = [log.gap_ms(turn, audio.voiced.last_before) for turn in turns]
        return TalkResult(
            audio, turns, recording, log.errors, gaps, self._cleared_at, log.num_rejoined
        )

    async def hang_up(self) -> None:
        """The caller hangs up. Safe to call twice. Raises what broke the receiving tasks."""
        if not self.has_ended.is_set() and (goodbye := self.peer.goodbye()) is not None:
            await self._send(goodbye)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HANG_UP_TIMEOUT_S):
                await self._link.close()
        if self._sideband is not None:
            await self._sideband.close()
        for task in self._tasks:
            task.cancel()
        tasks, self._tasks = self._tasks, []
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    # --- out ---

    async def _send(self, message: Message) -> None:
        with contextlib.suppress(ConnectionClosed, OSError):  # the receiver hears of it, too
            await self._link.send(message)

    @property
    def _frame_samples(self) -> int:
        return RATE * self.peer.frame_ms // 1000

    async def _send_frame(self, pcm: Pcm) -> None:
        """One frame, at its time. ``pcm``: 24 kHz."""
        frame_ns = self.peer.frame_ms * 1_000_000
        if self._num_sent == 0:
            self._began_ns = self._clock.now_ns()
        due_ns = self._began_ns + (self._num_sent + 1) * frame_ns
        await self._clock.sleep(max(due_ns - self._clock.now_ns(), 0) / NS_PER_S)
        samples = self._to_line.process(pcm.astype(np.float32) / np.float32(32768.0))
        self._rest = np.concatenate((self._rest, samples))
        size = self.peer.format.rate * self.peer.frame_ms // 1000
        frame, self._rest = self._rest[:size], self._rest[size:]
        frame = np.pad(frame, (size - frame.size, 0))  # the resampler's delay, once
        message = self.peer.audio(encode(frame, self.peer.format), self._num_sent)
        self._num_sent += 1
        self._set_out(message, due_ns, frame_ns)
        while self._way and self._way[0][0] <= due_ns:
            await self._send(heapq.heappop(self._way)[2])

    def _set_out(self, message: Message, now_ns: int, frame_ns: int) -> None:
        trouble = self._trouble
        if self._random.random() < trouble.loss:
            return
        arrives_ns = now_ns + int(self._random.random() * trouble.late_ms * 1e6)
        if trouble.is_shuffled:
            arrives_ns += 2 * frame_ns * (self._random.random() < _SWAPPED)
        else:
            arrives_ns = max(arrives_ns, self._last_ns)
        self._last_ns = max(arrives_ns, self._last_ns)
        heapq.heappush(self._way, (arrives_ns, self._num_sent, message))

    # --- in ---

    def _now(self) -> int:
        return (self._clock.now_ns() - self._start_ns) * RATE // NS_PER_S

    async def _receive(self) -> None:
        receiving = asyncio.create_task(self._link.receive())
        try:
            while True:
                wait_s = None
                if self._marks:
                    wait_s = max(0, self._marks[0][0] - self._clock.now_ns()) / NS_PER_S
                await asyncio.wait([receiving], timeout=wait_s)
                await self._give_back_marks()
                if not receiving.done():
                    continue
                message = receiving.result()
                if message is None:
                    return
                receiving = asyncio.create_task(self._link.receive())
                if await self._take(message):
                    return
        except PeerError as error:
            self._failure = TalkError(f"the server broke the provider's protocol: {error}")
        except (ConnectionClosed, OSError):
            pass  # reported as the end of the call
        finally:
            receiving.cancel()
            self.has_ended.set()

    async def _take(self, message: Message) -> bool:
        """True when the server has said goodbye."""
        match self.peer.read(message):
            case Play(payload):
                self._play(payload)
            case Mark() as mark:
                self.num_marks += 1
                self._marks.append((max(self._ends_ns, self._clock.now_ns()), mark))
            case Clear():
                self._ends_ns = min(self._ends_ns, self._clock.now_ns())
                self._marks = deque((0, mark) for _, mark in self._marks)
                if self._log is not None:
                    self._log.recording.stop_playing(self._now())
                    self._cleared_at.append(self._now())
            case Goodbye():
                return True
        return False

    def _play(self, payload: bytes) -> None:
        samples = decode(payload, self.peer.format)
        now_ns = self._clock.now_ns()
        length_ns = len(samples) * NS_PER_S // self.peer.format.rate
        self._ends_ns = max(self._ends_ns, now_ns) + length_ns
        pcm = to_pcm16(self._from_line.process(samples))
        if self._log is None or not pcm.size:
            return
        piece = self._log.recording.play(pcm, self._now())
        answered = [turn for turn in self._log.turns if turn.response_id]
        if answered:
            answered[-1].pieces.append(piece)

    async def _give_back_marks(self) -> None:
        now_ns = self._clock.now_ns()
        while self._marks and self._marks[0][0] <= now_ns:
            await self._link.send(self._marks.popleft()[1].reply)

    async def _follow(self, sideband: ClientConnection) -> None:
        try:
            async for message in sideband:
                event = parse_event(message)
                if self._log is not None:
                    # What it would answer is for the line to know.
                    self._log.feed(event, self._now())
        except ConnectionClosed:
            pass  # the line tells of the end of the call
        except TalkError as error:
            self._failure = error
        except ProtocolError as error:
            self._failure = TalkError(f"the server broke the protocol: {error}")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


@asynccontextmanager
async def open_call(
    address: str,
    provider: str,
    *,
    api_key: str | None = None,
    token: str | None = None,
    audiosocket: tuple[str, int] | None = None,
    trouble: Trouble | None = None,
) -> AsyncIterator[CallClient]:
    """A call to the server at ``address``, hung up at the end of the block.

    ``token``: what the stream brings along; else the API key. ``audiosocket``: where Asterisk would
    connect to. Raises TalkError.
    """
    peer = PEERS[provider](new_call_id(provider), token or api_key or "")
    link = await _link(address, provider, audiosocket)
    client = CallClient(peer, link, trouble or Trouble())
    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.hang_up)
        await client.begin()
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        await client.attach(realtime_url(address), headers)
        yield client


@dataclass(frozen=True, slots=True)
class AudioSocketPort:
    """Where Asterisk would connect to: of a server that runs, or of one that we start."""

    port: int

    @classmethod
    def of(cls, url: str | None, port: int | None) -> AudioSocketPort:
        """``port`` of the server at ``url``; a free one for our own. Raises ConfigError."""
        if port is None and url is not None:
            raise ConfigError("--provider audiosocket with --url needs --audiosocket-port")
        return cls(port or _free_port())

    @property
    def settings(self) -> dict[str, str]:
        """Environment of a server that is to listen there."""
        return {"PARLEY_AUDIOSOCKET_PORT": str(self.port)}

    def at(self, url: str) -> tuple[str, int]:
        """Host and port, on the machine that ``url`` names."""
        host = urlsplit(url if "://" in url else f"http://{url}").hostname
        return host or _LOCALHOST, self.port


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOCALHOST, 0))
        return int(probe.getsockname()[1])


async def _link(
    address: str, provider: str, audiosocket: tuple[str, int] | None
) -> _WebSocketLink | _TcpLink:
    if provider != "audiosocket":
        return _WebSocketLink(await _open(_stream_url(address), {}))
    if audiosocket is None:
        raise ConnectError("AudioSocket needs the port of PARLEY_AUDIOSOCKET_PORT")
    host, port = audiosocket
    try:
        return _TcpLink(*await asyncio.open_connection(host, port))
    except OSError as error:
        raise ConnectError(f"cannot reach {host}:{port}: {error.strerror or error}") from error


def _stream_url(address: str) -> str:
    parts = urlsplit(realtime_url(address))
    return urlunsplit((parts.scheme, parts.netloc, "/phone/stream", "", ""))


async def _has_session(sideband: ClientConnection) -> bool:
    """Whether there is the call that ``sideband`` asks for; then traces will come, too. Raises
    TalkError."""
    ask = {"type": "realtime", "parley": {"trace": True}}
    try:
        if parse_event(await sideband.recv())["type"] != "session.created":
            return False
        await sideband.send(json.dumps({"type": "session.update", "session": ask}))
    except ConnectionClosed as error:
        raise ConnectError(f"the server closed the attached session: {error}") from error
    return True


async def _open(url: str, headers: dict[str, str]) -> ClientConnection:
    local = urlsplit(url).hostname in LOCAL_HOSTS
    try:
        return await connect(
            url, additional_headers=headers, compression=None, proxy=None if local else True
        )
    except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as error:
        raise connect_error(url.partition("?")[0], error, has_key=bool(headers)) from error
