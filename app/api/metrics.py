"""``GET /metrics`` for Prometheus."""

from __future__ import annotations

import asyncio
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.conversation import Services
from llm_core import EngineStats, LlmError

# A scrape must not wait for an engine that hangs; then its figures are missing, which alerts.
_ENGINE_TIMEOUT_S = 1.0
_NO_STATS = float("nan")


class EngineGauges:
    """The engine's own figures, as of the last scrape; not a number while it does not answer. Its
    sums begin anew with its process, as those of any process do."""

    def __init__(self, services: Services) -> None:
        self._engine = services.engine
        self._stats: EngineStats | None = None
        for name, about, field in (
            ("llm_running_requests", "Requests that the engine works on.", "num_running"),
            ("llm_waiting_requests", "Requests in the engine's queue.", "num_waiting"),
            ("llm_open_drafts", "Prompts that may still change.", "num_drafts"),
            ("llm_cached_tokens", "Tokens in the KV cache.", "cached_tokens"),
            ("llm_kv_blocks", "Blocks of the KV cache.", "num_blocks"),
            ("llm_kv_free_blocks", "Of them, those no request holds.", "num_free_blocks"),
            ("llm_kv_pinned_blocks", "Of them, those kept for good.", "num_pinned_blocks"),
        ):
            services.metrics.gauge(name, about, partial(self._value, field))
        for name, about, field in (
            ("llm_cache_lookup_tokens", "Tokens of prompts sought in it.", "total_prompt_tokens"),
            ("llm_cache_hit_tokens", "Tokens of prompts found in it.", "total_hit_tokens"),
            ("llm_evicted_blocks", "Blocks whose tokens were forgotten.", "total_evicted_blocks"),
            ("llm_preemptions", "Requests set back to waiting.", "total_preempted"),
            ("llm_timeouts", "Requests that ran out of their time.", "total_timeouts"),
            ("llm_downgraded", "Requests that gave something up.", "total_downgraded"),
        ):
            services.metrics.counter(name, about, partial(self._value, field))
        for name, about, field in (
            ("llm_drafted_tokens", "Guesses that the engine verified.", "num_drafted"),
            ("llm_accepted_drafts", "Of them, those that were right.", "num_accepted"),
            ("llm_verified_steps", "Steps of a sequence that verified guesses.", "num_steps"),
        ):
            services.metrics.counter(name, about, partial(self._speculation, field))
        services.metrics.gauge(
            "llm_up", "1 while the engine process runs.", lambda: float(self._engine.is_alive)
        )
        rollout = services.rollout
        services.metrics.gauge(
            "canary_share",
            "Of the conversations, those that a second engine gets now.",
            lambda: rollout.share if rollout is not None and rollout.is_running else 0.0,
        )
        services.metrics.gauge(
            "canary_withdrawn",
            "1 when the second engine was withdrawn since the start.",
            lambda: float(rollout is not None and not rollout.is_running),
        )

    async def refresh(self) -> None:
        """Ask the engine."""
        self._stats = None
        if not self._engine.is_alive:
            return
        try:
            async with asyncio.timeout(_ENGINE_TIMEOUT_S):
                self._stats = await self._engine.stats()
        except (TimeoutError, LlmError):
            return  # the gauges say so: they are not a number

    def _speculation(self, field: str) -> float:
        return _NO_STATS if self._stats is None else float(getattr(self._stats.speculation, field))

    def _value(self, field: str) -> float:
        return _NO_STATS if self._stats is None else float(getattr(self._stats, field))


def metrics_router(services: Services) -> APIRouter:
    """The route, as ``PARLEY_METRICS`` wants it: behind the key, open, or not there at all."""
    router = APIRouter()
    mode = services.settings.metrics
    if mode == "off":
        return router
    engine = EngineGauges(services)

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        if mode == "key":
            request.app.state.gatekeeper.check(request.headers)
        await engine.refresh()
        content, content_type = services.metrics.exposition(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": content_type})

    return router
