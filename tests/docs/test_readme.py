"""The tables of README and docs are what benchmarks/results holds, and its files exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).resolve().parents[2]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_made_from_the_results() -> None:
    tables = load(REPO / "benchmarks" / "tables.py")
    texts = [page.read_text(encoding="utf-8") for page in tables.PAGES]
    marked = [name for text in texts for _, name, _ in tables.MARKED.findall(text)]
    assert len(set(marked)) == len(marked)
    for text in texts:
        assert tables.filled(text) == text, "run python benchmarks/tables.py --write"


def test_every_table_with_rows_is_shown_and_no_other() -> None:
    tables = load(REPO / "benchmarks" / "tables.py")
    texts = [page.read_text(encoding="utf-8") for page in tables.PAGES]
    marked = {name for text in texts for _, name, _ in tables.MARKED.findall(text)}
    assert marked == {name for name, make in tables.TABLES.items() if "Measured on" in make()}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(f"docs/{x.name}" for x in REPO.glob("docs/*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    path = REPO / page
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target
