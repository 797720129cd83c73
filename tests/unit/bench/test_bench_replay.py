"""Replay of arrival traces: its arithmetic, on a clock and servers whose times are known."""

from __future__ import annotations

import asyncio
import json
import xml.etree.ElementTree as ET
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from app.cli.replay import _rates
from app.config import load_settings
from app.engine_options import engine_config, parse_options
from app.errors import ConfigError, ParleyError
from bench.harness.plot import Chart, Line, to_svg
from bench.load.open_loop import OpenLoop, Served, Step, Targets, find_saturation
from bench.load.replay import ReplayOptions, ReplayResult
from bench.load.trace import Arrival, at_rate, piece, read_arrivals, scaled
from tests.support.fakes import ManualClock, settle

HEADER = "t_s,context_tokens,generated_tokens,split\n"


def trace_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


# --- the trace ---


def test_a_split_of_the_trace_is_read(tmp_path: Path) -> None:
    path = trace_file(tmp_path, HEADER + "0.5,10,3,dev\n1.0,20,4,held\n2.5,30,5,dev\n")
    assert read_arrivals(path, "dev") == [Arrival(0.5, 10, 3), Arrival(2.5, 30, 5)]
    assert len(read_arrivals(path)) == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("t_s,context_tokens\n0,1\n", "no column 'generated_tokens'"),
        (HEADER + "0,1,1,dev\nsoon,1,1,dev\n", r"trace.csv:3: could not convert"),
        (HEADER + "0,1,1,dev\n1,1\n", r"trace.csv:3: "),
        (HEADER + "0,1,1,dev\n1,-4,1,dev\n", "trace.csv:3: .* out of range"),
        (HEADER + "0,1,1,dev\nnan,4,1,dev\n", "trace.csv:3: .* out of range"),
        (HEADER + "2,1,1,dev\n1,1,1,dev\n", "not in order of time"),
        (HEADER + "2,1,1,dev\n", "has 1 arrivals of 'dev'"),
    ],
)
def test_a_wrong_trace_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ParleyError, match=says):
        read_arrivals(trace_file(tmp_path, text), "dev")
    with pytest.raises(ParleyError, match="cannot be read"):
        read_arrivals(tmp_path / "absent.csv")


def test_time_is_stretched_and_bursts_stay() -> None:
    arrivals = [Arrival(10.0, 1, 2), Arrival(10.0, 1, 2), Arrival(14.0, 1, 2)]
    assert [a.at_s for a in at_rate(arrivals, 4.0)] == [0.0, 0.0, 0.5]  # 2 gaps at 4/s
    assert [a.at_s for a in at_rate(arrivals[:2], 4.0)] == [0.0, 0.0]


def test_lengths_are_scaled_and_fit() -> None:
    arrivals = [Arrival(0, 1000, 200), Arrival(1, 10, 1), Arrival(2, 90_000, 90_000)]
    found = [(a.context_tokens, a.generated_tokens) for a in scaled(arrivals, 0.1, 512)]
    assert found == [(100, 20), (1, 2), (256, 256)]


def test_a_piece_that_is_not_there_is_refused() -> None:
    arrivals = [Arrival(n, 1, 2) for n in range(5)]
    assert [a.at_s for a in piece(arrivals, 1, 3)] == [1, 2, 3]
    with pytest.raises(ParleyError, match="are too many"):
        piece(arrivals, 3, 3)


# --- the open loop ---


class OneAtATime:
    """A server that takes ``service_s`` for each request, in the order in which they come."""

    def __init__(self, clock: ManualClock, service_s: float) -> None:
        self.clock = clock
        self.service_s = service_s
        self.free_ns = 0
        self.came_ns: list[int] = []

    async def serve(self, number: int, arrival: Arrival, due_ns: int) -> Served:
        now_ns = self.clock.now_ns()
        self.came_ns.append(now_ns)
        self.free_ns = max(self.free_ns, now_ns) + int(self.service_s * 1e9)
        await self.clock.sleep((self.free_ns - now_ns) / 1e9)
        return Served(
            ttft_ms=(self.clock.now_ns() - due_ns) / 1e6,
            tpot_ms=5.0,
            num_tokens=10,
            error="engine_busy" if number == 7 else "",
        )


