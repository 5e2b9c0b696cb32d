"""Tables and JSON on a terminal or in a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dispatch import Decision, table_rows

WIDE = 100_000  # of output that is no terminal: no line is broken


def console(stderr: bool = False) -> Console:
    """Return a console; without a terminal lines are as long as they need to be."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else WIDE)


def emit(value: Any) -> None:
    """Print JSON."""
    print(json.dumps(value, indent=2))


def line(text: str, stderr: bool = False, style: str | None = None) -> None:
    """Print text as it is."""
    console(stderr).print(text, style=style, markup=False, highlight=False)


def decision_table(decision: Decision, title: str | None = None) -> None:
    """Print a decision: its reason, and a row for each candidate."""
    header, *rows = table_rows(decision)
    table = Table()
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if 0 < index < 7 else "left", overflow="fold", no_wrap=0 < index < 7)
    for row in rows:
        table.add_row(*row, style="bold" if "chosen" in row else None)
    line(title or str(decision.problem), style="italic")
    console().print(table, markup=False, highlight=False)
    line(f"-> {decision.candidate}: {decision.reason}\n")


def key_values(header: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Print a plain table."""
    table = Table()
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    if title is not None:
        line(title, style="italic")
    console().print(table, markup=False, highlight=False)
