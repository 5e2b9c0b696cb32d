"""A plugin's file, its entry point and its backend have one name."""

from __future__ import annotations

import tomllib
from pathlib import Path

REPO = Path(__file__).parents[2]


def _entry_points() -> dict[str, str]:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["entry-points"]["dispatch.backends"]


def test_entry_point_is_named_as_its_module() -> None:
    assert _entry_points() == {name: f"dispatch.plugins.{name}" for name in _entry_points()}


def test_every_plugin_has_an_entry_point() -> None:
    plugins = {path.name.removesuffix(".py") for path in (REPO / "plugins").glob("[!_]*") if path.name != "__pycache__"}
    assert plugins <= set(_entry_points())
