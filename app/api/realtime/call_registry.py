"""The calls whose audio runs apart from their events, so that others can attach to them.

A call (WebRTC, phone) is entered under its id for as long as it lasts; ``/v1/realtime?call_id=``
then gives its owner a second, controlling client: all server events, and client events of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from app.api.realtime.connection import RealtimeConnection
from app.errors import ClientError


class CallsRegistry:
    """Running calls by their ids. Bounded by the number of sessions that the server allows."""

    def __init__(self) -> None:
        self._calls: dict[str, tuple[str, RealtimeConnection]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._calls

    @contextmanager
    def entered(self, call_id: str, owner: str, connection: RealtimeConnection) -> Iterator[None]:
        """The call can be found during the block. ``owner``: ``Grant.owner`` of whoever made it."""
        assert call_id not in self._calls, "call ids are unique"
        self._calls[call_id] = (owner, connection)
        try:
            yield
        finally:
            del self._calls[call_id]

    def find(self, call_id: str, owner: str) -> RealtimeConnection:
        """Raises ClientError when there is no such call, or it is somebody else's."""
        known_owner, connection = self._calls.get(call_id, ("", None))
        if connection is None or known_owner != owner:
            raise ClientError(
                f"There is no running call with the id {call_id[:80]!r}.",
                code="call_not_found",
                param="call_id",
            )
        return connection
