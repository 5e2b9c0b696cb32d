"""The sdist and the wheel, built as a user would, hold what the repository holds, and the wheel works by itself."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
FOLDERS = {"dispatch/": "dispatch/"} | {f"{name}/": f"dispatch/{name}/" for name in ("kernels", "plugins", "policies")}
DATA = {"dispatch/": ("py.typed",), "policies/": ("*.toml", "*.json")}
OPTIONAL = {"torch", "jax", "jaxlib", "triton", "flax", "equinox", "matplotlib", "pytest", "hypothesis"}
MAY_NEED_ONE = ("dispatch.frameworks.", "dispatch.integrations.", "dispatch.kernels.", "dispatch.testing.")

IMPORT_EACH = """
import importlib, json, sys
missing = {}
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing[name] = error.name
print(json.dumps(missing))
"""


@dataclass(frozen=True, slots=True)
class Built:
    """One build: the wheel and the paths in it."""

    wheel: Path
    files: frozenset[str]


def _repository_files() -> list[str]:
    listed = ["ls-files", "--cached", "--others", "--exclude-standard"]
    # CI may run as another user than the one who cloned.
    command = ["git", "-c", "safe.directory=*", "-C", str(REPO), *listed]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if (REPO / name).is_file()]


def _expected_in_wheel() -> set[str]:
    found = set()
    for name in _repository_files():
        for folder, installed in FOLDERS.items():
            inside = name.removeprefix(folder)
            if inside != name and (name.endswith(".py") or any(Path(inside).match(x) for x in DATA.get(folder, ()))):
                found.add(installed + inside)
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build from a copy of the repository's files, so that no stale folder of this checkout is in it."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in _repository_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, source / name)
    _run(sys.executable, "-m", "build", "--outdir", str(dist), str(source))
    assert sorted(path.suffix for path in dist.iterdir()) == [".gz", ".whl"]
    wheel = next(dist.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        return Built(wheel, frozenset(name for name in archive.namelist() if not name.endswith("/")))


@pytest.fixture(scope="module")
def python(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel without extras into an environment of its own and return its interpreter."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    _run(str(python), "-m", "pip", "install", "-q", "-c", str(REPO / "constraints.txt"), str(built.wheel))
    return python


def _run(*command: str, stdin: str = "", cwd: Path | None = None) -> str:
    run = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, cwd=cwd)
    assert run.returncode == 0, f"{' '.join(command)}\n{run.stdout}\n{run.stderr}"
    return run.stdout


def test_wheel_holds_the_repositorys_files_and_nothing_else(built: Built) -> None:
    inside = {name for name in built.files if not name.partition("/")[0].endswith(".dist-info")}
    assert inside == _expected_in_wheel()
    assert "dispatch/py.typed" in inside


def test_wheel_carries_the_licence(built: Built) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in built.files)


def _may_need_one(module: str) -> bool:
    """Return whether a module is for one framework: by its place, or as plugins/_cublas_torch by its name."""
    bound = module.startswith("dispatch.plugins._") and module.rpartition("_")[2] in OPTIONAL
    return bound or module.startswith(MAY_NEED_ONE)


def test_every_module_without_a_framework_imports(built: Built, python: Path, tmp_path: Path) -> None:
    paths = (name.removesuffix(".py").removesuffix("/__init__") for name in built.files if name.endswith(".py"))
    modules = sorted(path.replace("/", ".") for path in paths)
    assert "dispatch.plugins" in modules
    missing = json.loads(_run(str(python), "-c", IMPORT_EACH, stdin=json.dumps(modules), cwd=tmp_path))
    unexpected = {
        module: name
        for module, name in missing.items()
        if name.partition(".")[0] not in OPTIONAL or not _may_need_one(module)
    }
    assert unexpected == {}


def test_installed_metadata_names_every_extra_and_entry_point(python: Path, tmp_path: Path) -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    code = (
        "import importlib.metadata as m, json; d = m.distribution('gemm-dispatch');"
        "print(json.dumps([sorted(d.metadata.get_all('Provides-Extra')),"
        " {e.name: e.value for e in d.entry_points if e.group == 'dispatch.backends'}]))"
    )
    extras, backends = json.loads(_run(str(python), "-c", code, cwd=tmp_path))
    assert extras == sorted(project["optional-dependencies"])
    assert backends == project["entry-points"]["dispatch.backends"]
