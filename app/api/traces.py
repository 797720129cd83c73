"""The turns and where their time went: lists, statistics, and what clients report.

The database is read and answers are rendered in worker threads, not on the event loop: most
handlers are plain functions.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import FileResponse
from pydantic import Field

from app.api.http.body import read_parsed
from app.api.validation import WireModel, parse_body
from app.errors import ClientError
from app.observe import LANES, OUTCOMES, TraceFilter, TraceQuery, TraceWriter, period_ms

MAX_TRACES = 1000
_MAX_MS = 3_600_000.0
_MAX_REPORT_BYTES = 2048

Limit = Annotated[int, Query(ge=1, le=MAX_TRACES)]
Id = Annotated[str | None, Query(max_length=100)]
Time = Annotated[str | None, Query(max_length=40)]


class PlayoutReport(WireModel):
    """What a client's player has measured of one answer; milliseconds.

    ``first_audio_delay_ms`` is from the receipt of the first audible sample to its sound,
    ``gap_ms`` the silence inside the answer in ``num_gaps`` gaps, ``played_ms`` what was heard.
    """

    first_audio_delay_ms: float | None = Field(default=None, ge=0.0, le=_MAX_MS)
    gap_ms: float | None = Field(default=None, ge=0.0, le=_MAX_MS)
    num_gaps: int | None = Field(default=None, ge=0, le=1_000_000)
    played_ms: float | None = Field(default=None, ge=0.0, le=_MAX_MS)


class TraceNotFoundError(ClientError):
    """There is no such turn, or it is gone already (HTTP 404)."""

    code = "trace_not_found"


def chosen_turns(
    conversation: Id = None,
    outcome: Id = None,
    min_voice_to_voice_ms: Annotated[float | None, Query(ge=0, le=_MAX_MS)] = None,
    since: Time = None,
    until: Time = None,
    over_budget: bool = False,
    engine: Id = None,
) -> TraceFilter:
    """The filter of a query. Raises ClientError for an outcome, a time or an engine that does not
    exist."""
    if engine and engine not in LANES:
        raise ClientError(
            f"Invalid value for 'engine': {engine!r}. Expected {' or '.join(LANES)}.",
            code="invalid_value",
            param="engine",
        )
    outcomes = tuple(name.strip() for name in outcome.split(",")) if outcome else ()
    for name in outcomes:
        if name not in OUTCOMES:
            raise ClientError(
                f"Invalid value for 'outcome': {name!r}. Expected one or more of "
                f"{', '.join(OUTCOMES)}, with commas between them.",
                code="invalid_value",
                param="outcome",
            )
    since_ms, until_ms = period_ms(since, until)
    return TraceFilter(
        session_id=conversation or None,
        outcomes=outcomes,
        min_voice_to_voice_ms=min_voice_to_voice_ms,
        since_ms=since_ms,
        until_ms=until_ms,
        over_budget=over_budget,
        engine=engine or None,
    )


def _checked(request: Request) -> None:
    request.app.state.gatekeeper.check(request.headers)


def _takes(*params: str) -> Callable[[Request], None]:
    """Lets the filters and ``params`` through: a misspelt filter would filter nothing."""
    known = {*inspect.signature(chosen_turns).parameters, *params}

    def refuse_others(request: Request) -> None:
        for name in request.query_params:
            if name not in known:
                raise ClientError(
                    f"Unknown parameter: {name[:100]!r}. Expected {', '.join(sorted(known))}.",
                    code="unknown_parameter",
                    param=name[:100],
                )

    return refuse_others


Chosen = Annotated[TraceFilter, Depends(chosen_turns)]


def traces_router(traces: TraceWriter) -> APIRouter:
    """The routes under ``/v1/traces``. The fields of a turn are those of ``TurnTrace.to_dict``."""
    router = APIRouter(prefix="/v1/traces", dependencies=[Depends(_checked)])
    query = TraceQuery(traces.store)

    @router.get("", dependencies=[Depends(_takes("limit", "cursor"))])
    def list_traces(
        chosen: Chosen,
        limit: Limit = 50,
        cursor: Annotated[int | None, Query(ge=0, le=2**63 - 1)] = None,
    ) -> Response:
        page = query.page(chosen, limit, cursor)
        return _rendered(
            {
                "object": "list",
                "data": page.turns,
                "has_more": page.next_cursor is not None,
                "next_cursor": page.next_cursor,
            }
        )

    @router.get("/conversations", dependencies=[Depends(_takes("limit"))])
    def list_conversations(chosen: Chosen, limit: Limit = 50) -> Response:
        return _rendered({"object": "list", "data": query.conversations(chosen, limit)})

    @router.get(
        "/stats", dependencies=[Depends(_takes("bucket_s", "compare_since", "compare_until"))]
    )
    def stats(
        chosen: Chosen,
        bucket_s: Annotated[int | None, Query(ge=1, le=31_536_000)] = None,
        compare_since: Time = None,
        compare_until: Time = None,
    ) -> Response:
        compare_with = None
        if compare_since is not None or compare_until is not None:
            since_ms, until_ms = period_ms(
                compare_since, compare_until, ("compare_since", "compare_until")
            )
            compare_with = replace(chosen, since_ms=since_ms, until_ms=until_ms)
        return _rendered(query.stats(chosen, bucket_s=bucket_s, compare_with=compare_with))

    @router.get("/{turn_id}")
    def get_trace(turn_id: str) -> Response:
        turn = query.get(turn_id)
        if turn is None:
            raise _not_found(turn_id)
        return _rendered(turn)

    @router.get("/{turn_id}/audio")
    def get_audio(turn_id: str) -> FileResponse:
        path = traces.recordings.path(turn_id) if traces.recordings is not None else None
        if path is None:
            raise TraceNotFoundError(
                f"There is no recording of a turn {turn_id[:100]!r}.", param="turn_id"
            )
        return FileResponse(path, media_type="audio/wav", headers={"cache-control": "no-store"})

    @router.post("/{turn_id}/playout")
    async def report_playout(turn_id: str, request: Request) -> dict[str, Any]:
        parse = partial(parse_body, kind=PlayoutReport)
        report = await read_parsed(request, _MAX_REPORT_BYTES, parse)
        if not await asyncio.to_thread(_note, traces, turn_id, report):
            raise _not_found(turn_id)
        return {"object": "trace.playout", "turn_id": turn_id}

    return router


def _rendered(answer: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _note(traces: TraceWriter, turn_id: str, report: PlayoutReport) -> bool:
    traces.flush()  # the client may be faster than the writer
    return traces.store.add_client_report(turn_id, report.model_dump(exclude_none=True))


def _not_found(turn_id: str) -> TraceNotFoundError:
    return TraceNotFoundError(f"There is no trace of a turn {turn_id[:100]!r}.", param="turn_id")
