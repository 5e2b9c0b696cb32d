"""Somebody else's plugins, packaged and installed as they would be, in environments of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

PYPROJECT = """
[build-system]
requires = []
build-backend = "tiny_backend"
backend-path = ["."]
"""
BUILD = """
import zipfile

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name, files = {name!r}, {files!r}
    with zipfile.ZipFile(f"{{wheel_directory}}/{{name}}", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return name
"""
BACKEND = """
import numpy as np
from dispatch import Capability, Rejection, hookimpl

class Mine:
    name = "{name}"
    capabilities = (Capability(frameworks=("numpy",), archs=("*",), dtypes=("float32",), out_dtypes=("float32",)),)
    def rejections(self, problem):
        return [Rejection("k", "5", "an even one")] if problem.k == 5 else []
    def prepare(self, operand, recipe, *, axis):
        return operand
    def plan(self, problem, config=None):
        {plan}
        return lambda a, b, bias=None: {result}

@hookimpl
def dispatch_backends():
    return [Mine()]
"""
GOOD = {"plan": "pass", "result": "a @ b"}
MODULES = {
    "plug_good": BACKEND.format(name="plug_good", **GOOD),
    "plug_import": "raise OSError('libfast.so.1: cannot open shared object file')",
    "plug_exit": "raise SystemExit(3)",
    "plug_syntax": "def broken(:",
    "plug_plan": BACKEND.format(name="plug_plan", plan="raise RuntimeError('no kernel for this')", result="a @ b"),
    "plug_shape": BACKEND.format(name="plug_shape", plan="pass", result="(a @ b)[:-1]"),
    "plug_dtype": BACKEND.format(name="plug_dtype", plan="pass", result="(a @ b).astype(np.float64)"),
    "plug_nan": BACKEND.format(name="plug_nan", plan="pass", result="a @ b * np.float32('nan')"),
    "plug_call": BACKEND.format(name="plug_call", plan="pass", result="1 / 0"),
    "plug_hook": BACKEND.format(name="plug_hook", **GOOD).replace("return [Mine()]", "raise KeyError('hook')"),
}
RUN = """
import json, sys, warnings
sys.modules |= dict.fromkeys(("torch", "jax"))  # quicker
said = []
warnings.simplefilter("always")
warnings.showwarning = lambda message, category, *rest: said.append(f"{category.__name__}: {message}")
import numpy as np, dispatch
from dispatch.testing import fake_timings
rng = np.random.default_rng(0)
a, b = (rng.standard_normal(s).astype("f4") for s in ((8, 16), (16, 4)))
latency = json.loads(sys.argv[1])
with fake_timings({"baseline": 100.0, **latency}):
    right = all(np.allclose(dispatch.matmul(a, b), a.astype("f8") @ b, rtol=1e-4, atol=1e-5) for _ in range(3))
    decision = dispatch.explain(a, b)
    odd = dispatch.explain(a[:, :5], b[:5])
print(json.dumps({
    "right": right,
    "backend": decision.backend,
    "reason": decision.reason,
    "verdicts": {v.candidate.backend: v.reason for v in decision.candidates},
    "odd": {v.candidate.backend: v.reason for v in odd.candidates},
    "backends": [[x.name, x.distribution, x.version, x.unavailable] for x in dispatch.backends()],
    "quarantined": dispatch.stats()["quarantined"],
    "said": said,
}))
"""


def make_package(folder, dist, modules, points):
    """Return a folder that pip can build: it brings a build backend, so that nothing has to be downloaded for it."""
    folder.mkdir()
    stem = dist.replace("-", "_") + "-1.2"
    entries = "".join(f"{name} = {module}\n" for name, module in points.items())
    files = {f"{name}.py": text for name, text in modules.items()} | {
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.2\n",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}.dist-info/entry_points.txt": f"[dispatch.backends]\n{entries}",
    }
    record = "".join(f"{path},,\n" for path in (*files, f"{stem}.dist-info/RECORD"))
    files[f"{stem}.dist-info/RECORD"] = record
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "tiny_backend.py").write_text(BUILD.format(name=f"{stem}-py3-none-any.whl", files=files))
    return folder


class Environment:
    """A virtual environment that sees what the running one has; more is installed into it alone."""

    def __init__(self, home):
        venv.create(home, with_pip=True)
        self.python = home / "bin" / "python"
        site = Path(self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        seen = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
        lines = [f"import site; site.addsitedir({path!r})" for path in seen]  # follows an editable install's files
        (site / "running.pth").write_text("\n".join(lines) + "\n")

    def run(self, *arguments, **env):
        environment = os.environ | env
        done = subprocess.run(
            [self.python, *arguments], capture_output=True, text=True, env=environment, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, *folders):
        flags = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
        self.run("-m", "pip", "install", *flags, *map(str, folders))

    def multiply(self, cache, **latency):
        return json.loads(self.run("-c", RUN, json.dumps(latency), DISPATCH_CACHE_DIR=str(cache)).split("\n")[-2])


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One environment with a plugin of each kind, each a module of one distribution."""
    folder = tmp_path_factory.mktemp("shared")
    environment = Environment(folder / "env")
    environment.install(make_package(folder / "source", "acme-gemm", MODULES, {name: name for name in MODULES}))
    return environment


@pytest.fixture(scope="module")
def served(shared, tmp_path_factory):
    """What an environment full of broken plugins, each of them seemingly the fastest, makes of a product."""
    broken = dict.fromkeys(MODULES, 1.0) | {"plug_good": 10.0}
    return shared.multiply(tmp_path_factory.mktemp("cache"), **broken)


def test_a_plugin_is_found_and_chosen_where_it_wins(served):
    assert served["right"]
    assert served["backend"] == "plug_good"
    assert served["reason"].startswith("10.00x the framework's own product")
    assert ["plug_good", "acme-gemm", "1.2", None] in served["backends"]
    assert [x[0] for x in served["backends"]][:3] == ["bf16_fallback", "cpu_blas", "cublas"]


def test_its_rejections_are_the_reason_elsewhere(served):
    assert served["odd"]["plug_good"] == "k is 5; needs an even one"


def test_a_plugin_is_explained_where_it_loses(shared, tmp_path):
    found = shared.multiply(tmp_path, plug_good=99.0)
    assert found["right"]
    assert found["backend"] == "bf16_fallback"
    assert "1.05x not reached: 1.01x" in found["verdicts"]["plug_good"]
    assert "1.05x not reached: 1.01x" in found["reason"]


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        ("plug_import", "OSError: libfast.so.1"),
        ("plug_exit", "SystemExit: 3"),
        ("plug_syntax", "SyntaxError"),
        ("plug_hook", "KeyError: 'hook'"),
    ],
)
def test_one_that_does_not_load_is_a_warning_and_listed(served, plugin, reason):
    warned = [x for x in served["said"] if plugin in x]
    assert len(warned) == 1
    assert warned[0].startswith(f"PluginWarning: plugin {plugin} of acme-gemm: {reason}")
    (listed,) = [x for x in served["backends"] if x[0] == plugin]
    assert listed[1] == "acme-gemm"
    assert listed[3].startswith(reason)
    assert plugin not in served["verdicts"]


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        ("plug_plan", "RuntimeError: no kernel for this"),
        ("plug_shape", "returned shape (7, 4), not (8, 4)"),
        ("plug_dtype", "returned dtype float64, not float32"),
        ("plug_nan", "returned values that are not finite"),
        ("plug_call", "ZeroDivisionError: division by zero"),
    ],
)
def test_one_that_fails_is_quarantined_with_the_reason_and_the_next_one_serves(served, plugin, reason):
    assert served["quarantined"][plugin].startswith(reason)
    assert reason in served["verdicts"][plugin]
    (listed,) = [x for x in served["backends"] if x[0] == plugin]
    assert listed[3].startswith(reason)
    assert not [x for x in served["said"] if plugin in x]


