"""What bounds the dense product: ncu's counters of one launch of ours and one of torch's, at 8192^3 with row scales.

    python benchmarks/counters.py [--record NAME] [--size 8192]

Needs an NVIDIA GPU, `ncu`, and the right to read performance counters. Clocks are left as they are: at this size the
power limit sets them, and how much is done at that power is the question.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _rows

METRICS = {
    "gpu__time_duration.sum": "latency_us",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "tensor_pipe_percent",
    "sm__cycles_elapsed.avg.per_second": "clock_hz",
    "lts__t_sector_hit_rate.pct": "l2_hit_percent",
    "l1tex__m_xbar2l1tex_read_bytes.sum": "l2_to_sm_bytes",
    "dram__bytes.sum": "dram_bytes",
}
KERNELS = "regex:gemm|cutlass|nvjet|device_kernel"


def counters(size: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel that ncu saw."""
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    command += ["--metrics", ",".join(METRICS), "--kernel-name", KERNELS]
    command += [sys.executable, str(Path(__file__).with_name("each_kernel.py")), "--size", str(size)]
    command += ["--only", "pingpong", "torch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise SystemExit(f"ncu gave no table (exit {done.returncode}):\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    configs = iter(line.split()[-1] for line in lines[:start] if line.startswith(f"{size}x{size}"))
    for entry in list(csv.DictReader(lines[start:]))[1:]:  # the first line has the units
        values = {name: float(entry[metric].replace(",", "")) for metric, name in METRICS.items()}
        values["latency_us"] *= 1e-3
        ours = entry["Kernel Name"].startswith("gemm_kernel")
        name = next(configs) if ours else entry["Kernel Name"].partition("(")[0]
        figures = ", ".join(f"{key} {value:.4g}" for key, value in values.items())
        print(f"{name[:60]:60} {figures}")
        yield {
            "table": "counters",
            "problem": {
                "m": size,
                "n": size,
                "k": size,
                "dtype": "float8_e4m3fn",
                "kernel": "ours" if ours else "torch",
            },
            "candidate": name,
            **values,
            **_rows.stamp(),
        }


def main() -> None:
    """Read the counters, print, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", metavar="NAME", help="append the rows to results/NAME.jsonl")
    parser.add_argument("--size", type=int, default=8192)
    arguments = parser.parse_args()
    found = list(counters(arguments.size))
    if arguments.record:
        print(_rows.append(found, arguments.record))


if __name__ == "__main__":
    main()
