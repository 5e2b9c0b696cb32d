"""Known calls: what is used stays, what is not goes, and nothing grows without end."""

from __future__ import annotations

import pytest

from dispatch.remembering import KnownCalls, known


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "MOST_PLANS", 4)


def plan_of(number: int) -> object:
    return lambda a, b: number


def test_what_is_not_used_for_two_generations_is_forgotten() -> None:
    calls = KnownCalls()
    plans = [plan_of(i) for i in range(20)]
    for i, plan in enumerate(plans):
        calls.keep(i, plan, f"backend {i}")
        assert calls.young.get(0) or calls.find(0)  # asked for again and again
        assert len(calls) <= 8
        assert len(calls.served) <= 8
    assert calls.find(0) is plans[0]
    assert calls.served[0] == "backend 0"
    assert calls.find(1) is None
    assert 1 not in calls.served
    assert calls.served[19] == "backend 19"


def test_what_is_found_among_the_old_is_young_again() -> None:
    calls = KnownCalls()
    for i in range(5):
        calls.keep(i, plan_of(i))
    assert 0 not in calls.young
    assert calls.find(0) is calls.young[0]


def test_plans_of_compiled_code_are_bounded_too() -> None:
    calls = KnownCalls()
    for i in range(20):
        calls.keep_compiled(i, plan_of(i))
        assert i in calls.compiled
        assert len(calls.compiled) <= 4


def test_everything_can_be_forgotten() -> None:
    calls = KnownCalls()
    for i in range(6):
        calls.keep(i, plan_of(i), "fast")
        calls.keep_compiled(i, plan_of(i))
    calls.clear()
    assert (len(calls), calls.find(0), calls.served, calls.compiled) == (0, None, {}, {})
