"""What no route has answered: the files of the web page, and refusals that say what is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_FILE_METHODS = "GET, HEAD"


class Pages(StaticFiles):
    """The files of a folder. Revalidated on every load, so that an upgraded server is seen at once.

    Mounted at the root it takes whatever no route has taken, also a route's path with another
    method. Such a request gets 405 with ``Allow`` (RFC 9110, section 15.5.6), a request without an
    upgrade for a path that speaks WebSocket gets 426 (15.5.22), anything else that is no file 404.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises HTTPException for what is refused."""
        routes: Iterable[BaseRoute] = scope["app"].routes
        if scope["type"] == "http":
            _refuse_known_path(scope, routes)
        await super().__call__(scope, receive, send)

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The file, or 404; other methods than GET and HEAD get 405 where there is one."""
        if scope["method"] in ("GET", "HEAD"):
            return await super().get_response(path, scope)
        await super().get_response(path, {**scope, "method": "HEAD"})  # or 404
        raise HTTPException(405, headers={"Allow": _FILE_METHODS})

    def file_response(self, *args: Any, **kwargs: Any) -> Any:
        """As in Starlette, with its way of caching."""
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


def _refuse_known_path(scope: Scope, routes: Iterable[BaseRoute]) -> None:
    """Raises HTTPException when a route has this path, and takes no such request."""
    own = [route for route in routes if not isinstance(route, Mount)]

    def is_taken(**changed: str) -> bool:
        return any(route.matches({**scope, **changed})[0] is Match.FULL for route in own)

    methods = [method for method in _METHODS if is_taken(method=method)]
    if methods:
        raise HTTPException(405, headers={"Allow": ", ".join(methods)})
    if is_taken(type="websocket"):
        raise HTTPException(
            426,
            "This path speaks WebSocket: the request must ask for an upgrade.",
            headers={"Upgrade": "websocket", "Connection": "Upgrade"},
        )
