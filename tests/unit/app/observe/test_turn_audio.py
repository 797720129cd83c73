"""Recordings of turns: what lies where in time, who may hear them, and how long they stay."""

from __future__ import annotations

import io
import os
from pathlib import Path

import httpx
import numpy as np
import pytest
import soundfile as sf

from app.config import Settings
from app.observe.store import TraceStore
from app.observe.turn_audio import AudioFiles, TurnAudio
from app.observe.writer import TraceWriter
from app.server.lifecycle import create_app, listening
from tests.support.fake_turns import a_turn
from tests.support.fakes import (
    ManualClock,
    PacedEngine,
    ScriptedEngine,
    fake_services,
    recent,
    voice,
)
from tests.support.session_call import call

NS = 1_000_000_000
LOUD = 0.1


def read(content: bytes) -> tuple[np.ndarray, int]:
    frames, rate = sf.read(io.BytesIO(content), dtype="float32", always_2d=True)
    return frames, rate


def files_in(folder: Path, **limits: float) -> AudioFiles:
    chosen = {"max_age_s": 1e9, "max_bytes": 10**9} | limits
    return AudioFiles(folder, **chosen)  # type: ignore[arg-type]


def test_both_sides_lie_where_they_sounded() -> None:
    caller = np.full(32_000, 0.5, np.float32)  # 2 s, the voice ends after 1.5 s
    audio = TurnAudio(10 * NS, caller, speech_end_sample=24_000)
    audio.add_reply(np.full(24_000, 0.25, np.float32), 24_000, 11 * NS)
    audio.add_reply(np.full(24_000, 0.25, np.float32), 24_000, 12 * NS)
    frames, rate = read(audio.to_wav())
    assert rate == 24_000 and frames.shape == (int(24_000 * (1.5 + 3)), 2)
    left, right = (np.flatnonzero(np.abs(side) > LOUD) / rate for side in frames.T)
    assert left[0] < 0.01 and left[-1] == pytest.approx(2.0, abs=0.01)
    assert right[0] == pytest.approx(2.5, abs=0.001) and right[-1] == pytest.approx(4.5, abs=0.001)


def test_what_was_not_heard_is_not_kept() -> None:
    audio = TurnAudio(0)
    audio.add_reply(np.full(8_000, 0.25, np.float32), 8_000, NS)
    audio.add_reply(np.full(8_000, 0.25, np.float32), 8_000, 2 * NS)
    audio.stopped_ns = 1_500_000_000
    frames, rate = read(audio.to_wav())
    assert len(frames) == 1.5 * rate
    assert len(read(TurnAudio(0).to_wav())[0]) == 0


def test_files_are_private_whole_and_forgotten(tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    files = files_in(folder, max_bytes=250, max_age_s=100)
    assert files.prune(0.0) == 0, "no folder yet"
    for number in range(4):
        files.write(f"turn_{number}", b"x" * 100)
        os.utime(folder / f"turn_{number}.wav", (1000 + number, 1000 + number))
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert files.prune(1003.0) == 2
    assert sorted(p.name for p in folder.iterdir()) == ["turn_2.wav", "turn_3.wav"]
    assert files.prune(1102.5) == 1
    assert files.path("turn_3") is not None
    for name in ("turn_2", "../traces", "turn_/../../x", "turn_3.wav", ""):
        assert files.path(name) is None


@pytest.mark.parametrize("is_on", [False, True])
async def test_a_call_is_recorded_only_when_that_is_switched_on(
    tmp_path: Path, is_on: bool
) -> None:
    assert Settings().record is False
    engine = PacedEngine(ManualClock(), "Fine. And you?")
    async with call(engine, "How are you?", settings={"record": is_on}) as c:
        c.services.traces.recordings = files_in(tmp_path)
        await c.ask(speech_s=0.6)
        await c.clock.advance(20)
        (turn,) = recent(c.services.traces.store, 10)
        assert turn["is_recorded"] is is_on
        path = c.services.traces.recordings.path(turn["turn_id"])
        assert (path is not None) is is_on
        if path is None:
            return
        frames, rate = read(path.read_bytes())
        voiced, replied = (np.flatnonzero(np.abs(side) > LOUD) / rate for side in frames.T)
        # The silence in the recording is the voice-to-voice time of the trace.
        gap_ms = (replied[0] - voiced[-1]) * 1000
        assert gap_ms == pytest.approx(turn["voice_to_voice_ms"], abs=40)
        assert replied[-1] - replied[0] == pytest.approx(turn["facts"]["reply_audio_s"], abs=0.05)


async def test_an_interrupted_answer_ends_where_it_was_interrupted(tmp_path: Path) -> None:
    engine = PacedEngine(ManualClock(), "One two three four five six. " * 6)
    async with call(engine, "Count.", "Stop.", settings={"record": True}) as c:
        c.services.traces.recordings = files_in(tmp_path)
        await c.ask()
        await c.clock.advance(1)
        await c.hear(voice(0.2))
        (turn,) = recent(c.services.traces.store, 10)
        path = c.services.traces.recordings.path(turn["turn_id"])
        assert turn["outcome"] == "interrupted" and path is not None
        frames, rate = read(path.read_bytes())
        replied = np.flatnonzero(np.abs(frames[:, 1]) > LOUD) / rate
        heard_s = (turn["instants_ms"]["ended"] - turn["voice_to_voice_ms"]) / 1000
        assert replied[-1] - replied[0] == pytest.approx(heard_s, abs=0.05)
        assert turn["facts"]["reply_audio_s"] > heard_s + 0.5, "more was sent ahead"


def test_the_writer_keeps_recordings_in_its_thread(tmp_path: Path) -> None:
    store = TraceStore.in_memory(10)
    files = files_in(tmp_path / "recordings")
    writer = TraceWriter(store, recordings=files)
    writer.start()
    audio = TurnAudio(0, np.full(1600, 0.5, np.float32), 1600)
    writer.add(a_turn(1), audio)
    writer.add(a_turn(2))
    writer.flush()
    path = files.path("turn_1")
    assert path is not None and len(read(path.read_bytes())[0]) == 1600
    assert files.path("turn_2") is None
    writer.close()
    store.close()


async def test_recordings_are_behind_the_key(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<!doctype html>")
    services = fake_services(ScriptedEngine(), port=0, api_keys=("k1",))
    services.traces.recordings = files_in(tmp_path / "recordings")
    services.traces.recordings.write("turn_1", TurnAudio(0).to_wav())
    app = create_app(services.settings, services, web_root=tmp_path)
    async with listening(app, services.settings) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/v1/traces/turn_1/audio")).status_code == 401
        http.headers["authorization"] = "Bearer k1"
        found = await http.get("/v1/traces/turn_1/audio")
        assert (found.status_code, found.headers["content-type"]) == (200, "audio/wav")
        assert found.content[:4] == b"RIFF"
        for missing in ("turn_2", "..%2Ftraces", "turn_1.wav"):
            refused = await http.get(f"/v1/traces/{missing}/audio")
            assert refused.status_code == 404, missing
    services.traces.recordings = None
