"""The tables of README.md and docs/, made from benchmarks/results.

python benchmarks/tables.py           print every table
python benchmarks/tables.py --write   put them between <!-- table: NAME --> and <!-- end --> in those files
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
Row = dict[str, Any]


def rows(table: str) -> list[Row]:
    """Return every row of a table, of all machines, the newest for each problem."""
    found: dict[str, Row] = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry["table"] == table:
                kind = (entry.get("problem"), entry.get("gate"), entry.get("jitted"), entry.get("framework"))
                kind += (
                    entry.get("layout"),
                    entry.get("weight_prepared"),
                    entry["table"] in ("host_call", "mesh") and entry["candidate"],
                    entry.get("op"),
                    entry.get("way"),
                    entry.get("gradient"),
                    entry.get("family"),
                    entry["table"] == "counters" and entry["candidate"],
                )
                found[json.dumps([path.stem, *kind, entry.get("size")])] = entry
    return list(found.values())


def main_job(where: Callable[[Row], bool]) -> str:
    """Return the table of choices: one line a problem, with the chosen candidate's and the best other's figures."""
    lines: list[Sequence[str]] = []
    chosen = [entry for entry in rows("main") if where(entry)]
    for entry in sorted(chosen, key=lambda x: (x["problem"]["framework"], x["jitted"], -x["problem"]["m"], x["gate"])):
        problem, error = entry["problem"], entry["error"] or {}
        name = f"{problem['framework']}{', jitted' if entry['jitted'] else ''} {problem['dtype']} "
        sizes = f"{problem['m']}x{problem['n']}x{problem['k']}"
        cells = [
            name + sizes,
            entry["gate"],
            f"`{entry['candidate']}`",
            _number(entry["speedup"], "{:.2f}x"),
            _us(entry["baseline_us"]),
            _us(entry["latency_us"]),
            _number(error.get("similarity_loss"), "{:.1e}"),
            _number(error.get("relative_l2"), "{:.1e}"),
            entry["reason"].split(" the framework's own product (")[0],
        ]
        lines.append(cells)
    return _table(
        "problem | tolerance | chosen | speedup | own product | chosen | similarity loss | relative L2 | why",
        lines,
        chosen,
    )


def host() -> str:
    """Return the table of host time beyond the plan's own."""
    lines: list[Sequence[str]] = []
    found = rows("host")
    for entry in found:
        times = (f"{entry[key]:.2f} us" for key in ("own_us", "call_us", "beyond_us"))
        bias = ", with a bias" if entry.get("bias") else ""
        lines.append([f"{entry['framework']} {entry['size']}x{entry['size']} float32{bias}", *times])
    return _table("| own matmul | whole call | beyond the plan", lines, found)


def kernels(table: str) -> str:
    """Return a table of benchmarks/gemm.py: our latency and TFLOP/s beside each peer's latency."""
    found = rows(table)
    peers = list(dict.fromkeys(name.partition("@")[0] for entry in found for name in entry["peers"]))
    extra = [name for name in ("layout", "weight_prepared") if any(name in entry for entry in found)]
    head = ["m x n x k", *(name.replace("_", " ") for name in extra), "ours", "TFLOP/s", *peers]
    head.append(f"against {next((entry['against'] for entry in found if 'against' in entry), 'the best')}")
    lines: list[Sequence[str]] = []
    for entry in found:
        problem, times = entry["problem"], {name.partition("@")[0]: us for name, us in entry["peers"].items()}
        cells = [
            f"{problem['m']} x {problem['n']} x {problem['k']}",
            *(str(entry.get(name, "")) for name in extra),
            f"{_us(entry['latency_us'])} ± {_us(entry['spread_us'] / 2)}",
            _number(entry["tflops"], "{:.0f}"),
            *(_us(times.get(name)) for name in peers),
            _number(entry["speedup"], "{:.2f}x"),
            f"`{entry['candidate'].rpartition('/')[2]}`",
        ]
        lines.append(cells)
    ratios = [entry["speedup"] for entry in found if entry["speedup"]]
    mean = [f"Geometric mean {statistics.geometric_mean(ratios):.3f}x.", ""] if ratios else []
    return _table(" | ".join([*head, "config"]), lines, found, mean)


