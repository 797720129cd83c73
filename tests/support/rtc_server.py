"""A whole server with real calls and scripted models, and what its callers hear."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np

from app.conversation.services import Services
from app.server.lifecycle import create_app, listening
from app.transports.webrtc.channel import CallAudio
from tests.support.fakes import (
    ScriptedEngine,
    ScriptedRecognizer,
    ToneSynthesizer,
    fake_services,
    recent,
)
from tests.support.rtc_client import RATE, RtcClient

STORY = "Once upon a time there was a very long story that went on and on, and on. " * 4


class Singer(ToneSynthesizer):
    """A tone that Opus lets through: it takes constant pressure for no sound at all."""

    def synthesize(self, text: str, *, speed: float = 1.0) -> np.ndarray:
        steady = super().synthesize(text, speed=speed)
        at = np.arange(len(steady)) / self.sample_rate
        return (steady * np.sin(2 * np.pi * 300 * at)).astype(np.float32)


class Server:
    def __init__(self, url: str, app: Any, services: Services) -> None:
        self.url = url
        self.app = app
        self.services = services

    @property
    def engine(self) -> ScriptedEngine:
        return cast(ScriptedEngine, self.services.engine)

    def last_trace(self) -> dict[str, Any]:
        """Of the turn that ended last."""
        [turn] = recent(self.services.traces.store, 1)
        return cast(dict[str, Any], turn)

    def the_audio(self) -> CallAudio:
        """That of the only call there is."""
        [(_, connection)] = self.app.state.calls._calls.values()
        return cast(CallAudio, connection._audio)

    @property
    def num_sessions(self) -> int:
        return len(self.app.state.connections)

    def client(self, **options: Any) -> RtcClient:
        return RtcClient(self.url, **options)


@asynccontextmanager
async def serving(
    tmp_path: Path,
    *replies: str,
    words: Sequence[str] = (),
    engine: Any = None,
    **settings: Any,
) -> AsyncIterator[Server]:
    """``words``: what the caller says, turn by turn; always the same question if none are given.

    ``engine``: a real one, in place of the one that says ``replies``.
    """
    (tmp_path / "index.html").write_text("<!doctype html><title>Parley</title>")
    services = fake_services(
        engine or ScriptedEngine(*(replies or ("It is sunny.",))),
        ScriptedRecognizer(*(words or ["What is the weather?"] * 50)),
        Singer(),
        host="127.0.0.1",
        port=0,
        **settings,
    )
    if engine is None:
        cast(Any, services.engine).is_alive = True
    app = create_app(services.settings, services, web_root=tmp_path)
    async with listening(app, services.settings) as url:
        yield Server(url, app, services)


def heard(client: RtcClient) -> np.ndarray:
    return np.concatenate(client.heard) if client.heard else np.zeros(0, np.int16)


def loud_s(client: RtcClient) -> float:
    """Seconds of sound that the client has heard."""
    samples = heard(client)
    frames = samples[: len(samples) // 240 * 240].reshape(-1, 240)  # 5 ms: a period and a half
    return float(np.count_nonzero(np.abs(frames).max(axis=1) > 2_000)) * 240 / RATE


async def ask(client: RtcClient) -> None:
    item = {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "Tell me a story."}],
    }
    client.send("conversation.item.create", item=item)
    client.send("response.create")
