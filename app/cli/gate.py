"""`parley bench gate`: the options and the verdict. See ``bench.gate``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from app.cli.models import HomeOption
from app.cli.quantize import read_text
from app.config import load_settings
from app.engine_options import parse_options
from app.errors import ParleyError
from llm_core import LlmError

if TYPE_CHECKING:
    from bench.gate import GateResult

_FAILED = 1
_SideArgument = Annotated[
    str, typer.Argument(help="MODEL,name=value,...; without a model the configured one.")
]


def gate(
    old: _SideArgument,
    new: _SideArgument,
    rounds: Annotated[int, typer.Option(help="Rounds of speed; the median counts.", min=1)] = 3,
    text: Annotated[
        Path | None, typer.Option(help="Text for perplexity; else the old engine's own answers.")
    ] = None,
    voice: Annotated[
        int, typer.Option(help="Compare so many spoken utterances too.", min=0, max=64)
    ] = 0,
    min_speed: Annotated[float, typer.Option(help="Least ratio of each speed.", min=0)] = 0.95,
    min_agreement: Annotated[
        float, typer.Option(help="Least share of an answer's words in common.", min=0, max=1)
    ] = 0.9,
    max_perplexity_rise: Annotated[float, typer.Option(help="Relative.", min=0)] = 0.01,
    max_wer_rise: Annotated[float, typer.Option(help="Absolute; with --voice.", min=0)] = 0.02,
    max_v2v_ratio: Annotated[float, typer.Option(help="Of the medians; with --voice.")] = 1.1,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    home: HomeOption = None,
) -> None:
    """May the NEW engine replace the OLD one? Exit status 0 if it may, 1 if not."""
    from bench import gate as bench

    settings = load_settings(home=home)
    sides = []
    for words in (old, new):
        model, options = parse_options(words)
        sides.append(bench.Side(model or settings.llm_model, options))
    limits = bench.Limits(
        min_speed, min_agreement, max_perplexity_rise, max_wer_rise, max_v2v_ratio
    )
    notes = Console(stderr=True, highlight=False)
    try:
        result = asyncio.run(
            bench.run(
                sides[0],
                sides[1],
                settings,
                limits,
                num_rounds=rounds,
                text=read_text(text),
                voice_turns=voice,
                progress=lambda note: notes.print(note, style="dim", markup=False),
            )
        )
    except LlmError as error:
        raise ParleyError(str(error)) from error
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=1))
    else:
        _show(result, Console(highlight=False))
    if not result.passed:
        raise typer.Exit(_FAILED)


def _show(result: GateResult, console: Console) -> None:
    table = Table(
        "", *(f"{n}: {m['model']}" for n, m in result.models.items()), "value", "limit", ""
    )
    for check in result.checks:
        table.add_row(
            check.name,
            f"{check.old:.4g}",
            f"{check.new:.4g}",
            f"{check.value:.4g}",
            f"{check.limit:g}",
            "passed" if check.passed else "FAILED",
        )
    console.print(table)
    for check in result.checks:
        if not check.passed:
            console.print(check.reason(), markup=False)
    console.print("the new engine may replace the old one" if result.passed else "it may not")
