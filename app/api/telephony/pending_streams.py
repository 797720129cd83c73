"""Phone streams that have not begun: their socket is open, and they are no calls yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from app.errors import UnavailableError

# A provider says at once which call it brings.
START_TIMEOUT_S = 3.0
# Streams without a valid token that may wait, of one address and in all: the least number, and more
# where the server takes more calls. A proxy may bring all calls from one address.
_LEAST_OF_ADDRESS = 8
_ADDRESSES = 4


@dataclass(eq=False, slots=True)
class _Waiting:
    """``address`` None: it has brought a token that opens any call, or its wire is trusted."""

    address: str | None
    limit: asyncio.Timeout
    is_displaced: bool = False


class PendingStreams:
    """Streams that have not begun.

    Overflow rule: a stream without a valid token takes the place of the one that has waited longest
    (of the same address, if that has too many), so that streams which never begin keep nobody out.
    Of those with one, ``max_calls`` may wait; further ones are refused.
    """

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self._max_of_address = max(_LEAST_OF_ADDRESS, max_calls)
        self._max_unknown = _ADDRESSES * self._max_of_address
        self._waiting: list[_Waiting] = []  # the oldest first

    def __len__(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def waiting(self, address: str | None) -> AsyncIterator[None]:
        """For the time until a stream begins, which is the block.

        ``address`` None: see ``_Waiting``. Raises UnavailableError when there is no room (any
        more), TimeoutError after ``START_TIMEOUT_S``.
        """
        self._make_room(address)
        stream = _Waiting(address, asyncio.timeout(START_TIMEOUT_S))
        self._waiting.append(stream)
        try:
            async with stream.limit:
                yield
        except TimeoutError:
            if stream.is_displaced:
                raise self._full() from None
            raise
        finally:
            self._waiting.remove(stream)

    def _make_room(self, address: str | None) -> None:
        """For one more. Raises UnavailableError."""
        unknown = [s for s in self._waiting if s.address is not None and not s.is_displaced]
        if address is None:
            if sum(s.address is None for s in self._waiting) >= self._max_calls:
                raise self._full()
            return
        same = [stream for stream in unknown if stream.address == address]
        if len(same) >= self._max_of_address:
            self._displace(same[0])
        elif len(unknown) >= self._max_unknown:
            self._displace(unknown[0])

    def _displace(self, stream: _Waiting) -> None:
        stream.is_displaced = True
        if not stream.limit.expired():
            stream.limit.reschedule(asyncio.get_running_loop().time())

    def _full(self) -> UnavailableError:
        return UnavailableError(
            f"{len(self)} streams have not begun yet; try again soon.",
            retry_after_s=START_TIMEOUT_S,
        )
