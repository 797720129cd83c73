"""What is said frame by frame, and how exactly it is known what was heard."""

from __future__ import annotations

import numpy as np
import pytest

from app.transports.audio_port import Cut, Playback
from app.transports.webrtc.opus import ENCODED_RATE, FRAME_SAMPLES
from app.transports.webrtc.playout import FRAME_BYTES, SILENT_FRAME, OutputBuffer


class Ear:
    """A buffer and what it has told."""

    def __init__(self) -> None:
        self.notes: list[Playback] = []
        self.buffer = OutputBuffer(self.notes.append)

    def push(self, samples: int, item: str = "item_1", response: str = "resp_1") -> None:
        pcm = np.full(samples, 1_000, "<i2").tobytes()
        self.buffer.push(response, item, pcm)

    def hear(self, frames: int) -> np.ndarray:
        parts = [self.buffer.next_frame() for _ in range(frames)]
        assert all(len(part) == FRAME_BYTES for part in parts)
        return np.frombuffer(b"".join(parts), "<i2")


@pytest.fixture
def ear() -> Ear:
    return Ear()


def test_silence_when_there_is_nothing(ear: Ear) -> None:
    assert ear.buffer.next_frame() == SILENT_FRAME
    assert ear.buffer.clear() is None
    assert ear.notes == []


def test_started_and_stopped(ear: Ear) -> None:
    ear.push(2 * FRAME_SAMPLES + 100)
    assert ear.notes == [Playback("started", "resp_1")]
    ear.hear(1)
    assert ear.notes == [Playback("started", "resp_1")]
    ear.hear(1)
    # The rest is less than a frame: more may come.
    assert not ear.hear(1).any()
    ear.buffer.finish("resp_1")
    last = ear.hear(1)
    assert np.count_nonzero(last) == 100
    assert ear.notes == [Playback("started", "resp_1"), Playback("stopped", "resp_1")]
    assert ear.buffer.is_idle


def test_all_samples_come_through_in_order(ear: Ear) -> None:
    pcm = np.arange(1, 5_001, dtype="<i2")
    for start in range(0, 5_000, 333):
        ear.buffer.push("resp_1", "item_1", pcm[start : start + 333].tobytes())
    ear.buffer.finish("resp_1")
    heard = ear.hear(15)
    assert np.array_equal(heard[heard > 0], pcm)


def test_finish_behind_the_last_sample(ear: Ear) -> None:
    ear.push(FRAME_SAMPLES)
    ear.hear(1)
    assert len(ear.notes) == 1
    ear.buffer.finish("resp_1")
    assert ear.notes[-1] == Playback("stopped", "resp_1")
    ear.buffer.finish("resp_1")  # twice, and for one that is not known
    ear.buffer.finish("resp_2")
    assert len(ear.notes) == 2


@pytest.mark.parametrize("frames", [1, 3, 10])
def test_a_cut_knows_what_was_heard(ear: Ear, frames: int) -> None:
    ear.push(20 * FRAME_SAMPLES)
    ear.hear(frames)
    assert ear.buffer.clear() == Cut("resp_1", "item_1", frames * 20)
    tail = ear.hear(1)
    # Within 5 ms it is silent, without a click.
    fade = ENCODED_RATE // 200
    assert np.abs(np.diff(np.concatenate(([1_000], tail[:fade])))).max() < 50
    assert not tail[fade:].any()
    assert ear.buffer.is_idle
    # "cleared" is told by whoever cleared it.
    assert ear.notes == [Playback("started", "resp_1")]


def test_a_cut_before_the_first_sound(ear: Ear) -> None:
    ear.push(FRAME_SAMPLES)
    assert ear.buffer.clear() == Cut("resp_1", "item_1", 0)
    assert not ear.hear(1).any()


def test_two_responses_follow_one_another(ear: Ear) -> None:
    ear.push(FRAME_SAMPLES + 10)
    ear.buffer.finish("resp_1")
    ear.push(FRAME_SAMPLES, "item_2", "resp_2")
    ear.buffer.finish("resp_2")
    heard = ear.hear(3)
    assert np.count_nonzero(heard) == 2 * FRAME_SAMPLES + 10
    assert [(n.state, n.response_id) for n in ear.notes] == [
        ("started", "resp_1"),
        ("stopped", "resp_1"),
        ("started", "resp_2"),
        ("stopped", "resp_2"),
    ]


def test_length_of_what_waits(ear: Ear) -> None:
    ear.push(ENCODED_RATE)
    assert ear.buffer.waiting_ms == pytest.approx(1000)
    ear.hear(10)
    assert ear.buffer.waiting_ms == pytest.approx(800)
