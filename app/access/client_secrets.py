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

from pydantic_core import from_json, to_json

from app.errors import ClientError

PREFIX = "ek_"
MAX_SECRETS = 1_000
# One owner may hold this fraction of them: 1 / n.
_SHARE = 4
# Of the session that is kept with each.
MAX_SESSION_BYTES = 64 * 1024


class TooManySecretsError(ClientError):
    """There are too many secrets that have not expired yet (HTTP 429). ``retry_after_s``: until the
    first of them does."""

    code = "too_many_client_secrets"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class ClientSecret:
    """``owner``: whose key made it. ``session_json``: the session that its sessions start with."""

    owner: str
    session_json: bytes
    expires_at_s: int

    @property
    def session(self) -> dict[str, Any]:
        """As JSON values."""
        session: dict[str, Any] = from_json(self.session_json)
        return session


@dataclass(frozen=True, slots=True)
class _Kept:
    """``ends_s`` is by the store's clock. ``counted_as``: in whose share it is."""

    ends_s: float
    counted_as: str
    record: ClientSecret


class ClientSecretStore:
    """At most ``max_secrets``, a quarter of them for one owner; overflow rule: no more are made
    until some have expired.

    ``now_s``: a clock that nobody sets. One that is set back would make secrets last longer than
    was promised to those who gave them out; the date that clients are told is for them alone.
    """

    def __init__(
        self, max_secrets: int = MAX_SECRETS, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_secrets = max_secrets
        self._now_s = now_s
        self._secrets: dict[bytes, _Kept] = {}

    def __len__(self) -> int:
        return len(self._secrets)

    def create(
        self, owner: str, session: dict[str, Any], lifetime_s: int, counted_as: str | None = None
    ) -> tuple[str, ClientSecret]:
        """A new secret and its record. ``counted_as``: in whose share it is (None: ``owner``'s).

        Raises TooManySecretsError, and ClientError when ``session`` is too long.
        """
        now_s = self._now_s()
        session_json = to_json(session)
        if len(session_json) > MAX_SESSION_BYTES:
            raise ClientError(
                f"Invalid value for 'session': it may have at most {MAX_SESSION_BYTES} bytes.",
                code="invalid_value",
                param="session",
            )
        counted_as = counted_as or owner
        self._check_room(now_s, counted_as)
        value = PREFIX + secrets.token_hex(24)
        record = ClientSecret(owner, session_json, int(time.time()) + lifetime_s)
        self._secrets[_digest(value)] = _Kept(now_s + lifetime_s, counted_as, record)
        return value, record

    def find(self, value: str) -> ClientSecret | None:
        """The record of a secret that is valid now."""
        digest = _digest(value)
        kept = self._secrets.get(digest)
        if kept is None:
            return None
        if kept.ends_s <= self._now_s():
            del self._secrets[digest]
            return None
        return kept.record

    def _check_room(self, now_s: float, counted_as: str) -> None:
        """Raises TooManySecretsError."""
        self._secrets = {d: kept for d, kept in self._secrets.items() if kept.ends_s > now_s}
        of_all = [kept.ends_s for kept in self._secrets.values()]
        if len(of_all) >= self._max_secrets:
            raise TooManySecretsError(
                f"{self._max_secrets} client secrets are valid at the moment: try again later.",
                min(of_all) - now_s,
            )
        of_owner = [k.ends_s for k in self._secrets.values() if k.counted_as == counted_as]
        if len(of_owner) >= -(-self._max_secrets // _SHARE):
            raise TooManySecretsError(
                f"You have {len(of_owner)} client secrets that are valid: try again when one has "
                "expired.",
                min(of_owner) - now_s,
            )


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode()).digest()