async def finished(clock: ManualClock, work: Awaitable[Any]) -> Any:
    task = asyncio.ensure_future(work)
    while not task.done():
        await clock.advance(0.05)
    await settle()
    return task.result()


def steady(count: int) -> list[Arrival]:
    return [Arrival(float(n), 100, 10) for n in range(count)]


async def test_requests_do_not_wait_for_each_other_and_latency_counts_from_when_they_are_due() -> (
    None
):
    clock = ManualClock()
    server = OneAtATime(clock, 0.5)
    loop = OpenLoop(steady(11), server.serve, Targets(ttft_ms=1000.0), clock, num_warm_up=1)
    begin_ns = clock.now_ns()
    step: Step = await finished(clock, loop.step(4.0))
    # Twice as many as it can serve, and all came when they were due.
    assert [(at - begin_ns) / 1e9 for at in server.came_ns] == pytest.approx(
        [n / 4 for n in range(11)]
    )
    # The n-th is served (n + 1) * 0.5 s after the start and was due after n / 4.
    waits_ms = [500 + 250 * n for n in range(1, 11)]
    assert step.num_served == 10
    assert step.ttft_ms == pytest.approx({"p50": waits_ms[4], "p95": 3000, "p99": 3000, "n": 10})
    assert step.num_good == 2 and step.good_share == 0.2
    assert step.goodput_per_s == pytest.approx(0.8)
    assert step.errors == {"engine_busy": 1}
    assert step.num_tokens == 110 and step.took_s == pytest.approx(5.5, abs=0.06)


class AloneClock:
    """Time moves by sleeping, and when a test says so."""

    def __init__(self) -> None:
        self.ns = 0

    def now_ns(self) -> int:
        return self.ns

    async def sleep(self, seconds: float) -> None:
        self.ns += int(seconds * 1e9)
        await settle(3)


async def test_a_late_generator_is_part_of_the_latency() -> None:
    clock = AloneClock()

    async def blocks_the_loop(number: int, arrival: Arrival, due_ns: int) -> Served:
        clock.ns += 300_000_000  # the generator cannot run meanwhile
        return Served(ttft_ms=(clock.now_ns() - due_ns) / 1e6)

    loop = OpenLoop(steady(4), blocks_the_loop, Targets(ttft_ms=1.0), clock, num_warm_up=0)
    step = await loop.step(10.0)
    # They are due every 100 ms; from the second on each finds the loop blocked for 300 ms more.
    assert step.generator_late_ms == {"p50": 300.0, "p95": 700.0, "p99": 700.0, "n": 4}
    assert step.ttft_ms == {"p50": 600.0, "p95": 1000.0, "p99": 1000.0, "n": 4}


async def test_a_failed_request_is_never_good() -> None:
    assert not Targets().are_met_by(Served(error="engine_died"))
    assert Targets().are_met_by(Served())
    assert not Targets(v2v_ms=500).are_met_by(Served(ttft_ms=1.0))
    assert Targets(ttft_ms=5, tpot_ms=5).are_met_by(Served(ttft_ms=5.0, tpot_ms=5.0))
    with pytest.raises(ParleyError, match="leave none to count"):
        OpenLoop(
            steady(2), OneAtATime(ManualClock(), 1).serve, Targets(), ManualClock(), num_warm_up=2
        )


def steps_that_hold_up_to(most_per_s: float) -> Callable[[float], Awaitable[Step]]:
    async def step(rate_per_s: float) -> Step:
        good = 10 if rate_per_s <= most_per_s else 3
        nothing = {"n": 0}
        return Step(rate_per_s, 10, good, 100, 10.0, nothing, nothing, nothing, nothing)

    return step


