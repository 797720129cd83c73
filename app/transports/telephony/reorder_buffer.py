"""Numbered audio in its order: late pieces are put in their place, missing ones are named.

What is next in line leaves at once; behind a hole a few pieces wait for it to be filled. No clock:
a provider sends 50 pieces a second, so the number of those that wait says how long.

    ... emitted | next: missing | held held . held |
"""

from __future__ import annotations

from dataclasses import dataclass

# 60 ms at 20 ms a piece: what reordering on the way to us takes at most, as a rule.
MAX_HELD = 3
# A jump of more, either way, is a new stream and not loss.
_MAX_JUMP = 250


@dataclass(frozen=True, slots=True)
class Missing:
    """So many pieces never came."""

    num_pieces: int


class InOrder:
    """One stream's."""

    def __init__(self) -> None:
        self._next: int | None = None
        self._held: dict[int, bytes] = {}

    def feed(self, chunk: int | None, payload: bytes) -> list[bytes | Missing]:
        """What can leave now that ``payload`` has come; without a number it leaves at once."""
        if chunk is None:
            return [payload]
        if self._next is None or abs(chunk - self._next) > _MAX_JUMP:
            rest: list[bytes | Missing] = [self._held[n] for n in sorted(self._held)]
            self._held.clear()
            self._next = chunk + 1
            return [*rest, payload]
        if chunk < self._next or chunk in self._held:
            return []  # too late, or twice
        self._held[chunk] = payload
        out = self._take_ready()
        if len(self._held) > MAX_HELD:
            first = min(self._held)
            out.append(Missing(first - self._next))
            self._next = first
            out += self._take_ready()
        return out

    def _take_ready(self) -> list[bytes | Missing]:
        out: list[bytes | Missing] = []
        while self._next is not None and self._next in self._held:
            out.append(self._held.pop(self._next))
            self._next += 1
        return out
