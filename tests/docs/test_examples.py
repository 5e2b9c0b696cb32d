"""What README, docs and examples say to write is written as it stands there, and runs."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dispatch
from dispatch.testing import check, fake_timings, problems
from dispatch.tools.doubts import doubts

REPO = Path(__file__).resolve().parents[2]


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced code of a language in one page."""
    return re.findall(
        rf"^```{language}\n(.*?)^```", (REPO / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def test_the_layer_of_the_torch_page() -> None:
    torch = pytest.importorskip("torch")
    (program,) = blocks("docs/torch.md", "python")
    names: dict[str, Any] = {}
    exec(compile(program, "docs/torch.md", "exec"), names)
    plain = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.GELU(), torch.nn.Linear(20, 8, bias=False))
    model = names["convert"](copy.deepcopy(plain))
    x = torch.randn(2, 5, 12)
    with fake_timings({}):
        for _ in range(2):
            for each in (plain, model):
                optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
                each.train()(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                torch.testing.assert_close(model.eval()(x), plain.eval()(x))
        for each in (plain, model):
            each(x).square().sum().backward()
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad)
        twin, other = copy.deepcopy(model), copy.deepcopy(plain)
        for each in (twin, other):
            torch.nn.init.ones_(each[0].weight)
        torch.testing.assert_close(twin(x), other(x))
        torch.testing.assert_close(twin.double().eval()(x.double()), other.double()(x.double()))
    assert {type(layer).__name__ for layer in model} == {"Linear", "GELU"}
    assert all(type(layer) is not torch.nn.Linear for layer in model)
    assert isinstance(model[0].prepared, dispatch.PreparedOperand)
    assert model.train()[0].prepared is None


POLICIES = [
    pytest.param(text, id=f"{path.stem}-{i}")
    for path in sorted(REPO.glob("docs/*.md"))
    for i, text in enumerate(blocks(f"docs/{path.name}", "toml"))
    if "entry-points" not in text
]


def test_the_program_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    (program,) = blocks("README.md", "python")
    small = program.replace('"cuda"', '"cpu"').replace("8192", "64")
    assert "8192" not in small
    names: dict[str, object] = {}
    with fake_timings({}):
        exec(compile(small, "README.md", "exec"), names)
    a, b, c, y = (names[name] for name in "abcy")
    assert isinstance(a, torch.Tensor)
    assert torch.equal(c, a @ b)
    assert y.shape == (64, 64)  # type: ignore[attr-defined]
    assert "matmul(m=64, n=64, k=64, bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize("text", POLICIES)
def test_policies_in_the_docs_are_right(text: str, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(text, encoding="utf-8")
    policy = dispatch.load_policy(file)
    assert policy != dispatch.load_policy("default")
    assert doubts(policy) == []


def test_some_policies_are_in_the_docs() -> None:
    assert len(POLICIES) >= 4


def test_the_example_of_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = REPO / "examples" / "my_backend.py"
    monkeypatch.setenv("DISPATCH_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "float64_blas" in done.stdout
    monkeypatch.syspath_prepend(str(file.parent))
    import my_backend

    backend = my_backend.Float64Blas()
    drawn = problems(backend)
    assert drawn
    for problem in drawn:
        check(backend, problem)
