"""`parley bench replay`: the options, and the result for people. See ``bench.load.replay``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from app.cli.models import HomeOption
from app.config import load_settings
from app.engine_options import parse_options
from app.errors import ParleyError
from llm_core import LlmError

if TYPE_CHECKING:
    from bench.load.replay import ReplayResult


def replay(
    trace: Annotated[
        Path, typer.Argument(help="CSV with the columns t_s, context_tokens, generated_tokens.")
    ],
    voice: Annotated[
        bool, typer.Option("--voice", help="Whole calls by voice, instead of the engine alone.")
    ] = False,
    engine: Annotated[
        str, typer.Option(help="Model and options, as in 'MODEL,kv_dtype=int8,policy=fcfs'.")
    ] = "",
    rates: Annotated[
        str, typer.Option(help="Requests a second, with commas; without: saturation is sought.")
    ] = "",
    requests: Annotated[int, typer.Option(help="Requests of each step.", min=2)] = 20,
    warm_up: Annotated[int, typer.Option(help="Of them, those not counted.", min=0)] = 4,
    skip: Annotated[int, typer.Option(help="Lines of the trace to leave out.", min=0)] = 0,
    split: Annotated[str, typer.Option(help="Only lines with this in the column split.")] = "dev",
    scale: Annotated[
        float, typer.Option(help="Prompts and answers so many times as long.", min=0.001, max=10)
    ] = 0.1,
    ttft_ms: Annotated[float, typer.Option(help="Target: first token.", min=1)] = 600.0,
    tpot_ms: Annotated[float, typer.Option(help="Target: time per token after it.", min=1)] = 100.0,
    v2v_ms: Annotated[float, typer.Option(help="Target of --voice.", min=1)] = 1000.0,
    goal: Annotated[
        float, typer.Option(help="Share of requests that must meet them.", min=0.01, max=1)
    ] = 0.9,
    halvings: Annotated[
        int, typer.Option(help="Steps that narrow the saturation point down.", min=0, max=6)
    ] = 2,
    limit_s: Annotated[
        float, typer.Option(help="Seconds in which the search for saturation must be over.", min=1)
    ] = 240.0,
    seed: Annotated[int, typer.Option(help="Of the prompts.", min=0)] = 0,
    threads: Annotated[int, typer.Option(help="Compute threads of the engine.", min=1)] = 2,
    json_file: Annotated[Path | None, typer.Option("--out", help="Write the JSON there.")] = None,
    svg_file: Annotated[Path | None, typer.Option("--svg", help="Write a plot there.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    home: HomeOption = None,
) -> None:
    """Play a real trace of arrivals at growing rates: latency, goodput, the saturation point."""
    from bench.load import replay as bench
    from bench.load.open_loop import Targets

    model, options = parse_options(engine)
    if voice and engine:
        raise typer.BadParameter("with --voice the server's settings count", param_hint="--engine")
    settings = load_settings(home=home, llm_model=model or None)
    chosen = bench.ReplayOptions(
        trace=trace,
        split=split,
        skip=skip,
        num_requests=requests,
        num_warm_up=warm_up,
        scale=scale,
        rates_per_s=_rates(rates),
        num_halvings=halvings,
        limit_s=limit_s,
        goal_share=goal,
        targets=Targets(v2v_ms=v2v_ms) if voice else Targets(ttft_ms=ttft_ms, tpot_ms=tpot_ms),
        seed=seed,
    )
    notes = Console(stderr=True, highlight=False)

    def progress(text: str) -> None:
        notes.print(text, style="dim", markup=False)

    try:
        if voice:
            result = asyncio.run(bench.run_voice(chosen, settings, progress))
        else:
            options = {"num_threads": str(threads), **options}
            result = asyncio.run(bench.run_llm(chosen, settings, options, progress))
    except LlmError as error:
        raise ParleyError(str(error)) from error
    text = json.dumps(result.to_dict(), indent=1)
    _write(json_file, text + "\n")
    _write(svg_file, result.to_svg())
    if as_json:
        typer.echo(text)
    else:
        _show(result, Console(highlight=False))


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        rates = (0.0,)
    if any(not 0 < rate <= 10_000 for rate in rates):
        raise typer.BadParameter(
            f"{text!r}: numbers above 0, with commas between them", param_hint="--rates"
        )
    return rates


def _write(path: Path | None, text: str) -> None:
    if path is None:
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ParleyError(f"{path} cannot be written: {error.strerror}") from error


def _show(result: ReplayResult, console: Console) -> None:
    found = result.to_dict()
    trace = found["trace"]
    table = Table(
        title=f"{trace['name']}: {trace['requests']} requests a step, prompts of "
        f"{trace['mean_context_tokens']} and answers of {trace['mean_generated_tokens']} tokens"
        if result.kind == "llm"
        else f"{trace['name']}: {trace['requests']} calls a step",
        caption=f"{found['machine']['processor']}, memory read {found['machine']['read_gb_s']} "
        f"GB/s, load {found['machine']['load_average']} at the start; targets "
        + ", ".join(f"{name} {value:g}" for name, value in found["targets_ms"].items()),
    )
    columns = ("rate_per_s", "good_share", "goodput_per_s", "ttft_ms", "tpot_ms", "v2v_ms")
    shown = [name for name in columns if any(name in step for step in found["steps"])]
    for name in shown:
        table.add_column(name.replace("_per_s", ", 1/s").replace("_", " "), justify="right")
    for step in found["steps"]:
        table.add_row(*(_cell(step.get(name)) for name in shown))
    console.print(table)
    if found["saturation"] is not None:
        held, above = found["saturation"]["rate_per_s"], found["saturation"]["above_per_s"]
        console.print(
            f"saturation: {'no rate' if held is None else f'{held:.2f}/s'} held, "
            f"{'none' if above is None else f'{above:.2f}/s'} missed"
        )


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return " / ".join(f"{value[p]:.0f}" for p in ("p50", "p95", "p99"))
    return "" if value is None else f"{value:.2f}"