def test_two_of_one_name_and_one_of_a_built_in(tmp_path):
    environment = Environment(tmp_path / "env")
    good, wrong = BACKEND.format(name="twice", **GOOD), BACKEND.format(name="twice", plan="pass", result="a @ b * 3")
    shadow = wrong.replace("twice", "bf16_fallback")
    environment.install(
        make_package(tmp_path / "b", "b-dist", {"b_mod": wrong}, {"twice": "b_mod"}),
        make_package(tmp_path / "a", "a-dist", {"a_mod": good}, {"twice": "a_mod"}),
        make_package(tmp_path / "c", "a-shadow", {"c_mod": shadow}, {"bf16_fallback": "c_mod"}),
    )
    found = environment.multiply(tmp_path / "cache", twice=10.0)
    assert found["right"]
    assert found["backend"] == "twice"
    twice = "two backends are named 'twice': a-dist's is kept, not b-dist's"
    assert sorted(found["said"]) == [
        "PluginWarning: plugin bf16_fallback of a-shadow: two backends are named 'bf16_fallback': "
        "gemm-dispatch's is kept, not a-shadow's",
        f"PluginWarning: plugin twice of b-dist: {twice}",
    ]
    listed = [x[1:] for x in found["backends"] if x[0] == "twice"]
    assert listed == [["a-dist", "1.2", None], ["b-dist", "", twice]]
