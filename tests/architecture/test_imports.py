"""Who may import whom, read from the source of every module."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
FOLDERS = {
    "dispatch": REPO / "dispatch",
    "dispatch.kernels": REPO / "kernels",
    "dispatch.plugins": REPO / "plugins",
    "dispatch.policies": REPO / "policies",
}
CORE_LIBRARIES = {"numpy", "ml_dtypes", "pluggy", "platformdirs"}
FRAMEWORKS = {"torch": {"torch"}, "jax": {"jax", "jaxlib"}, "flax": {"flax", "jax"}, "equinox": {"equinox", "jax"}}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module; lazy: inside a function or under TYPE_CHECKING, so not run when its importer is."""

    target: str
    line: int
    lazy: bool


@dataclass(frozen=True, slots=True)
class Allowed:
    """What one module may import: libraries, and modules of `dispatch` (`x.*`: x and all below it).

    never_at_the_top: those of its modules that it may only import lazily.
    """

    libraries: frozenset[str] = frozenset()
    lazy_libraries: frozenset[str] = frozenset()
    modules: tuple[str, ...] = ()
    lazy_modules: tuple[str, ...] = ()
    never_at_the_top: tuple[str, ...] = ()


def imports(source: str, module: str, package: bool = False) -> Iterator[Import]:
    """Yield every import in `source`, importlib.import_module("...") included, by its absolute name.

    `from dispatch import name` yields `dispatch.name` where name is no public one: a private module or a room.
    """
    parent = module if package else module.rpartition(".")[0]
    yield from _imports(ast.parse(source), parent, lazy=False)


def _imports(node: ast.AST, parent: str, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for target in _targets(child, parent):
            yield Import(target, child.lineno, lazy)
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for part in child.body:
                yield from _imports(ast.Module([part], []), parent, lazy=True)
            yield from _imports(ast.Module(child.orelse, []), parent, lazy)
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, parent, lazy or function)


