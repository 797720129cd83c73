"""``/v1/audio`` over real sockets, with scripted models: forms, shapes, errors, limits, leaving."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from app.api.audio import speech
from app.api.http import body as http_body
from app.api.http.errors import error_response
from app.conversation.speech.asr_scheduler import BusyRecognizerError
from app.server.lifecycle import create_app, listening
from audio.asr.recognizer import Transcript
from audio.errors import AbandonedError, ModelError
from audio.frame import Samples
from tests.support.fakes import ScriptedEngine, ScriptedRecognizer, ToneSynthesizer, fake_services
from tests.unit.app.api.test_chat_api import error_of, eventually


def wav(seconds: float) -> bytes:
    out = io.BytesIO()
    at = np.arange(int(seconds * 16_000)) / 16_000
    soundfile.write(out, 0.3 * np.sin(2 * np.pi * 200 * at), 16_000, format="WAV")
    return out.getvalue()


@asynccontextmanager
async def serving(
    tmp_path: Path,
    recognizer: ScriptedRecognizer | None = None,
    voice: ToneSynthesizer | None = None,
    workers: Executor | None = None,
    **settings: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server; checks at the end that nothing is left behind."""
    (tmp_path / "index.html").write_text("<!doctype html><title>Parley</title>")
    tasks = asyncio.all_tasks()
    services = fake_services(
        ScriptedEngine(), recognizer, voice, None, workers, host="127.0.0.1", port=0, **settings
    )
    app = create_app(services.settings, services, web_root=tmp_path)
    async with (
        listening(app, services.settings) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        yield client
    await eventually(lambda: asyncio.all_tasks() == tasks, "all tasks of the server end")


async def transcribe(
    client: httpx.AsyncClient, content: bytes | None = None, **fields: Any
) -> httpx.Response:
    files = {"file": ("a.wav", wav(1.0) if content is None else content)}
    form = {"model": "whisper-1", **fields}
    return await client.post("/v1/audio/transcriptions", files=files, data=form)


async def speak(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    body = {"model": "tts-1", "voice": "alloy", "input": "Hello.", **fields}
    return await client.post("/v1/audio/speech", json=body)


async def metric(client: httpx.AsyncClient, name: str) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


async def until_busy_with(client: httpx.AsyncClient, num_requests: int) -> None:
    async with asyncio.timeout(10):
        while await metric(client, "parley_audio_requests") != num_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# --- transcriptions ---


async def test_a_file_becomes_text(tmp_path: Path) -> None:
    recognizer = ScriptedRecognizer("Hello there.", "Hello again.")
    async with serving(tmp_path, recognizer) as client:
        whole = await transcribe(client)
        assert whole.json() == {
            "text": "Hello there.",
            "usage": {"type": "duration", "seconds": 1},
        }
        plain = await transcribe(client, response_format="text")
        assert plain.headers["content-type"] == "text/plain; charset=utf-8"
        assert plain.text == "Hello again.\n"
        assert recognizer.heard_s == [pytest.approx(1.0, abs=0.01)] * 2
        assert await metric(client, "parley_files_transcribed_total") == 2
        assert await metric(client, "parley_file_audio_seconds_total") == pytest.approx(
            2.0, abs=0.1
        )
        assert await metric(client, "parley_audio_requests") == 0


async def test_segments_and_words(tmp_path: Path) -> None:
    texts = ["I know. You too.", "And he"]
    async with serving(tmp_path, ScriptedRecognizer(*texts, *texts)) as client:
        plain = (await transcribe(client, wav(13.0), response_format="verbose_json")).json()
        both = (
            await transcribe(
                client,
                wav(13.0),
                **{
                    "response_format": "verbose_json",
                    "timestamp_granularities[]": ["word", "segment"],
                },
            )
        ).json()
    assert (plain["task"], plain["text"]) == ("transcribe", "I know. You too. And he")
    assert plain["duration"] == pytest.approx(13.0, abs=0.01)
    assert "words" not in plain
    assert [segment["text"] for segment in plain["segments"]] == ["I know.", "You too.", "And he"]
    assert [segment["id"] for segment in plain["segments"]] == [0, 1, 2]
    assert set(plain["segments"][0]) == {
        *("id", "seek", "start", "end", "text", "tokens", "temperature"),
        *("avg_logprob", "compression_ratio", "no_speech_prob"),
    }
    edges = [at for segment in plain["segments"] for at in (segment["start"], segment["end"])]
    assert edges == sorted(edges) and edges[1] == 0.2 and edges[4] > 5.0
    assert both["segments"] == plain["segments"]
    assert [word["word"] for word in both["words"]] == both["text"].split()
    assert both["words"][1] == {"word": "know.", "start": 0.1, "end": 0.2}


async def test_words_alone(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedRecognizer("I know.")) as client:
        fields = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
        body = (await transcribe(client, **fields)).json()
    assert "segments" not in body and len(body["words"]) == 2


async def test_subtitles(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedRecognizer("I know.", "I know.")) as client:
        srt = await transcribe(client, response_format="srt")
        assert srt.text == "1\n00:00:00,000 --> 00:00:00,200\nI know.\n\n"
        vtt = await transcribe(client, response_format="vtt")
        assert vtt.text == "WEBVTT\n\n00:00:00.000 --> 00:00:00.200\nI know.\n\n"
        assert vtt.headers["content-type"] == "text/vtt; charset=utf-8"


async def test_a_stream_of_pieces(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedRecognizer("One.", "", "Three.")) as client:
        response = await transcribe(client, wav(20.0), stream="true")
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line]
    assert [event["type"] for event in events] == [
        *["transcript.text.delta"] * 2,
        "transcript.text.done",
    ]
    assert "".join(event["delta"] for event in events[:2]) == events[2]["text"] == "One. Three."
    assert events[2]["usage"]["seconds"] == 20


def test_a_recogniser_with_too_many_before_it_says_when_to_come_again() -> None:
    response = error_response(BusyRecognizerError("64 turns wait already"))
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


async def test_a_recogniser_that_fails(tmp_path: Path) -> None:
    recognizer = ScriptedRecognizer()
    recognizer.error = ModelError("broken")
    async with serving(tmp_path, recognizer) as client:
        response = await transcribe(client)
        assert response.status_code == 500
        assert error_of(response)["code"] == "transcription_failed"
        last = json.loads((await transcribe(client, stream="true")).text.strip()[6:])
        assert last["error"]["code"] == "transcription_failed"


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"model": "llama"}, 404, "model_not_found", "model"),
        ({"language": "fr"}, 400, "unsupported_value", "language"),
        ({"temperature": "0.4"}, 400, "unsupported_value", "temperature"),
        ({"response_format": "diarized_json"}, 400, "invalid_value", "response_format"),
        (
            {"timestamp_granularities[]": "word"},
            *(400, "invalid_value", "timestamp_granularities"),
        ),
        (
            {"timestamp_granularities[]": "phone", "response_format": "verbose_json"},
            *(400, "invalid_value", "timestamp_granularities[0]"),
        ),
        ({"include[]": "logprobs"}, 400, "unsupported_value", "include"),
        ({"chunking_strategy": '{"type":"x"}'}, 400, "unsupported_value", "chunking_strategy"),
        ({"stream": "maybe"}, 400, "invalid_value", "stream"),
        ({"stream": "true", "response_format": "srt"}, 400, "unsupported_value", "stream"),
        ({"known_speaker_names[]": "Ann"}, 400, "unknown_parameter", "known_speaker_names"),
        ({"model": ["parley", "parley"]}, 400, "invalid_value", "model"),
        ({"prompt": "x" * 60_000}, 200, "", ""),
    ],
)
async def test_forms_are_checked(
    tmp_path: Path, fields: dict[str, Any], status: int, code: str, param: str
) -> None:
    async with serving(tmp_path, ScriptedRecognizer("Yes.")) as client:
        response = await transcribe(client, **fields)
        assert response.status_code == status, response.text
        if status != 200:
            error = error_of(response)
            assert (error["code"], error["param"]) == (code, param)
            assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"What is this?", 400, "invalid_file"),
        (wav(1.0)[:44], 400, "invalid_file"),
        (b"", 400, "invalid_file"),
        (wav(4.0), 400, "invalid_file"),  # 3 s are allowed here
        (bytes(150_000), 413, "request_too_large"),
    ],
)
async def test_files_are_checked(tmp_path: Path, content: bytes, status: int, code: str) -> None:
    async with serving(tmp_path, max_file_s=3.0, max_file_mb=0.13) as client:
        response = await transcribe(client, content)
        assert response.status_code == status
        assert (error_of(response)["code"], error_of(response)["param"]) == (code, "file")


