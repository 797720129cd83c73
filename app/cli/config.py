"""``parley config``: the settings in force, and docs/configuration.md."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.table import Table

from app.config import SECTIONS, Settings, load_settings

# URLs, in which people write user names and passwords.
_MAY_HOLD_CREDENTIALS = ("otel_endpoint", "ice_servers")

_HEADER = """# Configuration

Every setting is an environment variable; `parley config` prints the values in force. A list is
given as names with commas between them. An unknown `PARLEY_` variable is reported at start.

This page is generated from `app/config.py` by `parley config --markdown`.
"""


def config(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print docs/configuration.md instead.")
    ] = False,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only settings that differ from their default.")
    ] = False,
) -> None:
    """Print the settings in force; secrets are hidden."""
    if markdown:
        typer.echo(to_markdown(), nl=False)
        return
    settings = load_settings()
    table = Table("variable", "value", "default", box=None, pad_edge=False)
    for name, field in Settings.model_fields.items():
        value, default = shown(getattr(settings, name)), shown(default_of(field))
        if changed and value == default:
            continue
        if value and (not field.repr or name in _MAY_HOLD_CREDENTIALS):
            value = "(set)"
        table.add_row(f"PARLEY_{name.upper()}", value, default)
    Console().print(table)


def to_markdown() -> str:
    """All settings as a document: a table per section."""
    parts = [_HEADER]
    for name, field in Settings.model_fields.items():
        if name in SECTIONS:
            parts.append(f"\n## {SECTIONS[name]}\n\n")
            parts.append("| variable | default | meaning |\n|---|---|---|\n")
        default = documented_default(name, field)
        parts.append(f"| `PARLEY_{name.upper()}` | {default} | {field.description} |\n")
    return "".join(parts)


def documented_default(name: str, field: FieldInfo) -> str:
    """The default as the document shows it: the same on every machine."""
    machine_dependent = {"home": "`~/.parley`", "llm_threads": "2 (1 on one CPU)"}
    text = shown(default_of(field))
    return machine_dependent.get(name) or (f"`{text}`" if text else "none")


def default_of(field: FieldInfo) -> object:
    return field.get_default(call_default_factory=True)


def shown(value: object) -> str:
    """A value as it would be written in an environment variable."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case tuple():
            return ",".join(str(item) for item in value)
        case dict():
            return ",".join(f"{key}={number:g}" for key, number in value.items())
        case float():
            return f"{value:g}"
        case Path():
            home = str(Path.home())
            text = os.fspath(value)
            return text.replace(home, "~", 1) if text.startswith(home) else text
        case _:
            return str(value)
