"""Work for one request, which ends when its client does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send


class Answer(Response):
    """Worked on until it is done or the client leaves; ``place`` is closed then."""

    def __init__(self, place: ExitStack | None = None) -> None:
        super().__init__()
        self._place = place or ExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._place:
            await while_connected(self._answer(scope, receive, send), receive)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run ``work`` until it ends or the client leaves; nothing of it is left when this returns.

    The request's body must have been read. Raises what ``work`` raises.
    """
    working = asyncio.create_task(work, name="answer over HTTP")
    leaving = asyncio.create_task(_left(receive), name="client over HTTP")
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
        await asyncio.wait({working, leaving})
    if not working.cancelled():
        working.result()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