def quantize_in_jax(table: str) -> str:
    """Return a table of quantizers in JAX beside XLA's."""
    lines: list[Sequence[str]] = []
    found = rows(table)
    for entry in found:
        height, width = entry["problem"]["m"], max(entry["problem"]["n"], entry["problem"]["k"])
        by_xla = {name.partition("@")[0]: us for name, us in entry["peers"].items()}["XLA"]
        speed = 3e-6 * height * width / entry["latency_us"]
        times = _us(entry["latency_us"]), f"{speed:.2f}", _us(by_xla)
        lines.append([f"{height} x {width}", entry["layout"], *times, _number(entry["speedup"], "{:.2f}x")])
    return _table("rows x k | source | ours | TB/s | XLA | against XLA", lines, found)


def quantize() -> str:
    """Return the table of the quantizer's speed, as the share of a copy's bytes a second."""
    lines: list[Sequence[str]] = []
    found = rows("quantize")
    for entry in found:
        height, width = entry["problem"]["m"], entry["problem"]["n"]
        copied = next(iter(entry["peers"].values()))
        speed = 3e-6 * height * width / entry["latency_us"]
        share = _number(entry["share_of_copy"], "{:.2f}")
        lines.append([f"{height} x {width}", _us(entry["latency_us"]), _us(copied), f"{speed:.2f}", share])
    return _table("rows x columns | ours | copy | TB/s | share of copy", lines, found)


def host_call() -> str:
    """Return the table of what a known call takes of the host."""
    lines: list[Sequence[str]] = []
    found = rows("host_call")
    for entry in found:
        own = next(iter(entry["peers"].values()))
        lines.append([entry["candidate"], _us(entry["host_us"]), _us(own), f"{entry['ratio']:.2f}"])
    return _table("256 x 256 x 256, bfloat16 | host time | torch.matmul | ratio", lines, found)


def torch_graphs() -> str:
    """Return the table of products with a prepared weight in torch: eager, compiled and replayed."""
    lines: list[Sequence[str]] = []
    found = rows("torch_graphs")
    for entry in found:
        problem, times = entry["problem"], {name.partition(",")[0]: us for name, us in entry["peers"].items()}
        cells = [
            f"{problem['m']} x {problem['n']} x {problem['k']}",
            entry["way"],
            f"{_us(entry['latency_us'])} ± {_us(entry['spread_us'] / 2)}",
            _us(times.get("torch.matmul")),
            _us(times.get("scaled_mm")),
            _number(entry["speedup"], "{:.2f}x"),
            f"`{entry['candidate']}`",
        ]
        lines.append(cells)
    return _table("m x n x k | way | ours | torch.matmul | scaled_mm | against torch.matmul | chosen", lines, found)


def host_compiled() -> str:
    """Return the table of what a call compiled by torch takes of the host."""
    lines: list[Sequence[str]] = []
    found = rows("host_compiled")
    for entry in found:
        problem, times = entry["problem"], {name.partition("@")[0]: us for name, us in entry["peers"].items()}
        cells = [
            f"{problem['m']} x {problem['n']} x {problem['k']} {problem['dtype']}",
            entry["way"],
            f"{_us(entry['host_us'])} ± {_us(entry['spread_us'] / 2)}",
            _us(times.get("torch.matmul")),
            f"{entry['beyond_us']:+.1f} ± {entry['beyond_spread_us'] / 2:.1f} us",
            *(_us(times.get(name)) for name in ("plan as an op", "plan alone")),
            entry["device"].partition(" (")[0],
            f"`{entry['candidate']}`",
        ]
        lines.append(cells)
    return _table(
        "m x n x k | operands | dispatch.matmul | torch.matmul | beyond | plan as an op | plan alone | on | chosen",
        lines,
        found,
    )


def linear() -> str:
    """Return the table of forward and backward of a linear layer."""
    lines: list[Sequence[str]] = []
    found = rows("linear")
    for entry in found:
        problem = entry["problem"]
        cells = [
            f"{problem['tokens']} x {problem['inputs']} -> {problem['outputs']}",
            entry["way"],
            entry["gradient"],
            f"{_us(entry['latency_us'])} ± {_us(entry['spread_us'] / 2)}",
            _us(next(iter(entry["peers"].values()))),
            _number(entry["speedup"], "{:.2f}x"),
            ", ".join(f"{op} `{name}`" for op, name in entry["candidate"].items()),
        ]
        lines.append(cells)
    return _table(
        "tokens x inputs -> outputs | way | gradients | ours | torch.matmul | speedup | served by", lines, found
    )


