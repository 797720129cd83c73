"""Who may connect: API keys, and which web pages may use a visitor's browser to do so."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from app.access.client_secrets import PREFIX as SECRET_PREFIX
from app.access.client_secrets import ClientSecretStore
from app.config import Settings
from app.errors import ClientError

# A browser cannot set headers on a WebSocket, so its key comes as a subprotocol.
REALTIME_SUBPROTOCOL = "realtime"
_KEY_SUBPROTOCOL = "openai-insecure-api-key."


class AuthenticationError(ClientError):
    """No key, or a wrong one (HTTP 401)."""

    code = "invalid_api_key"


class OriginError(ClientError):
    """A page of another site is trying to connect from a visitor's browser (HTTP 403)."""

    code = "origin_not_allowed"


class HostError(ClientError):
    """The request is for a name that is not ours (HTTP 421)."""

    code = "host_not_allowed"


@dataclass(frozen=True, slots=True)
class Principal:
    """What a request may do.

    ``owner`` stands for the key that it came with (a digest; the same for all where no key is asked
    for; then ``has_key`` is False). ``session``: the configuration bound to a client secret, as
    JSON values.
    """

    owner: str
    has_key: bool = True
    session: dict[str, Any] = field(default_factory=dict)

    def limited_as(self, peer: str) -> str:
        """Whose limits count: the key's; where none is asked for, the address's."""
        return self.owner if self.has_key else f"address {peer}"


_ANYONE = Principal("anyone", has_key=False)


def peer_of(request: HTTPConnection) -> str:
    """The address that a request comes from; "?" where the socket has none."""
    return request.client.host if request.client else "?"


class Authenticator:
    """Checks a request before anything is done for it."""

    def __init__(self, settings: Settings, client_secrets: ClientSecretStore | None = None) -> None:
        self.client_secrets = client_secrets or ClientSecretStore()
        self._digests = [_digest(key) for key in settings.api_keys]
        self._origins = {_normal(origin) for origin in settings.allowed_origins}
        self._any_origin = "*" in settings.allowed_origins
        self._hosts = {"localhost", settings.host.lower(), *map(str.lower, settings.allowed_hosts)}
        self._any_host = "*" in settings.allowed_hosts

    @property
    def origins(self) -> list[str]:
        """Those of other sites whose pages may connect; ``*`` among them: any."""
        return sorted(self._origins)

    def check(self, headers: Headers, subprotocols: Iterable[str] = ()) -> Principal:
        """For holders of an API key. Raises AuthenticationError or OriginError."""
        self.check_origin(headers)
        return self._check_key(_keys_in(headers, subprotocols))

    def check_caller(self, headers: Headers, subprotocols: Iterable[str] = ()) -> Principal:
        """For whoever wants to open a session: with an API key, or with a client secret.

        Raises AuthenticationError or OriginError.
        """
        self.check_origin(headers)
        keys = _keys_in(headers, subprotocols)
        secret = next((key for key in keys if key.startswith(SECRET_PREFIX)), None)
        if secret is None:
            return self._check_key(keys)
        record = self.client_secrets.find(secret)
        if record is None:
            raise AuthenticationError("The client secret is not valid, or has expired.")
        return Principal(record.owner, record.owner != _ANYONE.owner, record.session)

    def check_host(self, headers: Headers) -> None:
        """Raises HostError for a name that is neither local, nor an address, nor configured.

        A page of another site can make its own name point to this server (DNS rebinding); the
        browser then takes us for a part of that site, and only the Host header tells.
        """
        host = _split(f"//{headers.get('host', '')}").hostname or ""
        if self._any_host or host in self._hosts or host.endswith(".localhost"):
            return
        if not _is_address(host):
            raise HostError(
                f"This server does not go by the name {host[:200]!r}. If it should, its operator "
                "adds the name to PARLEY_ALLOWED_HOSTS."
            )

    def check_origin(self, headers: Headers) -> None:
        """Raises OriginError for a page of another site that is not allowed to connect."""
        origin = headers.get("origin")
        if origin is None or self._any_origin:
            return  # not a browser, or the operator does not mind
        normal = _normal(origin)
        if normal in self._origins:
            return
        # TLS may end at a proxy, so the schemes may differ; the host may not.
        host = _split(normal).netloc
        if host and host == headers.get("host", "").lower():
            return
        raise OriginError(f"Pages of {origin[:200]!r} may not connect to this server.")

    def _check_key(self, keys: list[str]) -> Principal:
        if not self._digests:
            return _ANYONE
        if not keys:
            raise AuthenticationError(
                "No API key was given. Send it as 'Authorization: Bearer KEY', or from a browser "
                f"as the subprotocol '{_KEY_SUBPROTOCOL}KEY'."
            )
        known = next((key for key in keys if self._is_known(key)), None)
        if known is None:
            raise AuthenticationError("The API key is not valid.")
        return Principal(_digest(known).hex()[:16])

    def _is_known(self, candidate: str) -> bool:
        """Takes the same time whichever key matches, and however much of one does."""
        digest, known = _digest(candidate), False
        for expected in self._digests:
            known |= hmac.compare_digest(digest, expected)
        return known


def _keys_in(headers: Headers, subprotocols: Iterable[str]) -> list[str]:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    keys = [key.strip()] if scheme.lower() == "bearer" and key.strip() else []
    return keys + [
        name.removeprefix(_KEY_SUBPROTOCOL)
        for name in subprotocols
        if name.startswith(_KEY_SUBPROTOCOL)
    ]


def _split(url: str) -> SplitResult:
    """Empty for what is no URL, such as an open bracket: it equals no name of ours."""
    try:
        return urlsplit(url)
    except ValueError:
        return SplitResult("", "", "", "", "")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _digest(key: str) -> bytes:
    """Of equal length for all keys, so that a comparison does not tell how long they are."""
    return hashlib.sha256(key.encode()).digest()


def _normal(origin: str) -> str:
    return origin.strip().rstrip("/").lower()
