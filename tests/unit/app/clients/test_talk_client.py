"""The talk client against a scripted server, and the pure parts beneath it."""

from __future__ import annotations

import asyncio
import base64
import tracemalloc
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf

from app.clients.recording import RATE, Recording, VoicedFrames, first_audible, write_mono
from app.clients.talk import (
    CallerAudio,
    ConnectError,
    NoReplyError,
    NoSpeechError,
    TalkError,
    load_caller_audio,
    open_talk,
    realtime_url,
)
from app.clients.talk_log import ProtocolError, TalkLog, Verdict
from app.errors import AudioInputError
from audio.frame import SPEECH_RATE
from audio.vad import VadModel
from tests.support.scripted_realtime import Call, Script, scripted_server, tone, trace
from tests.support.speech import NOISES


class FastClock:
    """Time that passes only while somebody waits for it, and then at once."""

    def __init__(self) -> None:
        self._now_ns = 0

    def now_ns(self) -> int:
        return self._now_ns

    async def sleep(self, seconds: float) -> None:
        self._now_ns += round(seconds * 1e9)
        # Lets the receiver run, as real waiting does.
        await asyncio.sleep(0)


@pytest.fixture(scope="module")
def vad() -> VadModel:
    return VadModel()


def audio_of(seconds: float, vad: VadModel) -> CallerAudio:
    """A caller whose voice the (scripted) server takes for granted."""
    pcm = np.frombuffer(tone(seconds), dtype="<i2").astype(np.int16)
    voiced = VoicedFrames(np.zeros(RATE, np.float32), RATE, vad)
    voiced._frames = np.arange(round(seconds * 100))  # a tone is no voice to the real model
    return CallerAudio(Path("question.wav"), pcm, voiced, RATE)


def answer_after(samples: int, reply: bytes) -> Script:
    """Answers once, when so much audio has come in."""
    answered = False

    async def script(call: Call, event: dict[str, Any]) -> None:
        nonlocal answered
        if not answered and call.num_audio_samples >= samples:
            answered = True
            await call.send("input_audio_buffer.speech_started", item_id="item_1", audio_start_ms=0)
            await call.answer("what is it", "It is this.", reply)

    return script


# -- over a socket -------------------------------------------------------------------------------


