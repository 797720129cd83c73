"""Each provider's messages, read and written as its documentation has them."""

from __future__ import annotations

import base64
import contextlib
import json
import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.transports.telephony.detect import detect
from app.transports.telephony.protocol import (
    AudioReceived,
    HungUp,
    KeyPressed,
    MarkReached,
    PhoneProtocol,
    PhoneProtocolError,
    Started,
)
from app.transports.telephony.providers import audiosocket
from app.transports.telephony.providers.audiosocket import AudioSocket
from audio.codecs import PCMA_8K, PCMU_8K, AudioFormat

AUDIO = bytes(range(160))
BASE64 = base64.b64encode(AUDIO).decode()

STARTS: dict[str, dict[str, Any]] = {
    "twilio": {
        "event": "start",
        "sequenceNumber": "1",
        "streamSid": "MZ1",
        "start": {
            "streamSid": "MZ1",
            "accountSid": "AC1",
            "callSid": "CA1",
            "tracks": ["inbound"],
            "customParameters": {"token": "t"},
            "mediaFormat": {"encoding": "audio/x-mulaw", "sampleRate": 8000, "channels": 1},
        },
    },
    "telnyx": {
        "event": "start",
        "sequence_number": "1",
        "stream_id": "s-1",
        "start": {
            "call_control_id": "CA1",
            "user_id": "AC1",
            "custom_parameters": {"token": "t"},
            "media_format": {"encoding": "PCMA", "sample_rate": 8000, "channels": 1},
        },
    },
    "plivo": {
        "event": "start",
        "sequenceNumber": 0,
        "start": {
            "callId": "CA1",
            "streamId": "s-1",
            "accountId": "AC1",
            "tracks": ["inbound"],
            "mediaFormat": {"encoding": "audio/x-mulaw", "sampleRate": 8000},
        },
        "extra_headers": "{X-PH-token: t}",
    },
    "exotel": {
        "event": "start",
        "sequence_number": "1",
        "stream_sid": "MZ1",
        "start": {
            "stream_sid": "MZ1",
            "call_sid": "CA1",
            "account_sid": "AC1",
            "custom_parameters": {"token": "t"},
            "media_format": {"encoding": "audio/x-raw", "sample_rate": "8000", "bit_rate": "16"},
        },
    },
    "vonage": {
        "event": "websocket:connected",
        "content-type": "audio/l16;rate=16000",
        "uuid": "CA1",
        "application_id": "AC1",
        "token": "t",
    },
}
FORMATS = {
    "twilio": PCMU_8K,
    "telnyx": PCMA_8K,
    "plivo": PCMU_8K,
    "exotel": AudioFormat("pcm16", 8_000),
    "vonage": AudioFormat("pcm16", 16_000),
}


def begun(provider: str) -> tuple[PhoneProtocol, Started]:
    found = detect(json.dumps(STARTS[provider]))
    assert found is not None
    return found


@pytest.mark.parametrize("provider", STARTS)
def test_a_provider_is_told_by_its_first_message(provider: str) -> None:
    protocol, started = begun(provider)
    assert protocol.provider == provider
    assert protocol.input_format == protocol.output_format == FORMATS[provider]
    assert (started.call_id, started.account) == ("CA1", "AC1")
    assert started.parameters["token"] == "t"


@pytest.mark.parametrize(
    "connected",
    [
        {"event": "connected", "protocol": "Call", "version": "1.0.0"},
        {"event": "connected", "version": "1.0.0"},
        {"event": "connected"},
    ],
)
def test_connected_only_announces_a_start(connected: dict[str, str]) -> None:
    assert detect(json.dumps(connected)) is None


@pytest.mark.parametrize(
    "message",
    ["", "{", "[]", '"start"', "{}", '{"event":"media"}', '{"event":"start"}', b"\0\1", "[" * 5000]
    + [json.dumps({"event": "start", "start": {}}), "x" * 100_000],
)
def test_what_begins_no_stream_is_refused(message: str | bytes) -> None:
    with pytest.raises(PhoneProtocolError):
        detect(message)


@pytest.mark.parametrize("provider", STARTS)
def test_a_format_that_is_not_known_is_named(provider: str) -> None:
    text = json.dumps(STARTS[provider]).replace("8000", "11025").replace("16000", "11025")
    text = text.replace("audio/x-mulaw", "audio/opus")
    words = r"'[\w.-]*(ormat[\w.]*|content-type)' is .*(11025|opus).*, expected .*8000|mulaw"
    with pytest.raises(PhoneProtocolError, match=words):
        detect(text)


def test_what_a_provider_says_of_its_errors_is_told() -> None:
    protocol, _ = begun("telnyx")
    error = {"event": "error", "payload": {"code": 100002, "title": "unknown_error"}}
    with pytest.raises(PhoneProtocolError, match="an error: .*100002.*unknown"):
        protocol.parse(json.dumps(error))


MEDIA = {"track": "inbound", "chunk": "7", "timestamp": "140", "payload": BASE64}


@pytest.mark.parametrize("provider", ["twilio", "telnyx", "plivo", "exotel"])
def test_json_streams_are_read(provider: str) -> None:
    protocol, _ = begun(provider)

    def parse(**fields: Any) -> Any:
        return protocol.parse(json.dumps(fields))

    assert parse(event="media", media=MEDIA) == AudioReceived(AUDIO, 7)
    assert parse(event="media", media=MEDIA | {"track": "outbound"}) is None
    assert parse(event="dtmf", dtmf={"digit": "#", "track": "inbound_track"}) == KeyPressed("#")
    assert parse(event="stop", stop={}) == HungUp("the stream was stopped")
    assert parse(event="mark", mark={"name": "m"}) == MarkReached("m")
    assert parse(event="something new") is None
    for wrong in (
        {"event": "media"},
        {"event": "media", "media": {"payload": "%%%"}},
        {"event": "media", "media": {"payload": 7}},
        {"event": "media", "media": MEDIA | {"chunk": "-1"}},
        {"event": "media", "media": MEDIA | {"chunk": True}},
        {"event": "dtmf", "dtmf": {"digit": "55"}},
        {"event": "mark", "mark": {}},
    ):
        with pytest.raises(PhoneProtocolError):
            parse(**wrong)


