"""The stock `openai` package transcribes files and has texts read aloud; the base URL is ours."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jiwer
import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError, OpenAI

from audio.files.containers import read_speech
from audio.frame import SPEECH_RATE
from tests.integration.openai_caller import RATE, calling, pause, words
from tests.support.speech import DOG_OR_CAT, MONOLOGUE, Voice

pytestmark = pytest.mark.integration


@pytest.fixture
def client(server_url: str) -> Iterator[OpenAI]:
    url = f"{server_url}/v1"
    with OpenAI(base_url=url, api_key="none-needed", max_retries=0) as client:
        yield client


def test_a_recording_as_text(client: OpenAI, voice: Voice) -> None:
    with voice.say(DOG_OR_CAT).path.open("rb") as file:
        heard = client.audio.transcriptions.create(file=file, model="whisper-1", language="en")
    assert words(heard.text) == words(DOG_OR_CAT)
    assert heard.usage is not None and heard.usage.type == "duration"


def test_a_recording_of_half_a_minute_with_times(client: OpenAI, voice: Voice) -> None:
    with voice.say(MONOLOGUE).path.open("rb") as file:
        heard = client.audio.transcriptions.create(
            file=file,
            model="whisper-1",
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
        )
    spoken_s = voice.say(MONOLOGUE).samples().size / SPEECH_RATE
    assert spoken_s > 30
    assert heard.duration == pytest.approx(spoken_s, abs=0.2)
    assert heard.words and heard.segments
    assert [word.word for word in heard.words] == heard.text.split()
    edges = [edge for word in heard.words for edge in (word.start, word.end)]
    assert edges == sorted(edges) and edges[-1] <= heard.duration
    assert " ".join(segment.text for segment in heard.segments) == heard.text
    assert len(heard.segments) >= 5
    assert all(len(segment.text) <= 84 and segment.tokens for segment in heard.segments)
    assert "police dogs" in words(heard.text)


@pytest.mark.parametrize("kind", ["text", "srt", "vtt"])
def test_other_forms(client: OpenAI, voice: Voice, kind: Any) -> None:
    with voice.say(DOG_OR_CAT).path.open("rb") as file:
        heard: Any = client.audio.transcriptions.create(
            file=file, model="gpt-4o-mini-transcribe", response_format=kind
        )
    assert isinstance(heard, str)
    assert heard.startswith(
        {"text": "Should", "srt": "1\n00:00:0", "vtt": "WEBVTT\n\n00:00:0"}[kind]
    )
    assert words(DOG_OR_CAT) in words(heard)


def test_a_stream_of_text(client: OpenAI, voice: Voice) -> None:
    with voice.say(MONOLOGUE).path.open("rb") as file:
        events = list(
            client.audio.transcriptions.create(
                file=file, model="gpt-4o-transcribe", response_format="json", stream=True
            )
        )
    *deltas, done = events
    assert len(deltas) >= 2 and done.type == "transcript.text.done"
    assert "".join(delta.delta for delta in deltas if delta.type == "transcript.text.delta") == (
        done.text
    )


def test_what_is_said_can_be_heard(client: OpenAI) -> None:
    text = "I would like **two cups** of coffee, please. Thank you very much."
    said = "i would like two cups of coffee please thank you very much"
    for kind in ("mp3", "wav", "opus", "flac", "aac"):
        spoken = client.audio.speech.create(
            model="tts-1", voice="alloy", input=text, response_format=kind
        )
        heard = client.audio.transcriptions.create(
            file=(f"a.{kind}", spoken.content), model="whisper-1"
        )
        assert jiwer.wer(said, words(heard.text)) <= 0.25


def test_speech_comes_while_it_is_made(client: OpenAI, tmp_path: Path) -> None:
    text = "This is the first sentence. " + "Here is another one, somewhat longer than that. " * 8
    parts: list[int] = []
    with client.audio.speech.with_streaming_response.create(
        model="gpt-4o-mini-tts", voice="coral", input=text, response_format="pcm", speed=1.2
    ) as response:
        assert response.headers["content-type"] == "audio/pcm"
        parts += [len(part) for part in response.iter_bytes(4096)]
    assert sum(parts) / 48_000 > 10
    with client.audio.speech.with_streaming_response.create(
        model="tts-1", voice="nova", input="Hello there.", response_format="mp3"
    ) as response:
        response.stream_to_file(tmp_path / "hello.mp3")
    samples = read_speech((tmp_path / "hello.mp3").read_bytes(), max_s=60)
    assert 0.4 < len(samples) / 16_000 < 3


def test_errors_are_the_packages_own(client: OpenAI) -> None:
    with pytest.raises(APIStatusError) as caught:
        client.audio.transcriptions.create(file=io.BytesIO(b"no audio"), model="whisper-1")
    assert (caught.value.status_code, caught.value.code) == (400, "invalid_file")
    with pytest.raises(APIStatusError) as caught:
        client.audio.speech.create(model="tts-1", voice="alloy", input="x", instructions="Shout.")
    assert caught.value.code == "unsupported_value"
    for silent in ("...", "\N{GRINNING FACE}", "\u2014"):
        with pytest.raises(BadRequestError, match="nothing in it"):
            client.audio.speech.create(model="tts-1", voice="alloy", input=silent)


async def test_several_at_once(server_url: str, voice: Voice) -> None:
    content = voice.say(DOG_OR_CAT).path.read_bytes()
    async with AsyncOpenAI(base_url=f"{server_url}/v1", api_key="none-needed") as client:
        # More than one owner's places: the package comes again by itself.
        heard = await asyncio.gather(
            *(
                client.audio.transcriptions.create(file=("a.flac", content), model="whisper-1")
                for _ in range(4)
            )
        )
    assert {words(one.text) for one in heard} == {words(DOG_OR_CAT)}


@pytest.mark.timeout(240)
async def test_a_caller_speaks_while_files_are_worked_on(server_url: str, voice: Voice) -> None:
    content = voice.say(MONOLOGUE).path.read_bytes()
    text = "This is a long text that is read aloud for nobody in particular. " * 10
    async with (
        AsyncOpenAI(base_url=f"{server_url}/v1", api_key="none-needed") as client,
        calling(server_url) as caller,
    ):
        heard = asyncio.create_task(
            client.audio.transcriptions.create(file=("a.flac", content), model="whisper-1")
        )
        spoken = asyncio.create_task(
            client.audio.speech.create(model="tts-1", voice="alloy", input=text)
        )
        await caller.say(voice.say(DOG_OR_CAT).pcm16(RATE) + pause(1.0), pace=1.0)
        done = (await caller.until("response.done"))["response"]
        assert done["status"] in ("completed", "incomplete")
        (final,) = caller.of("conversation.item.input_audio_transcription.completed")
        assert words(final["transcript"]) == words(DOG_OR_CAT)
        assert words((await heard).text).startswith("yes i know that there are guide dogs")
        assert len((await spoken).content) > 100_000
        assert not caller.of("error")
