"""Who may call: Twilio's signature, one-time tokens for streams, and how many calls at once.

Query strings of a Twilio stream's URL never arrive, so its token travels as a <Parameter>.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit, urlunsplit

from starlette.datastructures import Headers

from app.access import AuthenticationError, Authenticator
from app.config import Settings
from app.errors import ClientError
from app.transports.telephony import Started

# Between Twilio's question and its stream lies less than a second, as a rule.
TOKEN_LIFETIME_S = 60.0
MAX_TOKENS = 1_000


class SignatureError(ClientError):
    """The request is not Twilio's, or was changed on its way (HTTP 403)."""

    code = "invalid_signature"


class TooManyCallsError(ClientError):
    """The account has as many calls as it may (a busy tone)."""

    code = "too_many_calls"


def twilio_signature(auth_token: str, url: str, params: Mapping[str, Sequence[str]]) -> str:
    """What ``X-Twilio-Signature`` must be for a POST of ``params`` to the public ``url``.

    Base64 of HMAC-SHA1 over the URL and the sorted parameters, each name with its values.
    """
    text = url + "".join(name + v for name in sorted(params) for v in sorted(set(params[name])))
    digest = hmac.new(auth_token.encode(), text.encode(), hashlib.sha1).digest()
    return base64.b64encode(digest).decode()


def check_twilio(
    auth_token: str, url: str, params: Mapping[str, Sequence[str]], signature: str
) -> None:
    """Raises SignatureError. Takes the same time however much of the signature is right.

    Twilio signs the URL with its port or without it, so both will do.
    """
    is_valid = False
    for candidate in (url, _with_port(url), _without_port(url)):
        expected = twilio_signature(auth_token, candidate, params)
        is_valid |= hmac.compare_digest(expected.encode(), signature.encode("utf-8", "replace"))
    if not is_valid:
        raise SignatureError(
            "X-Twilio-Signature does not fit. Behind a proxy, PARLEY_PHONE_PUBLIC_URL must be the "
            "address that Twilio was given."
        )


def _without_port(url: str) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    return urlunsplit(parts._replace(netloc=f"[{host}]" if ":" in host else host))


def _with_port(url: str) -> str:
    parts = urlsplit(url)
    if parts.port is not None:
        return url
    port = 443 if parts.scheme == "https" else 80
    return urlunsplit(parts._replace(netloc=f"{parts.netloc}:{port}"))


class CallTokens:
    """One token for each call that Twilio has announced; good once, for that call, for a minute.

    At most ``MAX_TOKENS``; overflow rule: the oldest is forgotten, its call is refused.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._calls: dict[bytes, tuple[str, float]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def create(self, call_id: str) -> str:
        """A new token."""
        now_s = self._now_s()
        for digest in [d for d, (_, ends_s) in self._calls.items() if ends_s <= now_s]:
            del self._calls[digest]
        if len(self._calls) >= MAX_TOKENS:
            del self._calls[next(iter(self._calls))]
        token = secrets.token_urlsafe(24)
        self._calls[_digest(token)] = (call_id, now_s + TOKEN_LIFETIME_S)
        return token

    def take(self, token: str, call_id: str) -> bool:
        """Whether ``token`` was made for this call; afterwards it is good for nothing."""
        known_id, ends_s = self._calls.pop(_digest(token), ("", 0.0))
        is_same = hmac.compare_digest(known_id.encode(), call_id.encode())
        return bool(known_id) and is_same and ends_s > self._now_s()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


class PhoneGuard:
    """Checks a stream before anything is done for it."""

    def __init__(self, settings: Settings, gatekeeper: Authenticator) -> None:
        self.tokens = CallTokens()
        self._settings = settings
        self._gatekeeper = gatekeeper
        self._num_calls: Counter[str] = Counter()
        keys = settings.api_keys
        self.operator = gatekeeper.check(_bearer(keys[0] if keys else "")).owner
        """Whose calls are those that no API key has made: of the first one."""

    @property
    def is_open(self) -> bool:
        """No secret of any kind was configured: anybody may call."""
        s = self._settings
        return not (s.api_keys or s.phone_token or s.phone_twilio_auth_token)

    def knows(self, offered: Iterable[str]) -> bool:
        """One of ``offered`` opens a call whatever its stream says."""
        return any(self._owner_of(token) is not None for token in offered)

    def check(self, started: Started, offered: Iterable[str]) -> str:
        """The owner of a call whose stream brought one of ``offered`` as its token.

        A parameter ``token`` of the stream counts as well. Raises AuthenticationError.
        """
        tokens = [*offered, started.parameters.get("token", "")]
        for token in tokens:
            if token and self.tokens.take(token, started.call_id):
                return self.operator
            if (owner := self._owner_of(token)) is not None:
                return owner
        if self.is_open:
            return self.operator
        raise AuthenticationError("The stream brings no valid token.")

    @contextmanager
    def counted(self, account: str) -> Iterator[None]:
        """A call of ``account`` for as long as the block runs. Raises TooManyCallsError."""
        limit = self._settings.phone_max_calls_per_account
        if self._num_calls[account] >= limit:
            raise TooManyCallsError(f"The account has {limit} calls, and may have no more.")
        self._num_calls[account] += 1
        try:
            yield
        finally:
            self._num_calls[account] -= 1
            if not self._num_calls[account]:
                del self._num_calls[account]

    def _owner_of(self, token: str) -> str | None:
        """None: it is neither the phone token, nor a key, nor a client secret."""
        expected = self._settings.phone_token
        if expected and hmac.compare_digest(_digest(expected), _digest(token)):
            return self.operator
        if token and self._settings.api_keys:
            with suppress(AuthenticationError):
                return self._gatekeeper.check_caller(_bearer(token)).owner
        return None


def tokens_in(headers: Headers) -> list[str]:
    """What ``Authorization`` brings along: a bearer token, or the password of Basic."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return [value.strip()]
    if scheme.lower() == "basic":
        try:
            _, _, password = base64.b64decode(value, validate=True).decode().partition(":")
        except ValueError:
            return []
        return [password]
    return []


def _bearer(key: str) -> Headers:
    return Headers({"authorization": f"Bearer {key}"} if key else {})
