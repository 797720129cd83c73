"""SIGTERM to a real server: the answer under way is heard to its end, newcomers are sent away."""

from __future__ import annotations

import json
import signal

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from app.clients.server_process import own_server
from tests.integration.test_bad_input import event, received, until
from tests.support.server_env import BRIEF

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("llm_model_path", "asr_model_dir", "tts_voice_path"),
]

STORY = event(
    "conversation.item.create",
    item={
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "Tell me a story about the sea."}],
    },
)


async def close_code(socket: ClientConnection) -> int:
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            await received(socket)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code


@pytest.mark.timeout(120)
async def test_a_stopped_server_finishes_its_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (BRIEF | {"PARLEY_DRAIN_TIMEOUT_S": "40"}).items():
        monkeypatch.setenv(name, value)
    async with own_server(home=None) as server:
        url = server.url.replace("http", "ws") + "/v1/realtime"
        async with connect(url) as busy, connect(url) as idle:
            await until(idle, "session.created")
            await busy.send(STORY)
            await busy.send(event("response.create"))
            await until(busy, "response.output_audio.delta")
            server.process.send_signal(signal.SIGTERM)
            assert await close_code(idle) == 1001
            async with connect(url) as late:
                refusal = json.loads(await late.recv())
                assert refusal["error"]["code"] == "server_shutting_down"
                assert await close_code(late) == 1013
            done = (await until(busy, "response.done"))["response"]
            assert done["status"] in ("completed", "incomplete")
            assert done["output"][0]["content"][0]["transcript"]
            assert await close_code(busy) == 1001
        assert await server.process.wait() == 0
