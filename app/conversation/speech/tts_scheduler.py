"""One voice for all callers: the sound that is needed soonest is made first.

A caller who hears nothing yet goes before one who has seconds of an answer in hand, whoever asked
first, and all callers before texts that are read aloud for a file. A piece that is being made is
made to its end; so many at once that words can still be heard.
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
    """The queue. Everything but the jobs themselves happens on the event loop."""

    def __init__(self, workers: Executor, max_running: int = 1) -> None:
        self._workers = workers
        self._max_running = max_running
        self._num_running = 0
        self._waiting: list[tuple[bool, int, int, asyncio.Future[None]]] = []
        self._serial = 0

    @property
    def num_waiting(self) -> int:
        """Pieces for callers that are not begun."""
        return sum(not is_late and not turn.done() for is_late, _, _, turn in self._waiting)

    async def run(self, job: Callable[[], T], needed_ns: int, *, is_live: bool = True) -> T:
        """What ``job`` returns, run by a worker thread; ``needed_ns``: when the caller has heard
        all there is by now. ``is_live`` False: it is for no caller."""
        if self._num_running >= self._max_running:
            self._serial += 1
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (not is_live, needed_ns, self._serial, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # it was our turn in that very moment
                    self._next()
                raise
        else:
            self._num_running += 1
        loop = asyncio.get_running_loop()
        running = self._workers.submit(job)
        # By the thread's own future: that of the loop is done at once when it is cancelled, and
        # what a thread has begun goes on.
        running.add_done_callback(partial(self._on_made, loop))
        return await asyncio.wrap_future(running)

    def _on_made(self, loop: asyncio.AbstractEventLoop, _: Future[T]) -> None:
        """In the worker thread; or, of a job that was cancelled before it began, in the loop's."""
        # Closed: the server has ended before the sound that it was making.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._next)

    def _next(self) -> None:
        """Whoever had the place gives it to the next one."""
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._num_running -= 1