@pytest.mark.parametrize(
    ("most_per_s", "start", "halvings", "held", "missed"),
    [
        (5.0, 1.0, 2, 5.0, 6.0),  # 1, 2, 4, 8, 6, 5
        (5.0, 16.0, 1, 4.0, 6.0),  # 16, 8, 4, 6
        (0.0, 1.0, 2, None, 2.0**-7),
        (1e9, 1.0, 2, 128.0, None),
        (5.0, 4.0, 0, 4.0, 8.0),
    ],
)
async def test_the_saturation_point_is_found(
    most_per_s: float, start: float, halvings: int, held: float | None, missed: float | None
) -> None:
    found, steps = await find_saturation(
        steps_that_hold_up_to(most_per_s), start_per_s=start, goal_share=0.9, num_halvings=halvings
    )
    assert (found.rate_per_s, found.above_per_s) == (held, missed)
    assert [s.rate_per_s for s in steps] == sorted(s.rate_per_s for s in steps)


async def test_a_server_of_known_speed_saturates_where_it_must() -> None:
    clock = ManualClock()
    server = OneAtATime(clock, 0.25)
    loop = OpenLoop(steady(40), server.serve, Targets(ttft_ms=600.0), clock, num_warm_up=0)
    found, _ = await finished(
        clock, find_saturation(loop.step, start_per_s=1.0, goal_share=0.9, num_halvings=3)
    )
    assert found.rate_per_s == pytest.approx(4.0)  # it serves four a second
    assert found.above_per_s == pytest.approx(4.5)


# --- the result ---


def result() -> ReplayResult:
    times = {"p50": 100.0, "p95": 400.0, "p99": 900.0, "n": 20}
    steps = [
        Step(rate, 20, good, 400, 20 / rate, times, times, {"n": 0}, {"p99": 1.0, "n": 20})
        for rate, good in ((1.0, 20), (2.0, 15))
    ]
    options = ReplayOptions(Path("t<r>ace.csv"), targets=Targets(ttft_ms=600.0))
    machine = {"processor": "a & b", "read_gb_s": 30.0, "load_average": 0.1}
    return ReplayResult("llm", machine, {"name": "<m>"}, options, steady(20), steps, None)


def test_the_result_is_json_and_says_how_machines_compare() -> None:
    found = json.loads(json.dumps(result().to_dict()))
    assert found["best_goodput_per_s"] == 1.5
    assert found["goodput_by_calibration"] == 0.05
    assert found["targets_ms"] == {"ttft_ms": 600.0}
    assert found["steps"][1]["good_share"] == 0.75
    assert found["steps"][1]["tokens_per_s"] == 40.0
    assert "v2v_ms" not in found["steps"][0]


def test_the_plot_is_well_formed() -> None:
    root = ET.fromstring(result().to_svg())
    lines = root.findall(".//{*}polyline")
    assert len(lines) == 5
    xs = [float(point.split(",")[0]) for point in lines[0].attrib["points"].split()]
    assert xs == sorted(xs) and len(xs) == 2
    empty = to_svg([Chart("nothing", "x", "y", [Line("none", [])])])
    assert ET.fromstring(empty) is not None


# --- options ---


def test_an_engine_is_described_in_words() -> None:
    settings = load_settings()
    model, options = parse_options("package:x, kv_dtype=int8,max_step_ms=40,max_context=none")
    assert (model, options["kv_dtype"]) == ("package:x", "int8")
    options["max_context"] = "2048"
    config = engine_config(settings, Path("m.gguf"), options)
    assert (config.kv_dtype, config.max_step_ms, config.max_context) == ("int8", 40, 2048)
    assert config.num_threads == settings.llm_threads and config.model_path == "m.gguf"
    assert parse_options("policy=fcfs") == ("", {"policy": "fcfs"})
    assert parse_options("") == ("", {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("m,fast", "expected name=value"),
        ("m,model_path=/etc", "no option of an engine; there are num_threads"),
        ("m,kv_dtype=int3", "kv_dtype"),
        ("m,num_threads=0", "num_threads must be at least 1"),
        ("m,num_threads=two", "num_threads"),
    ],
)
def test_wrong_words_are_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        engine_config(load_settings(), Path("m.gguf"), parse_options(text)[1])


@pytest.mark.parametrize("text", ["fast", "0", "1,-2", "inf"])
def test_wrong_rates_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="above 0"):
        _rates(text)
    assert _rates("1, 2.5") == (1.0, 2.5)