async def test_a_question_is_answered(vad: VadModel) -> None:
    async with (
        scripted_server(answer_after(RATE // 2, tone(0.2))) as server,
        open_talk(server.url) as client,
    ):
        result = await client.speak(audio_of(0.3, vad), timeout_s=5)
    said = result.to_dict()
    assert said["transcript"] == "what is it"
    assert said["reply"] == "It is this."
    assert said["reply_audio_s"] == pytest.approx(0.2)
    assert said["voice_to_voice_ms"] == 600.0 == sum(said["stages_ms"].values())
    assert set(said["stages_ms"]) == {
        "endpoint",
        "asr",
        "queue",
        "prefill",
        "decode",
        "tts",
        "send",
    }
    assert said["status"] == "completed"
    # The server answered when 500 ms had come in, 200 ms after the caller's last voiced sample.
    assert said["gap_in_recording_ms"] == pytest.approx(200, abs=60)
    assert server.calls[0].received[0]["session"] == {"type": "realtime", "parley": {"trace": True}}


async def test_audio_goes_out_at_speaking_pace_and_silence_follows(vad: VadModel) -> None:
    loop = asyncio.get_running_loop()
    async with (
        scripted_server(answer_after(RATE, tone(0.1))) as server,
        open_talk(server.url) as client,
    ):
        started = loop.time()
        await client.speak(audio_of(0.3, vad), timeout_s=5)
        took_s = loop.time() - started
    call = server.calls[0]
    assert call.num_audio_samples / RATE == pytest.approx(took_s, abs=0.15)
    # A tone of 0.3 s has few samples near zero; all that came later is silence.
    assert 0.28 * RATE < call.loud_samples <= 0.3 * RATE


async def test_one_conversation_may_go_on(vad: VadModel) -> None:
    turns = iter((("one", "First."), ("two", "Second.")))
    due = RATE // 5

    async def script(call: Call, event: dict[str, Any]) -> None:
        nonlocal due
        # The next answer is due only when the client begins a new recording.
        if call.num_audio_samples >= due and call.loud_samples >= due // 2:
            due = call.num_audio_samples * 10
            transcript, reply = next(turns)
            await call.answer(transcript, reply, tone(0.1), number=call.num_items)
            call.num_items += 1

    async with scripted_server(script) as server, open_talk(server.url) as client:
        first = await client.speak(audio_of(0.2, vad), timeout_s=5)
        due = server.calls[0].num_audio_samples + RATE // 5
        server.calls[0].loud_samples = due
        second = await client.speak(audio_of(0.2, vad), timeout_s=5)
    assert [first.turns[0].reply, second.turns[0].reply] == ["First.", "Second."]
    assert len(server.calls) == 1


@pytest.mark.parametrize("spoken_s", [0.3, 120.0])
async def test_silence_is_an_error_and_costs_no_memory(vad: VadModel, spoken_s: float) -> None:
    pcm = np.zeros(round(spoken_s * RATE), dtype=np.int16)
    audio = CallerAudio(
        Path("silence.wav"), pcm, VoicedFrames(pcm[:1].astype(np.float32), RATE, vad), RATE
    )
    async with scripted_server() as server, open_talk(server.url, clock=FastClock()) as client:
        tracemalloc.start()
        with pytest.raises(NoSpeechError, match=r"no speech was found in silence\.wav .* 2 s"):
            await client.speak(audio, timeout_s=2)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert server.calls[0].num_audio_samples >= (spoken_s + 2) * RATE
    assert peak_bytes < 1_000_000


async def test_sound_without_words(vad: VadModel) -> None:
    async def script(call: Call, event: dict[str, Any]) -> None:
        if call.num_audio_samples == RATE // 10:
            await call.send("input_audio_buffer.speech_started", item_id="item_1", audio_start_ms=0)
            await call.hear("", "item_1")

    async with scripted_server(script) as server, open_talk(server.url) as client:
        with pytest.raises(NoSpeechError, match="no words were recognised"):
            await client.speak(audio_of(0.2, vad), timeout_s=1)


async def test_an_answer_that_never_comes(vad: VadModel) -> None:
    async def script(call: Call, event: dict[str, Any]) -> None:
        if call.num_audio_samples == RATE // 10:
            await call.hear("hello", "item_1")
            await call.send("error", error={"message": "the kitchen is on fire"})

    async with scripted_server(script) as server, open_talk(server.url) as client:
        with pytest.raises(NoReplyError, match=r"an answer to question\.wav was due.*on fire"):
            await client.speak(audio_of(0.2, vad), timeout_s=1)


async def test_a_failed_answer_is_told(vad: VadModel) -> None:
    async def script(call: Call, event: dict[str, Any]) -> None:
        if call.num_audio_samples == RATE // 10:
            await call.hear("hello", "item_1")
            await call.begin_reply("resp_1", "item_2")
            details = {"error": {"message": "the voice is gone"}}
            await call.end_reply("resp_1", "failed", status_details=details)
            await call.socket.send('{"type": "future.event", "about": "nothing we know"}')

    async with scripted_server(script) as server, open_talk(server.url) as client:
        result = await client.speak(audio_of(0.2, vad), timeout_s=5)
    assert result.to_dict()["status"] == "failed"
    assert result.turns[0].failure == "the voice is gone"
    assert result.to_dict()["stages_ms"] is None


async def test_barge_in_stops_the_player_and_truncates(vad: VadModel) -> None:
    async def script(call: Call, event: dict[str, Any]) -> None:
        if call.num_audio_samples == RATE // 10 and not call.num_items:
            call.num_items = 1
            await call.hear("tell me a story", "item_1")
            await call.begin_reply("resp_1", "item_reply_1")
            await call.say("Once upon a time", tone(5.0), "resp_1", "item_reply_1")
        if call.num_audio_samples == RATE * 4 // 10 and call.num_items == 1:
            call.num_items = 2
            await call.send("input_audio_buffer.speech_started", item_id="item_2", audio_start_ms=0)
            # In flight when the caller spoke up: not to be played any more.
            await call.say(" there was", tone(1.0), "resp_1", "item_reply_1")
            await call.end_reply("resp_1", "cancelled")
            await call.send_event(trace("resp_1"))
            await call.answer("stop", "All right.", tone(0.1), number=2)

    async with scripted_server(script) as server, open_talk(server.url) as client:
        result = await client.speak(audio_of(0.5, vad), timeout_s=5)
    first, second = result.turns
    assert (first.status, second.status) == ("cancelled", "completed")
    truncated = server.calls[0].received[-1]
    assert truncated["type"] == "conversation.item.truncate"
    assert truncated["item_id"] == "item_reply_1"
    assert truncated["audio_end_ms"] == pytest.approx(300, abs=80)
    assert truncated["audio_end_ms"] == first.reply_samples * 1000 // RATE
    assert result.recording.played[-1].pcm.size == second.reply_samples


async def test_a_server_that_hangs_up(vad: VadModel) -> None:
    async def script(call: Call, event: dict[str, Any]) -> None:
        if call.num_audio_samples >= RATE // 10:
            await call.socket.close(1011, "out of breath")

    async with scripted_server(script) as server, open_talk(server.url) as client:
        with pytest.raises(TalkError, match=r"closed the connection \(code 1011: out of breath\)"):
            await client.speak(audio_of(0.5, vad), timeout_s=5)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("no json", "not JSON"),
        ("[1]", "not a Realtime event"),
        ('{"type": "response.created"}', "broke the protocol: malformed response.created"),
    ],
)
async def test_a_server_that_talks_nonsense(vad: VadModel, message: str, complaint: str) -> None:
    async def script(call: Call, event: dict[str, Any]) -> None:
        if call.num_audio_samples == RATE // 10:
            await call.socket.send(message)

    async with scripted_server(script) as server, open_talk(server.url) as client:
        with pytest.raises(TalkError, match=complaint):
            await client.speak(audio_of(0.5, vad), timeout_s=5)