def test_messages_to_the_providers() -> None:
    sent = {}
    for provider in STARTS:
        protocol, _ = begun(provider)
        sent[provider] = [protocol.media(AUDIO), protocol.mark("m"), protocol.clear()]
    decoded = {
        name: [json.loads(m) for m in messages if isinstance(m, str)]
        for name, messages in sent.items()
    }
    assert decoded["twilio"] == [
        {"event": "media", "streamSid": "MZ1", "media": {"payload": BASE64}},
        {"event": "mark", "streamSid": "MZ1", "mark": {"name": "m"}},
        {"event": "clear", "streamSid": "MZ1"},
    ]
    assert decoded["telnyx"] == [
        {"event": "media", "media": {"payload": BASE64}},
        {"event": "mark", "mark": {"name": "m"}},
        {"event": "clear"},
    ]
    plivo_media = {"contentType": "audio/x-mulaw", "sampleRate": 8000, "payload": BASE64}
    assert decoded["plivo"] == [
        {"event": "playAudio", "media": plivo_media},
        {"event": "checkpoint", "streamId": "s-1", "name": "m"},
        {"event": "clearAudio", "streamId": "s-1"},
    ]
    assert decoded["exotel"] == [
        {"event": "media", "stream_sid": "MZ1", "media": {"payload": BASE64}},
        {"event": "mark", "stream_sid": "MZ1", "mark": {"name": "m"}},
        {"event": "clear", "stream_sid": "MZ1"},
    ]
    assert sent["vonage"][0] == AUDIO
    assert decoded["vonage"] == [
        {"action": "notify", "payload": {"name": "m"}},
        {"action": "clear"},
    ]


def test_plivo_gives_checkpoints_back() -> None:
    protocol, _ = begun("plivo")
    played = {"event": "playedStream", "streamId": "s-1", "name": "m"}
    assert protocol.parse(json.dumps(played)) == MarkReached("m")
    assert protocol.parse(json.dumps({"event": "clearedAudio", "streamId": "s-1"})) is None


def test_vonage_speaks_binary_and_json() -> None:
    protocol, _ = begun("vonage")
    assert protocol.parse(AUDIO) == AudioReceived(AUDIO)
    with pytest.raises(PhoneProtocolError, match="PCM16"):
        protocol.parse(AUDIO[:-1])
    dtmf = {"event": "websocket:dtmf", "digit": "5", "duration": 260}
    assert protocol.parse(json.dumps(dtmf)) == KeyPressed("5")
    notify = {"event": "websocket:notify", "payload": {"name": "m"}}
    assert protocol.parse(json.dumps(notify)) == MarkReached("m")


def test_audiosocket_frames() -> None:
    call_id = uuid.uuid4()
    protocol, started = AudioSocket.begin(audiosocket.frame(0x01, call_id.bytes))
    assert started.call_id == str(call_id)
    assert protocol.parse(audiosocket.frame(0x10, AUDIO)) == AudioReceived(AUDIO)
    assert protocol.parse(audiosocket.frame(0x03, b"5")) == KeyPressed("5")
    assert protocol.parse(audiosocket.frame(0x00)) == HungUp("the peer hung up")
    assert isinstance(protocol.parse(audiosocket.frame(0xFF, b"\1")), HungUp)
    assert protocol.parse(audiosocket.frame(0x77, b"what")) is None
    assert protocol.media(bytes(320)) == b"\x10\x01\x40" + bytes(320)
    assert protocol.hang_up() == b"\0\0\0"
    for wrong in (audiosocket.frame(0x10, b"\0"), audiosocket.frame(0x03), b"\x16\0\2\0\0"):
        with pytest.raises(PhoneProtocolError):
            protocol.parse(wrong)
    for first in (audiosocket.frame(0x10, AUDIO), audiosocket.frame(0x01, b"short")):
        with pytest.raises(PhoneProtocolError):
            AudioSocket.begin(first)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner),
    max_leaves=12,
)
EVENTS = ("connected", "start", "media", "dtmf", "mark", "stop", "websocket:dtmf", "playedStream")
messages = (
    st.text(max_size=60)
    | st.binary(max_size=60)
    | json_values.map(json.dumps)
    | st.fixed_dictionaries(
        {"event": st.sampled_from(EVENTS)},
        optional=dict.fromkeys(("start", "media", "dtmf", "mark", "payload", "name"), json_values),
    ).map(json.dumps)
)


@given(messages)
@settings(max_examples=150, deadline=None)
def test_whatever_comes_is_read_or_refused(message: str | bytes) -> None:
    protocols = [begun(provider)[0] for provider in STARTS]
    for parse in (detect, *(protocol.parse for protocol in protocols)):
        with contextlib.suppress(PhoneProtocolError):
            parse(message)


@given(st.binary(max_size=40))
def test_whatever_frame_comes_is_read_or_refused(content: bytes) -> None:
    for kind in (0x00, 0x01, 0x03, 0x10, 0x12, 0x77, 0xFF):
        for parse in (AudioSocket.begin, AudioSocket().parse):
            with contextlib.suppress(PhoneProtocolError):
                parse(audiosocket.frame(kind, content))