async def test_what_is_no_form(tmp_path: Path) -> None:
    async with serving(tmp_path, max_file_mb=0.1) as client:
        path = "/v1/audio/transcriptions"
        response = await client.post(path, json={})
        assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_media_type")
        without = {"content-type": "multipart/form-data"}
        response = await client.post(path, content=b"x", headers=without)
        assert error_of(response)["code"] == "missing_required_parameter"
        response = await client.post(path, data={"model": "whisper-1"}, files={"other": b"x"})
        assert error_of(response)["code"] == "missing_required_parameter"
        response = await transcribe(client, bytes(400_000))
        assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")


# --- speech ---


@pytest.mark.parametrize(
    ("wanted", "media_type"),
    [
        ("wav", "audio/wav"),
        ("pcm", "audio/pcm"),
        ("mp3", "audio/mpeg"),
        ("opus", "audio/ogg"),
        ("flac", "audio/flac"),
        ("aac", "audio/aac"),
        (None, "audio/mpeg"),
    ],
)
async def test_a_text_becomes_a_file(tmp_path: Path, wanted: str | None, media_type: str) -> None:
    voice = ToneSynthesizer()
    async with serving(tmp_path, voice=voice) as client:
        response = await speak(client, input="Hello **there**.", response_format=wanted)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == media_type
        assert "".join(voice.spoken).strip() == "Hello there."
        length_s = sum(len(text.strip()) for text in voice.spoken) / 24
        if wanted == "pcm":
            assert len(response.content) == round(length_s * 48_000)
        elif wanted == "wav":
            assert len(response.content) == 44 + round(length_s * 48_000)
        else:
            assert len(response.content) > 100
        assert await metric(client, "parley_texts_spoken_total") == 1
        seconds = await metric(client, "parley_text_audio_seconds_total")
        assert seconds == pytest.approx(length_s, abs=0.01)


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"model": "gpt-4o"}, 404, "model_not_found", "model"),
        ({"voice": "darth"}, 400, "invalid_value", "voice"),
        ({"voice": {"id": "onyx"}}, 200, "", ""),
        ({"input": ""}, 400, "string_below_min_length", "input"),
        ({"input": "x" * 4097}, 400, "string_above_max_length", "input"),
        ({"speed": 5}, 400, "integer_above_max_value", "speed"),
        ({"response_format": "midi"}, 400, "invalid_value", "response_format"),
        ({"instructions": "Shout."}, 400, "unsupported_value", "instructions"),
        ({"stream_format": "sse"}, 400, "unsupported_value", "stream_format"),
        ({"mood": "good"}, 400, "unknown_parameter", "mood"),
    ],
)
async def test_texts_are_checked(
    tmp_path: Path, fields: dict[str, Any], status: int, code: str, param: str
) -> None:
    async with serving(tmp_path) as client:
        response = await speak(client, **fields)
        assert response.status_code == status, response.text
        if status != 200:
            assert (error_of(response)["code"], error_of(response)["param"]) == (code, param)


