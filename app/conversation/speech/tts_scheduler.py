"""Deadline scheduler for speech synthesis: the audio that runs out first is made first.

A caller who hears nothing yet goes before one with seconds of buffered audio, and all callers go
before batch synthesis. A running job is not interrupted; ``max_running`` limits the jobs at a time,
so that the recogniser gets a core too.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class TtsScheduler:
    """The queue. Only the jobs run outside of the event loop."""

    def __init__(self, workers: Executor, max_running: int = 1) -> None:
        self._workers = workers
        self._max_running = max_running
        self._num_running = 0
        self._waiting: list[tuple[bool, int, int, asyncio.Future[None]]] = []
        self._serial = 0

    @property
    def num_waiting(self) -> int:
        """Jobs for callers that wait."""
        return sum(not is_batch and not start.done() for is_batch, _, _, start in self._waiting)

    async def run(self, job: Callable[[], T], needed_ns: int, *, is_live: bool = True) -> T:
        """Run ``job`` in a worker thread and return its result.

        ``needed_ns``: deadline, when the caller's buffered audio runs out. ``is_live`` False: batch
        synthesis.
        """
        if self._num_running >= self._max_running:
            self._serial += 1
            start = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (not is_live, needed_ns, self._serial, start))
            try:
                await start
            except asyncio.CancelledError:
                if start.done() and not start.cancelled():  # started at this very moment
                    self._next()
                raise
        else:
            self._num_running += 1
        loop = asyncio.get_running_loop()
        running = self._workers.submit(job)
        # On the thread's own future: the loop's is done as soon as it is cancelled, while the
        # thread goes on.
        running.add_done_callback(partial(self._on_made, loop))
        return await asyncio.wrap_future(running)

    def _on_made(self, loop: asyncio.AbstractEventLoop, _: Future[T]) -> None:
        """Runs in the worker thread, or in the loop's for a job cancelled before it was started."""
        # The loop is closed: the server has stopped before the job.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._next)

    def _next(self) -> None:
        """Pass the slot on to the next job that waits."""
        while self._waiting:
            *_, start = heapq.heappop(self._waiting)
            if not start.done():
                start.set_result(None)
                return
        self._num_running -= 1
