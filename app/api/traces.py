"""The recent turns and where their time went."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from app.observe.writer import TraceWriter

MAX_TRACES = 1000


def traces_router(traces: TraceWriter) -> APIRouter:
    """``GET /v1/traces?limit=``: newest first. The fields are those of ``TurnTrace.to_dict``."""
    router = APIRouter()

    @router.get("/v1/traces")
    def list_traces(
        request: Request, limit: Annotated[int, Query(ge=1, le=MAX_TRACES)] = 50
    ) -> dict[str, Any]:
        request.app.state.gatekeeper.check(request.headers)
        return {"object": "list", "data": traces.store.recent(limit)}

    return router
