"""A Decision as text: a table a person can read, without a terminal library."""

from __future__ import annotations

from collections.abc import Sequence

from dispatch._decision import Decision, Verdict, _us
from dispatch._measurement import METRICS, Measurement
from dispatch.measuring.buckets import bucket

HEADER = ("candidate", "latency", "spread", "speedup", "sim. loss", "rel. L2", "max/scale", "verdict", "reason")


def as_text(decision: Decision) -> str:
    """Return the decision as lines: the problem, the choice, the reason, and a row for each candidate."""
    policy = f"policy {decision.policy}, {decision.source}" + ("" if decision.settled else ", not settled")
    if decision.baseline is not None and decision.baseline.error_data not in (None, "caller"):
        policy += f", errors on {decision.baseline.error_data} data"
    head = [str(decision.problem), f"  -> {decision.candidate}: {decision.reason}  [{policy}]"]
    first, last = bucket(decision.problem)
    if first < last and decision.baseline is not None:
        head.append(f"  m = {first} to {last} share it: measured at both, of each candidate the worse speedup counts")
    return "\n".join([*head, *_aligned(rows(decision))])


def rows(decision: Decision) -> list[tuple[str, ...]]:
    """Return the table's rows, header first: the framework's own product, then a row for each candidate."""
    table: list[tuple[str, ...]] = [HEADER]
    if decision.baseline is not None:
        table.append(("framework's own", *_figures(decision.baseline), "baseline", ""))
    table += [_row(verdict) for verdict in decision.candidates]
    return table


def _row(verdict: Verdict) -> tuple[str, ...]:
    reason = "" if verdict.outcome in ("chosen", "passed") else verdict.reason
    return (str(verdict.candidate), *_figures(verdict.measurement), verdict.outcome, reason)


def _figures(measurement: Measurement | None) -> tuple[str, ...]:
    if measurement is None:
        return ("-",) * 6
    error = measurement.error
    errors = ("-",) * 3 if error is None else tuple(f"{error.value(metric):.2g}" for metric in METRICS)
    return (_us(measurement.latency_us), _us(measurement.spread_us), f"{measurement.speedup:.2f}x", *errors)


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
