"""Tables and JSON on a terminal or in a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dispatch import Decision, table_rows

WIDE = 100_000  # of output that is no terminal: no line is broken
NARROW = 110  # columns below which the figures would leave no room for a candidate's name and reason


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
    """Print a decision: its reason, and a row for each candidate; a paragraph each where rows would be squeezed."""
    header, *rows = table_rows(decision)
    line(title or str(decision.problem), style="italic")
    if console().width < NARROW:
        _paragraphs(header, rows)
    else:
        _table(header, rows)
    line(f"-> {decision.candidate}: {decision.reason}\n")


def _paragraphs(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    for name, *figures, verdict, reason in rows:
        known = (f"{what} {figure}" for what, figure in zip(header[1:], figures, strict=False) if figure != "-")
        line(f"{name}: {verdict}", style="bold" if verdict == "chosen" else None)
        for text in (", ".join(known), reason):
            if text:
                console().print(Padding(Text(text), (0, 0, 0, 2), expand=False))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table()
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if 0 < index < 7 else "left", overflow="fold", no_wrap=0 < index < 7)
    for row in rows:
        table.add_row(*row, style="bold" if "chosen" in row else None)
    console().print(table, markup=False, highlight=False)


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
