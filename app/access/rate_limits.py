"""How fast one key may open sessions, ask for completions and send messages.

Sessions and requests above the limit are refused with a hint when to come again. Messages above it
are read later, so that nothing that was sent is lost: a caller who sends too much waits, nobody
else does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from app.config import Settings
from app.errors import ClientError

logger = logging.getLogger(__name__)

# Owners that were seen last; who is forgotten begins with full buckets. Whose buckets are full by
# themselves is forgotten anyway: each phone call is an owner.
MAX_OWNERS = 10_000
# A message of this length counts as one, a longer one as many.
BYTES_A_MESSAGE = 16 * 1024
_MESSAGE_BURST_S = 2.0


@dataclass(frozen=True, slots=True)
class RateState:
    """How much of a limit is left: ``limit`` at most, and in how many seconds it is full again."""

    limit: int
    remaining: int
    reset_s: float


class RateLimitedError(ClientError):
    """Too many requests of one key (HTTP 429)."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TokenBucket:
    """``rate_per_s`` tokens a second, at most ``burst`` of them saved up."""

    def __init__(self, rate_per_s: float, burst: float, now_s: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._tokens = burst
        self._at_s = now_s

    def try_take(self, now_s: float) -> float:
        """Take one if there is one. Returns 0, or the seconds until there is."""
        self._refill(now_s)
        if self._tokens < 1.0:
            return (1.0 - self._tokens) / self._rate_per_s
        self._tokens -= 1.0
        return 0.0

    def take(self, cost: float, now_s: float) -> float:
        """Take ``cost`` in any case. Returns the seconds after which the debt is paid."""
        self._refill(now_s)
        self._tokens -= cost
        return max(0.0, -self._tokens / self._rate_per_s)

    def state(self, now_s: float) -> RateState:
        """What is left at this moment."""
        self._refill(now_s)
        missing = self._burst - self._tokens
        return RateState(int(self._burst), max(0, int(self._tokens)), missing / self._rate_per_s)

    def is_full(self, now_s: float) -> bool:
        """Nothing is owed: a new bucket would be the same."""
        self._refill(now_s)
        return self._tokens >= self._burst

    def _refill(self, now_s: float) -> None:
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._rate_per_s)
        self._at_s = now_s


@dataclass(frozen=True, slots=True)
class _Buckets:
    """What one owner may do."""

    sessions: TokenBucket
    chats: TokenBucket
    messages: TokenBucket

    def are_full(self, now_s: float) -> bool:
        return all(b.is_full(now_s) for b in (self.sessions, self.chats, self.messages))


class RateLimits:
    """Sessions, chat requests and messages of each owner."""

    def __init__(self, settings: Settings, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._sessions_per_minute = settings.max_sessions_per_minute
        self._chats_per_minute = settings.max_chat_requests_per_minute
        self._messages_per_s = settings.max_messages_per_s
        self._clock_s = clock_s
        self._buckets: OrderedDict[str, _Buckets] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def check_session(self, owner: str) -> None:
        """Count a new session. Raises RateLimitedError."""
        self._take(self._of(owner).sessions, f"{self._sessions_per_minute} sessions")

    def check_chat(self, owner: str) -> None:
        """Count a new chat request. Raises RateLimitedError."""
        self._take(self._of(owner).chats, f"{self._chats_per_minute} chat requests")

    def _take(self, bucket: TokenBucket, limit: str) -> None:
        wait_s = bucket.try_take(self._clock_s())
        if wait_s:
            raise RateLimitedError(
                f"More than {limit} a minute: try again in {math.ceil(wait_s)} s.", wait_s
            )

    def pacer(self, owner: str) -> RateLimiter:
        """For one connection of ``owner``."""
        return RateLimiter(self, owner)

    def messages_of(self, owner: str) -> TokenBucket:
        """What ``owner`` may send, over all its connections."""
        return self._of(owner).messages

    def now_s(self) -> float:
        """On the clock of the buckets."""
        return self._clock_s()

    def _of(self, owner: str) -> _Buckets:
        if owner not in self._buckets:
            now_s, per_s = self._clock_s(), self._messages_per_s
            self._forget_idle(now_s)
            self._buckets[owner] = _Buckets(
                TokenBucket(self._sessions_per_minute / 60, self._sessions_per_minute, now_s),
                TokenBucket(self._chats_per_minute / 60, self._chats_per_minute, now_s),
                TokenBucket(per_s, per_s * _MESSAGE_BURST_S, now_s),
            )
            if len(self._buckets) > MAX_OWNERS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(owner)
        return self._buckets[owner]

    def _forget_idle(self, now_s: float) -> None:
        """Those who were seen longest ago, up to one who still owes something."""
        while self._buckets:
            owner, buckets = next(iter(self._buckets.items()))
            if not buckets.are_full(now_s):
                return
            del self._buckets[owner]


class RateLimiter:
    """What a connection awaits with the length of each message, before it reads the next."""

    def __init__(self, limits: RateLimits, owner: str) -> None:
        self._limits = limits
        self._owner = owner
        self._was_told = False

    async def __call__(self, num_bytes: int) -> None:
        """Count a message of ``num_bytes``; returns when its turn has come."""
        messages = self._limits.messages_of(self._owner)
        wait_s = messages.take(1 + num_bytes // BYTES_A_MESSAGE, self._limits.now_s())
        if wait_s:
            if not self._was_told:
                self._was_told = True
                logger.warning("client sends too fast; it is read later")
            await asyncio.sleep(wait_s)

    def owe(self, num_bytes: int) -> None:
        """Count an answer of ``num_bytes`` as well: the next message waits until that is paid."""
        messages = self._limits.messages_of(self._owner)
        messages.take(num_bytes // BYTES_A_MESSAGE, self._limits.now_s())

    def state(self) -> RateState:
        """How many messages may be sent at once now."""
        return self._limits.messages_of(self._owner).state(self._limits.now_s())