async def test_a_body_that_is_no_json(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        for content in (b"{", b"[]", b"\xff"):
            response = await client.post("/v1/audio/speech", content=content)
            assert (response.status_code, error_of(response)["code"]) == (400, "invalid_json")


async def test_a_voice_that_fails_at_once_has_a_status_of_its_own(tmp_path: Path) -> None:
    voice = ToneSynthesizer()
    voice.error = ModelError("hoarse")
    async with serving(tmp_path, voice=voice) as client:
        response = await speak(client)
        assert response.status_code == 500
        assert error_of(response)["code"] == "synthesis_failed"


async def test_a_voice_that_fails_later_leaves_a_file_without_an_end(tmp_path: Path) -> None:
    class Fading(ToneSynthesizer):
        def synthesize(self, text: str, *, speed: float = 1.0) -> Samples:
            if self.spoken:
                raise ModelError("hoarse")
            return super().synthesize(text, speed=speed)

    async with serving(tmp_path, voice=Fading()) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await speak(
                client, input="First sentence here. Second one here.", response_format="pcm"
            )


async def test_sound_comes_while_the_rest_is_made(tmp_path: Path) -> None:
    gate = threading.Event()

    class Slow(ToneSynthesizer):
        def synthesize(self, text: str, *, speed: float = 1.0) -> Samples:
            assert not self.spoken or gate.wait(10)
            return super().synthesize(text, speed=speed)

    with ThreadPoolExecutor(2) as workers:
        async with serving(tmp_path, voice=Slow(), workers=workers) as client:
            body = {"model": "tts-1", "voice": "alloy", "response_format": "pcm"}
            body["input"] = "First sentence here. Second one here."
            async with client.stream("POST", "/v1/audio/speech", json=body) as response:
                parts = response.aiter_bytes()
                assert len(await anext(parts)) > 1_000
                gate.set()
                rest = b"".join([part async for part in parts])
            assert len(rest) > 10_000


# --- keys, limits, ends ---


async def test_a_key_is_asked_for(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedRecognizer("Yes."), api_keys=("k1",)) as client:
        for response in (await transcribe(client), await speak(client)):
            assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
        client.headers["authorization"] = "Bearer k1"
        assert (await transcribe(client)).status_code == 200
        assert (await speak(client)).status_code == 200


async def test_requests_count_as_sessions_of_their_key(tmp_path: Path) -> None:
    async with serving(tmp_path, max_sessions_per_minute=1) as client:
        assert (await speak(client)).status_code == 200
        response = await speak(client)
        assert (response.status_code, error_of(response)["code"]) == (429, "rate_limit_exceeded")
        assert int(response.headers["retry-after"]) > 0


class Held(ScriptedRecognizer):
    """Hears nothing before it may, and notices when nobody waits."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*texts)
        self.may = threading.Event()
        self.num_begun = 0
        self.num_given_up = 0

    def transcribe(
        self, samples: Samples, *, is_wanted: Callable[[], bool] = lambda: True, **hints: Any
    ) -> Transcript:
        self.num_begun += 1
        while not self.may.wait(0.01):
            if not is_wanted():
                self.num_given_up += 1
                raise AbandonedError("nobody waits")
        return super().transcribe(samples)


async def test_nobody_takes_all_places(tmp_path: Path) -> None:
    held = Held("one", "two", "three")
    with ThreadPoolExecutor(2) as workers:
        async with serving(
            tmp_path, held, workers=workers, api_keys=("k1", "k2", "k3"), max_audio_requests=3
        ) as client:

            def by(key: str) -> asyncio.Task[httpx.Response]:
                files, form = {"file": wav(1.0)}, {"model": "whisper-1"}
                headers = {"authorization": f"Bearer {key}"}
                sent = client.post(
                    "/v1/audio/transcriptions", files=files, data=form, headers=headers
                )
                return asyncio.create_task(sent)  # type: ignore[arg-type]

            client.headers["authorization"] = "Bearer k1"
            running = [by("k1"), by("k1")]
            await until_busy_with(client, 2)
            refused = await by("k1")
            assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
            running.append(by("k2"))
            await until_busy_with(client, 3)
            refused = await by("k3")
            assert (refused.status_code, error_of(refused)["code"]) == (503, "overloaded")
            assert refused.headers["retry-after"] == "2"
            held.may.set()
            assert {(await task).json()["text"] for task in running} == {"one", "two", "three"}
            assert await metric(client, "parley_audio_requests") == 0


async def test_who_leaves_is_not_worked_for(tmp_path: Path) -> None:
    held = Held("never")
    with ThreadPoolExecutor(2) as workers:
        async with serving(tmp_path, held, workers=workers) as client:
            asking = asyncio.create_task(transcribe(client))
            await eventually(lambda: held.num_begun == 1, "the file is being heard")
            asking.cancel()
            await asyncio.wait([asking])
            await eventually(lambda: held.num_given_up == 1, "the file is given up")
            assert await metric(client, "parley_audio_requests") == 0
            assert await metric(client, "parley_files_transcribed_total") == 0


async def test_a_place_is_free_again_after_a_bad_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, max_audio_requests=1) as client:
        for _ in range(3):
            assert (await transcribe(client, model="llama")).status_code == 404
            assert (await speak(client, input="")).status_code == 400
        monkeypatch.setattr(http_body, "BODY_TIMEOUT_S", 0.05)

        async def slow() -> AsyncIterator[bytes]:
            yield b'{"model": '
            await asyncio.sleep(5)

        response = await client.post("/v1/audio/speech", content=slow())
        assert (response.status_code, error_of(response)["code"]) == (408, "request_timeout")
        assert (await speak(client)).status_code == 200


async def test_who_does_not_read_loses_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speech, "_UNREAD_S", 0.1)
    text = "A long sentence that is spoken and spoken, without any end in sight. " * 50
    async with serving(tmp_path) as client:
        url = client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port, limit=1024)
        body = json.dumps(
            {"model": "tts-1", "voice": "alloy", "input": text, "response_format": "pcm"}
        )
        head = "POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        writer.write((head + body).encode())
        await writer.drain()
        await reader.readexactly(100)
        await until_busy_with(client, 0)
        assert await metric(client, "parley_texts_spoken_total") == 0
        writer.close()
