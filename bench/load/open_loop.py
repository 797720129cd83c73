"""Open-loop load: requests come when the trace says, however long the ones before them take.

A closed loop (the next request when the last one is answered) slows down with the server and so
never shows an overload. Latency counts from the instant at which a request was due, also when the
generator itself was late, so nothing is left out where it hurts ("coordinated omission").
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.clock import Clock
from app.errors import ParleyError
from bench.harness.figures import percentiles
from bench.load.trace import Arrival, at_rate

# Of one search: more would double a rate, or halve it, beyond all that a machine serves.
_MAX_STEPS = 8


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request may take to count as good; None: not asked for. Milliseconds."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    v2v_ms: float | None = None

    def are_met_by(self, served: Served) -> bool:
        """Whether all was in time; a figure that is missing is not."""
        pairs = (
            (self.ttft_ms, served.ttft_ms),
            (self.tpot_ms, served.tpot_ms),
            (self.v2v_ms, served.v2v_ms),
        )
        return not served.error and all(
            limit is None or (took is not None and took <= limit) for limit, took in pairs
        )


@dataclass(frozen=True, slots=True)
class Served:
    """What came of one request. ``ttft_ms`` counts from the instant at which it was due."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    v2v_ms: float | None = None
    num_tokens: int = 0
    error: str = ""


Serve = Callable[[int, Arrival, int], Awaitable[Served]]
"""Serves the n-th arrival, due at an instant in nanoseconds. Errors are in what it returns."""


@dataclass(frozen=True, slots=True)
class Step:
    """One pass over the arrivals at one rate, without those of its warm-up."""

    rate_per_s: float
    num_served: int
    num_good: int
    num_tokens: int
    took_s: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    v2v_ms: dict[str, float]
    generator_late_ms: dict[str, float]
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def good_share(self) -> float:
        """Of the requests, those within all targets."""
        return self.num_good / self.num_served

    @property
    def goodput_per_s(self) -> float:
        """Requests a second within all targets."""
        return self.rate_per_s * self.good_share

    def to_dict(self) -> dict[str, Any]:
        """For JSON; figures that nothing was measured for are left out."""
        found: dict[str, Any] = {
            "rate_per_s": round(self.rate_per_s, 3),
            "requests": self.num_served,
            "good_share": round(self.good_share, 4),
            "goodput_per_s": round(self.goodput_per_s, 3),
            "tokens_per_s": round(self.num_tokens / self.took_s, 1) if self.took_s else 0.0,
            "generator_late_ms": self.generator_late_ms,
            "errors": self.errors,
        }
        for name in ("ttft_ms", "tpot_ms", "v2v_ms"):
            values: dict[str, float] = getattr(self, name)
            if values["n"]:
                found[name] = values
        return found


class OpenLoop:
    """Plays arrivals at a rate of choice, the first ``num_warm_up`` of them uncounted."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        serve: Serve,
        targets: Targets,
        clock: Clock,
        *,
        num_warm_up: int,
    ) -> None:
        """Raises ParleyError when the warm-up leaves nothing to count."""
        if num_warm_up >= len(arrivals):
            raise ParleyError(
                f"{len(arrivals)} requests with a warm-up of {num_warm_up} leave none to count"
            )
        self._arrivals = arrivals
        self._serve = serve
        self._targets = targets
        self._clock = clock
        self._num_warm_up = num_warm_up

    async def step(self, rate_per_s: float) -> Step:
        """All arrivals once; returns when all are served."""
        start_ns = self._clock.now_ns()
        served: dict[int, Served] = {}
        late_ms: list[float] = []

        async def run(number: int, arrival: Arrival, due_ns: int) -> None:
            served[number] = await self._serve(number, arrival, due_ns)

        async with asyncio.TaskGroup() as requests:
            for number, arrival in enumerate(at_rate(self._arrivals, rate_per_s)):
                due_ns = start_ns + int(arrival.at_s * 1e9)
                await self._clock.sleep(max(0, due_ns - self._clock.now_ns()) / 1e9)
                late_ms.append(max(0, self._clock.now_ns() - due_ns) / 1e6)
                requests.create_task(run(number, arrival, due_ns))
        took_s = (self._clock.now_ns() - start_ns) / 1e9
        counted = [served[number] for number in range(self._num_warm_up, len(self._arrivals))]
        return Step(
            rate_per_s=rate_per_s,
            num_served=len(counted),
            num_good=sum(self._targets.are_met_by(one) for one in counted),
            num_tokens=sum(one.num_tokens for one in served.values()),
            took_s=took_s,
            ttft_ms=percentiles([s.ttft_ms for s in counted if s.ttft_ms is not None]),
            tpot_ms=percentiles([s.tpot_ms for s in counted if s.tpot_ms is not None]),
            v2v_ms=percentiles([s.v2v_ms for s in counted if s.v2v_ms is not None]),
            generator_late_ms=percentiles(late_ms),
            errors=dict(Counter(one.error for one in counted if one.error)),
        )


@dataclass(frozen=True, slots=True)
class Saturation:
    """``rate_per_s``: the highest rate that was held, None when none was; the point lies between it
    and ``above_per_s``, the lowest one that was not (None: all that were tried were held)."""

    rate_per_s: float | None
    above_per_s: float | None


async def find_saturation(
    step: Callable[[float], Awaitable[Step]],
    *,
    start_per_s: float,
    goal_share: float,
    num_halvings: int,
    fits: Callable[[float], bool] = lambda rate_per_s: True,
    on_step: Callable[[Step], None] = lambda step: None,
) -> tuple[Saturation, list[Step]]:
    """Double the rate until fewer than ``goal_share`` of the requests are good, then halve the gap.

    When already the first rate is too high, it is halved until one is held. ``fits``: whether there
    is time for a step at a rate; the search ends where there is not. The first step is always made.
    All steps are returned in order of their rates.
    """
    steps: list[Step] = []
    held: float | None = None
    missed: float | None = None
    rate = start_per_s
    halvings = 0
    while len(steps) < _MAX_STEPS and halvings <= num_halvings and (not steps or fits(rate)):
        done = await step(rate)
        steps.append(done)
        on_step(done)
        if done.good_share >= goal_share:
            held = rate if held is None else max(held, rate)
        else:
            missed = rate if missed is None else min(missed, rate)
        if missed is None:
            rate *= 2
        elif held is None:
            rate /= 2
        else:
            rate = (held + missed) / 2
            halvings += 1
    return Saturation(held, missed), sorted(steps, key=lambda one: one.rate_per_s)
