"""``parley bench``: how fast is this machine, measured as a caller would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from app.cli_models import HomeOption

bench_app = typer.Typer(no_args_is_help=True, help="Measure this machine.")


@bench_app.callback()
def _group() -> None:
    """Measure this machine."""


@bench_app.command("voice")
def bench_voice(
    callers: Annotated[int, typer.Option(help="Callers at once.", min=1, max=256)] = 1,
    turns: Annotated[int, typer.Option(help="Utterances of each caller.", min=1, max=1000)] = 8,
    url: Annotated[str | None, typer.Option(help="A running server; else one is started.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="PARLEY_API_KEY", help="Key for a server that asks for one")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Folder for recordings of both sides.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    home: HomeOption = None,
) -> None:
    """Callers speak over real sockets at speaking pace; both sides are recorded and measured."""
    from app.bench import voice

    notes = Console(stderr=True, highlight=False)
    figures = voice.run(
        callers=callers,
        turns=turns,
        url=url,
        api_key=api_key,
        home=home,
        record=record,
        on_note=lambda note: notes.print(note, style="dim", markup=False),
    )
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        _show(figures, Console(highlight=False))


def _show(figures: dict[str, Any], console: Console) -> None:
    for name, value in figures.items():
        console.print(f"{name.replace('_', ' '):24} {_text(value)}", markup=False)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {_text(part)}" for name, part in value.items())
    return f"{value:g}" if isinstance(value, int | float) else str(value)
