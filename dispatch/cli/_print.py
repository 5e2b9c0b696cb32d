"""Tables and JSON on a terminal or in a file."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dispatch import Decision, table_rows

WIDE = 160  # of output that is no terminal: nothing is cut


def console(stderr: bool = False) -> Console:
    """Return a console; without a terminal lines are as long as they need to be."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else max(WIDE, shutil.get_terminal_size().columns)
    return Console(stderr=stderr, width=width)


def emit(value: Any) -> None:
    """Print JSON."""
    print(json.dumps(value, indent=2))


def decision_table(decision: Decision, title: str | None = None) -> None:
    """Print a decision: its reason, and a row for each candidate."""
    header, *rows = table_rows(decision)
    table = Table(title=title or str(decision.problem), title_justify="left", caption=None)
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if 0 < index < 7 else "left", overflow="fold", no_wrap=0 < index < 7)
    for row in rows:
        table.add_row(*row, style="bold" if "chosen" in row else None)
    out = console()
    out.print(table, markup=False, highlight=False)
    out.print(f"-> {decision.candidate}: {decision.reason}\n", markup=False, highlight=False)


def key_values(header: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Print a plain table."""
    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console().print(table, markup=False, highlight=False)
