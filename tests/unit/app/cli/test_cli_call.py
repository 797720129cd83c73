"""`parley call`: what it is asked the wrong way, and what the way to the server does to frames."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from app.cli.main import EXIT_USAGE, Provider, main
from app.clients.call import CallClient, Trouble, open_call
from app.clients.phone_providers import PEERS
from app.clients.recording import RATE, VoicedFrames
from app.clients.talk import CallerAudio, ConnectError
from tests.support.fakes import EnergyVad, ManualClock
from tests.support.phone_caller import phone_server


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--keys", "1x"], "'x' is not on a phone"),
        (["--provider", "nobody"], "nobody"),
        (["--provider", "audiosocket", "--url", "http://127.0.0.1:1"], "--audiosocket-port"),
        (["--loss", "2"], "loss"),
    ],
)
def test_a_wrong_call_is_told_at_once(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = tmp_path / "question.wav"
    recording.write_bytes(b"")
    with pytest.raises(SystemExit) as ended:
        main(["call", str(recording), *arguments])
    assert ended.value.code == EXIT_USAGE
    assert complaint in capsys.readouterr().err


def test_every_provider_can_be_asked_for() -> None:
    assert [str(provider) for provider in Provider] == list(PEERS)


async def test_a_server_that_is_not_there_is_told_in_words(closed_port: int) -> None:
    words = rf"^cannot reach ws://127.0.0.1:{closed_port}/.*: Connection refused$"
    with pytest.raises(ConnectError, match=words):
        async with open_call(f"http://127.0.0.1:{closed_port}", "twilio"):
            pass


async def sent_chunks(trouble: Trouble, count: int) -> list[int]:
    """The numbers of the frames that reach the server, in their order."""
    arrived: list[int] = []

    class Link:
        async def send(self, message: str) -> None:
            arrived.append(int(json.loads(message)["media"]["chunk"]))

    client = CallClient(PEERS["twilio"]("CA1"), cast(Any, Link()), trouble)

    async def sleep(seconds: float) -> None:
        pass

    cast(Any, client)._clock.sleep = sleep
    for _ in range(count):
        await client._send_frame(np.zeros(RATE // 50, np.int16))
    return arrived


async def test_frames_are_lost_late_and_shuffled_as_asked() -> None:
    assert await sent_chunks(Trouble(), 50) == [*range(1, 51)]
    lossy = await sent_chunks(Trouble(loss=0.2), 500)
    assert 350 < len(lossy) < 450 and lossy == sorted(lossy)
    late = await sent_chunks(Trouble(late_ms=100), 200)
    assert late == [*range(1, len(late) + 1)] and 190 <= len(late) < 200
    shuffled = await sent_chunks(Trouble(is_shuffled=True), 200)
    assert shuffled != sorted(shuffled) and len(shuffled) >= 197


async def test_what_was_rejoined_is_counted_by_phone_too() -> None:
    client = CallClient(PEERS["twilio"]("CA1"), cast(Any, None), Trouble())
    clock = ManualClock()
    cast(Any, client)._clock = clock
    item, response = {"item_id": "item_2"}, {"id": "resp_1", "status": "completed"}
    events: list[dict[str, Any]] = [
        {"type": "input_audio_buffer.committed", "item_id": "item_1"},
        {"type": "conversation.item.deleted", "item_id": "item_1"},
        {"type": "input_audio_buffer.committed"} | item,
        {"type": "conversation.item.input_audio_transcription.completed", "transcript": "a"} | item,
        {"type": "response.created", "response": response},
        {"type": "response.done", "response": response},
        {"type": "parley.turn.trace", "turn": {"response_id": "resp_1"}},
    ]

    async def send_frame(pcm: object) -> None:
        assert client._log is not None
        while events:
            client._log.feed(events.pop(0), 0)
        await clock.advance(0.02)

    cast(Any, client)._send_frame = send_frame
    voiced = VoicedFrames(np.zeros(RATE, np.float32), RATE, cast(Any, EnergyVad()))
    audio = CallerAudio(Path("x.wav"), np.zeros(RATE // 2, np.int16), voiced, RATE)
    result = await client.speak(audio, timeout_s=5)
    assert (len(result.turns), result.num_rejoined) == (1, 1)


@pytest.mark.parametrize("provider", PEERS)
async def test_a_simulated_provider_hears_the_greeting(provider: str, tmp_path: Path) -> None:
    greeting = "Hello there."
    async with phone_server(tmp_path, "Yes.", phone_greeting=greeting, api_keys=("k1",)) as server:
        opened = open_call(
            server.url, provider, api_key="k1", audiosocket=("127.0.0.1", server.port)
        )
        async with opened as client:
            greeting_s = await client.hear_greeting()
            await client.press("5#")
        assert greeting_s >= 0.45
        if provider != "audiosocket":
            assert client.num_marks
            with pytest.raises(ConnectError):
                async with open_call(server.url, provider, api_key="k1", token="wrong"):
                    pass
