"""Where the command line finds traces: the database of this machine's home, or a running server."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from app.errors import ParleyError
from app.observe import FILE_NAME, Page, Retention, TraceFilter, TraceQuery, TraceStore, Turn

_PAGE = 500
_TIMEOUT_S = 30.0


class TraceSourceError(ParleyError):
    """There are no traces here, or they cannot be reached."""

    code = "traces_unavailable"


class TraceSource(Protocol):
    """What the commands need."""

    def page(self, chosen: TraceFilter, limit: int, cursor: int | None = None) -> Page:
        """Turns, newest first."""
        ...

    def get(self, turn_id: str) -> Turn | None:
        """One turn."""
        ...

    def stats(self, chosen: TraceFilter, compare_with: TraceFilter | None) -> dict[str, Any]:
        """See ``TraceQuery.stats``."""
        ...


class LocalTraces:
    """The database in ``home``. A server may be writing to it."""

    def __init__(self, home: Path) -> None:
        """Raises TraceSourceError when there is none, ConfigError when it cannot be read."""
        path = home / FILE_NAME
        if not path.is_file():
            raise TraceSourceError(
                f"there are no traces in {path}; a server with PARLEY_TRACE_DB=true writes them, "
                "and --url asks one that keeps them elsewhere"
            )
        self._query = TraceQuery(TraceStore(path, Retention()))

    def page(self, chosen: TraceFilter, limit: int, cursor: int | None = None) -> Page:
        """See ``TraceSource``."""
        return self._query.page(chosen, limit, cursor)

    def get(self, turn_id: str) -> Turn | None:
        """See ``TraceSource``."""
        return self._query.get(turn_id)

    def stats(self, chosen: TraceFilter, compare_with: TraceFilter | None) -> dict[str, Any]:
        """See ``TraceSource``."""
        return self._query.stats(chosen, compare_with=compare_with)


class RemoteTraces:
    """A server at ``url``. All methods raise TraceSourceError when it does not answer well."""

    def __init__(self, url: str, api_key: str | None) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise TraceSourceError(f"--url must begin with http:// or https://, got {url!r}")
        self._url = url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def page(self, chosen: TraceFilter, limit: int, cursor: int | None = None) -> Page:
        """See ``TraceSource``."""
        body = self._ask("", {**_parameters(chosen), "limit": limit, "cursor": cursor})
        return Page(body["data"], body["next_cursor"])

    def get(self, turn_id: str) -> Turn | None:
        """See ``TraceSource``."""
        try:
            return self._ask(f"/{urllib.parse.quote(turn_id, safe='')}", {})
        except TraceSourceError as error:
            if error.code == "trace_not_found":
                return None
            raise

    def stats(self, chosen: TraceFilter, compare_with: TraceFilter | None) -> dict[str, Any]:
        """See ``TraceSource``."""
        parameters = _parameters(chosen)
        if compare_with is not None:
            other = _parameters(compare_with)
            parameters |= {f"compare_{name}": other[name] for name in ("since", "until")}
        return self._ask("/stats", parameters)

    def _ask(self, path: str, parameters: dict[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in parameters.items() if value is not None}
        url = f"{self._url}/v1/traces{path}?{urllib.parse.urlencode(given)}"
        request = urllib.request.Request(url, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                body = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error) from error
        except OSError as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            known = isinstance(reason, OSError) and reason.strerror
            raise TraceSourceError(f"cannot reach {self._url}: {known or reason}") from error
        except ValueError as error:
            raise TraceSourceError(
                f"{self._url} does not answer as a server should: {error}"
            ) from error
        if not isinstance(body, dict):
            raise TraceSourceError(f"{self._url} does not answer as a Parley server does")
        return body


def all_turns(source: TraceSource, chosen: TraceFilter) -> Iterator[Turn]:
    """Every turn, newest first, in pages."""
    cursor = None
    while True:
        page = source.page(chosen, _PAGE, cursor)
        yield from page.turns
        cursor = page.next_cursor
        if cursor is None:
            return


def _parameters(chosen: TraceFilter) -> dict[str, Any]:
    fields = asdict(chosen)
    return {
        "conversation": fields["session_id"],
        "outcome": ",".join(chosen.outcomes) or None,
        "min_voice_to_voice_ms": fields["min_voice_to_voice_ms"],
        "since": None if chosen.since_ms is None else chosen.since_ms / 1000,
        "until": None if chosen.until_ms is None else chosen.until_ms / 1000,
        "over_budget": "true" if chosen.over_budget else None,
        "engine": chosen.engine,
    }


def _refusal(error: urllib.error.HTTPError) -> TraceSourceError:
    try:
        told = json.load(error)["error"]
        return TraceSourceError(str(told["message"]), code=told["code"])
    except (ValueError, KeyError, TypeError):
        return TraceSourceError(f"the server answered {error.code} {error.reason}")
