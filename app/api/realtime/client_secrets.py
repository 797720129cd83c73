"""``POST /v1/realtime/client_secrets``: short-lived keys for browsers, bound to a configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from app.access import peer_of
from app.api.http.body import read_parsed
from app.api.http.json_input import json_object
from app.api.model_names import OWN_NAME, Names
from app.api.realtime.session_params import SessionParams, SessionState, to_config, to_wire
from app.api.validation import WireModel, checked, null_is
from app.conversation import Services, new_id, prepare_guides

MAX_BODY_BYTES = 128 * 1024


class ExpiresAfter(WireModel):
    """``expires_after``: seconds from now, as OpenAI has it."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Field(ge=10, le=7200)] = 600


class ClientSecretRequest(WireModel):
    """The body; both parts may be left out."""

    expires_after: Annotated[ExpiresAfter, null_is(ExpiresAfter())] = ExpiresAfter()
    session: Annotated[SessionParams, null_is(SessionParams())] = SessionParams()


def _parse(body: bytes) -> tuple[dict[str, Any], ClientSecretRequest]:
    data = json_object(body or b"{}")
    return data, checked(data, ClientSecretRequest)


def client_secrets_router(services: Services, names: Names) -> APIRouter:
    """The session is checked as a ``session.update`` would be, and shown as it will begin."""
    router = APIRouter()
    settings, server_tools = services.settings, services.tools.names

    @router.post("/v1/realtime/client_secrets")
    async def create(request: Request) -> dict[str, Any]:
        gatekeeper = request.app.state.gatekeeper
        grant = gatekeeper.check(request.headers)
        request.app.state.connections.check()
        owner = grant.limited_as(peer_of(request))
        request.app.state.rate_limits.check_session(owner)
        data, wanted = await read_parsed(request, MAX_BODY_BYTES, _parse)
        state = SessionState(settings, names, wanted.session.model or OWN_NAME, server_tools)
        state.params = state.merged(wanted.session, voice_locked=False)
        config = to_config(state.params)
        await prepare_guides(services.engine, services.tools, config, "session.tools")
        value, record = gatekeeper.client_secrets.create(
            grant.owner, data.get("session") or {}, wanted.expires_after.seconds, owner
        )
        shown = to_wire(new_id("sess"), state.params)
        return {"value": value, "expires_at": record.expires_at_s, "session": shown}

    return router
