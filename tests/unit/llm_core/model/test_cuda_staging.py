"""The staging ring does not overwrite buffers that a copy still reads."""

from __future__ import annotations

import pytest
import torch

from llm_core.model.gpu.staging import StagingRing


class FakeEvent:
    """Marks in a stream that somebody else works off."""

    log: list[str] = []
    count = 0

    def __init__(self) -> None:
        self.name = f"event {FakeEvent.count}"
        FakeEvent.count += 1
        self.is_pending = False

    def record(self) -> None:
        self.log.append(f"record {self.name}")
        self.is_pending = True

    def synchronize(self) -> None:
        if self.is_pending:
            self.log.append(f"wait {self.name}")
        self.is_pending = False


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> StagingRing:
    monkeypatch.setattr(FakeEvent, "log", [])
    monkeypatch.setattr(FakeEvent, "count", 0)
    return StagingRing(is_pinned=False, make_event=FakeEvent)


def test_buffers_alternate_and_wait_for_their_copies(ring: StagingRing) -> None:
    first = ring.acquire(10)
    ring.record_copy(first)
    second = ring.acquire(20)
    ring.record_copy(second)
    assert first.data_ptr() != second.data_ptr() and first.dtype == torch.int32
    assert FakeEvent.log == ["record event 0", "record event 1"], "two steps need no waiting"
    third = ring.acquire(7)
    assert third.data_ptr() == first.data_ptr() and len(third) == 7
    assert FakeEvent.log[2:] == ["wait event 0"], "the copy of two steps ago"
    ring.record_copy(third)
    ring.acquire(1)
    assert FakeEvent.log[3:] == ["record event 0", "wait event 1"]


def test_unused_buffer_is_not_waited_for(ring: StagingRing) -> None:
    for _ in range(5):
        ring.acquire(3)
    assert FakeEvent.log == []


def test_a_buffer_grows(ring: StagingRing) -> None:
    small, _ = ring.acquire(1), ring.acquire(1)
    large = ring.acquire(100_000)
    assert len(large) == 100_000 and large.data_ptr() != small.data_ptr()
    ring.acquire(1)
    assert ring.acquire(90_000).data_ptr() == large.data_ptr(), "it is kept"


def test_cpu_copies_are_synchronous() -> None:
    ring = StagingRing.of(torch.device("cpu"))
    words = [ring.acquire(4) for _ in range(4)]
    for buffer in words:
        ring.record_copy(buffer)
    assert words[0].data_ptr() == words[2].data_ptr() != words[1].data_ptr()
