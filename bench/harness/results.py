"""Results of benchmarks: a table for people, and a file in the format of ``bench/results``."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.harness import machine

Cell = str | float | None
"""A text, a number, or None for what was not measured."""


@dataclass
class Result:
    """One table of figures. ``details``: further keys of the file, for what is no table."""

    columns: Sequence[str]
    rows: list[Sequence[Cell]] = field(default_factory=list)
    notes: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def add(self, *row: Cell) -> None:
        """Append one row. Raises ValueError when it has not one cell a column."""
        if len(row) != len(self.columns):
            raise ValueError(f"{row} has not the columns {self.columns}")
        self.rows.append(row)

    def lines(self) -> Iterator[str]:
        """The table in aligned columns, the first one to the left."""
        texts = [[str(name) for name in self.columns], *(map(cell_text, row) for row in self.rows)]
        table = [list(row) for row in texts]
        widths = [max(len(row[column]) for row in table) for column in range(len(self.columns))]
        for row in table:
            cells = [row[0].ljust(widths[0])]
            cells += [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
            yield "  ".join(cells).rstrip()

    def to_dict(self) -> dict[str, Any]:
        """Date, machine and command of this process, and the table."""
        contents: dict[str, Any] = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": machine.summary(),
            "command": command_line(),
        }
        if self.notes:
            contents["notes"] = self.notes
        contents |= {"columns": list(self.columns), "rows": [list(row) for row in self.rows]}
        return contents | dict(self.details)

    def write(self, path: Path) -> None:
        """The file: one line a row, so that results of two dates can be compared by ``diff``."""
        parts = []
        for name, value in self.to_dict().items():
            text = json.dumps(value, ensure_ascii=False)
            if name == "rows" and value:
                rows = (json.dumps(row, ensure_ascii=False) for row in value)
                text = "[\n  " + ",\n  ".join(rows) + "\n ]"
            parts.append(f" {json.dumps(name)}: {text}")
        path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """``--json FILE`` of every benchmark script."""
    parser.add_argument("--json", type=Path, help="write the result to this file")


def report(result: Result, options: argparse.Namespace) -> None:
    """Print the table, and write the file that ``--json`` names."""
    print("\n".join(result.lines()))
    if result.notes:
        print(f"\n{result.notes}")
    if options.json is not None:
        result.write(options.json)


def cell_text(cell: Cell) -> str:
    """A cell for people."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.3g}" if abs(cell) < 100 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def command_line() -> str:
    """The command of this process as it would be typed, without the place of its result."""
    words = list(sys.orig_argv[1:])
    for at, word in enumerate(words):
        if word == "--json":
            del words[at : at + 2]
            break
    return shlex.join(["python", *words])
