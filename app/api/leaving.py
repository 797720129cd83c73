"""Work for one request, which ends when its client does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


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