def _targets(node: ast.AST, parent: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = parent.split(".")[: len(parent.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*base, *filter(None, [node.module])])
        return [f"{base}.{alias.name}" if _is_module(base, alias.name) else base for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = node.args[0].value
        if ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__"):
            return [name] if isinstance(name, str) else []
    return []


def _is_module(base: str, name: str) -> bool:
    if base == "dispatch" and name.startswith("_") and not name.startswith("__"):
        return True
    return (
        any(
            path.is_dir() or path.with_suffix(".py").is_file()
            for package, folder in FOLDERS.items()
            if base == package or base.startswith(package + ".")
            for path in [folder.joinpath(*base.split(".")[package.count(".") + 1 :], name)]
        )
        or f"{base}.{name}" in FOLDERS
    )


def shared_modules(room: str) -> list[str]:
    """Return the modules of a room that belong to no framework."""
    names = (path.stem for path in (FOLDERS["dispatch"] / room).glob("*.py"))
    return [name for name in names if name.lstrip("_").partition("_")[0] not in FRAMEWORKS]


def allowed(module: str) -> Allowed:
    """Return what `module` may import beside the standard library."""
    area, _, name = module.removeprefix("dispatch").removeprefix(".").partition(".")
    own = f"dispatch.{area}.*"
    name = name.partition(".")[0]
    numeric = frozenset({"numpy", "ml_dtypes"})
    frameworks = frozenset({"torch", "jax", "jaxlib"})
    match area:
        case "cli":
            modules = ("dispatch", own, "dispatch.tools.*", "dispatch.integrations.*")
            return Allowed(frozenset({"rich", "typer"}), modules=modules)
        case "tools":
            return Allowed(numeric, frameworks | {"matplotlib"}, ("dispatch", own))
        case "testing":
            return Allowed(numeric | {"hypothesis", "pytest"}, frameworks, ("dispatch", own))
        case "integrations":
            return Allowed(numeric | FRAMEWORKS.get(name, set()), modules=("dispatch", own))
        case "plugins":
            # A module whose name starts with _ is shared by plugins and is none itself. One named for a framework too,
            # _cublas_torch, is imported inside prepare() and plan() alone, and may have at its top what they may have.
            modules = ("dispatch", "dispatch.plugins._*", f"dispatch.plugins.{name}.*")
            room = FRAMEWORKS.get(name.rpartition("_")[2]) if name.startswith("_") else None
            if room is not None:
                return Allowed(numeric | room | {"triton"}, frameworks, (*modules, "dispatch.kernels.*"))
            inside = tuple(f"dispatch.plugins._*_{x}" for x in FRAMEWORKS)
            return Allowed(numeric, frameworks | {"triton"}, modules, ("dispatch.kernels.*",), inside)
        case "kernels":
            return Allowed(numeric | {"jax", "triton"}, frozenset({"torch"}), (own,))
    rooms = ("measuring", "quantization", "registry", "remembering", "policies")
    # In frameworks what is named for none of them is for all: _shapes, request ...
    shared = ("dispatch.frameworks", *(f"dispatch.frameworks.{x}" for x in shared_modules("frameworks")))
    core = ("dispatch", "dispatch._*", *(f"dispatch.{room}.*" for room in rooms), *shared)
    if area == "policies":
        return Allowed(modules=core)
    if area != "frameworks":
        return Allowed(frozenset(CORE_LIBRARIES), modules=core, lazy_modules=("dispatch.frameworks.*",))
    # torch.py, torch/ and _torch_more.py are one room; the door, __init__.py, opens each room when it is needed.
    room = name.lstrip("_").partition("_")[0]
    libraries = frozenset(CORE_LIBRARIES | FRAMEWORKS.get(room, set()))
    if not name:
        return Allowed(libraries, modules=core, lazy_modules=(own,))
    mine = (f"dispatch.frameworks.{room}.*", f"dispatch.frameworks._{room}*")
    return Allowed(libraries, modules=(*core, *mine), lazy_modules=() if room in FRAMEWORKS else (own,))


def violations(source: str, module: str, package: bool = False) -> list[str]:
    """Return one line for each import in `source` that `module` may not have."""
    rule = allowed(module)
    found = []
    for item in imports(source, module, package):
        root = item.target.partition(".")[0]
        if root in sys.stdlib_module_names:
            continue
        if root == "dispatch":
            fine = _matches(item.target, rule.modules) or (item.lazy and _matches(item.target, rule.lazy_modules))
            fine = fine and (item.lazy or not _matches(item.target, rule.never_at_the_top))
        else:
            fine = root in rule.libraries or (item.lazy and root in rule.lazy_libraries)
        if not fine:
            found.append(f"{module}:{item.line} imports {item.target}{' (lazily)' if item.lazy else ''}")
    return list(dict.fromkeys(found))


def _matches(target: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(target, pattern) or target == pattern.removesuffix(".*") for pattern in patterns)


def modules() -> dict[str, Path]:
    """Return every module of the package by its import name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return found


@pytest.mark.parametrize("module", modules())
def test_module_imports_only_what_its_place_allows(module: str) -> None:
    path = modules()[module]
    assert violations(path.read_text(encoding="utf-8"), module, path.name == "__init__.py") == []


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "docs"])
def test_nobody_imports_a_plugin(folder: str) -> None:
    for path in (REPO / folder).rglob("*.py"):
        targets = {item.target for item in imports(path.read_text(encoding="utf-8"), path.stem)}
        assert not {x for x in targets if x.startswith("dispatch.plugins.")}, path


def test_core_without_its_rooms_is_small() -> None:
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (REPO / "dispatch").glob("*.py"))
    assert lines < 1500


def test_importing_dispatch_loads_no_framework_and_no_terminal_library(tmp_path: Path) -> None:
    heavy = ("torch", "jax", "jaxlib", "triton", "rich", "typer")
    code = f"import dispatch, sys; print(*[name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert run.stdout.split() == []


WRONG = {
    "core imports a framework": ("dispatch._x", "def f():\n    import torch"),
    "core imports rich": ("dispatch._x", "import rich.table"),
    "core imports another library": ("dispatch._x", "import scipy"),
    "core imports the command": ("dispatch._x", "from dispatch.cli import main"),
    "core imports the tools": ("dispatch._x", "from dispatch import tools"),
    "core imports a plugin by a string": ("dispatch._x", "importlib.import_module('dispatch.plugins.cublas')"),
    "core imports a kernel lazily": ("dispatch._x", "def f():\n    from dispatch import kernels"),
    "core imports a framework's room at its top": ("dispatch._x", "import dispatch.frameworks.torch"),
    "measuring imports a framework": ("dispatch.measuring.latency", "def f():\n    import jax"),
    "quantization imports a kernel": ("dispatch.quantization", "def f():\n    import dispatch.kernels.x"),
    "a room imports another framework": ("dispatch.frameworks.torch", "def f():\n    import jax"),
    "a room imports another room": ("dispatch.frameworks.jax", "def f():\n    import dispatch.frameworks.torch"),
    "the rooms' door imports a framework": ("dispatch.frameworks", "def f():\n    import torch"),
    "a room imports a kernel": ("dispatch.frameworks.jax", "def f():\n    from dispatch.kernels import reference"),
    "a plugin imports a framework at its top": ("dispatch.plugins.x", "import torch"),
    "a plugin imports a kernel at its top": ("dispatch.plugins.x", "from dispatch.kernels import reference"),
    "a plugin imports a kernel in its class": ("dispatch.plugins.x", "class A:\n    import dispatch.kernels.y"),
    "a plugin imports another": ("dispatch.plugins.x", "def f():\n    from dispatch.plugins import y_gemm"),
    "a plugin imports another, relatively": ("dispatch.plugins.x", "from .y_gemm import BACKEND"),
    "a plugin imports a private module": ("dispatch.plugins.x", "from dispatch._problem import Problem"),
    "a plugin imports a private module, from the top": ("dispatch.plugins.x", "from dispatch import _problem"),
    "a plugin imports what is bound to a framework": ("dispatch.plugins.x", "import dispatch.plugins._x_torch"),
    "a plugin imports a room": ("dispatch.plugins.x", "from dispatch.frameworks import framework"),
    "a plugin imports a room, from the top": ("dispatch.plugins.x", "from dispatch import frameworks"),
    "a kernel imports torch at its top": ("dispatch.kernels.x", "import torch"),
    "a kernel imports torch under if": ("dispatch.kernels.x", "if True:\n    import torch"),
    "a kernel imports torch in else of TYPE_CHECKING": (
        "dispatch.kernels.x",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import torch",
    ),
    "a kernel imports the core": ("dispatch.kernels.x", "from dispatch import Problem"),
    "a kernel imports a plugin": ("dispatch.kernels.x", "from ..plugins import cublas"),
    "the tools import rich": ("dispatch.tools.demo", "from rich import print"),
    "the tools import a private module": ("dispatch.tools.demo", "from dispatch.remembering.store import Store"),
    "the tools import a framework at their top": ("dispatch.tools.demo", "import jax.numpy as jnp"),
    "testing imports a plugin": ("dispatch.testing.fakes", "from dispatch.plugins.cublas import BACKEND"),
    "testing imports typer": ("dispatch.testing.fakes", "import typer"),
    "the command imports a private module": ("dispatch.cli.main", "from dispatch.policies.policy import load"),
    "the command imports a plugin": ("dispatch.cli.main", "import dispatch.plugins.cublas"),
    "the command imports a framework": ("dispatch.cli.main", "def f():\n    import torch"),
    "an integration imports another framework": ("dispatch.integrations.torch", "import jax"),
    "policies import something": ("dispatch.policies", "import numpy"),
}

RIGHT = {
    "the core stands on its libraries": ("dispatch._x", "import sqlite3, numpy, pluggy, ml_dtypes, platformdirs"),
    "the core uses its rooms": ("dispatch._x", "from dispatch.frameworks import framework\nimport dispatch.measuring"),
    "the core is re-exported": ("dispatch", "from dispatch._problem import Problem"),
    "a room imports its framework": ("dispatch.frameworks.jax", "import jax\nimport jaxlib"),
    "a room in several modules": ("dispatch.frameworks.torch._autograd", "import torch"),
    "a room in private modules": ("dispatch.frameworks.torch", "from dispatch.frameworks._torch_library import op"),
    "the rooms' door opens a room": ("dispatch.frameworks", "def f():\n    import dispatch.frameworks.torch"),
    "a room uses the core": ("dispatch.frameworks.torch", "from dispatch._problem import Operand"),
    "a plugin uses public names": ("dispatch.plugins.x", "from dispatch import Problem, Rejection"),
    "a plugin is lazy": ("dispatch.plugins.x", "def plan():\n    import torch\n    from dispatch.kernels import y"),
    "a plugin's types": ("dispatch.plugins.x", "if TYPE_CHECKING:\n    import torch"),
    "what is bound to a framework": ("dispatch.plugins._x_torch", "import torch\nfrom dispatch.kernels import y"),
    "a plugin imports what is bound lazily": ("dispatch.plugins.x", "def f():\n    import dispatch.plugins._x_torch"),
    "plugins share a private module": ("dispatch.plugins.x", "from dispatch.plugins._padding import pad"),
    "a kernel imports its DSL": ("dispatch.kernels.x", "import triton.language as tl\nimport jax.experimental.pallas"),
    "a kernel is launched on torch tensors": ("dispatch.kernels.x", "def launch(a):\n    import torch"),
    "tools make arrays": ("dispatch.tools.demo", "from dispatch import matmul\ndef f():\n    import torch"),
    "the command prints": ("dispatch.cli.main", "import rich, typer\nfrom dispatch.tools import demo"),
}


@pytest.mark.parametrize("case", WRONG)
def test_checker_reports_a_wrong_import(case: str) -> None:
    module, source = WRONG[case]
    assert len(violations(source, module, module in FOLDERS)) == 1


@pytest.mark.parametrize("case", RIGHT)
def test_checker_lets_a_right_import_pass(case: str) -> None:
    module, source = RIGHT[case]
    assert violations(source, module, module in FOLDERS) == []


def test_checker_sees_lines_and_laziness() -> None:
    source = "import os\n\ndef f():\n    from . import y\n"
    assert list(imports(source, "dispatch.plugins.x")) == [
        Import("os", 1, False),
        Import("dispatch.plugins", 4, True),
    ]
