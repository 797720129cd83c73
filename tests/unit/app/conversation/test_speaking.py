"""The queue for the voice: who needs sound soonest is served first; nobody's place is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from app.conversation.speech.tts_scheduler import TtsScheduler


class Bench:
    """A queue whose jobs wait until they are let go, one by one."""

    def __init__(self, max_running: int = 1) -> None:
        self.workers = ThreadPoolExecutor(4)
        self.queue = TtsScheduler(self.workers, max_running)
        self.made: list[str] = []
        self.gates: dict[str, threading.Event] = {}

    def start(self, name: str, needed_ns: int) -> asyncio.Task[str]:
        self.gates[name] = threading.Event()
        return asyncio.create_task(self.queue.run(self._job(name), needed_ns))

    def _job(self, name: str) -> Callable[[], str]:
        def make() -> str:
            self.made.append(name)
            assert self.gates[name].wait(10)
            return name

        return make

    def let_go(self) -> None:
        for gate in self.gates.values():
            gate.set()


async def begun(bench: Bench, number: int) -> None:
    async with asyncio.timeout(10):
        while len(bench.made) < number:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_who_needs_it_soonest_goes_first() -> None:
    bench = Bench()
    tasks = [bench.start("first", 9_000)]
    await begun(bench, 1)
    wanted = {"in no hurry": 5_000, "has nothing": 0, "soon": 700, "as soon": 700}
    tasks += [bench.start(name, needed_ns) for name, needed_ns in wanted.items()]
    await asyncio.sleep(0)
    assert bench.queue.num_waiting == 4
    bench.let_go()
    assert await asyncio.gather(*tasks) == ["first", *wanted]
    assert bench.made == ["first", "has nothing", "soon", "as soon", "in no hurry"]
    assert bench.queue.num_waiting == 0
    bench.workers.shutdown()


async def test_so_many_at_once_and_not_more() -> None:
    bench = Bench(max_running=2)
    tasks = [bench.start(str(i), i) for i in range(3)]
    await begun(bench, 2)
    assert bench.queue.num_waiting == 1
    bench.let_go()
    assert await asyncio.gather(*tasks) == ["0", "1", "2"]
    bench.workers.shutdown()


async def test_who_gives_up_leaves_no_hole() -> None:
    bench = Bench()
    first = bench.start("first", 0)
    await begun(bench, 1)
    second, third = bench.start("second", 1), bench.start("third", 2)
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    bench.gates["first"].set()
    await begun(bench, 2)
    # Its turn has come; now it is cancelled while its job runs.
    third.cancel()
    bench.let_go()
    await asyncio.wait([first, third])
    assert bench.made == ["first", "third"]
    after = bench.start("after", 0)
    bench.let_go()
    assert await after == "after"
    bench.workers.shutdown()


async def test_what_is_being_made_keeps_its_place_when_nobody_wants_it_any_more() -> None:
    """A thread cannot be stopped: after a barge-in it makes its piece to the end."""
    bench = Bench()
    unwanted = bench.start("unwanted", 0)
    await begun(bench, 1)
    unwanted.cancel()
    await asyncio.wait([unwanted])
    wanted = bench.start("wanted", 0)
    await asyncio.sleep(0.05)
    assert bench.made == ["unwanted"] and bench.queue.num_waiting == 1
    bench.let_go()
    assert await wanted == "wanted"
    bench.workers.shutdown()


async def test_a_job_that_was_cancelled_before_a_thread_had_time_for_it_is_not_done() -> None:
    bench = Bench()
    busy = threading.Event()
    blocked = [bench.workers.submit(busy.wait, 10) for _ in range(4)]  # by recognisers, say
    unwanted = bench.start("unwanted", 0)
    await asyncio.sleep(0)
    unwanted.cancel()
    await asyncio.wait([unwanted])
    busy.set()
    assert all(one.result() for one in blocked)
    wanted = bench.start("wanted", 0)
    bench.let_go()
    assert await wanted == "wanted"
    assert bench.made == ["wanted"]
    bench.workers.shutdown()
