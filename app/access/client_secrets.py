"""Short-lived keys (``ek_...``) that a client's own server hands to a browser.

Only digests are kept: what is in memory opens nothing. A secret opens sessions until it expires;
sessions that are open then go on. It opens nothing else (no traces, no further secrets).
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.errors import ClientError

PREFIX = "ek_"
MAX_SECRETS = 1_000


class TooManySecretsError(ClientError):
    """The store is full of secrets that have not expired yet (HTTP 429)."""

    code = "too_many_client_secrets"


@dataclass(frozen=True, slots=True)
class ClientSecret:
    """``owner``: whose key made it. ``session``: what its sessions start with, as JSON values."""

    owner: str
    session: dict[str, Any]
    expires_at_s: int


class ClientSecretStore:
    """At most ``max_secrets``; overflow rule: no more are made until some have expired.

    ``now_s``: a clock that nobody sets. One that is set back would make secrets last longer than
    was promised to those who gave them out; the date that clients are told is for them alone.
    """

    def __init__(
        self, max_secrets: int = MAX_SECRETS, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_secrets = max_secrets
        self._now_s = now_s
        self._secrets: dict[bytes, tuple[float, ClientSecret]] = {}  # with their ends by `now_s`

    def __len__(self) -> int:
        return len(self._secrets)

    def create(
        self, owner: str, session: dict[str, Any], lifetime_s: int
    ) -> tuple[str, ClientSecret]:
        """A new secret and its record. Raises TooManySecretsError."""
        now_s = self._now_s()
        if len(self._secrets) >= self._max_secrets:
            self._drop_expired(now_s)
        if len(self._secrets) >= self._max_secrets:
            raise TooManySecretsError(
                f"{self._max_secrets} client secrets are valid at the moment: try again later."
            )
        value = PREFIX + secrets.token_hex(24)
        record = ClientSecret(owner, session, int(time.time()) + lifetime_s)
        self._secrets[_digest(value)] = (now_s + lifetime_s, record)
        return value, record

    def find(self, value: str) -> ClientSecret | None:
        """The record of a secret that is valid now."""
        digest = _digest(value)
        ends_s, record = self._secrets.get(digest, (0.0, None))
        if record is not None and ends_s <= self._now_s():
            del self._secrets[digest]
            return None
        return record

    def _drop_expired(self, now_s: float) -> None:
        for digest in [d for d, (ends_s, _) in self._secrets.items() if ends_s <= now_s]:
            del self._secrets[digest]


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode()).digest()
