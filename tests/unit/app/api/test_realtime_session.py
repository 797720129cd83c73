"""The session object: what updates add up to, and in which words the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest

from app.api.model_names import Names
from app.api.realtime.client_events import SessionUpdate, parse_event
from app.api.realtime.session_params import SessionState, to_config, to_wire
from app.config import Settings
from app.conversation.session_config import TurnDetection
from app.errors import ClientError
from audio.codecs import PCM16_24K, PCMA_8K, PCMU_8K
from tests.support.openai_events import check_server_event

SETTINGS = Settings(instructions="Be kind.", vad_silence_ms=450)
NAMES = Names.of(SETTINGS, ("en",))


def refused_update(**session: Any) -> tuple[str, str | None]:
    with pytest.raises(ClientError) as caught:
        parse_event({"type": "session.update", "session": session})
    return caught.value.code, caught.value.param


def state() -> SessionState:
    return SessionState(SETTINGS, NAMES, "parley")


def updated(current: SessionState, *, voice_locked: bool = False, **session: Any) -> SessionState:
    event = parse_event({"type": "session.update", "session": session})
    assert isinstance(event, SessionUpdate)
    current.params = current.merged(event.session, voice_locked=voice_locked)
    return current


def refused_merge(**session: Any) -> tuple[str, str | None]:
    with pytest.raises(ClientError) as caught:
        updated(state(), **session)
    return caught.value.code, caught.value.param


def wire(current: SessionState) -> dict[str, Any]:
    shown = to_wire("sess_1", current.params)
    check_server_event({"type": "session.updated", "event_id": "event_1", "session": shown})
    return shown


def test_the_first_session_object() -> None:
    shown = wire(state())
    assert shown["object"] == "realtime.session"
    assert shown["instructions"] == "Be kind."
    assert shown["output_modalities"] == ["audio"]
    assert shown["max_output_tokens"] == "inf"
    assert shown["tools"] == []
    heard, spoken = shown["audio"]["input"], shown["audio"]["output"]
    assert heard["format"] == {"type": "audio/pcm", "rate": 24000}
    assert heard["noise_reduction"] is None
    assert heard["turn_detection"] == {
        "type": "semantic_vad",
        "eagerness": "auto",
        "create_response": True,
        "interrupt_response": True,
    }
    assert heard["transcription"]["model"] == "whisper-tiny.en"
    assert spoken == {"format": heard["format"], "voice": "piper-en_US-joe-medium", "speed": 1.0}
    config = to_config(state().params)
    assert config.turn_detection == TurnDetection(kind="semantic_vad", silence_duration_ms=450)
    assert config.input_format is PCM16_24K
    assert config.transcribe
    assert not config.send_traces


def test_updates_merge_and_clear() -> None:
    now = updated(state(), instructions="Sing.", audio={"output": {"speed": 1.25}})
    updated(now, audio={"input": {"turn_detection": {"type": "server_vad", "threshold": 0.7}}})
    shown = wire(now)
    assert shown["instructions"] == "Sing."
    assert shown["audio"]["output"]["speed"] == 1.25
    vad = shown["audio"]["input"]["turn_detection"]
    assert (vad["threshold"], vad["silence_duration_ms"]) == (0.7, 450)

    updated(
        now,
        instructions="",
        output_modalities=["text"],
        max_output_tokens=64,
        audio={"input": {"turn_detection": None, "transcription": None}},
        parley={"trace": True, "budget_ms": 700, "word_timestamps": True},
    )
    config = to_config(now.params)
    assert config.instructions == ""
    assert config.modality == "text"
    assert config.max_output_tokens == 64
    assert config.turn_detection is None
    assert not config.transcribe
    assert config.send_traces
    assert config.word_timestamps
    assert config.budget_ms == 700
    assert wire(now)["parley"]["budget_ms"] == 700
    assert wire(now)["audio"]["input"]["turn_detection"] is None

    updated(
        now,
        instructions=None,
        output_modalities=None,
        max_output_tokens="inf",
        tools=[],
        audio={"input": {"turn_detection": {"type": "server_vad"}, "transcription": {}}},
    )
    config = to_config(now.params)
    assert config.instructions == ""
    assert config.modality == "audio"
    assert config.max_output_tokens is None
    assert config.turn_detection == TurnDetection(silence_duration_ms=450)
    assert wire(now)["audio"]["input"]["transcription"]["model"] == "whisper-tiny.en"


def detection(current: SessionState) -> dict[str, Any]:
    shown: dict[str, Any] = wire(current)["audio"]["input"]["turn_detection"]
    return shown


def test_the_kind_of_turn_detection_changes_as_a_whole() -> None:
    now = updated(
        state(),
        audio={
            "input": {
                "turn_detection": {
                    "type": "server_vad",
                    "threshold": 0.7,
                    "create_response": False,
                }
            }
        },
    )
    update = {"type": "semantic_vad", "eagerness": "low"}
    updated(now, audio={"input": {"turn_detection": update}})
    assert detection(now) == update | {"create_response": True, "interrupt_response": True}
    updated(now, audio={"input": {"turn_detection": {"interrupt_response": False}}})
    assert to_config(now.params).turn_detection == TurnDetection(
        kind="semantic_vad", silence_duration_ms=450, eagerness="low", interrupt_response=False
    )
    updated(now, audio={"input": {"turn_detection": {"idle_timeout_ms": 5000}}})  # no other has it
    assert detection(now) == {
        "type": "server_vad",
        "threshold": 0.5,
        "prefix_padding_ms": 300,
        "silence_duration_ms": 450,
        "create_response": True,
        "interrupt_response": True,
        "idle_timeout_ms": 5000,
    }


def test_noise_reduction_is_taken_and_what_is_in_effect_is_shown() -> None:
    now = updated(state(), audio={"input": {"noise_reduction": {"type": "near_field"}}})
    assert to_config(now.params).noise_reduction == "near_field"
    assert wire(now)["audio"]["input"]["noise_reduction"] == {"type": "near_field"}
    off = updated(now, audio={"input": {"noise_reduction": None}})
    assert to_config(off.params).noise_reduction is None
    assert wire(off)["audio"]["input"]["noise_reduction"] is None


def test_formats() -> None:
    now = updated(
        state(),
        audio={
            "input": {"format": {"type": "audio/pcmu"}},
            "output": {"format": {"type": "audio/pcma"}},
        },
    )
    config = to_config(now.params)
    assert (config.input_format, config.output_format) == (PCMU_8K, PCMA_8K)
    assert wire(now)["audio"]["input"]["format"] == {"type": "audio/pcmu"}


def test_names_of_openai_stand_for_what_is_loaded() -> None:
    now = updated(
        state(),
        type="realtime",
        model="gpt-realtime",
        audio={
            "input": {"transcription": {"model": "gpt-4o-mini-transcribe", "language": "en"}},
            "output": {"voice": "marin"},
        },
    )
    shown = wire(now)
    assert shown["model"] == "parley"
    assert shown["audio"]["output"]["voice"] == "marin"
    assert shown["audio"]["input"]["transcription"]["model"] == "gpt-4o-mini-transcribe"
    updated(now, audio={"output": {"voice": {"id": "parley"}}})
    for name in ("parley", "gpt-realtime-mini", "gpt-4o-realtime-preview", NAMES.model):
        assert NAMES.is_model(name)
    assert not NAMES.is_model("gpt-4o")
    assert not NAMES.is_model("")


@pytest.mark.parametrize(
    ("session", "code", "param"),
    [
        ({"model": "llama"}, "model_not_found", "session.model"),
        ({"audio": {"output": {"voice": "bob"}}}, "invalid_value", "session.audio.output.voice"),
        (
            {"audio": {"input": {"transcription": {"model": "deepgram"}}}},
            "invalid_value",
            "session.audio.input.transcription.model",
        ),
        (
            {"audio": {"input": {"transcription": {"language": "de"}}}},
            "unsupported_value",
            "session.audio.input.transcription.language",
        ),
        (
            {"audio": {"input": {"turn_detection": {"type": "semantic_vad", "threshold": 0.4}}}},
            "unknown_parameter",
            "session.audio.input.turn_detection.threshold",
        ),
        (
            {"audio": {"input": {"turn_detection": {"type": "server_vad", "eagerness": "low"}}}},
            "unknown_parameter",
            "session.audio.input.turn_detection.eagerness",
        ),
    ],
)
def test_names_that_are_not_here(session: dict[str, Any], code: str, param: str) -> None:
    assert refused_merge(**session) == (code, param)


def test_the_voice_is_locked_once_it_was_heard() -> None:
    now = updated(state(), audio={"output": {"voice": "alloy"}})
    updated(now, voice_locked=True, audio={"output": {"voice": "alloy", "speed": 1.1}})
    with pytest.raises(ClientError) as caught:
        updated(now, voice_locked=True, audio={"output": {"voice": "echo"}})
    assert caught.value.code == "cannot_update_voice"


_INPUT, _OUTPUT = "session.audio.input", "session.audio.output"


@pytest.mark.parametrize(
    ("session", "code", "param"),
    [
        ({"type": "transcription"}, "unsupported_value", "session.type"),
        ({"type": "chat"}, "invalid_value", "session.type"),
        ({"temperature": 0.8}, "unknown_parameter", "session.temperature"),
        ({"input_audio_format": "pcm16"}, "unknown_parameter", "session.input_audio_format"),
        ({"instructions": 5}, "invalid_type", "session.instructions"),
        ({"instructions": "x" * 100_001}, "string_above_max_length", "session.instructions"),
        (
            {"tools": [{"type": "function"}]},
            "missing_required_parameter",
            "session.tools[0].name",
        ),
        ({"truncation": "half"}, "invalid_value", "session.truncation"),
        (
            {"truncation": {"type": "retention_ratio", "retention_ratio": 0}},
            "invalid_value",
            "session.truncation",
        ),
        (
            {"truncation": {"type": "retention_ratio", "token_limits": {}}},
            "unsupported_value",
            "session.truncation",
        ),
        ({"tracing": "always"}, "invalid_value", "session.tracing"),
        ({"prompt": {"id": "p"}}, "unsupported_value", "session.prompt"),
        ({"audio": None}, "invalid_type", "session.audio"),
        ({"parley": {"trace": "yes"}}, "invalid_type", "session.parley.trace"),
        (
            {"parley": {"word_timestamps": 1}},
            "invalid_type",
            "session.parley.word_timestamps",
        ),
        ({"parley": {"budget_ms": 0}}, "integer_below_min_value", "session.parley.budget_ms"),
        ({"audio": {"input": {"format": "pcm16"}}}, "invalid_type", f"{_INPUT}.format"),
        (
            {"audio": {"input": {"format": {"type": "audio/opus"}}}},
            "invalid_value",
            f"{_INPUT}.format.type",
        ),
        (
            {"audio": {"input": {"format": {"type": "audio/pcm", "rate": 16000}}}},
            "unsupported_value",
            f"{_INPUT}.format.rate",
        ),
        (
            {"audio": {"input": {"format": {"type": "audio/pcm", "rate": 8000}}}},
            "unsupported_value",
            f"{_INPUT}.format.rate",
        ),
        (
            {"audio": {"input": {"noise_reduction": {"type": "loud"}}}},
            "invalid_value",
            f"{_INPUT}.noise_reduction.type",
        ),
        (
            {"audio": {"input": {"turn_detection": {"type": "telepathy"}}}},
            "invalid_value",
            f"{_INPUT}.turn_detection.type",
        ),
        (
            {"audio": {"input": {"turn_detection": {"eagerness": "extreme"}}}},
            "invalid_value",
            f"{_INPUT}.turn_detection.eagerness",
        ),
        (
            {"audio": {"input": {"turn_detection": {"idle_timeout_ms": 4999}}}},
            "integer_below_min_value",
            f"{_INPUT}.turn_detection.idle_timeout_ms",
        ),
        (
            {"audio": {"input": {"turn_detection": {"type": "server_vad", "threshold": 1.5}}}},
            "decimal_above_max_value",
            f"{_INPUT}.turn_detection.threshold",
        ),
        ({"audio": {"output": {"speed": 2}}}, "integer_above_max_value", f"{_OUTPUT}.speed"),
        ({"audio": {"output": {"speed": "fast"}}}, "invalid_type", f"{_OUTPUT}.speed"),
        ({"audio": {"output": {"voice": 3}}}, "invalid_type", f"{_OUTPUT}.voice"),
    ],
)
def test_refused_session_parameters(session: dict[str, Any], code: str, param: str) -> None:
    assert refused_update(**session) == (code, param)


def test_null_for_what_is_not_offered_is_fine() -> None:
    shown = wire(
        updated(
            state(),
            tools=[],
            tool_choice="auto",
            tracing=None,
            prompt=None,
            include=[],
            truncation="auto",
            audio={"input": {"noise_reduction": None}},
        )
    )
    assert shown["audio"]["input"]["noise_reduction"] is None


@pytest.mark.parametrize(
    ("session", "now"),
    [
        ({"voice": "alloy"}, "session.audio.output.voice"),
        ({"modalities": ["text"]}, "session.output_modalities"),
        ({"audio": {"output": {"modalities": "x"}}}, None),
        ({"temperature": 0.8}, None),
    ],
)
def test_names_of_the_beta_are_refused_with_those_of_now(
    session: dict[str, Any], now: str | None
) -> None:
    with pytest.raises(ClientError) as caught:
        updated(state(), **session)
    assert caught.value.code == "unknown_parameter"
    hint = f"It is of the beta API; now it is '{now}'."
    assert caught.value.message.endswith(hint if now else "'.")
    assert now is not None or "beta" not in caught.value.message
