"""Work in advance: what is replaced is stopped, and nothing of it is left in the end."""

from __future__ import annotations

import asyncio

from app.conversation.response.eager import EagerGeneration


async def test_work_that_was_replaced_is_over_when_all_is_closed() -> None:
    ahead, ended = EagerGeneration(), list[str]()

    async def work(name: str, gives_up_after_s: float) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(gives_up_after_s)  # as an answer takes its time to
            ended.append(name)

    for name, gives_up_after_s in (("first", 0.05), ("second", 0.02), ("third", 0.0)):
        ahead.do(work(name, gives_up_after_s))
        await asyncio.sleep(0)
    assert not ahead.is_idle
    await ahead.close()
    assert ended == ["third", "second", "first"] and ahead.is_idle


async def test_what_has_ended_by_itself_is_not_waited_for() -> None:
    ahead = EagerGeneration()
    await ahead.close()

    async def nothing() -> None:
        pass

    ahead.do(nothing())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert ahead.is_idle
    ahead.do(nothing())
    await ahead.close()
    assert ahead.is_idle
