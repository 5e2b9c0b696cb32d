"""The commands: each prints what the core and the tools return."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.progress import Progress

import dispatch
from dispatch.cli._print import console, decision_table, emit, key_values, line
from dispatch.tools import demo as demonstration
from dispatch.tools import doctor as examination
from dispatch.tools.doubts import doubts

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]

app = typer.Typer(
    name="dispatch",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
policies = typer.Typer(no_args_is_help=True, help="Look at policy files.")
cache = typer.Typer(no_args_is_help=True, help="Look at the decision store.")


def _version(wanted: bool) -> None:
    if wanted:
        line(f"gemm-dispatch {metadata.version('gemm-dispatch')}")
        raise typer.Exit


@app.callback()
def _command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Matrix products by the fastest route that is accurate enough. Exit codes: 0 done, 1 no, 2 usage."""


app.add_typer(policies, name="policy")
app.add_typer(cache, name="cache")


@app.command()
def demo(as_json: AsJson = False) -> None:
    """Multiply in every framework that is installed, and show what was chosen and why."""
    installed = dispatch.installed()
    products = list(demonstration.products(installed))
    decisions = []
    with Progress(console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=len(products))
        for product in products:
            progress.update(task, description=f"measuring {product}")
            decisions.append(product.decision())
            progress.advance(task)
    missing = [name for name in ("numpy", "torch", "jax") if name not in installed]
    if as_json:
        emit({"decisions": [decision.to_dict() for decision in decisions], "not_installed": missing})
        return
    for product, decision in zip(products, decisions, strict=True):
        decision_table(decision, title=str(product))
    for name in missing:
        line(f"{name} is not installed: nothing shown for it.")


@app.command()
def explain(
    m: Annotated[int, typer.Option("-M", min=0, help="Rows of a.")],
    n: Annotated[int, typer.Option("-N", min=0, help="Columns of b.")],
    k: Annotated[int, typer.Option("-K", min=0, help="Columns of a, rows of b.")],
    dtype: Annotated[str, typer.Option(help="Of both operands: bfloat16, float16, float32 ...")] = "bfloat16",
    framework: Annotated[str, typer.Option(help="numpy, torch or jax.")] = "numpy",
    device: Annotated[str | None, typer.Option(help="cpu, cuda:0 ...; the framework's default.")] = None,
    transpose_b: Annotated[bool, typer.Option(help="b is the transpose of an (n, k) array.")] = False,
    policy: Annotated[str | None, typer.Option(help="A policy's name or path.")] = None,
    backend: Annotated[str | None, typer.Option(help="This backend only.")] = None,
    scope: Annotated[str | None, typer.Option(help="The name of the place whose decision it is.")] = None,
    as_json: AsJson = False,
) -> None:
    """Decide one product of random normal operands, and say why."""
    try:
        operands = demonstration.Product(framework, dtype, m, n, k, device, transpose_b).operands()
    except (ValueError, TypeError) as error:  # no such framework or dtype
        _fail(error, 2)
    except (ImportError, AttributeError, LookupError, RuntimeError) as error:
        _fail(error)
    try:
        decision = dispatch.explain(*operands, policy=policy, backend=backend, scope=scope)
    except (ImportError, ValueError, TypeError, AttributeError, LookupError, RuntimeError) as error:
        _fail(error)
    if as_json:
        emit(decision.to_dict())
    else:
        decision_table(decision)


@app.command()
def backends(as_json: AsJson = False) -> None:
    """List every backend, and why one cannot work on this machine."""
    found = dispatch.backends()
    if as_json:
        emit(
            [
                {
                    "name": x.name,
                    "distribution": x.distribution,
                    "version": x.version,
                    "status": x.status,
                    "available": x.available,
                    "unavailable": x.unavailable,
                }
                for x in found
            ]
        )
        return
    rows = [(x.name, f"{x.distribution} {x.version}".strip(), x.status, x.unavailable or "available") for x in found]
    key_values(("backend", "from", "status", "here"), rows)


@policies.command("check")
def policy_check(
    file: Annotated[Path, typer.Argument(help="A policy file, or the name of a shipped one.")], as_json: AsJson = False
) -> None:
    """Say whether a policy file is right, and what to look at again; exit with 1 if it is not right."""
    try:
        policy = dispatch.load_policy(file if file.exists() else str(file))
    except (dispatch.PolicyError, OSError) as error:
        if as_json:
            emit({"file": str(file), "ok": False, "error": str(error)})
            raise typer.Exit(1) from None
        _fail(error)
    if as_json:
        emit({"file": str(file), "ok": True, "fingerprint": policy.fingerprint, "doubts": doubts(policy)})
        return
    line(f"{file}: right, {_count(len(policy.rules), 'rule')}")
    for doubt in doubts(policy):
        line(f"look again at {doubt}")


@policies.command("show")
def policy_show(
    name: Annotated[str | None, typer.Argument(help="A policy's name or path; the one in force if left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the effective values, and where each came from."""
    try:
        policy = dispatch.current_policy() if name is None else dispatch.load_policy(name)
    except (dispatch.PolicyError, OSError) as error:
        _fail(error)
    values = policy.to_dict()
    if as_json:
        emit({"name": policy.name, "values": values, "origins": dict(policy.origins)})
        return
    rows = [
        (f"{section}.{key}", _plain(value), policy.origins.get(f"{section}.{key}", ""))
        for section, keys in values.items()
        if section != "rules"
        for key, value in keys.items()
    ]
    rows += [(f"rules[{i}]", _plain(rule), policy.name) for i, rule in enumerate(values["rules"])]
    key_values(("key", "value", "from"), rows, title=f"policy {policy.name}")


@cache.command("show")
def cache_show(as_json: AsJson = False) -> None:
    """List the stored decisions."""
    entries = dispatch.stored()
    if as_json:
        emit([decision.to_dict() for decision in entries])
        return
    rows = [(str(x.problem), str(x.candidate), f"{x.speedup:.2f}x" if x.speedup else "-", x.policy) for x in entries]
    key_values(("problem", "chosen", "speedup", "policy"), rows, title=str(dispatch.stats()["store"]["path"]))


@cache.command("clear")
def cache_clear(as_json: AsJson = False) -> None:
    """Forget every stored decision."""
    count = dispatch.clear_store()
    if as_json:
        emit({"removed": count})
    else:
        line(f"{_count(count, 'decision')} removed")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Look at versions, hardware, store, policy and plugins; exit with 1 if something is wrong."""
    report = examination.report()
    if as_json:
        emit(report)
    else:
        rows = [(key, _plain(value)) for key, value in report.items() if key != "problems"]
        key_values(("what", "found"), rows)
        for problem in report["problems"]:
            line(f"problem: {problem}", style="bold")
    if report["problems"]:
        raise typer.Exit(1)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_plain(x)}" for key, x in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or "none"
    return "-" if value is None else str(value)


def _fail(error: Exception, code: int = 1) -> NoReturn:
    line(f"{type(error).__name__}: {error}", stderr=True)
    raise typer.Exit(code) from None


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def main() -> None:
    """Run the command."""
    try:
        sys.exit(app())
    except dispatch.PolicyError as error:  # the one that DISPATCH_POLICY names
        line(f"PolicyError: {error}", stderr=True)
        sys.exit(1)
