"""Our end of ICE (RFC 8445), made so that a call on a local network connects at once.

aiortc's defaults ask a public STUN server and wait 5 s for it. Here no server is asked unless one
is configured, and then for half a second at most. Without one the peer must be able to reach us
directly, so that its own addresses are not needed: its checks tell where it is (peer-reflexive
candidates). That spares us the mDNS names behind which browsers hide addresses, and our own checks
begin when the peer is ready for them instead of being repeated half a second later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from aioice import Candidate as IceCandidate
from aioice import Connection
from aioice.ice import StunProtocol
from aioice.stun import Message
from aiortc import RTCIceGatherer, RTCIceServer
from aiortc.rtcicetransport import connection_kwargs, parse_stun_turn_uri

from app.clock import Clock
from app.config import Settings
from app.errors import ConfigError
from app.transports.webrtc.sdp import Candidate

_SERVER_WAIT_S = 0.5
# Datagrams that nobody has read: 10 s of audio. Overflow rule: the newest are dropped.
MAX_QUEUED_DATAGRAMS = 500


@dataclass(frozen=True, slots=True)
class IceConfig:
    """Which servers are asked, and the address that a NAT shows of this machine, if any."""

    servers: tuple[RTCIceServer, ...] = ()
    public_address: str | None = None

    @classmethod
    def of(cls, settings: Settings) -> IceConfig:
        """Raises ConfigError for a URI that is neither stun: nor turn:."""
        servers = []
        for uri in settings.ice_servers:
            try:
                parse_stun_turn_uri(uri)
            except ValueError as error:
                raise ConfigError(
                    f"PARLEY_ICE_SERVERS: {uri!r} is not like stun:HOST:PORT or turn:HOST:PORT"
                ) from error
            servers.append(
                RTCIceServer(
                    urls=uri,
                    username=settings.ice_username or None,
                    credential=settings.ice_credential or None,
                )
            )
        return cls(tuple(servers), settings.public_address)


class IceConnection(Connection):
    """aioice's connection with bounded queues, a bounded wait for servers, and a sign of life."""

    def __init__(self, clock: Clock, **options: Any) -> None:
        super().__init__(ice_controlling=False, **options)
        self.last_heard_ns = clock.now_ns()
        self._clock = clock

    async def get_component_candidates(
        self,
        component: int,
        addresses: list[str],
        timeout: int = 5,  # noqa: ASYNC109  the signature is aioice's
    ) -> list[IceCandidate]:
        """As in aioice. A machine without a network is reachable on the loopback at least."""
        found: list[IceCandidate] = await super().get_component_candidates(
            component,
            addresses or ["127.0.0.1"],
            timeout=_SERVER_WAIT_S,  # type: ignore[arg-type]  # seconds for asyncio.wait
        )
        return found

    def data_received(self, data: bytes, component: int) -> None:
        """Anyone may send to the port: an empty datagram, or a flood, must not harm the call."""
        self.last_heard_ns = self._clock.now_ns()
        if data and self._queue.qsize() < MAX_QUEUED_DATAGRAMS:
            super().data_received(data, component)

    def request_received(
        self, message: Message, addr: tuple[str, int], protocol: StunProtocol
    ) -> None:
        """A check of the peer."""
        self.last_heard_ns = self._clock.now_ns()
        super().request_received(message, addr, protocol)

    async def query_consent(self) -> None:
        """No questions whether the peer still wants what we send (RFC 7675).

        A call ends after 3.5 s in which nothing at all came (``call.LOST_S``), where the RFC allows
        30 s. aioice asks once and waits half a second, so that on a busy machine six answers in a
        row come too late, and a call in full swing is taken for one that was hung up.
        """


class IceGatherer(RTCIceGatherer):
    """aiortc's gatherer over an ``IceConnection``."""

    def __init__(self, config: IceConfig, clock: Clock) -> None:
        super().__init__(iceServers=list(config.servers))
        self._config = config
        self.connection = IceConnection(clock, **connection_kwargs(list(config.servers)))
        self._connection = self.connection  # of this one aiortc's transport makes use

    def candidate_lines(self) -> list[str]:
        """Our addresses as SDP values, the public one first among them."""
        lines = []
        for candidate in self.connection.local_candidates:
            line = candidate.to_sdp()
            address = self._config.public_address
            if address and candidate.type == "host" and ":" not in candidate.host:
                lines.append(_with_address(line, candidate.host, address))
            lines.append(line)
        return list(dict.fromkeys(lines))

    async def add_remote(self, candidates: tuple[Candidate, ...]) -> None:
        """The peer's addresses, which matter only where servers help both to find each other."""
        if not self._config.servers:
            return
        for given in candidates:
            if given.host.endswith(".local"):
                continue  # found out by its checks, or relayed
            await self.connection.add_remote_candidate(
                IceCandidate(
                    foundation=given.foundation,
                    component=given.component,
                    transport=given.transport,
                    priority=given.priority,
                    host=given.host,
                    port=given.port,
                    type=given.type,
                )
            )


def _with_address(line: str, host: str, address: str) -> str:
    return re.sub(rf"(?<= ){re.escape(host)}(?= )", address, line, count=1)