async def test_a_server_without_traces_is_no_obstacle(vad: VadModel) -> None:
    answer = answer_after(RATE // 5, tone(0.1))

    async def script(call: Call, event: dict[str, Any]) -> None:
        await answer(call, event)

    async with scripted_server(script, refuses_updates=True) as server, open_talk(server.url) as c:
        result = await c.speak(audio_of(0.2, vad), timeout_s=5)
    assert result.turns[0].reply == "It is this."


async def test_keys(vad: VadModel) -> None:
    async with scripted_server(api_key="sesame") as server:
        with pytest.raises(ConnectError, match="asks for an API key"):
            async with open_talk(server.url):
                pass
        with pytest.raises(ConnectError, match="does not accept this API key"):
            async with open_talk(server.url, api_key="wrong"):
                pass
        async with open_talk(server.url, api_key="sesame"):
            pass


async def test_nobody_there(closed_port: int) -> None:
    with pytest.raises(ConnectError, match=f"cannot reach ws://127.0.0.1:{closed_port}/v1/re"):
        async with open_talk(f"http://127.0.0.1:{closed_port}"):
            pass


async def test_something_else_there() -> None:
    async with scripted_server() as server:
        with pytest.raises(ConnectError, match=r"no Realtime endpoint at .* \(HTTP 404\)"):
            async with open_talk(server.url + "/elsewhere"):
                pass


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("http://h:1", "ws://h:1/v1/realtime"),
        ("https://h/", "wss://h/v1/realtime"),
        ("ws://h/v1/realtime?model=m", "ws://h/v1/realtime?model=m"),
        ("https://h/parley/v1", "wss://h/parley/v1/realtime"),
        ("localhost:8080", "ws://localhost:8080/v1/realtime"),
    ],
)
def test_addresses(address: str, url: str) -> None:
    assert realtime_url(address) == url