def mesh() -> str:
    """Return the table of a tensor-parallel MLP on several GPUs."""
    lines: list[Sequence[str]] = []
    found = rows("mesh")
    for entry in found:
        problem, error = entry["problem"], entry["error"] or {}
        kinds = ", ".join(f"{count} {kind}" for kind, count in entry["collectives"].items())
        cells = [
            f"{problem['m']} tokens, {problem['k']} -> {problem['n']} -> {problem['k']}, {problem['pass']}",
            entry["candidate"],
            f"{_us(entry['latency_us'])} ± {_us(entry['spread_us'] / 2)}",
            f"{entry['tflops']:.0f}",
            _number(entry["speedup"], "{:.2f}x"),
            kinds or "none",
            _number(error.get("relative_l2"), "{:.1e}"),
            _number(error.get("similarity_loss"), "{:.1e}"),
        ]
        lines.append(cells)
    return _table("| products by | time | TFLOP/s | speedup | collectives | relative L2 | worst row", lines, found)


def jax_training() -> str:
    """Return the table of trained transformer blocks: losses, and a step's time."""
    lines: list[Sequence[str]] = []
    found = rows("jax_training")
    for entry in found:
        problem, losses = entry["problem"], entry["losses"]
        cells = [
            problem["library"],
            f"{problem['batch']} x {problem['sequence']}, {problem['k']}, {problem['n']}",
            *(f"{losses[name]:.5f}" for name in ("own", "dispatch", "own, another seed")),
            _us(entry["baseline_us"]),
            f"{_us(entry['latency_us'])} ± {_us(entry['spread_us'] / 2)}",
            _number(entry["speedup"], "{:.2f}x"),
        ]
        lines.append(cells)
    return _table(
        "library | batch x sequence, width, hidden | loss: own | dispatch | own, another seed | "
        "a step: own | dispatch | speedup",
        lines,
        found,
    )


def jax_training_products() -> str:
    """Return the table of that block's products, jnp.matmul against what was chosen."""
    lines: list[Sequence[str]] = []
    found = rows("jax_training_products")
    for entry in found:
        problem = entry["problem"]
        cells = [
            entry["op"],
            f"{problem['m']} x {problem['n']} x {problem['k']}",
            _us(entry["baseline_us"]),
            _us(entry["latency_us"]),
            _number(entry["speedup"], "{:.2f}x"),
            f"`{entry['candidate']}`",
        ]
        lines.append(cells)
    return _table("op | m x n x k | jnp.matmul | chosen | speedup |", lines, found)


def counters() -> str:
    """Return the table of ncu's counters, a column a kernel."""
    found = rows("counters")
    names = " | ".join(f"`{entry['candidate']}`" for entry in found)
    lines: list[Sequence[str]] = []
    for name, text, scale in (
        ("tensor_pipe_percent", "tensor pipe active, %", 1.0),
        ("clock_hz", "SM clock, GHz", 1e-9),
        ("latency_us", "time, us", 1.0),
        ("l2_hit_percent", "L2 hit rate, %", 1.0),
        ("l2_to_sm_bytes", "from L2 to the multiprocessors, GB", 1e-9),
        ("dram_bytes", "from and to DRAM, GB", 1e-9),
    ):
        lines.append([text, *(f"{entry[name] * scale:.3g}" for entry in found)])
    return _table(f"| {names}", lines, found)


def guard() -> str:
    """Return the table of families of data: what wins, and what the guard says where normal data had decided."""
    lines: list[Sequence[str]] = []
    found = rows("guard")
    for entry in found:
        problem = entry["problem"]
        cells = [
            f"{problem['m']} x {problem['n']} x {problem['k']}",
            entry["family"],
            f"`{entry['candidate']}`",
            _number(entry["speedup"], "{:.2f}x"),
            *(_number(value, "{:.1e}") for value in entry["error"].values()),
            *(_guarded(entry["guards"][recipe]) for recipe in ("e4m3:row", "e4m3:tensor")),
        ]
        lines.append(cells)
    return _table(
        "m x n x k | family | winner | speedup | similarity loss | relative L2 | max/scale | row scales | tensor",
        lines,
        found,
    )


def _guarded(found: Row | None) -> str:
    if found is None:
        return "none is chosen"
    calls = found["async_tripped_after"]
    said = f"tripped after {calls}" if calls else "silent"
    return f"{found['loss']:.1e}: async {said}, strict {found['strict']}"


def guard_cost() -> str:
    """Return the table of what the guard costs where both operands are quantized."""
    lines: list[Sequence[str]] = []
    found = rows("guard_cost")
    for entry in found:
        problem = entry["problem"]
        cells = [
            f"{problem['m']} x {problem['n']} x {problem['k']}",
            entry["layout"],
            _us(entry["off_us"]),
            f"{entry['async']:+.2%}",
            f"{entry['async_low']:+.2%} to {entry['async_high']:+.2%}",
            str(entry["pairs"]),
            f"{entry['strict_ratio']:.2f}x",
        ]
        lines.append(cells)
    return _table("m x n x k | b | off | async | 95% interval | pairs | strict", lines, found)


