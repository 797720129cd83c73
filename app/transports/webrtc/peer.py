"""One connection to a peer: ICE, DTLS, media and data, from the offer to the last packet.

Built of aiortc's transports without its RTCPeerConnection: we only ever answer, on one bundled
transport, and bring our own audio streams (see ``rtp``).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiortc import (
    RTCCertificate,
    RTCDataChannel,
    RTCDtlsFingerprint,
    RTCDtlsParameters,
    RTCDtlsTransport,
    RTCIceParameters,
    RTCIceTransport,
    RTCSctpCapabilities,
    RTCSctpTransport,
)
from aiortc.exceptions import InvalidStateError
from aiortc.rtcsctptransport import Chunk, DataChunk
from aiortc.utils import random32

from app.clock import Clock
from app.transports.webrtc.channel import LABEL
from app.transports.webrtc.ice import IceConfig, IceGatherer
from app.transports.webrtc.rtp import AudioReceiver, AudioSender, report
from app.transports.webrtc.sdp import Local, Offer, answer
from audio.frame import Samples

logger = logging.getLogger(__name__)

# From the answer to a working connection; a browser takes 0.1 s on a local network.
CONNECT_TIMEOUT_S = 15.0
# A client has one data channel. Some more are closed again; whoever opens many is not a client.
_MAX_CHANNELS = 8
# Pieces of messages that are not complete (aiortc announces 1 MB as its window, and trusts in it).
_MAX_REASSEMBLY_BYTES = 2 * 1024 * 1024


@dataclass(slots=True)
class PeerEvents:
    """What a peer tells its call. ``on_end(is_clean)``: once; not after ``Peer.close``."""

    on_connected: Callable[[], None]
    on_channel: Callable[[RTCDataChannel], None]
    on_audio: Callable[[Samples, int], None]
    next_frame: Callable[[], bytes]
    on_end: Callable[[bool], None]


class _Sctp(RTCSctpTransport):
    """With a limit on what a peer may leave unfinished, and an end that nobody need be told of."""

    async def _receive_data_chunk(self, chunk: DataChunk) -> None:
        if self._advertised_rwnd + _MAX_REASSEMBLY_BYTES < len(chunk.user_data):
            raise ConnectionError("the peer sends more than it may")
        await super()._receive_data_chunk(chunk)

    async def _send_chunk(self, chunk: Chunk) -> None:
        """Its timers go on for a moment when the transport has ended: then it is too late."""
        try:
            await super()._send_chunk(chunk)
        except ConnectionError:
            logger.debug("the transport is gone; nothing more is sent")


class Peer:
    """See the module's docstring. ``close`` may be called at any moment, and again."""

    def __init__(
        self,
        offer: Offer,
        certificate: RTCCertificate,
        ice: IceConfig,
        clock: Clock,
        events: PeerEvents,
    ) -> None:
        self.offer = offer
        self.is_connected = False
        self._clock = clock
        self._events = events
        self._fingerprint = next(
            f.value for f in certificate.getFingerprints() if f.algorithm == "sha-256"
        )
        self._ssrc = random32()
        self._cname = secrets.token_urlsafe(12)
        self._gatherer = IceGatherer(ice, clock)
        self._gatherer.connection.ice_controlling = offer.is_lite
        self._ice = RTCIceTransport(self._gatherer)
        self._dtls = RTCDtlsTransport(self._ice, [certificate])
        self._dtls._set_role("server" if offer.is_active else "client")
        self._dtls.on("statechange", self._on_dtls_state)
        self._sctp: _Sctp | None = None
        self._num_channels = 0
        self._receiver: AudioReceiver | None = None
        self._sender: AudioSender | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._connecting: asyncio.Task[None] | None = None
        self._has_ended = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def last_heard_ns(self) -> int:
        """When the peer last sent anything at all: audio, an event, a check."""
        return self._gatherer.connection.last_heard_ns

    @property
    def receiver(self) -> AudioReceiver | None:
        """The caller's audio stream."""
        return self._receiver

    async def answer(self) -> str:
        """The answer to the offer; the connection is being made from now on.

        Raises ConnectionError when it was closed meanwhile, OSError when there are no sockets left.
        """
        await self._gatherer.gather()
        if self._closing is not None:  # meanwhile; what was gathered came too late for `_close`
            await self._gatherer.connection.close()
            raise ConnectionError("the connection was given up before it was answered")
        await self._gatherer.add_remote(self.offer.candidates)
        text = answer(
            self.offer,
            Local(
                ufrag=self._gatherer.connection.local_username,
                password=self._gatherer.connection.local_password,
                fingerprint=self._fingerprint,
                is_active=not self.offer.is_active,
                candidates=self._gatherer.candidate_lines(),
                ssrc=self._ssrc,
                cname=self._cname,
            ),
        )
        self._connecting = asyncio.create_task(self._connect(), name="webrtc connect")
        return text

    async def close(self) -> None:
        """End the connection; returns when nothing of it is left."""
        self._has_ended = True
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="webrtc close")
        await asyncio.shield(self._closing)

    # --- up ---

    async def _connect(self) -> None:
        offer = self.offer
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._ice.start(RTCIceParameters(offer.ufrag, offer.password, offer.is_lite))
                if self._ice.state != "completed":
                    raise ConnectionError(f"ICE is {self._ice.state}")
                await self._dtls.start(
                    RTCDtlsParameters([RTCDtlsFingerprint(*f) for f in offer.fingerprints])
                )
                if self._dtls.state != "connected":
                    raise ConnectionError(f"DTLS is {self._dtls.state}")
                self._start_media()
                await self._start_data()
        except (ConnectionError, TimeoutError, InvalidStateError) as error:
            logger.info("no connection to the peer: %s", error)
            self._end(is_clean=False)
            return
        self.is_connected = True
        if not self._has_ended:
            self._events.on_connected()

    def _start_media(self) -> None:
        codec = self.offer.opus_payload_type
        if codec is None:
            return
        if self.offer.sends_audio:
            self._receiver = AudioReceiver(codec, self._clock, self._events.on_audio)
            self._receiver.register(self._dtls)
        if self.offer.takes_audio:
            self._sender = AudioSender(codec, self._ssrc, self._cname, self._clock)
            self._run(self._sender.run(self._dtls, self._events.next_frame), "webrtc audio")
        reports = report(
            self._dtls, self._clock, self._sender, self._receiver, self._ssrc, self._cname
        )
        self._run(reports, "webrtc reports")

    async def _start_data(self) -> None:
        if self.offer.data_mid is None:
            return
        self._sctp = _Sctp(self._dtls)
        self._sctp.on("datachannel", self._on_channel)
        limits = RTCSctpCapabilities(maxMessageSize=self.offer.max_message_bytes)
        await self._sctp.start(limits, self.offer.sctp_port)

    def _on_channel(self, line: RTCDataChannel) -> None:
        self._num_channels += 1
        if self._num_channels > _MAX_CHANNELS:
            logger.warning("the peer opens too many data channels")
            self._end(is_clean=False)
        elif line.label != LABEL:
            line.close()
        else:
            line.on("close", lambda: self._end(is_clean=True))
            self._events.on_channel(line)

    # --- down ---

    def _on_dtls_state(self) -> None:
        # "closed": the peer said goodbye.
        if self._dtls.state == "closed":
            self._end(is_clean=True)

    def _end(self, *, is_clean: bool) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._events.on_end(is_clean)

    async def _close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        if self._connecting is not None:
            self._connecting.cancel()
        for task in self._tasks:
            task.cancel()
        tasks = [*self._tasks, *([self._connecting] if self._connecting else [])]
        if tasks:
            await asyncio.wait(tasks)
        if self._sctp is not None:
            await self._sctp.stop()
        pump = self._dtls._task  # gives its end to nobody else
        await self._dtls.stop()
        await self._ice.stop()
        if self._ice.state != "closed" or self._gatherer.connection.local_candidates:
            await self._gatherer.connection.close()  # gathered, and never started
        if pump is not None:
            await asyncio.wait([pump])
            if not pump.cancelled() and (error := pump.exception()) is not None:
                logger.info("the transport ended with an error: %r", error)
        self._dtls.remove_all_listeners()
        if self.is_connected:
            logger.info("webrtc connection closed", extra=self._line_quality())

    def _line_quality(self) -> dict[str, int]:
        """For the log: what became of the caller's packets, and of our frames."""
        quality = {}
        if self._receiver is not None:
            buffer = self._receiver.buffer
            quality = {
                "lost": buffer.num_lost,
                "late": buffer.num_late,
                "duplicates": buffer.num_duplicates,
                "resets": buffer.num_resets,
                "damaged": self._receiver.decoder.num_bad,
            }
        if self._sender is not None:
            quality["skipped_frames"] = self._sender.num_skipped_frames
        return quality

    def _run(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.append(task)
        task.add_done_callback(_log_failure)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed", task.get_name(), exc_info=error)