@pytest.mark.parametrize("address", ["ftp://h", "http://", "http://h:99999", "http://h:x"])
def test_addresses_that_make_no_sense(address: str) -> None:
    with pytest.raises(ConnectError, match="is not a server address"):
        realtime_url(address)


# -- files ---------------------------------------------------------------------------------------


def test_any_file_becomes_24_khz(tmp_path: Path, vad: VadModel) -> None:
    path = tmp_path / "eight.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(tone(0.5)[: 2 * 4000])
    audio = load_caller_audio(path, vad)
    assert audio.source_rate == 8000
    assert audio.pcm.size == pytest.approx(0.5 * RATE, abs=2)
    assert not audio.voiced.found


@pytest.mark.parametrize("content", [b"", b"this is no audio at all"])
def test_a_file_that_is_no_audio(tmp_path: Path, vad: VadModel, content: bytes) -> None:
    path = tmp_path / "bad.wav"
    path.write_bytes(content)
    with pytest.raises(AudioInputError, match=r"bad\.wav"):
        load_caller_audio(path, vad)


@pytest.mark.parametrize("kind", NOISES)
def test_noise_is_no_voice(vad: VadModel, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "noise.wav"
    sf.write(path, NOISES[kind](), SPEECH_RATE)
    assert not load_caller_audio(path, vad).voiced.found


# -- the recording of both sides -----------------------------------------------------------------


def ramp(start: int, count: int) -> np.ndarray[Any, np.dtype[np.int16]]:
    return np.arange(start, start + count, dtype=np.int16)


def test_pieces_play_on_arrival_or_after_the_one_before() -> None:
    recording = Recording(ramp(0, 10))
    assert recording.play(ramp(100, 5), 4).start == 4
    assert recording.play(ramp(200, 5), 6).start == 9
    assert recording.play(ramp(300, 5), 30).start == 30
    assert recording.reply_end == 35


def test_a_player_that_stops_forgets_the_rest() -> None:
    recording = Recording(ramp(0, 10))
    piece = recording.play(ramp(100, 5), 4)
    recording.play(ramp(200, 5), 6)
    recording.stop_playing(7)
    assert recording.reply_end == 7
    assert piece.pcm.tolist() == [100, 101, 102]
    recording.stop_playing(0)
    assert recording.reply_end == 0


def test_the_recording_is_stereo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.clients.recording.WRITE_BLOCK_SAMPLES", 4)
    recording = Recording(ramp(1, 6))
    recording.play(ramp(101, 3), 3)
    recording.play(ramp(201, 2), 8)
    recording.write(tmp_path / "both.wav")
    with wave.open(str(tmp_path / "both.wav")) as file:
        assert (file.getnchannels(), file.getframerate()) == (2, RATE)
        frames = np.frombuffer(file.readframes(99), dtype="<i2").reshape(-1, 2)
    assert frames[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 0, 0]
    assert frames[:, 1].tolist() == [0, 0, 0, 101, 102, 103, 0, 0, 201, 202]


def test_the_first_audible_sample() -> None:
    recording = Recording(ramp(0, 1))
    quiet = np.full(10, 100, dtype=np.int16)
    pieces = [recording.play(quiet, 5)]
    assert first_audible(pieces) is None
    pieces.append(recording.play(np.array([0, -32768, 5], dtype=np.int16), 0))
    assert first_audible(pieces) == 16


def test_a_reply_is_written_as_heard(tmp_path: Path) -> None:
    write_mono(tmp_path / "reply.wav", [ramp(1, 3), ramp(7, 2)])
    with wave.open(str(tmp_path / "reply.wav")) as file:
        assert (file.getnchannels(), file.getframerate(), file.getsampwidth()) == (1, RATE, 2)
        assert np.frombuffer(file.readframes(9), dtype="<i2").tolist() == [1, 2, 3, 7, 8]


# -- the log -------------------------------------------------------------------------------------


def log_of(*, expects_traces: bool = True) -> TalkLog:
    return TalkLog(Recording(ramp(0, 10)), expects_traces=expects_traces)


def committed(item_id: str) -> dict[str, Any]:
    return {"type": "input_audio_buffer.committed", "item_id": item_id, "previous_item_id": None}


def transcribed(item_id: str, text: str) -> dict[str, Any]:
    name = "conversation.item.input_audio_transcription.completed"
    return {"type": name, "item_id": item_id, "transcript": text}


def created(response_id: str) -> dict[str, Any]:
    return {"type": "response.created", "response": {"id": response_id}}


def done(response_id: str, status: str = "completed") -> dict[str, Any]:
    return {"type": "response.done", "response": {"id": response_id, "status": status}}


def test_two_utterances_may_share_one_answer() -> None:
    log = log_of()
    for event in (committed("a"), committed("b"), created("r"), transcribed("b", "Doe.")):
        log.feed(event, 0)
    log.feed(transcribed("a", "My name is John."), 0)  # late
    assert [turn.transcript for turn in log.turns] == ["My name is John. Doe."]


def test_the_log_waits_for_all_that_is_due() -> None:
    log = log_of()
    timeout = 10 * RATE

    def verdict(seconds: float) -> Verdict:
        return log.verdict(round(seconds * RATE), timeout)

    log.feed({"type": "input_audio_buffer.speech_started", "item_id": "a"}, 0)
    assert verdict(9) is Verdict.WAIT
    assert verdict(11) is Verdict.STALLED
    log.feed(committed("a"), 0)
    log.feed(transcribed("a", "hello"), 0)
    assert verdict(9) is Verdict.WAIT
    log.feed(created("r"), 0)
    log.feed(
        {
            "type": "response.output_audio.delta",
            "response_id": "r",
            "item_id": "i",
            "delta": base64.b64encode(tone(4.0)).decode(),
        },
        RATE,
    )
    assert verdict(4.9) is Verdict.WAIT
    log.feed(done("r"), RATE)
    assert verdict(5.9) is Verdict.WAIT  # played until 5 s, and the trace is missing
    log.feed(trace("r"), RATE)
    assert verdict(5.7) is Verdict.WAIT
    assert verdict(5.81) is Verdict.FINISHED


def test_a_trace_that_does_not_come_is_not_waited_for_long() -> None:
    for expects_traces, finished_s in ((True, 3.1), (False, 0.9)):
        log = log_of(expects_traces=expects_traces)
        for event in (committed("a"), created("r"), done("r")):
            log.feed(event, 0)
        assert log.verdict(round((finished_s - 0.2) * RATE), RATE * 9) is Verdict.WAIT
        assert log.verdict(round(finished_s * RATE), RATE * 9) is Verdict.FINISHED


def test_a_transcription_that_failed_is_told() -> None:
    log = log_of()
    name = "conversation.item.input_audio_transcription.failed"
    log.feed(committed("a"), 0)
    log.feed({"type": name, "item_id": "a", "error": {"message": "too faint"}}, 0)
    assert log.errors == ["the server could not transcribe the caller: too faint"]
    assert not log.turns[0].awaits_response


@pytest.fixture
def audio_delta() -> Iterator[dict[str, Any]]:
    yield {"type": "response.output_audio.delta", "response_id": "r", "item_id": "i"}


@pytest.mark.parametrize("delta", ["%%%", base64.b64encode(b"abc").decode(), None])
def test_audio_that_is_none(audio_delta: dict[str, Any], delta: str | None) -> None:
    log = log_of()
    log.feed(created("r"), 0)
    with pytest.raises(ProtocolError):
        log.feed(audio_delta | {"delta": delta}, 0)
