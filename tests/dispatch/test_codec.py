"""Facts as plain values, and back."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch import Candidate, Error, Measurement, Operand, Problem, RecipePair, Rejection, ScalingRecipe, Verdict
from dispatch.remembering import from_plain, to_plain

KINDS = (Candidate, Error, Measurement, Operand, Problem, Rejection, Verdict)
PAIR = RecipePair.parse("e4m3:1x128@e4m3:128x128")

floats = st.floats(allow_nan=False, allow_infinity=True)
recipes = st.builds(
    ScalingRecipe,
    st.sampled_from(["e4m3", "e5m2"]),
    st.sampled_from(["tensor", "row", "1x128"]),
    st.sampled_from(["float32", "e8m0"]),
)
pairs = st.builds(RecipePair, recipes, recipes)
operands = st.builds(Operand, st.text(), st.lists(st.integers(0), max_size=3).map(tuple), recipe=st.none() | recipes)
FACTS = {
    Candidate: st.builds(Candidate, st.text(), st.none() | pairs, st.none() | st.text(), st.none() | st.text()),
    Error: st.builds(Error, floats, floats, floats, st.integers()),
    Operand: operands,
    Rejection: st.builds(Rejection, st.text(), st.text(), st.text()),
}
FACTS[Measurement] = st.builds(
    Measurement, floats, floats, floats, st.integers(), floats, st.none() | FACTS[Error], settled=st.booleans()
)
FACTS[Problem] = st.builds(
    Problem, *[st.integers()] * 3, operands, operands, *[st.text()] * 3, recipe=st.none() | pairs, bias=st.none()
)
FACTS[Verdict] = st.builds(
    Verdict,
    FACTS[Candidate],
    st.text(),
    st.text(),
    st.none() | FACTS[Measurement],
    st.lists(FACTS[Rejection], max_size=3).map(tuple),
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(KINDS).flatmap(lambda kind: FACTS[kind]))
def test_facts_survive_json(fact):
    text = json.dumps(to_plain(fact), allow_nan=False)
    assert from_plain(type(fact), json.loads(text)) == fact


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.0, -0.0, 5e-324, 1.7976931348623157e308])
def test_every_float_survives_in_json_without_extensions(value):
    text = json.dumps(to_plain(Error(value, 0.0, 1.0)), allow_nan=False)
    again = from_plain(Error, json.loads(text)).similarity_loss
    assert (
        math.isnan(again) if math.isnan(value) else (again, math.copysign(1, again)) == (value, math.copysign(1, value))
    )


def test_recipes_are_their_text():
    assert to_plain(Candidate("x", PAIR))["recipe"] == "e4m3:1x128@e4m3:128x128"
    assert to_plain({"a": (PAIR, [1.5])}) == {"a": [str(PAIR), [1.5]]}


def test_a_whole_number_may_stand_for_a_float():
    found = from_plain(Error, {"similarity_loss": 1, "relative_l2": "inf", "max_abs_over_scale": 0, "rows": 3})
    assert found == Error(1.0, math.inf, 0.0, 3)
    assert isinstance(found.similarity_loss, float)


GOOD = to_plain(Verdict(Candidate("x", PAIR), "passed", "y", Measurement(1.0, 1.0, 0.0, 3, 2.0, Error(0.0, 0.0, 0.0))))


@dataclass(frozen=True)
class Path:
    """Where in GOOD something else stands."""

    keys: tuple[str, ...]
    value: object


BAD = [
    Path(("candidate",), None),
    Path(("candidate",), "x"),
    Path(("candidate",), [1, 2]),
    Path(("candidate", "backend"), 3),
    Path(("candidate", "backend"), None),
    Path(("candidate", "recipe"), "e4m3:everything"),
    Path(("candidate", "recipe"), 3),
    Path(("candidate", "recipe"), {}),
    Path(("measurement", "latency_us"), "fast"),
    Path(("measurement", "latency_us"), None),
    Path(("measurement", "latency_us"), 10**400),
    Path(("measurement", "rounds"), 1.5),
    Path(("measurement", "rounds"), "3"),
    Path(("measurement", "settled"), 1),
    Path(("measurement", "error"), 3),
    Path(("rejections",), None),
    Path(("rejections",), "text"),
    Path(("rejections",), {"subject": "k"}),
    Path(("rejections",), [3]),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda x: f"{'.'.join(x.keys)}={x.value!r:.20}")
def test_anything_else_is_refused(bad):
    data = json.loads(json.dumps(GOOD))
    place = data
    for key in bad.keys[:-1]:
        place = place[key]
    place[bad.keys[-1]] = bad.value
    with pytest.raises((KeyError, TypeError, ValueError)):
        from_plain(Verdict, data)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Verdict)])
def test_what_is_missing_is_refused(name):
    with pytest.raises(KeyError):
        from_plain(Verdict, {key: value for key, value in GOOD.items() if key != name})


def test_what_is_unknown_is_left_out():
    assert from_plain(Verdict, {**GOOD, "more": 1}) == from_plain(Verdict, GOOD)
