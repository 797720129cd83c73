"""Domain events -> server events, checked against the classes of the openai package."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from app.api.realtime.server_events import (
    Speaker,
    WireMapper,
    error_event,
    item_object,
    server_event,
)
from app.conversation import events as e
from tests.support.openai_events import check_server_event

PCM = {"type": "audio/pcm", "rate": 24000}


def mapper() -> WireMapper:
    return WireMapper("conv_1", Speaker(PCM, "joe"))


def wire(event: e.SessionEvent, to: WireMapper | None = None) -> list[dict[str, Any]]:
    """What is sent, as the client decodes it, each event valid for the openai package."""
    made = (to or mapper()).to_wire(event)
    sent: list[dict[str, Any]] = msgspec.json.decode(msgspec.json.encode(made))
    for one in sent:
        check_server_event(one)
    return sent


def spoken_item(text: str = "Hello there.", status: e.ItemStatus = "completed") -> e.Item:
    return e.Item("item_a", "assistant", [e.Part("output_audio", text, 900.0)], status)


def test_input_buffer_events() -> None:
    (started,) = wire(e.SpeechStarted("item_u", 120))
    assert started["type"] == "input_audio_buffer.speech_started"
    assert (started["item_id"], started["audio_start_ms"]) == ("item_u", 120)
    (stopped,) = wire(e.SpeechStopped("item_u", 2000))
    assert (stopped["type"], stopped["audio_end_ms"]) == (
        "input_audio_buffer.speech_stopped",
        2000,
    )
    (committed,) = wire(e.InputCommitted("item_u", None))
    assert committed["previous_item_id"] is None
    (cleared,) = wire(e.InputCleared())
    assert cleared["type"] == "input_audio_buffer.cleared"


def test_user_items() -> None:
    audio = e.Item("item_u", "user", [e.Part("input_audio", None, 1500.0)])
    (added,) = wire(e.ItemAdded(audio, "item_0"))
    assert added["type"] == "conversation.item.added"
    assert added["previous_item_id"] == "item_0"
    assert added["item"] == {
        "id": "item_u",
        "object": "realtime.item",
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_audio", "transcript": None}],
    }
    typed = e.Item("item_t", "user", [e.Part("input_text", "Hi")])
    (done,) = wire(e.ItemDone(typed, "item_u"))
    assert done["type"] == "conversation.item.done"
    assert done["item"]["content"] == [{"type": "input_text", "text": "Hi"}]
    (system,) = wire(e.ItemAdded(e.Item("i", "system", [e.Part("input_text", "Be brief")]), None))
    assert system["item"]["role"] == "system"


def test_item_changes() -> None:
    (deleted,) = wire(e.ItemDeleted("item_u"))
    assert deleted["type"] == "conversation.item.deleted"
    (truncated,) = wire(e.ItemTruncated("item_a", 0, 480))
    assert (truncated["type"], truncated["audio_end_ms"]) == ("conversation.item.truncated", 480)
    retrieved = server_event("conversation.item.retrieved", item=item_object(spoken_item()))
    check_server_event(retrieved)
    assert retrieved["item"]["content"] == [{"type": "output_audio", "transcript": "Hello there."}]


def test_transcription_events() -> None:
    prefix = "conversation.item.input_audio_transcription"
    (delta,) = wire(e.TranscriptionDelta("item_u", "Hi"))
    assert (delta["type"], delta["delta"]) == (f"{prefix}.delta", "Hi")
    (completed,) = wire(e.TranscriptionCompleted("item_u", "Hi there.", 1.5))
    assert completed["transcript"] == "Hi there."
    assert completed["usage"] == {"type": "duration", "seconds": 1.5}
    (failed,) = wire(e.TranscriptionFailed("item_u", "transcription_failed", "no model"))
    assert failed["error"]["code"] == "transcription_failed"


def test_a_spoken_response_in_order() -> None:
    to = mapper()
    response = e.Response("resp_1", "audio")
    sent = wire(e.ResponseStarted(response), to)
    item = e.Item("item_a", "assistant", [e.Part("output_audio", "")], "in_progress")
    sent += wire(e.OutputStarted("resp_1", item, "item_u"), to)
    sent += wire(e.OutputText("resp_1", "item_a", "Hello "), to)
    sent += wire(e.OutputAudio("resp_1", "item_a", b"\x01\x02" * 10), to)
    item = spoken_item("Hello ")
    sent += wire(e.OutputDone("resp_1", item, "item_u"), to)
    response.status, response.output = "completed", [item]
    response.usage = e.ResponseUsage(input_tokens=30, cached_tokens=20, output_tokens=4)
    sent += wire(e.ResponseDone(response), to)

    assert [event["type"] for event in sent] == [
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_audio_transcript.delta",
        "response.output_audio.delta",
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
    ]
    created, item_added, conversation_added, part_added = sent[:4]
    assert created["response"]["status"] == "in_progress"
    assert created["response"]["usage"] is None
    assert item_added["item"]["content"] == []
    assert item_added["item"]["status"] == "in_progress"
    assert conversation_added["previous_item_id"] == "item_u"
    assert part_added["part"] == {"type": "audio", "transcript": ""}
    for delta in sent[4:6]:
        assert delta["response_id"] == "resp_1"
        assert delta["item_id"] == "item_a"
        assert (delta["output_index"], delta["content_index"]) == (0, 0)
    assert base64.b64decode(sent[5]["delta"]) == b"\x01\x02" * 10
    assert sent[7]["transcript"] == "Hello "
    assert sent[8]["part"] == {"type": "audio", "transcript": "Hello "}
    done = sent[-1]["response"]
    assert done["status_details"] is None
    assert done["output"][0]["id"] == "item_a"
    assert done["usage"]["total_tokens"] == 34
    assert done["usage"]["input_token_details"]["cached_tokens"] == 20
    assert done["audio"] == {"output": {"format": PCM, "voice": "joe"}}
    assert done["max_output_tokens"] == "inf"
    ids = [event["event_id"] for event in sent]
    assert len(set(ids)) == len(ids)


def test_a_written_response_in_order() -> None:
    to = mapper()
    wire(e.ResponseStarted(e.Response("resp_1", "text", max_output_tokens=50)), to)
    item = e.Item("item_a", "assistant", [e.Part("output_text", "Hi.")])
    sent = wire(e.OutputStarted("resp_1", item, None), to)
    sent += wire(e.OutputText("resp_1", "item_a", "Hi."), to)
    sent += wire(e.OutputDone("resp_1", item, None), to)
    assert [event["type"] for event in sent] == [
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
    ]
    assert sent[2]["part"] == {"type": "text", "text": ""}
    assert sent[4]["text"] == "Hi."
    assert sent[6]["item"]["content"] == [{"type": "output_text", "text": "Hi."}]


@pytest.mark.parametrize(
    ("status", "reason", "details"),
    [
        ("cancelled", "turn_detected", {"type": "cancelled", "reason": "turn_detected"}),
        ("cancelled", "client_cancelled", {"type": "cancelled", "reason": "client_cancelled"}),
        ("incomplete", "max_output_tokens", {"type": "incomplete", "reason": "max_output_tokens"}),
    ],
)
def test_why_a_response_ended_early(
    status: e.ResponseStatus, reason: str, details: dict[str, str]
) -> None:
    (done,) = wire(e.ResponseDone(e.Response("resp_1", "audio", status, reason)))
    assert done["response"]["status"] == status
    assert done["response"]["status_details"] == details


def test_a_failed_response_says_what_failed() -> None:
    response = e.Response("resp_1", "audio", "failed", "engine_died", "the engine stopped")
    (done,) = wire(e.ResponseDone(response))
    assert done["response"]["status_details"] == {
        "type": "failed",
        "error": {
            "type": "server_error",
            "code": "engine_died",
            "message": "the engine stopped",
        },
    }


def test_metadata_and_limit_are_returned() -> None:
    response = e.Response("r", "text", max_output_tokens=7, metadata={"topic": "x"})
    (created,) = wire(e.ResponseStarted(response))
    assert created["response"]["metadata"] == {"topic": "x"}
    assert created["response"]["max_output_tokens"] == 7
    assert created["response"]["output_modalities"] == ["text"]


def test_traces_and_faults() -> None:
    (trace,) = wire(e.TurnTraced({"turn_id": "turn_1", "voice_to_voice_ms": 512.5}))
    assert trace["type"] == "parley.turn.trace"
    assert trace["turn"]["voice_to_voice_ms"] == 512.5


def test_when_words_were_said() -> None:
    said = (e.SpokenWord("Hello", 120, 480), e.SpokenWord("there.", 500, 900))
    (told,) = wire(e.TranscriptWords("item_u", said))
    assert told["type"] == "parley.transcript.words"
    assert (told["item_id"], told["content_index"], told["error"]) == ("item_u", 0, None)
    assert told["words"] == [
        {"word": "Hello", "start_ms": 120, "end_ms": 480},
        {"word": "there.", "start_ms": 500, "end_ms": 900},
    ]
    (failed,) = wire(e.TranscriptWordsFailed("item_u", "recognizer_busy", "too many wait"))
    assert failed["words"] is None
    assert failed["error"]["code"] == "recognizer_busy"


def test_errors_name_the_event_that_caused_them() -> None:
    event = error_event(
        "invalid_request_error", "invalid_value", "bad", param="audio", client_event_id="evt_9"
    )
    check_server_event(event)
    assert event["error"]["event_id"] == "evt_9"
    assert event["event_id"] != "evt_9"


def test_running_responses_are_forgotten_when_they_end() -> None:
    to = mapper()
    for number in range(3):
        response = e.Response(f"resp_{number}", "audio")
        to.to_wire(e.ResponseStarted(response))
        to.to_wire(e.ResponseDone(response))
    assert not to._running


def test_an_event_nobody_mapped_is_a_fault() -> None:
    with pytest.raises(TypeError, match="int"):
        mapper().to_wire(3)  # type: ignore[arg-type]
