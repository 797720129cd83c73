"""``parley traces``: what the turns of a server took, in a terminal.

Exit codes: 0 done; 1 there are no such traces, or they cannot be reached; 2 wrong usage.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from app.cli.models import HomeOption
from app.cli.trace_source import LocalTraces, RemoteTraces, TraceSource, TraceSourceError, all_turns
from app.cli.waterfall import STAGE_TITLES, early_note, waterfall
from app.config import load_settings
from app.errors import ClientError
from app.observe import LANES, OUTCOMES, STAGE_NAMES, TraceFilter, Turn, period_before, period_ms

traces_app = typer.Typer(help="Where the time of the turns went. Without a command: list them.")

_Url = Annotated[
    str | None,
    typer.Option(help="Ask a running server, http(s)://. [dim]else the database in HOME[/]"),
]
_ApiKey = Annotated[
    str | None, typer.Option(help="Key for the server.", envvar="PARLEY_API_KEY", show_envvar=True)
]
_Conversation = Annotated[str | None, typer.Option(help="Only turns of this conversation.")]
_Outcome = Annotated[
    str | None, typer.Option(help=f"Only these, with commas between: {', '.join(OUTCOMES)}.")
]
_MinMs = Annotated[float | None, typer.Option(help="Only turns as slow, voice to voice.", min=0)]
_Since = Annotated[
    str | None, typer.Option(help="Not before: 24h, 7d, or 2026-01-31T12:00 [dim](local time)[/].")
]
_Until = Annotated[str | None, typer.Option(help="Before this time.")]
_OverBudget = Annotated[bool, typer.Option("--over-budget", help="Only turns over budget.")]
_Engine = Annotated[str | None, typer.Option("--engine", help="In a roll-out: stable or canary.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]

_WHOLE = "voice to voice"
_WIDE = 150  # columns of a terminal in which all stages have room
_OUTCOME_STYLES = {"answered": "green", "failed": "bold red", "timed_out": "bold red"}


class ExportFormat(StrEnum):
    """How ``parley traces export`` writes."""

    JSONL = "jsonl"


@traces_app.callback(invoke_without_command=True)
def traces(
    context: typer.Context,
    conversation: _Conversation = None,
    outcome: _Outcome = None,
    min_ms: _MinMs = None,
    since: _Since = None,
    until: _Until = None,
    over_budget: _OverBudget = False,
    engine: _Engine = None,
    limit: Annotated[int, typer.Option(help="How many turns.", min=1, max=1000)] = 20,
    as_json: _Json = False,
    url: _Url = None,
    api_key: _ApiKey = None,
    home: HomeOption = None,
) -> None:
    """Where the time of the turns went. Without a command: list them, newest first."""
    if context.invoked_subcommand is not None:
        return
    chosen = _chosen(conversation, outcome, min_ms, since, until, over_budget, engine)
    page = _source(url, api_key, home).page(chosen, limit)
    if as_json:
        _print_json({"object": "list", "data": page.turns, "next_cursor": page.next_cursor})
        return
    console = Console()
    if not page.turns:
        console.print("no turns", style="dim")
        return
    console.print(_turn_table(page.turns, console.width))
    if page.next_cursor is not None:
        console.print("and more: --limit, --since", style="dim")


@traces_app.command()
def show(
    turn_id: Annotated[str | None, typer.Argument(help="A turn; without it the last one.")] = None,
    as_json: _Json = False,
    url: _Url = None,
    api_key: _ApiKey = None,
    home: HomeOption = None,
) -> None:
    """One turn: its waterfall and everything that is known of it."""
    source = _source(url, api_key, home)
    if turn_id is None:
        turn = next(iter(source.page(TraceFilter(), 1).turns), None)
    else:
        turn = source.get(turn_id)
    if turn is None:
        raise TraceSourceError(f"there is no trace of {turn_id or 'any turn'}")
    if as_json:
        _print_json(turn)
        return
    _show_turn(Console(), turn)


@traces_app.command()
def stats(
    conversation: _Conversation = None,
    since: _Since = None,
    until: _Until = None,
    engine: _Engine = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="With the period before, as long. Needs --since.")
    ] = False,
    as_json: _Json = False,
    url: _Url = None,
    api_key: _ApiKey = None,
    home: HomeOption = None,
) -> None:
    """Percentiles of every stage, and the slowest turns with what made them slow."""
    chosen = _chosen(conversation, None, None, since, until, False, engine)
    compare_with = None
    if compare:
        try:
            compare_with = period_before(chosen, int(time.time() * 1000))
        except ValueError as error:
            raise typer.BadParameter("--compare needs --since") from error
    found = _source(url, api_key, home).stats(chosen, compare_with)
    if as_json:
        _print_json(found)
        return
    console = Console()
    if not found["summary"]["turns"]:
        console.print("no turns", style="dim")
        return
    console.print(_stage_table(found["summary"], found["compared_with"]))
    console.print(_slowest_table(found["slowest"][:10]))


@traces_app.command()
def export(
    format_: Annotated[
        ExportFormat, typer.Option("--format", help="One JSON object a line, newest first.")
    ] = ExportFormat.JSONL,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where to. [dim]default: standard output[/]")
    ] = None,
    conversation: _Conversation = None,
    outcome: _Outcome = None,
    min_ms: _MinMs = None,
    since: _Since = None,
    until: _Until = None,
    over_budget: _OverBudget = False,
    engine: _Engine = None,
    url: _Url = None,
    api_key: _ApiKey = None,
    home: HomeOption = None,
) -> None:
    """Write turns for other programs."""
    chosen = _chosen(conversation, outcome, min_ms, since, until, over_budget, engine)
    source = _source(url, api_key, home)
    num_turns = 0
    with _output(out) as write:
        for turn in all_turns(source, chosen):
            write(json.dumps(turn, ensure_ascii=False) + "\n")
            num_turns += 1
    if out is not None:
        Console(stderr=True).print(f"{num_turns} turns in {out}", highlight=False, markup=False)


@contextmanager
def _output(out: Path | None) -> Iterator[Any]:
    if out is None:
        yield sys.stdout.write
        return
    try:
        with out.open("w", encoding="utf-8") as file:
            yield file.write
    except OSError as error:
        raise TraceSourceError(f"cannot write {out}: {error.strerror}") from error


def _chosen(
    conversation: str | None,
    outcome: str | None,
    min_ms: float | None,
    since: str | None,
    until: str | None,
    over_budget: bool,
    engine: str | None,
) -> TraceFilter:
    outcomes = tuple(name.strip() for name in outcome.split(",")) if outcome else ()
    for name in outcomes:
        if name not in OUTCOMES:
            raise typer.BadParameter(f"there is no outcome {name!r}: {', '.join(OUTCOMES)}")
    if engine is not None and engine not in LANES:
        raise typer.BadParameter(f"there is no engine {engine!r}: {', '.join(LANES)}")
    try:
        # What is printed is in the time of this machine, and so is what is typed.
        since_ms, until_ms = period_ms(since, until, ("--since", "--until"), zone=None)
    except ClientError as error:
        reason = error.message.removeprefix(f"Invalid value for '{error.param}': ")
        raise typer.BadParameter(reason, param_hint=f"'{error.param}'") from error
    return TraceFilter(
        session_id=conversation,
        outcomes=outcomes,
        min_voice_to_voice_ms=min_ms,
        since_ms=since_ms,
        until_ms=until_ms,
        over_budget=over_budget,
        engine=engine,
    )


def _source(url: str | None, api_key: str | None, home: Path | None) -> TraceSource:
    if url is not None:
        return RemoteTraces(url, api_key)
    return LocalTraces(load_settings(home=home).home)


def _print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))


def _when(ended_at_ms: int) -> str:
    return datetime.fromtimestamp(ended_at_ms / 1000).strftime("%m-%d %H:%M:%S")


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _turn_table(turns: list[Turn], width: int) -> Table:
    """All stages where there is room for them, else the longest one."""
    is_wide = width >= _WIDE
    table = Table(box=None, header_style="dim", pad_edge=False, collapse_padding=True)
    for title in ("ended", "turn", *(["conversation"] if is_wide else []), "outcome"):
        table.add_column(title, no_wrap=True)
    stages = [STAGE_TITLES[stage] for stage in STAGE_NAMES] if is_wide else ["longest stage"]
    for title in ("ms", *stages):
        table.add_column(title, justify="right", no_wrap=not is_wide)
    for turn in turns:
        spent = turn["stages_ms"]
        longest = max(spent, key=lambda stage: spent[stage], default=None)
        cells: list[str | Text] = [_when(turn["ended_at_ms"]), turn["turn_id"]]
        if is_wide:
            cells.append(turn["session_id"])
        cells.append(Text(turn["outcome"], style=_OUTCOME_STYLES.get(turn["outcome"], "")))
        cells.append(Text(_ms(turn["voice_to_voice_ms"]), style="bold"))
        if is_wide:
            cells += [
                Text(_ms(spent.get(stage)), style="cyan" if stage == longest else "dim")
                for stage in STAGE_NAMES
            ]
        elif longest is not None:
            cells.append(Text(f"{STAGE_TITLES[longest]} {_ms(spent[longest])}", style="cyan"))
        table.add_row(*cells)
    return table


def _show_turn(console: Console, turn: Turn) -> None:
    head = Text.assemble(
        (turn["turn_id"], "bold"),
        f"  {turn['session_id']}  {_when(turn['ended_at_ms'])}  ",
        (turn["outcome"], _OUTCOME_STYLES.get(turn["outcome"], "bold")),
        f" {turn['reason']}" if turn["reason"] else "",
    )
    console.print(head)
    for who, name in (("caller", "transcript"), ("Parley", "reply")):
        if turn[name]:
            console.print(Text.assemble((f"{who}: ", "dim"), turn[name]))
    console.print(waterfall(turn))
    if note := early_note(turn):
        console.print(Text(note, style="dim"))
    for line in _budget_lines(turn.get("budget")):
        console.print(line)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    facts = {**turn["facts"], **{f"client {k}": v for k, v in turn.get("client", {}).items()}}
    for name, value in facts.items():
        shown = f"{value:,.1f}" if isinstance(value, float) else str(value)
        table.add_row(name, shown)
    console.print(table)


def _budget_lines(budget: dict[str, Any] | None) -> Iterator[Text]:
    """How the turn stands against its budget, and what was done because it was late."""
    if budget is None:
        return
    misses = budget["misses_ms"]
    over = ", ".join(f"{STAGE_TITLES.get(s, 'whole')} +{_ms(ms)}" for s, ms in misses.items())
    verdict = Text(f"over: {over} ms", style="bold red") if over else Text("kept", style="green")
    yield Text.assemble(("budget ", "dim"), f"{_ms(budget['target_ms'])} ms ", verdict)
    for action in budget["actions"]:
        saved = action["saved_ms"]
        effect = "" if saved is None else f", {_ms(saved)} ms saved"
        because = STAGE_TITLES.get(action["stage"], action["stage"])
        yield Text(f"  {action['policy'].replace('_', ' ')}, for {because} was late{effect}")


def _stage_table(summary: dict[str, Any], before: dict[str, Any] | None) -> Table:
    title = f"{summary['turns']:,} turns, {summary['conversations']:,} conversations"
    table = Table(box=None, header_style="dim", pad_edge=False, title=title, title_justify="left")
    table.add_column("ms", no_wrap=True)
    names = ("p50", "p95", "p99", "max")
    for name in names:
        table.add_column(name, justify="right")
    if before is not None:
        table.add_column(f"p50 before ({before['turns']:,} turns)", justify="right")
        table.add_column("p95 before", justify="right")
    earlier = _spreads(before) if before is not None else {}
    for title, now in _spreads(summary).items():
        cells = [_ms(now.get(name)) for name in names]
        if before is not None:
            cells += [_ms(earlier[title].get("p50")), _ms(earlier[title].get("p95"))]
        table.add_row(title, *cells, style="bold" if title == _WHOLE else "")
    return table


def _spreads(summary: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The whole and each stage by its title; empty where nothing was spoken."""
    whole = {_WHOLE: summary["voice_to_voice_ms"] or {}}
    return whole | {STAGE_TITLES[s]: summary["stages_ms"][s] or {} for s in STAGE_NAMES}


def _slowest_table(slowest: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, collapse_padding=True)
    table.title, table.title_justify = "the slowest", "left"
    for title in ("ended", "turn", "ms", "because of", "above its median"):
        is_number = title in ("ms", "above its median")
        table.add_column(title, no_wrap=True, justify="right" if is_number else "left")
    for turn in slowest:
        above_ms = turn["cause_above_median_ms"]
        # Among few turns also those that nothing has slowed are of the slowest.
        because = (
            (STAGE_TITLES[turn["cause"]], f"+{_ms(above_ms)}") if above_ms >= 0.5 else ("–", "")
        )
        table.add_row(
            _when(turn["ended_at_ms"]), turn["turn_id"], _ms(turn["voice_to_voice_ms"]), *because
        )
    return table
