"""One call: what lives on when its connection breaks, and the connection that it has at the moment.

    new -> connected -> lost -> connected (a new offer for the same call) -> ended
                          \\-> ended, when nobody comes back in time

A peer that says goodbye ends the call at once; one that falls silent is waited for. Meanwhile the
session stays, with its conversation and its KV, the answer pauses, and events wait.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from datetime import UTC, datetime, timedelta

from aiortc import RTCCertificate, RTCDataChannel

from app.clock import Clock, MonotonicClock
from app.config import Settings
from app.transports.webrtc.channel import CallAudio, CallChannel
from app.transports.webrtc.ice import IceConfig
from app.transports.webrtc.peer import Peer, PeerEvents
from app.transports.webrtc.sdp import Offer

logger = logging.getLogger(__name__)

# A peer sends 50 packets a second, or at least a check every 2.5 s: this long, and it is gone.
LOST_S = 3.5
_WATCH_EVERY_S = 0.5
# aiortc's certificates are good for 30 days.
_CERTIFICATE_AGE = timedelta(days=1)


class Gateway:
    """Makes calls. They share a certificate, which costs some ms to make, for a day each."""

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        """Raises ConfigError when the ICE servers cannot be understood."""
        self.resume_window_s = settings.resume_window_s
        self.ice = IceConfig.of(settings)
        self.clock = clock or MonotonicClock()
        self._certificate = RTCCertificate.generateCertificate()
        self._made_at = datetime.now(UTC)

    @property
    def certificate(self) -> RTCCertificate:
        """The one for a new connection."""
        if abs(datetime.now(UTC) - self._made_at) > _CERTIFICATE_AGE:  # the clock may be set back
            self._certificate = RTCCertificate.generateCertificate()
            self._made_at = datetime.now(UTC)
        return self._certificate

    def new_call(self) -> Call:
        """A call without a connection yet."""
        return Call(self)


class Call:
    """See the module's docstring. Whoever makes one closes it."""

    def __init__(self, gateway: Gateway) -> None:
        # Unguessable: whoever knows it (and has a key) may resume the call.
        self.id = f"rtc_{secrets.token_hex(16)}"
        self.channel = CallChannel()
        self.audio = CallAudio()
        self.num_connections = 0
        self._gateway = gateway
        self._peer: Peer | None = None
        self._lost_at_ns: int | None = None
        self._last_heard_ns = 0
        self._silent_s = 0.0
        self._watching: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.channel.on_close = self.audio.close

    @property
    def peer(self) -> Peer | None:
        """The connection of the moment."""
        return self._peer

    @property
    def is_lost(self) -> bool:
        """The peer is being waited for."""
        return self._lost_at_ns is not None

    async def connect(self, offer: Offer) -> str:
        """The answer to an offer: the first one, or that of a caller who comes back.

        The connection before, if there is one, ends with this. Raises ConnectionError when another
        offer for this call came meanwhile, OSError when there are no sockets left.
        """
        self._drop_peer()
        peer = self._make_peer(offer)
        self._peer = peer
        self._lost_at_ns = None
        self.channel.expect(offer.data_mid is not None)
        self.audio.expect(offer.takes_audio)
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="webrtc watch")
        try:
            return await peer.answer()
        except BaseException:
            await peer.close()
            raise

    async def close(self) -> None:
        """End the call; returns when nothing of it is left."""
        self.channel.fail(1000, "the call has ended")
        self.audio.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        self._drop_peer()
        while self._closing:
            await asyncio.wait(self._closing)

    # --- the peer ---

    def _make_peer(self, offer: Offer) -> Peer:
        # Each event knows whose it is: a connection that was given up has nothing to say any more.
        def mine() -> bool:
            return self._peer is peer

        def on_connected() -> None:
            if mine():
                self.num_connections += 1
                logger.info("call connected", extra={"call_id": self.id[:12]})
                self.audio.attach()

        def on_channel(line: RTCDataChannel) -> None:
            if mine():
                self.channel.attach(line)

        def on_end(is_clean: bool) -> None:
            if mine():
                self._on_end(is_clean)

        peer = Peer(
            offer,
            self._gateway.certificate,
            self._gateway.ice,
            self._gateway.clock,
            PeerEvents(
                on_connected=on_connected,
                on_channel=on_channel,
                on_audio=self.audio.heard,
                next_frame=self.audio.next_frame,
                on_end=on_end,
            ),
        )
        return peer

    def _on_end(self, is_clean: bool) -> None:
        if is_clean:
            self.channel.fail(1000, "the peer hung up")
        elif not self.num_connections:
            self.channel.fail(1006, "no connection to the peer came about")
        else:
            self._lose()

    def _lose(self) -> None:
        logger.info("call lost", extra={"call_id": self.id[:12]})
        self._lost_at_ns = self._gateway.clock.now_ns()
        self._drop_peer()

    def _drop_peer(self) -> None:
        peer, self._peer = self._peer, None
        self.audio.detach()
        self.channel.detach()
        if peer is not None:
            closing = asyncio.create_task(peer.close(), name="webrtc drop")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _watch(self) -> None:
        """Notice a peer that has fallen silent, and one that does not come back."""
        clock = self._gateway.clock
        while True:
            await clock.sleep(_WATCH_EVERY_S)
            if self._lost_at_ns is not None:
                if (clock.now_ns() - self._lost_at_ns) / 1e9 > self._gateway.resume_window_s:
                    self.channel.fail(1006, "the connection was lost")
                    return
            elif self._is_silent():
                self._lose()

    def _is_silent(self) -> bool:
        """Asked once every ``_WATCH_EVERY_S``.

        The rounds in which nothing came are counted, and not the time since something did: when
        this process itself was held up, what the peer has sent meanwhile is still to be read.
        """
        peer = self._peer
        if peer is None or not peer.is_connected or peer.last_heard_ns != self._last_heard_ns:
            self._last_heard_ns = peer.last_heard_ns if peer is not None else 0
            self._silent_s = 0.0
            return False
        self._silent_s += _WATCH_EVERY_S
        return self._silent_s > LOST_S
