"""Offers as browsers and aiortc make them, offers that nobody should make, and the answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.transports.webrtc.sdp import MAX_SDP_BYTES, Local, Offer, SdpError, answer, parse_offer
from tests.unit.app.server.test_digits import ODD_DIGITS

FINGERPRINT = ":".join(["AB"] * 32)
# The shape of Chromium's offers; addresses from the documentation ranges.
OFFER = "\r\n".join(
    [
        "v=0",
        "o=- 4611731400430051336 2 IN IP4 127.0.0.1",
        "s=-",
        "t=0 0",
        "a=group:BUNDLE 0 1",
        "a=extmap-allow-mixed",
        "a=msid-semantic: WMS 6d1e",
        "m=audio 9 UDP/TLS/RTP/SAVPF 111 63 9 0 8 13 110 126",
        "c=IN IP4 0.0.0.0",
        "a=rtcp:9 IN IP4 0.0.0.0",
        "a=candidate:1 1 udp 2113937151 1b2c3d4e-0000-4000-8000-000000000000.local 51001 typ host",
        "a=candidate:2 1 tcp 1518280447 192.0.2.7 9 typ host tcptype active",
        "a=candidate:3 1 udp 1677729535 198.51.100.9 51002 typ srflx raddr 192.0.2.7 rport 51001",
        "a=ice-ufrag:F7gI",
        "a=ice-pwd:x9cml/YzichV2+XlhiMu8g7q",
        "a=ice-options:trickle",
        f"a=fingerprint:sha-256 {FINGERPRINT}",
        "a=setup:actpass",
        "a=mid:0",
        "a=extmap:1 urn:ietf:params:rtp-hdrext:ssrc-audio-level",
        "a=sendrecv",
        "a=msid:6d1e d0f1",
        "a=rtcp-mux",
        "a=rtpmap:111 opus/48000/2",
        "a=fmtp:111 minptime=10;useinbandfec=1",
        "a=rtpmap:63 red/48000/2",
        "a=rtpmap:9 G722/8000",
        "a=ssrc:371112 cname:tXkW",
        "m=application 9 UDP/DTLS/SCTP webrtc-datachannel",
        "c=IN IP4 0.0.0.0",
        "a=ice-ufrag:F7gI",
        "a=ice-pwd:x9cml/YzichV2+XlhiMu8g7q",
        f"a=fingerprint:sha-256 {FINGERPRINT}",
        "a=setup:actpass",
        "a=mid:1",
        "a=sctp-port:5000",
        "a=max-message-size:262144",
        "",
    ]
)
LOCAL = Local(
    ufrag="abcd",
    password="p" * 22,
    fingerprint=FINGERPRINT,
    is_active=True,
    candidates=["9 1 udp 2130706431 192.0.2.2 40000 typ host"],
    ssrc=7,
    cname="us",
)


def changed(old: str, new: str) -> str:
    assert old in OFFER
    return OFFER.replace(old, new)


def section(text: str, kind: str) -> list[str]:
    """Lines of one media section of an answer."""
    parts = text.split("m=")
    return next(p for p in parts if p.startswith(kind)).split("\r\n")


def test_a_browser_s_offer() -> None:
    offer = parse_offer(OFFER)
    assert offer.opus_payload_type == 111
    assert (offer.audio_mid, offer.data_mid) == ("0", "1")
    assert (offer.ufrag, offer.password) == ("F7gI", "x9cml/YzichV2+XlhiMu8g7q")
    assert offer.fingerprints == (("sha-256", FINGERPRINT),)
    assert offer.sends_audio
    assert offer.takes_audio
    assert not offer.is_active
    assert offer.max_message_bytes == 262_144
    # TCP candidates are of no use to us.
    assert [(c.host, c.port, c.type) for c in offer.candidates] == [
        ("1b2c3d4e-0000-4000-8000-000000000000.local", 51001, "host"),
        ("198.51.100.9", 51002, "srflx"),
    ]


def test_the_answer_repeats_sections_in_order() -> None:
    text = answer(parse_offer(OFFER), LOCAL)
    lines = text.split("\r\n")
    assert lines[0] == "v=0"
    assert lines[-1] == ""
    assert "a=group:BUNDLE 0 1" in lines
    audio = section(text, "audio")
    assert audio[0] == "audio 9 UDP/TLS/RTP/SAVPF 111"
    for line in (
        "a=mid:0",
        "a=sendrecv",
        "a=rtcp-mux",
        "a=rtpmap:111 opus/48000/2",
        "a=setup:active",
        "a=ice-ufrag:abcd",
        "a=candidate:9 1 udp 2130706431 192.0.2.2 40000 typ host",
        "a=ssrc:7 cname:us",
    ):
        assert line in audio
    # Header extensions that we did not take are not there to be sent.
    assert not any(line.startswith("a=extmap") for line in lines)
    assert "a=mid:1" in section(text, "application")


def test_session_level_fields_count_for_all_sections() -> None:
    lines = [x for x in OFFER.split("\r\n") if not x.startswith(("a=ice-", "a=finger", "a=setup"))]
    at = lines.index("a=group:BUNDLE 0 1")
    lines[at:at] = [
        "a=ice-ufrag:wxyz",
        "a=ice-pwd:" + "w" * 24,
        f"a=fingerprint:sha-256 {FINGERPRINT}",
        "a=setup:active",
    ]
    offer = parse_offer("\n".join(lines))  # line feeds alone are read as well
    assert offer.ufrag == "wxyz"
    assert offer.is_active


def test_video_is_turned_down() -> None:
    video = "m=video 9 UDP/TLS/RTP/SAVPF 96\r\na=mid:v\r\na=rtpmap:96 VP8/90000\r\n"
    offer = parse_offer(OFFER.replace("m=application", video + "m=application"))
    lines = answer(offer, LOCAL).split("\r\n")
    assert [line.split()[1] for line in lines if line.startswith("m=")] == ["9", "0", "9"]
    assert "a=group:BUNDLE 0 1" in lines


@pytest.mark.parametrize(
    "offered, answered",
    [
        ("sendrecv", "sendrecv"),
        ("sendonly", "recvonly"),
        ("recvonly", "sendonly"),
        ("inactive", "inactive"),
    ],
)
def test_directions_mirror_one_another(offered: str, answered: str) -> None:
    offer = parse_offer(changed("a=sendrecv", f"a={offered}"))
    assert f"a={answered}" in section(answer(offer, LOCAL), "audio")


def test_a_call_without_data_channel_or_without_audio() -> None:
    head, audio, data = OFFER.partition("m=audio")[0], *OFFER.split("m=")[1:]
    only_audio = parse_offer(head + "m=" + audio)
    assert (only_audio.audio_mid, only_audio.data_mid) == ("0", None)
    only_data = parse_offer(head + "m=" + data)
    assert (only_data.audio_mid, only_data.opus_payload_type) == (None, None)
    assert not only_data.takes_audio


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "must begin with 'v=0'"),
        ("hello", "must begin with 'v=0'"),
        ("v=0\r\ns=-\r\n", "neither an audio section nor a data channel"),
        (changed("opus/48000/2", "G722/8000"), "does not offer Opus"),
        (changed("a=rtcp-mux\r\n", ""), "rtcp-mux"),
        (changed("a=group:BUNDLE 0 1", "a=group:BUNDLE 0"), "share one transport"),
        (changed("a=mid:1", "a=mid:0"), "same a=mid"),
        (changed("a=mid:0\r\n", ""), "no a=mid"),
        (changed("a=mid:0", "a=mid:0\x00"), "not a token"),
        (changed("a=setup:actpass", "a=setup:holdconn"), "holdconn"),
        (changed("a=ice-ufrag:F7gI", "a=ice-ufrag:F7"), "a=ice-ufrag"),
        (changed("a=ice-pwd:x9cml/YzichV2+XlhiMu8g7q", "a=ice-pwd:short"), "a=ice-pwd"),
        (changed("sha-256", "md5"), "a=fingerprint"),
        (changed("a=sctp-port:5000", "a=sctp-port:99999"), "a=sctp-port"),
        (changed("a=max-message-size:262144", "a=max-message-size:-1"), "a=max-message-size"),
        *((changed("a=sctp-port:5000", f"a=sctp-port:{n}"), "a=sctp-port") for n in ODD_DIGITS),
        *(
            (changed("a=max-message-size:262144", f"a=max-message-size:1{n}"), "a=max-message-size")
            for n in ODD_DIGITS
        ),
        *((changed("m=audio 9 ", f"m=audio {n} "), "media line") for n in ODD_DIGITS),
        *((OFFER.replace(" 111", f" {n}").replace(":111", f":{n}"), "Opus") for n in ODD_DIGITS),
        (changed("m=audio 9 UDP", "m=audio nine UDP"), "media line"),
        (OFFER + "m=audio 9 UDP/TLS/RTP/SAVPF 0\r\n" * 20, "more than 16"),
        (OFFER + "a=x\r\n" * MAX_SDP_BYTES, "too long"),
    ],
)
def test_offers_that_cannot_be_answered(text: str, words: str) -> None:
    with pytest.raises(SdpError, match=words) as caught:
        parse_offer(text)
    assert caught.value.code == "invalid_offer"
    assert len(caught.value.message) < 300


LINES = st.sampled_from(OFFER.split("\r\n"))
NOISE = st.text(max_size=40)


@given(st.lists(LINES | NOISE | st.builds(lambda a, b: a[:7] + b, LINES, NOISE), max_size=60))
def test_whatever_comes_is_an_offer_or_an_error(lines: list[str]) -> None:
    try:
        offer = parse_offer("\r\n".join(["v=0", *lines]))
    except SdpError:
        return
    assert isinstance(offer, Offer)
    text = answer(offer, LOCAL)
    # Nothing of the peer's can begin a line of its own.
    assert text.count("\r\nm=") == len(offer.sections)
    assert all(line[1:2] == "=" for line in text.split("\r\n")[:-1])
