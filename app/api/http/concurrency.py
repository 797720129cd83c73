"""Limits on the requests of one kind that are worked on at once, in all and of one owner."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

from app.access import RateLimitedError
from app.errors import UnavailableError

_RETRY_AFTER_S = 2.0


class ConcurrencyLimiter:
    """``max_places`` in all; an owner may have half of them, so that nobody takes all.

    ``kind``: of the requests, for error messages.
    """

    def __init__(self, max_places: int, kind: str) -> None:
        self._max_places = max_places
        self._kind = kind
        self._max_of_owner = (max_places + 1) // 2
        self._taken: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._taken.total()

    def take(self, owner: str) -> ExitStack:
        """A place, until what is returned is closed.

        Raises RateLimitedError when ``owner`` has enough, UnavailableError when all are taken.
        """
        if self._taken[owner] >= self._max_of_owner:
            raise RateLimitedError(
                f"You have {self._max_of_owner} {self._kind} requests at work already; try again "
                "when one is done.",
                _RETRY_AFTER_S,
            )
        if len(self) >= self._max_places:
            raise UnavailableError(
                f"All {self._max_places} places for {self._kind} requests are taken; try again "
                "soon.",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._taken[owner] += 1
        place = ExitStack()
        place.callback(self._give_back, owner)
        return place

    def _give_back(self, owner: str) -> None:
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]
