"""An engine of its own for a test, with the framework's own product alone, and a clock that a test sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dispatch
from dispatch import _api
from dispatch._engine import Engine
from dispatch.measuring.guard import Guard
from dispatch.registry import Registry
from dispatch.remembering import DecisionStore


class Clock:
    """Seconds, as a test says."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class _Point:
    name, dist = "bf16_fallback", None

    def load(self) -> Any:
        from dispatch.plugins import bf16_fallback

        return bf16_fallback


def _fresh(path: Path) -> Engine:
    made = Engine(Registry(lambda: [_Point()]), DecisionStore(path), _api.forget)
    made.guard = Guard(_api.forget, Clock())
    return made


@pytest.fixture
def fresh() -> Callable[[Path], Engine]:
    """Make an engine as another process with a store at that path would have it."""
    return _fresh


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """The process's engine, for one test; its store is decisions.sqlite in the test's own folder."""
    made = _fresh(tmp_path / "decisions.sqlite")
    monkeypatch.setattr(_api, "_engine", made)
    dispatch.forget()
    yield made
    dispatch.forget()
    made.decisions.store.close()
