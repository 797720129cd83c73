"""The stock `openai` package holds a conversation: only the base URL is ours."""

from __future__ import annotations

import base64
import json
from typing import Any

import jiwer
import pytest

from tests.integration.openai_caller import RATE, Caller, calling, pause, words
from tests.support.speech import Voice

pytestmark = pytest.mark.integration


async def ask_aloud(caller: Caller, pcm: bytes, *, pace: float) -> tuple[str, dict[str, Any]]:
    """Say something and wait for the answer; what was understood, and the finished response."""
    await caller.say(pcm + pause(1.0), pace=pace)
    return await answered(caller)


async def answered(caller: Caller) -> tuple[str, dict[str, Any]]:
    started = await caller.until("input_audio_buffer.speech_started")
    stopped = await caller.until("input_audio_buffer.speech_stopped")
    assert stopped["audio_end_ms"] > started["audio_start_ms"]
    committed = await caller.until("input_audio_buffer.committed")
    assert committed["item_id"] == started["item_id"] == stopped["item_id"]
    done = (await caller.until("response.done"))["response"]
    (heard,) = caller.of(
        "conversation.item.input_audio_transcription.completed", item_id=committed["item_id"]
    )
    return heard["transcript"], done


def reply_audio_s(caller: Caller, response_id: str) -> float:
    deltas = caller.of("response.output_audio.delta", response_id=response_id)
    return sum(len(base64.b64decode(delta["delta"])) for delta in deltas) / 2 / RATE


def streamed_text(caller: Caller, kind: str, response_id: str) -> str:
    return "".join(e["delta"] for e in caller.of(f"{kind}.delta", response_id=response_id))


@pytest.mark.timeout(240)
async def test_a_conversation_of_five_turns_with_an_interruption(
    server_url: str, voice: Voice
) -> None:
    async with calling(server_url) as caller:
        await caller.connection.session.update(
            session={
                "type": "realtime",
                "instructions": "You are a friendly assistant. Answer in one short sentence.",
                "audio": {
                    "input": {
                        "format": {"type": "audio/pcm", "rate": 24000},
                        "transcription": {"model": "gpt-4o-mini-transcribe", "language": "en"},
                        "turn_detection": {"type": "server_vad", "silence_duration_ms": 500},
                    },
                    "output": {"format": {"type": "audio/pcm", "rate": 24000}, "voice": "marin"},
                },
            }
        )
        updated = await caller.until("session.updated")
        assert updated["session"]["audio"]["output"]["voice"] == "marin"

        # 1: spoken at speaking pace
        said = voice.say("Sunday is the best part of the week.")
        heard, first = await ask_aloud(caller, said.pcm16(RATE), pace=1.0)
        assert jiwer.wer(words(said.text), words(heard)) <= 0.25
        assert first["status"] in ("completed", "incomplete")
        assert reply_audio_s(caller, first["id"]) > 0.3
        spoken = first["output"][0]["content"][0]
        assert spoken["type"] == "output_audio"
        assert spoken["transcript"].strip()
        assert first["usage"]["output_tokens"] > 0

        # 2: typed, answered in text
        await caller.type("What day did I talk about?")
        await caller.connection.response.create(response={"output_modalities": ["text"]})
        second = (await caller.until("response.done"))["response"]
        assert second["status"] in ("completed", "incomplete")
        text = second["output"][0]["content"][0]["text"]
        assert text.strip()
        assert streamed_text(caller, "response.output_text", second["id"]) == text
        assert not caller.of("response.output_audio.delta", response_id=second["id"])

        # 3: a long spoken answer, interrupted; 4: what the caller said meanwhile is answered
        await caller.type("Tell me a long story about a dragon and a knight.")
        await caller.connection.response.create(
            response={"instructions": "You tell very long stories of many sentences."}
        )
        await caller.until("response.output_audio.delta")
        said = voice.say("Please tell me something about the moon.")
        await caller.say(said.pcm16(RATE) + pause(1.0), pace=1.0)
        await caller.until("input_audio_buffer.speech_started")
        third = (await caller.until("response.done"))["response"]
        assert third["status"] == "cancelled"
        assert third["status_details"]["reason"] == "turn_detected"
        cut = third["output"][0]
        assert cut["status"] == "incomplete"
        sent_text = streamed_text(caller, "response.output_audio_transcript", third["id"])
        kept = cut["content"][0]["transcript"]
        assert len(kept) < len(sent_text) or not kept
        await caller.until("input_audio_buffer.committed")
        fourth = (await caller.until("response.done"))["response"]
        assert fourth["status"] in ("completed", "incomplete")
        transcripts = caller.of("conversation.item.input_audio_transcription.completed")
        assert jiwer.wer(words(said.text), words(transcripts[-1]["transcript"])) <= 0.25
        done_at = caller.events.index(caller.of("response.done")[-2])
        late = [e for e in caller.events[done_at:] if e.get("response_id") == third["id"]]
        assert not late, "nothing of a cancelled response may follow its end"

        # 5: typed, answered aloud; what is kept of the interrupted answer can be looked up
        await caller.connection.conversation.item.retrieve(item_id=cut["id"])
        retrieved = await caller.until("conversation.item.retrieved")
        assert retrieved["item"]["content"][0]["transcript"] == kept
        await caller.type("Thank you. Goodbye!")
        await caller.connection.response.create()
        fifth = (await caller.until("response.done"))["response"]
        assert fifth["status"] in ("completed", "incomplete")
        assert reply_audio_s(caller, fifth["id"]) > 0.2

        assert not caller.of("error")
        ids = [event["event_id"] for event in caller.events]
        assert len(set(ids)) == len(ids)


