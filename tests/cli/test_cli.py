"""The command `dispatch`: what each subcommand prints, as a table and as JSON, and its exit code."""

from __future__ import annotations

import importlib.metadata
import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dispatch
from dispatch import Rejection, _api
from dispatch._engine import Engine
from dispatch.cli import _app, _print
from dispatch.registry import PluginWarning, Registry
from dispatch.remembering import DecisionStore
from dispatch.testing import FakeBackend, fake_timings, registered
from dispatch.tools import demo
from dispatch.tools.demo import Product

SEPARATE = "mix_stderr" in inspect.signature(CliRunner).parameters  # click before 8.2
RUNNER = CliRunner(mix_stderr=False) if SEPARATE else CliRunner()


@pytest.fixture(autouse=True)
def engine(tmp_path, monkeypatch):
    """The real backends and an empty store."""
    made = Engine(Registry(), DecisionStore(tmp_path / "decisions.sqlite"))
    monkeypatch.setattr(_api, "_engine", made)
    dispatch.forget()
    yield made
    dispatch.forget()


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A demonstration of two small products, on a machine with NumPy alone."""
    shown = [Product("numpy", "float16", 32, 32, 32), Product("numpy", "float32", 16, 8, 4, transpose_b=True)]
    monkeypatch.setattr(demo, "products", lambda frameworks: iter(shown))
    monkeypatch.setattr(dispatch, "installed", lambda: ("numpy",))


def run(*arguments, code=0):
    """Return what the command printed on stdout, and on stderr."""
    done = RUNNER.invoke(_app.app, list(arguments))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.stdout, done.stderr


def run_json(*arguments, code=0):
    return json.loads(run(*arguments, "--json", code=code)[0])


EXPLAIN = ("explain", "-M", "8", "-N", "4", "-K", "16", "--dtype", "float16")


def test_demo():
    out, _ = run("demo")
    for text in ("numpy float16 32 x 32 x 32", "numpy float32 16 x 8 x 4, b transposed", "framework's own", "-> "):
        assert text in out
    assert "torch is not installed" in out
    assert "jax is not installed" in out


def test_demo_as_json():
    out, _ = run("demo", "--json")
    assert out.startswith("{")  # progress is no part of it
    found = json.loads(out)
    assert found["not_installed"] == ["torch", "jax"]
    half, single = found["decisions"]
    assert half["problem"]["a"]["dtype"] == "float16"
    assert half["backend"] in ("cpu_blas", "bf16_fallback")
    assert half["reason"]
    assert single["backend"] == "bf16_fallback"


def test_every_product_of_the_demonstration_can_be_made(monkeypatch):
    monkeypatch.undo()
    shown = list(demo.products(("numpy",)))
    assert {(x.framework, x.dtype) for x in shown} >= {("numpy", "float16"), ("numpy", "float32")}


def test_explain():
    with fake_timings({"baseline": 1000.0, "cpu_blas": 100.0}):
        out, _ = run(*EXPLAIN)
    assert "matmul(m=8, n=4, k=16, float16 -> float16" in out
    assert "-> cpu_blas: 10.00x the framework's own product (100 us against 1 ms)" in out


def test_explain_as_json():
    with fake_timings({"baseline": 1000.0, "cpu_blas": 100.0}):
        found = run_json(*EXPLAIN)
    assert (found["backend"], found["speedup"], found["problem"]["k"]) == ("cpu_blas", 10.0, 16)
    assert {c["candidate"]["backend"] for c in found["candidates"]} >= {"cpu_blas", "bf16_fallback", "cublas"}


def test_explain_of_a_scope_follows_the_rules_for_it(tmp_path):
    policy = tmp_path / "heads.toml"
    policy.write_text('[[rules]]\nmatch = { scope = "*.lm_head" }\nbackends.deny = ["cpu_blas"]\n')
    with fake_timings({"baseline": 1000.0, "cpu_blas": 100.0}):
        found = [
            run_json(*EXPLAIN, "--policy", str(policy), "--scope", scope)["backend"]
            for scope in ("model.lm_head", "model.mlp")
        ]
    assert found == ["bf16_fallback", "cpu_blas"]


def test_explain_of_a_transposed_b_under_a_policy_with_one_backend():
    out, _ = run(*EXPLAIN, "--transpose-b", "--policy", "native", "--backend", "bf16_fallback")
    assert "row/col" in out
    assert "-> bf16_fallback: asked for by name" in out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("--framework", "tensorflow"), "framework 'tensorflow' is unknown; allowed: numpy, torch, jax"),
        (("--dtype", "float17"), "float17"),
        (("--policy", "none"), "no policy is named 'none'"),
        (("--policy", "./none.toml"), "cannot be read"),
        (("--backend", "none"), "backend 'none' is not registered; registered: bf16_fallback, cpu_blas, cublas"),
        (("--backend", "cublas"), "No backend can run matmul"),
        (("--device", "cuda:77", "--framework", "torch"), ""),
    ],
)
def test_explain_says_no(changes, said):
    if "torch" in changes:
        pytest.importorskip("torch")
    out, err = run(*EXPLAIN, *changes, code=2 if changes[1] in ("tensorflow", "float17") else 1)
    assert out == ""
    assert said in err
    assert "Traceback" not in err
    assert "overridden" not in err


def test_explain_of_a_locked_policy_says_no(tmp_path):
    file = tmp_path / "locked.toml"
    file.write_text('[tuning]\nmode = "locked"\n')
    _, err = run(*EXPLAIN, "--policy", str(file), code=1)
    assert "NotLockedError" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain",),
        (*EXPLAIN, "-M", "-1"),
        (*EXPLAIN, "-M", "many"),
        (*EXPLAIN, "--nonsense"),
        ("nonsense",),
        ("policy", "check"),
        ("cache", "nonsense"),
    ],
)
def test_a_wrong_command_line(arguments):
    _, err = run(*arguments, code=2)
    assert "Usage" in err


@pytest.mark.parametrize("arguments", [(), ("policy",), ("cache",)])
def test_help(arguments):
    out, _ = run(*arguments, "--help")
    assert "Usage" in out
    assert "Exit codes: 0 done, 1 no, 2 usage" in " ".join(run("--help")[0].split())


def test_backends():
    with registered(FakeBackend("mine"), distribution="my-package"):
        out, _ = run("backends")
        found = {x["name"]: x for x in run_json("backends")}
    for text in ("bf16_fallback", "cpu_blas", "mine", "my-package", "available", "gemm-dispatch"):
        assert text in out
    assert found["mine"]["available"] is True
    assert found["mine"]["unavailable"] is None
    assert found["bf16_fallback"]["distribution"] == "gemm-dispatch"


def test_policy_check(tmp_path):
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text("gate.min_speedup = 2.0\n")
    bad.write_text("gate.min_speed = 2.0\n")
    assert "right" in run("policy", "check", str(good))[0]
    assert "right" in run("policy", "check", "strict")[0]
    assert "no policy is named" in "".join(run("policy", "check", "stricter", code=1))
    assert run_json("policy", "check", str(good)) == {
        "file": str(good),
        "ok": True,
        "fingerprint": dispatch.load_policy(good).fingerprint,
        "doubts": [],
    }
    out, err = run("policy", "check", str(bad), code=1)
    assert out == ""
    for text in (str(bad), "min_speed", "min_speedup"):
        assert text in err.replace("\n", "")
    found = run_json("policy", "check", str(bad), code=1)
    assert (found["file"], found["ok"]) == (str(bad), False)
    assert "min_speed" in found["error"]


def test_policy_check_doubts_names_that_are_nobodys(tmp_path):
    file = tmp_path / "file.toml"
    file.write_text(
        'backends.deny = ["cublass", "cpu_*"]\nfallback.too_slow = ["cublas"]\n'
        '[[rules]]\nmatch = { op = ["dgrd", "?grad"], arch = ["hopper", "sm_90"] }\nbackends.allow = ["bf16_fallbak"]\n'
    )
    found = run_json("policy", "check", str(file))
    assert found["ok"] is True
    keys = ["rules[0].match.op: 'dgrd'", "rules[0].match.arch: 'hopper'", "backends.deny: 'cublass'"]
    keys.insert(2, "rules[0].match.arch: 'sm_90'")
    keys.append("rules[0].backends.allow: 'bf16_fallbak'")
    assert [doubt.partition(" matches")[0] for doubt in found["doubts"]] == keys
    out, _ = run("policy", "check", str(file))
    assert out.count("look again at") == 5


@pytest.mark.parametrize(
    ("guard", "metric", "doubted"),
    [
        ('mode = "strict"', "max_abs_over_scale", ["guard.mode"]),
        ("probe_every = 8", "max_abs_over_scale", ["guard.probe_every"]),
        ('mode = "off"', "max_abs_over_scale", []),
        ('mode = "strict"', "relative_l2", []),
    ],
)
def test_policy_check_doubts_a_guard_that_cannot_see_the_metric(tmp_path, guard, metric, doubted):
    file = tmp_path / "file.toml"
    file.write_text(f'[guard]\n{guard}\n[error]\nmetric = "{metric}"\n')
    assert [doubt.partition(":")[0] for doubt in run_json("policy", "check", str(file))["doubts"]] == doubted


def test_version():
    out, _ = run("--version")
    assert out.split() == ["gemm-dispatch", importlib.metadata.version("gemm-dispatch")]


@pytest.mark.parametrize("content", [None, b"gate = [", b"\xff\xfe"])
def test_policy_check_of_what_is_no_toml(tmp_path, content):
    file = tmp_path / "file.toml"
    if content is not None:
        file.write_bytes(content)
    _, err = run("policy", "check", str(file), code=1)
    assert "PolicyError" in err
    assert run_json("policy", "check", str(file), code=1)["ok"] is False


@pytest.mark.parametrize("file", ["relative.toml", "no_suffix"])
def test_policy_check_takes_any_path(tmp_path, monkeypatch, file):
    monkeypatch.chdir(tmp_path)
    Path(file).write_text("gate.min_speedup = 2.0\n")
    assert "right" in run("policy", "check", file)[0]


def test_policy_show(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('gate.min_speedup = 2.5\n[[rules]]\nmatch = { scope = "*.up" }\nerror.tolerance = 0.1\n')
    out, _ = run("policy", "show", str(file))
    lines = {line.split("│")[1].strip(): line for line in out.splitlines() if line.count("│") > 2}
    assert "2.5" in lines["gate.min_speedup"]
    assert "mine.toml" in lines["gate.min_speedup"]
    assert "default.toml" in lines["gate.min_speedup_lossless"]
    assert "*.up" in lines["rules[0]"]
    found = run_json("policy", "show", str(file))
    assert found["values"]["gate"]["min_speedup"] == 2.5
    assert found["origins"]["gate.min_speedup"] == str(file)
    assert found["values"]["rules"][0]["overrides"] == {"error.tolerance": 0.1}


def test_policy_show_of_the_one_in_force():
    assert "policy default" in run("policy", "show")[0]
    with dispatch.use_policy("strict"):
        assert run_json("policy", "show")["name"] == "strict"
    assert "no policy is named 'none'" in run("policy", "show", "none", code=1)[1]


def test_cache():
    assert run_json("cache", "show") == []
    with fake_timings({"baseline": 1000.0, "cpu_blas": 100.0}):
        run(*EXPLAIN)
    out, _ = run("cache", "show")
    for text in ("m=8, n=4, k=16", "cpu_blas", "10.00x", "default", "decisions.sqlite"):
        assert text in out
    (entry,) = run_json("cache", "show")
    assert entry["backend"] == "cpu_blas"
    assert "1 decision removed" in run("cache", "clear")[0]
    assert run_json("cache", "clear") == {"removed": 0}
    assert run_json("cache", "show") == []


def test_doctor(engine):
    out, _ = run("doctor")
    for text in ("python", "numpy", "cpu-", str(engine.decisions.store.path), "default", "bf16_fallback"):
        assert text in out
    found = run_json("doctor")
    assert found["problems"] == []
    assert found["packages"]["numpy"]
    assert found["store"]["state"] == "ok"
    assert found["policy"]["name"] == "default"


def test_doctor_finds_what_is_broken(engine):
    with pytest.warns(PluginWarning):
        engine.registry.add(object(), "odd", "broken-dist")
    out, _ = run("doctor", code=1)
    assert "problem: " in out
    assert "broken-dist" in out
    assert any("is no Backend" in x for x in run_json("doctor", code=1)["problems"])


def test_doctor_finds_a_framework_that_cannot_be_imported(monkeypatch):
    found = {"archs": {"numpy": ["cpu-avx2"]}, "broken": {"torch": "ImportError: no libc10.so"}, "driver": None}
    monkeypatch.setattr(dispatch, "machine", lambda: found)
    assert run_json("doctor", code=1)["problems"] == ["framework torch: ImportError: no libc10.so"]
    assert "problem: framework torch: ImportError: no libc10.so" in run("doctor", code=1)[0]


def test_doctor_finds_a_store_that_keeps_nothing(engine):
    engine.decisions.store.path.write_bytes(b"no database" * 500)
    with pytest.warns(dispatch.StoreWarning):
        found = run_json("doctor", code=1)
    assert found["problems"] == ["decision store: it is not an SQLite database"]
    assert found["store"]["state"] == "it is not an SQLite database"


def test_doctor_names_each_of_two_that_share_a_name():
    with registered(FakeBackend("mine"), distribution="one"):
        with pytest.warns(PluginWarning):
            dispatch.register(FakeBackend("mine"), distribution="two")
        found = run_json("doctor", code=1)
    assert found["backends"]["mine"] == "available"
    assert len(found["problems"]) == 1
    assert "one's is kept, not two's" in found["problems"][0]


def test_brackets_in_what_is_printed_are_no_markup(tmp_path):
    file = tmp_path / "[bold]mine.toml"
    file.write_text("gate.min_speedup = 2.5\n")
    assert "[bold]mine.toml" in run("policy", "check", str(file))[0]
    assert "[bold]mine.toml" in run("policy", "show", str(file))[0]
    rejection = Rejection("arch [/x]", "[red]", "[bold]")
    with registered(FakeBackend("mine", rejects=[rejection]), distribution="my[/x]dist"):
        assert "arch [/x] is [red]; needs [bold]" in run(*EXPLAIN)[0]
        assert "my[/x]dist" in run("backends")[0]


def test_without_a_terminal_nothing_is_cut(tmp_path):
    long = tmp_path / ("long" * 40 + ".toml")
    long.write_text("gate.min_speedup = 2.5\n")
    assert str(long) in run("policy", "check", str(long))[0]
    assert str(long) in run("policy", "show", str(long))[0]
    reason = "why" * 100
    with registered(FakeBackend("mine", rejects=[Rejection("k", "1", reason)])):
        out, _ = run(*EXPLAIN)
        assert reason in out
        assert "…" not in out
        assert reason in run(*EXPLAIN, "--backend", "mine", code=1)[1]


class Terminal(io.StringIO):
    """A terminal to write to."""

    def isatty(self):
        return True


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_in_a_terminal_every_name_and_figure_and_reason_is_whole(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    rejecting = FakeBackend("mine", rejects=[Rejection("k", "16", "32")])
    with registered(rejecting), fake_timings({"baseline": 1000.0, "cpu_blas": 100.0}):
        decision = Product("numpy", "float16", 8, 4, 16).decision()
        monkeypatch.setattr(sys, "stdout", terminal)
        _print.decision_table(decision)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= columns
    words = " ".join(" ".join(lines).split())
    for text in (
        "cpu_blas",
        "bf16_fallback",
        "chosen",
        "rejected",
        "1 ms",
        "10.00x",
        "k is 16; needs 32",
        "-> cpu_blas",
    ):
        assert text in words


def script(*arguments, **env):
    command = shutil.which("dispatch", path=Path(sys.executable).parent)
    assert command is not None
    return subprocess.run(
        [command, *arguments], capture_output=True, text=True, env=os.environ | env, timeout=120, check=False
    )


def test_the_installed_script(tmp_path):
    done = script(*EXPLAIN, "--json", DISPATCH_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["problem"]["m"] == 8
    assert done.stderr == ""
    assert script("policy", "check", str(tmp_path / "none.toml")).returncode == 1
    assert script("explain").returncode == 2


def test_a_policy_in_the_environment_that_is_wrong_is_said_without_a_traceback(tmp_path):
    for command in (("doctor",), ("policy", "show"), ("demo",), EXPLAIN):
        done = script(*command, DISPATCH_POLICY="none", DISPATCH_CACHE_DIR=str(tmp_path))
        assert done.returncode == 1
        assert "DISPATCH_POLICY=none" in done.stderr + done.stdout
        assert "Traceback" not in done.stderr


def test_a_device_that_numpy_has_not_is_an_error():
    out = run("explain", "-M", "4", "-N", "4", "-K", "4", "--device", "cuda:0", code=2)
    assert "NumPy has no device 'cuda:0'; allowed: cpu" in "".join(out)
