"""Session descriptions (RFC 8866, JSEP RFC 9429): what we need of an offer, and the answer to it.

We only answer. One audio section with Opus and one data channel are accepted, bundled on one
transport (RFC 9143) with RTCP multiplexed; every other section is turned down with port 0.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from app.digits import whole_number
from app.errors import ClientError

MAX_SDP_BYTES = 64 * 1024
MAX_SECTIONS = 16
MAX_CANDIDATES = 64
# Of one message on the data channel that we accept (what aiortc tells its peers too).
MAX_MESSAGE_BYTES = 256 * 1024
# What a peer takes that does not say (RFC 8841, section 6).
_DEFAULT_PEER_MESSAGE_BYTES = 64 * 1024

Direction = Literal["sendrecv", "sendonly", "recvonly", "inactive"]
_DIRECTIONS: dict[str, Direction] = {
    "sendrecv": "sendrecv",
    "sendonly": "sendonly",
    "recvonly": "recvonly",
    "inactive": "inactive",
}
_ANSWERS: dict[Direction, Direction] = {
    "sendrecv": "sendrecv",
    "sendonly": "recvonly",
    "recvonly": "sendonly",
    "inactive": "inactive",
}
_MEDIA_LINE = re.compile(r"m=(\w{1,32}) (\d{1,5}) ([\w/]{1,64}) (.{1,1024})", re.ASCII)
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`{|}~-]{1,64}")
_FINGERPRINT = re.compile(r"(sha-(?:256|384|512)) ([0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){31,63})")
# RFC 8839, section 5.4: ice-char is ALPHA / DIGIT / "+" / "/".
_UFRAG = re.compile(r"[A-Za-z0-9+/]{4,256}")
_PASSWORD = re.compile(r"[A-Za-z0-9+/]{22,256}")
_CANDIDATE = re.compile(
    r"(?P<foundation>[\w+/-]{1,32}) (?P<component>\d{1,3}) (?P<transport>\w{1,8})"
    r" (?P<priority>\d{1,10}) (?P<host>[\w.:-]{1,255}) (?P<port>\d{1,5}) typ (?P<type>\w{1,8})",
    re.ASCII,
)


class SdpError(ClientError):
    """An offer that cannot be answered."""

    code = "invalid_offer"


@dataclass(frozen=True, slots=True)
class Candidate:
    """An address of the peer (RFC 8839, section 5.1)."""

    foundation: str
    component: int
    transport: str
    priority: int
    host: str
    port: int
    type: str


@dataclass(slots=True)
class Section:
    """One ``m=`` section of an offer; ICE and DTLS fields fall back to those of the session."""

    kind: str
    protocol: str
    formats: str
    mid: str = ""
    direction: Direction = "sendrecv"
    attributes: dict[str, list[str]] = field(default_factory=dict)

    def last(self, name: str, default: str = "") -> str:
        """The value of the last attribute ``name``."""
        values = self.attributes.get(name)
        return values[-1] if values else default


@dataclass(frozen=True, slots=True)
class Offer:
    """A checked offer.

    ``opus_payload_type`` None: there is no audio; ``data_mid`` None: there is no data channel.
    ``fingerprints`` are (algorithm, value) of the peer's certificate. ``is_active``: the peer
    begins the DTLS handshake. ``max_message_bytes``: what the peer takes, 0 for any size.
    """

    sections: tuple[Section, ...]
    audio_mid: str | None
    data_mid: str | None
    opus_payload_type: int | None
    audio_direction: Direction
    ufrag: str
    password: str
    is_lite: bool
    fingerprints: tuple[tuple[str, str], ...]
    is_active: bool
    candidates: tuple[Candidate, ...]
    sctp_port: int
    max_message_bytes: int

    @property
    def sends_audio(self) -> bool:
        """The peer will send us audio."""
        return self.audio_mid is not None and self.audio_direction in ("sendrecv", "sendonly")

    @property
    def takes_audio(self) -> bool:
        """The peer wants audio from us."""
        return self.audio_mid is not None and self.audio_direction in ("sendrecv", "recvonly")


def parse_offer(text: str) -> Offer:
    """Read and check an offer. Raises SdpError that says what is wrong."""
    if len(text) > MAX_SDP_BYTES:
        raise SdpError(f"The offer is too long: {len(text)} characters, at most {MAX_SDP_BYTES}.")
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    if not lines or lines[0] != "v=0":
        raise SdpError("The offer is not a session description: it must begin with 'v=0'.")
    session, sections = _split(lines[1:])
    audio = _first(sections, "audio")
    data = _first(sections, "application")
    if audio is None and data is None:
        raise SdpError("The offer has neither an audio section nor a data channel.")
    accepted = [section for section in (audio, data) if section is not None]
    _check_bundle(session, accepted)
    lead = min(accepted, key=sections.index)
    if audio is not None and "rtcp-mux" not in audio.attributes:
        raise SdpError("The audio section must multiplex RTCP (a=rtcp-mux).")
    setup = lead.last("setup", session.last("setup"))
    if setup not in ("actpass", "active", "passive"):
        raise SdpError(f"a=setup must be actpass, active or passive, not {setup[:32]!r}.")
    return Offer(
        sections=tuple(sections),
        audio_mid=audio.mid if audio else None,
        data_mid=data.mid if data else None,
        opus_payload_type=_opus_payload_type(audio) if audio else None,
        audio_direction=audio.direction if audio else "inactive",
        ufrag=_checked(lead, session, "ice-ufrag", _UFRAG),
        password=_checked(lead, session, "ice-pwd", _PASSWORD),
        is_lite="ice-lite" in session.attributes,
        fingerprints=_fingerprints(lead, session),
        is_active=setup == "active",
        candidates=_candidates(accepted),
        sctp_port=_number(data, "sctp-port", 5000, 65_535) if data else 5000,
        max_message_bytes=(
            _number(data, "max-message-size", _DEFAULT_PEER_MESSAGE_BYTES, 2**31) if data else 0
        ),
    )


def _split(lines: Sequence[str]) -> tuple[Section, list[Section]]:
    session = current = Section("session", "", "")
    sections: list[Section] = []
    for line in lines:
        if line.startswith("m="):
            match = _MEDIA_LINE.fullmatch(line)
            if match is None:
                raise SdpError(f"This media line cannot be read: {line[:80]!r}.")
            if len(sections) == MAX_SECTIONS:
                raise SdpError(f"The offer has more than {MAX_SECTIONS} media sections.")
            current = Section(match[1], match[3], match[4])
            # Port 0: the peer itself has turned this section off.
            current.attributes["port"] = [match[2]]
            sections.append(current)
        elif line.startswith("a="):
            name, _, value = line[2:].partition(":")
            if name in _DIRECTIONS:
                current.direction = _DIRECTIONS[name]
            current.attributes.setdefault(name, []).append(value.strip())
    for section in sections:
        section.mid = section.last("mid")
        if section.mid and not _TOKEN.fullmatch(section.mid):
            raise SdpError(f"a=mid is not a token: {section.mid[:80]!r}.")
    return session, sections


def _first(sections: Sequence[Section], kind: str) -> Section | None:
    protocols = {
        "audio": ("UDP/TLS/RTP/SAVPF", "UDP/TLS/RTP/SAVP", "RTP/SAVPF"),
        "application": ("UDP/DTLS/SCTP", "TCP/DTLS/SCTP"),
    }
    for section in sections:
        fits = section.kind == kind and section.protocol in protocols[kind]
        if fits and section.last("port") != "0":
            if not section.mid:
                raise SdpError(f"The {kind} section has no a=mid.")
            return section
    return None


def _check_bundle(session: Section, accepted: Sequence[Section]) -> None:
    if len(accepted) < 2:
        return
    groups = [value.split() for value in session.attributes.get("group", [])]
    mids = {section.mid for section in accepted}
    if len(mids) < 2:
        raise SdpError("Two media sections have the same a=mid.")
    if not any(group[:1] == ["BUNDLE"] and mids <= set(group[1:]) for group in groups):
        raise SdpError("Audio and data channel must share one transport (a=group:BUNDLE).")


def _opus_payload_type(audio: Section) -> int:
    offered = audio.formats.split()
    for value in audio.attributes.get("rtpmap", []):
        number, _, codec = value.partition(" ")
        if codec.lower() == "opus/48000/2" and number in offered:
            payload_type = whole_number(number, max_digits=3)
            if payload_type is not None and payload_type < 128:
                return payload_type
    raise SdpError("The audio section does not offer Opus (opus/48000/2), the codec we speak.")


def _checked(lead: Section, session: Section, name: str, pattern: re.Pattern[str]) -> str:
    value = lead.last(name, session.last(name))
    if not pattern.fullmatch(value):
        raise SdpError(f"a={name} is missing or malformed.")
    return value


def _fingerprints(lead: Section, session: Section) -> tuple[tuple[str, str], ...]:
    values = lead.attributes.get("fingerprint") or session.attributes.get("fingerprint") or []
    found = [match for value in values[:8] if (match := _FINGERPRINT.fullmatch(value))]
    if not found:
        raise SdpError("a=fingerprint with sha-256, sha-384 or sha-512 is missing.")
    return tuple((match[1].lower(), match[2].upper()) for match in found)


def _candidates(sections: Sequence[Section]) -> tuple[Candidate, ...]:
    found: dict[tuple[str, int], Candidate] = {}
    for section in sections:
        for value in section.attributes.get("candidate", [])[:MAX_CANDIDATES]:
            match = _CANDIDATE.match(value)
            if match is None or match["transport"].lower() != "udp" or match["component"] != "1":
                continue
            port = int(match["port"])
            if 0 < port < 65_536:
                found[match["host"], port] = Candidate(
                    foundation=match["foundation"],
                    component=1,
                    transport="udp",
                    priority=int(match["priority"]),
                    host=match["host"],
                    port=port,
                    type=match["type"],
                )
    return tuple(found.values())[:MAX_CANDIDATES]


def _number(section: Section, name: str, default: int, largest: int) -> int:
    value = section.last(name)
    if not value:
        return default
    number = whole_number(value, max_digits=10)
    if number is None or number > largest:
        raise SdpError(f"a={name} must be a number up to {largest}.")
    return number


@dataclass(frozen=True, slots=True)
class Local:
    """Our end of the transport, as the answer tells it. ``candidates`` are SDP values."""

    ufrag: str
    password: str
    fingerprint: str
    is_active: bool
    candidates: Sequence[str]
    ssrc: int
    cname: str


def answer(offer: Offer, local: Local) -> str:
    """The answer to ``offer``: the same sections in the same order."""
    accepted = [mid for mid in (offer.audio_mid, offer.data_mid) if mid is not None]
    bundle = [section.mid for section in offer.sections if section.mid in accepted]
    lines = [
        "v=0",
        f"o=- {secrets.randbits(62)} 2 IN IP4 127.0.0.1",
        "s=-",
        "t=0 0",
        f"a=group:BUNDLE {' '.join(bundle)}",
        "a=msid-semantic: WMS *",
    ]
    for section in offer.sections:
        if section.kind == "audio" and section.mid == offer.audio_mid:
            lines += _audio_lines(offer, local)
        elif section.kind == "application" and section.mid == offer.data_mid:
            lines += _data_lines(offer, local)
        else:
            first = section.formats.split()[0]
            lines.append(f"m={section.kind} 0 {section.protocol} {first}")
            lines += ["c=IN IP4 0.0.0.0", "a=inactive"]
            lines += [f"a=mid:{section.mid}"] if section.mid else []
    return "\r\n".join(lines) + "\r\n"


def _audio_lines(offer: Offer, local: Local) -> list[str]:
    codec = offer.opus_payload_type
    return [
        f"m=audio 9 UDP/TLS/RTP/SAVPF {codec}",
        "c=IN IP4 0.0.0.0",
        "a=rtcp:9 IN IP4 0.0.0.0",
        *_transport_lines(local),
        f"a=mid:{offer.audio_mid}",
        f"a={_ANSWERS[offer.audio_direction]}",
        "a=msid:parley parley-audio",
        "a=rtcp-mux",
        f"a=rtpmap:{codec} opus/48000/2",
        # No usedtx: silence must go on arriving, because the end of a turn is found in it.
        f"a=fmtp:{codec} minptime=10;useinbandfec=1;stereo=0",
        "a=ptime:20",
        f"a=ssrc:{local.ssrc} cname:{local.cname}",
    ]


def _data_lines(offer: Offer, local: Local) -> list[str]:
    return [
        "m=application 9 UDP/DTLS/SCTP webrtc-datachannel",
        "c=IN IP4 0.0.0.0",
        *_transport_lines(local),
        f"a=mid:{offer.data_mid}",
        "a=sctp-port:5000",
        f"a=max-message-size:{MAX_MESSAGE_BYTES}",
    ]


def _transport_lines(local: Local) -> list[str]:
    return [
        *(f"a=candidate:{candidate}" for candidate in local.candidates),
        "a=end-of-candidates",
        f"a=ice-ufrag:{local.ufrag}",
        f"a=ice-pwd:{local.password}",
        f"a=fingerprint:sha-256 {local.fingerprint}",
        f"a=setup:{'active' if local.is_active else 'passive'}",
    ]