@pytest.mark.timeout(120)
async def test_a_turn_ended_by_hand_and_a_trace_of_it(server_url: str, voice: Voice) -> None:
    async with calling(server_url, model="parley") as caller:
        await caller.connection.session.update(
            session={
                "type": "realtime",
                "output_modalities": ["audio"],
                "max_output_tokens": 24,
                "audio": {"input": {"turn_detection": None}},
                "parley": {"trace": True, "word_timestamps": True},  # type: ignore[typeddict-unknown-key]
            }
        )
        await caller.until("session.updated")
        said = voice.say("The pencils have all been used.")
        pcm = said.pcm16(RATE)
        await caller.say(pcm, pace=20.0)
        await caller.connection.input_audio_buffer.commit()
        await caller.connection.response.create()
        response = (await caller.until("response.done"))["response"]
        assert response["status"] in ("completed", "incomplete")
        (heard,) = caller.of("conversation.item.input_audio_transcription.completed")
        assert jiwer.wer(words(said.text), words(heard["transcript"])) <= 0.25
        turn = (await caller.until("parley.turn.trace"))["turn"]
        assert turn["response_id"] == response["id"]
        assert turn["transcript"] == heard["transcript"]
        assert abs(sum(turn["stages_ms"].values()) - turn["voice_to_voice_ms"]) < 1e-6
        (told,) = caller.of("parley.transcript.words")
        assert " ".join(word["word"] for word in told["words"]) == heard["transcript"]
        assert told["item_id"] == heard["item_id"]
        edges = [edge for word in told["words"] for edge in (word["start_ms"], word["end_ms"])]
        assert edges == sorted(edges) and 0 <= edges[0] < edges[-1] <= len(pcm) / 2 / RATE * 1000
        assert turn["words"] == told["words"]
        assert not caller.of("input_audio_buffer.speech_started")


@pytest.mark.timeout(120)
async def test_a_client_cancels_and_truncates(server_url: str) -> None:
    async with calling(server_url) as caller:
        await caller.type("Tell me a long story about the sea.")
        await caller.connection.response.create()
        delta = await caller.until("response.output_audio.delta")
        await caller.connection.response.cancel()
        cancelled = (await caller.until("response.done"))["response"]
        assert cancelled["status"] == "cancelled"
        assert cancelled["status_details"]["reason"] == "client_cancelled"
        await caller.connection.conversation.item.truncate(
            item_id=delta["item_id"], content_index=0, audio_end_ms=0
        )
        truncated = await caller.until("conversation.item.truncated")
        assert truncated["item_id"] == delta["item_id"]
        await caller.connection.conversation.item.retrieve(item_id=delta["item_id"])
        retrieved = await caller.until("conversation.item.retrieved")
        assert not retrieved["item"]["content"][0]["transcript"]
        await caller.connection.conversation.item.truncate(
            item_id=delta["item_id"], content_index=0, audio_end_ms=10_000_000
        )
        error = (await caller.until("error"))["error"]
        assert "already shorter" in error["message"]


@pytest.mark.timeout(120)
async def test_a_function_is_called_and_its_result_is_answered(server_url: str) -> None:
    async with calling(server_url) as caller:
        weather = {
            "type": "function",
            "name": "get_weather",
            "description": "Get the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        }
        await caller.connection.session.update(
            session={
                "type": "realtime",
                "output_modalities": ["text"],
                "tools": [weather],  # type: ignore[list-item]
                "tool_choice": "auto",
            }
        )
        await caller.until("session.updated")
        await caller.type("What is the weather in Paris?")
        choice = {"type": "function", "name": "get_weather"}
        await caller.connection.response.create(response={"tool_choice": choice})  # type: ignore[typeddict-item]
        response = (await caller.until("response.done"))["response"]
        (call,) = response["output"]
        assert (call["type"], call["status"]) == ("function_call", "completed")
        assert json.loads(call["arguments"]) == {"city": "Paris"}
        arguments = caller.of("response.function_call_arguments.done", item_id=call["id"])
        assert arguments[0]["arguments"] == call["arguments"]
        assert arguments[0]["call_id"] == call["call_id"]

        await caller.connection.conversation.item.create(
            item={
                "type": "function_call_output",
                "call_id": call["call_id"],
                "output": "sunny, 21 degrees",
            }
        )
        await caller.connection.response.create()
        answer = (await caller.until("response.done"))["response"]
        assert answer["output"][0]["content"][0]["text"].strip()
        assert answer["usage"]["input_tokens"] > response["usage"]["input_tokens"]
        assert not caller.of("error")


@pytest.mark.timeout(120)
async def test_an_answer_out_of_band(server_url: str) -> None:
    async with calling(server_url) as caller:
        question = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Say hello."}],
        }
        await caller.connection.response.create(
            response={
                "conversation": "none",
                "output_modalities": ["text"],
                "metadata": {"topic": "greeting"},
                "input": [question],  # type: ignore[list-item]
            }
        )
        response = (await caller.until("response.done"))["response"]
        assert response["metadata"] == {"topic": "greeting"}
        assert response["output"][0]["content"][0]["text"].strip()
        assert not caller.of("conversation.item.added")
