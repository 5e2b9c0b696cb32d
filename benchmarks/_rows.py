"""Rows of benchmarks/results/<gpu>.jsonl: what every script here appends, and their reading."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dispatch

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("gemm-dispatch", "numpy", "torch", "triton", "jax", "jaxlib")


def row(table: str, decision: dispatch.Decision, **more: Any) -> dict[str, Any]:
    """Return the row of one decision: its problem, its choice and every candidate's figures."""
    problem = decision.problem
    chosen = decision.measurement
    seconds = (chosen.latency_us if chosen else float("nan")) * 1e-6
    return {
        "table": table,
        "problem": {
            "m": problem.m, "n": problem.n, "k": problem.k, "dtype": problem.a.dtype, "layout": f"{problem.a.layout}/"
            f"{problem.b.layout}", "framework": problem.framework, "arch": problem.arch, "modes": list(problem.modes),
        },
        "candidate": str(decision.candidate),
        "reason": decision.reason,
        "latency_us": None if chosen is None else chosen.latency_us,
        "spread_us": None if chosen is None else chosen.spread_us,
        "rounds": None if chosen is None else chosen.rounds,
        "tflops": None if chosen is None else problem.flops / seconds * 1e-12,
        "speedup": decision.speedup,
        "baseline_us": None if decision.baseline is None else decision.baseline.latency_us,
        "error": None if chosen is None or chosen.error is None else _error(chosen.error),
        "peers": _peers(decision),
        "candidates": {str(v.candidate): _candidate(v) for v in decision.candidates if v.measurement},
        "policy": decision.policy,
        **stamp(),
        **more,
    }  # fmt: skip


def stamp(device: str | None = None) -> dict[str, Any]:
    """Return where and when: device, driver, versions, date and command."""
    return {
        "device": device or device_name(),
        "driver": dispatch.machine()["driver"],
        "versions": {name: _version(name) for name in PACKAGES},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
    }


def append(rows: list[dict[str, Any]], name: str) -> Path:
    """Append rows to results/<name>.jsonl and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        for entry in rows:
            file.write(json.dumps(entry) + "\n")
    return path


def read(name: str, table: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of one table."""
    path = RESULTS / f"{name}.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if (entry := json.loads(line))["table"] == table:
            yield entry


def device_name() -> str:
    """Return the GPU's name, or the processor's."""
    if "torch" in dispatch.installed():
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_name(0)
    return cpu_name()


def cpu_name() -> str:
    """Return the processor's name and how many of its cores this process may use."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    import os

    return f"{model or platform.processor()} ({dispatch.machine()['archs']['numpy'][0]}, {os.cpu_count()} cores)"


def _peers(decision: dispatch.Decision) -> dict[str, float | None]:
    """Return the framework's own matmul, the peer that every decision is measured against."""
    name = decision.problem.framework
    version = _version(name)
    return {f"{name}.matmul@{version}": None if decision.baseline is None else decision.baseline.latency_us}


def _error(error: dispatch.Error) -> dict[str, float]:
    return {name: error.value(name) for name in ("similarity_loss", "relative_l2", "max_abs_over_scale")}


def _candidate(verdict: dispatch.Verdict) -> dict[str, Any]:
    found = verdict.measurement
    assert found is not None
    return {
        "latency_us": found.latency_us,
        "speedup": found.speedup,
        "outcome": verdict.outcome,
        "error": None if found.error is None else _error(found.error),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
