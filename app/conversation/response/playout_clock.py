"""When audio may be sent, and how much of it has been heard, by the clock.

For transports that hand audio to a player they cannot ask (a WebSocket client): the player is
assumed to start with the first chunk and to play without a break while it has something to play.

    played   [0, played) heard | [played, sent) in the player's buffer | the rest is not sent yet
"""

from __future__ import annotations

_NS = 1_000_000_000


class PlayoutClock:
    """Playout position of one response in samples of ``rate`` Hz."""

    def __init__(self, rate: int, lead_ms: int) -> None:
        self.rate = rate
        self.sent_samples = 0
        self.gap_ns = 0
        """Silence inside the reply because audio came too late."""
        self._lead_ns = lead_ms * 1_000_000
        self._ends_ns: int | None = None
        self._was_held = False

    def hold(self, now_ns: int) -> int:
        """The player falls silent and forgets what it has not played.

        Returns how much was heard; what is sent from now on follows that.
        """
        self.sent_samples = self.played_samples(now_ns)
        if self._ends_ns is not None:
            self._ends_ns = min(self._ends_ns, now_ns)
        self._was_held = True
        return self.sent_samples

    def sent(self, num_samples: int, now_ns: int) -> int:
        """Note that a chunk was sent; returns the instant at which it starts to sound."""
        starts_ns = now_ns
        if self._ends_ns is not None:
            starts_ns = max(now_ns, self._ends_ns)
            if not self._was_held:
                self.gap_ns += starts_ns - self._ends_ns
        self._was_held = False
        self.sent_samples += num_samples
        self._ends_ns = starts_ns + num_samples * _NS // self.rate
        return starts_ns

    def wait_s(self, now_ns: int) -> float:
        """Seconds until the buffer in the player has shrunk to the lead; 0 if it has."""
        if self._ends_ns is None:
            return 0.0
        return max(0, self._ends_ns - self._lead_ns - now_ns) / _NS

    def played_samples(self, now_ns: int) -> int:
        """How many samples have been heard by now."""
        if self._ends_ns is None:
            return 0
        unplayed = -(-max(0, self._ends_ns - now_ns) * self.rate // _NS)
        return max(0, self.sent_samples - unplayed)

    def remaining_s(self, now_ns: int) -> float:
        """Seconds until the player has played all that it has."""
        return 0.0 if self._ends_ns is None else max(0, self._ends_ns - now_ns) / _NS

    def is_playing(self, now_ns: int) -> bool:
        """The player still has audio to play."""
        return self._ends_ns is not None and now_ns < self._ends_ns