def guard_trips() -> str:
    """Return the table of how soon async trips."""
    lines: list[Sequence[str]] = []
    found = rows("guard_trips")
    for entry in found:
        problem, (least, most) = entry["problem"], entry["outlier_calls"]
        cells = [
            f"{problem['m']} x {problem['n']} x {problem['k']}",
            str(entry["normal_trips"]),
            f"after {entry['broken_calls']} calls",
            f"after {least if least == most else f'{least} to {most}'} calls, at {entry['places']} places",
        ]
        lines.append(cells)
    return _table("m x n x k | trips in 1000 normal calls | data beyond the tolerance | an outlier row", lines, found)


def guard_cost_jax() -> str:
    """Return the table of what callbacks cost in JAX programs where both operands are quantized."""
    lines: list[Sequence[str]] = []
    found = rows("guard_cost_jax")
    for entry in found:
        problem = entry["problem"]
        for name, program in (("calls", "one product"), ("chain", "8 products")):
            part = entry[name]
            cells = [
                f"{problem['m']} x {problem['n']} x {problem['k']}",
                program,
                _us(part["off_us"]),
                _us(part["callback_us"]),
                f"{part['added']:+.1%}",
                f"{part['low']:+.1%} to {part['high']:+.1%}",
                str(entry["pairs"]),
                f"{_us(part['host_off_us'])}, {_us(part['host_callback_us'])}",
            ]
            lines.append(cells)
    return _table("m x n x k | program | off | callback | added | 95% interval | pairs | returns after", lines, found)


KERNELS = ("dense", "mid", "decode", "block", "promoted", "sixteen_bit", "end_to_end")
TABLES: dict[str, Callable[[], str]] = {
    "gpu": lambda: main_job(lambda entry: entry["problem"]["arch"].startswith("sm")),
    "cpu": lambda: main_job(lambda entry: entry["problem"]["arch"].startswith("cpu")),
    "host": host,
    **{name: partial(kernels, name) for name in KERNELS},
    "quantize": quantize,
    "pallas_promoted": partial(kernels, "pallas_promoted"),
    **{f"jax_{name}": partial(kernels, f"jax_{name}") for name in ("dense", "decode", "mid", "block", "end_to_end")},
    "jax_chosen": partial(kernels, "jax_chosen"),
    "jax_quantize": partial(quantize_in_jax, "jax_quantize"),
    "pallas_quantize": partial(quantize_in_jax, "pallas_quantize"),
    "host_call": host_call,
    "torch_graphs": torch_graphs,
    "host_compiled": host_compiled,
    "linear": linear,
    "counters": counters,
    "mesh": mesh,
    "jax_training": jax_training,
    "jax_training_products": jax_training_products,
    "guard": guard,
    "guard_cost": guard_cost,
    "guard_trips": guard_trips,
    "guard_cost_jax": guard_cost_jax,
}


def filled(text: str) -> str:
    """Return `text` with every marked table made anew."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def _table(head: str, lines: Sequence[Sequence[str]], found: list[Row], more: Sequence[str] = ()) -> str:
    """Return a table: its head, a line of cells each, what follows, and where the rows in it were measured."""
    rule = "|---" * (head.count("|") + 1) + "|"
    written = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([f"| {head} |", rule, *written, "", *more, *_machines(found)])


def _machines(entries: list[Row]) -> list[str]:
    kinds = dict.fromkeys(
        f"{entry['device']}, "
        + (f"driver {entry['driver']}, " if entry["driver"] else "")
        + ", ".join(f"{name} {version}" for name, version in entry["versions"].items() if version)
        + f", {entry['date']}; `{entry['command']}`"
        for entry in entries
    )
    return [f"Measured on {kind}." for kind in kinds]


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    for limit, unit in ((1e3, "us"), (1e6, "ms")):
        if value < limit:
            return f"{value / limit * 1e3:.3g} {unit}"
    return f"{value / 1e6:.3g} s"


def _number(value: Any, form: str) -> str:
    return "-" if value is None else form.format(float(value))


def main() -> None:
    """Print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write them into README.md and docs/")
    if parser.parse_args().write:
        for page in PAGES:
            page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
        return
    for name, make in TABLES.items():
        print(f"{name}\n\n{make()}\n")


if __name__ == "__main__":
    main()
