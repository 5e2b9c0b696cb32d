"""decide() over random measurement tables: what it may choose, what it prefers, and what it says."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch import BASELINE, Candidate, Error, Measurement, Operand, Problem, RecipePair, Rejection, decide
from dispatch import load_policy as load
from dispatch._decision import LOSSLESS_RATIO, Decision, named
from dispatch._measurement import METRICS
from dispatch.remembering import from_plain

PAIRS = [RecipePair.parse(x) for x in ("e4m3:row", "e4m3:tensor", "e4m3:1x128@e4m3:128x128", "e5m2:row")]
DEFAULT = load("default")


def problem(a="bfloat16", b="bfloat16"):
    return Problem(64, 64, 64, Operand(a), Operand(b), "bfloat16", "torch", "sm90", "cuda:0")


PLAIN, ENCODED = problem(), problem("float8_e4m3fn", "float8_e4m3fn")
HALF = problem("bfloat16", "float8_e4m3fn")


def error(value):
    return Error(value, value, value, 8)


def measured(latency, base=100.0, wrong=1e-6, spread=0.0, settled=True):
    return Measurement(latency, latency, spread, 10, base / latency, error(wrong), "caller", settled)


def baseline(latency=100.0, wrong=1e-6, spread=0.0):
    found = measured(latency, latency, wrong, spread)
    return replace(found, rounding=error(0.0))


ROW = Candidate("cublas", PAIRS[0])
FAST = Candidate("fast")


# Strategies

ERRORS = st.sampled_from([0.0, 1e-7, 1e-6, 1.2e-6, 1e-4, 4.9e-3, 5e-3, 5.1e-3, 0.3, math.inf])
LATENCIES = st.sampled_from([1.0, 10.0, 50.0, 66.6, 70.0, 95.0, 96.0, 99.0, 100.0, 101.0, 500.0])
errors = st.builds(Error, ERRORS, ERRORS, ERRORS, st.just(8))
candidates = st.builds(
    Candidate,
    st.sampled_from(["cublas", "fast", "other", "bf16_fallback"]),
    st.sampled_from([None, *PAIRS]),
    st.none(),
    st.sampled_from([None, "c1"]),
)


@st.composite
def tables(draw):
    """Draw (problem, measurements, rejections, policy), with figures that fit together."""
    base = replace(baseline(draw(LATENCIES)), error=draw(errors), spread_us=draw(st.sampled_from([0.0, 1.0, 20.0])))
    base = replace(base, rounding=draw(errors))
    listed = draw(st.lists(candidates, max_size=6, unique=True))
    table, rejections = {BASELINE: base}, {}
    if unmeasured := draw(st.integers(0, 9)) == 0:
        table = {}
    for candidate in listed:
        kind = draw(st.sampled_from(["measured"] * 4 + ["twin", "rejected"]))
        if candidate.backend == "bf16_fallback" and kind == "rejected":
            kind = "twin"
        if kind == "rejected":
            rejections[candidate] = [Rejection("k", "100", "a multiple of 16")]
        elif unmeasured:
            table[candidate] = None
        elif kind == "twin" and not candidate.scaled:
            table[candidate] = base
        else:
            latency = draw(LATENCIES)
            table[candidate] = Measurement(
                latency,
                latency,
                draw(st.sampled_from([0.0, 0.5, 30.0])),
                10,
                base.latency_us / latency,
                draw(st.one_of(errors, st.none())),
                "caller",
                draw(st.sampled_from([True, True, True, False])),
            )
    policy = DEFAULT.override(
        gate={
            "min_speedup": draw(st.sampled_from([0.0, 1.0, 1.5, 3.0])),
            "min_speedup_lossless": draw(st.sampled_from([0.0, 1.0, 1.05, 2.0])),
        },
        error={"metric": draw(st.sampled_from(METRICS)), "tolerance": draw(st.sampled_from([0.0, 0.005, 0.5]))},
        fallback={
            "too_slow": draw(st.sampled_from([[], ["cublas"], ["fast", "cublas"], ["bf16_fallback", "cublas"]])),
            "too_wrong": draw(st.sampled_from([[], ["bf16_fallback"], ["cublas"]])),
        },
    )
    return draw(st.sampled_from([PLAIN, ENCODED, HALF])), table, rejections, policy


# What holds of every table, stated anew here and not by the judge's own methods


def keeps_less(problem, candidate):
    return candidate.recipe is not None and not (problem.a.encoded and problem.b.encoded)


def as_good(found, base, metric):
    if found.error is None or base.error is None:
        return False
    return found.error.value(metric) <= LOSSLESS_RATIO * max(base.error.value(metric), base.rounding.value(metric))


def accurate(found, base, policy):
    if found.error is None:
        return False
    metric, tolerance = policy.error.metric, policy.error.tolerance
    return found.error.value(metric) <= tolerance or as_good(found, base, metric)


def tied(one, other):
    return abs(one.latency_us - other.latency_us) <= max(one.spread_us, other.spread_us)


def passes(problem, candidate, table, policy):
    """Return whether a candidate passes both gates."""
    found, base = table.get(candidate), table.get(BASELINE)
    if found is None or base is None or found is base:
        return False
    lossless = not keeps_less(problem, candidate) and as_good(found, base, policy.error.metric)
    gate = policy.gate.min_speedup_lossless if lossless else policy.gate.min_speedup
    fast = gate == 0.0 or (found.speedup >= gate and not tied(found, base) and found.settled)
    return fast and accurate(found, base, policy)


@settings(max_examples=150, deadline=None)
@given(tables())
def test_chooses_only_what_passes_or_what_the_fallback_allows(drawn):
    problem, table, rejections, policy = drawn
    decision = decide(problem, table, rejections, policy)
    chosen, base = decision.candidate, table.get(BASELINE)
    able = [c for c in table if passes(problem, c, table, policy)]
    assert chosen not in rejections
    if able:
        assert chosen in able
        best = min(table[c].latency_us for c in able)
        assert any(table[c].latency_us == best and tied(table[chosen], table[c]) for c in able)
    elif chosen != BASELINE and chosen.backend != "bf16_fallback":
        found = table[chosen]
        assert accurate(found, base, policy)  # never outside the tolerance
        if problem.encoded and "faster than decoding" in decision.reason:
            return
        assert chosen.backend in (*policy.fallback.too_slow, *policy.fallback.too_wrong)
        assert found is base or found.latency_us <= base.latency_us or tied(found, base)  # never slower
        assert not keeps_less(problem, chosen)  # and never past the gate of what loses accuracy
        assert as_good(found, base, policy.error.metric)


@settings(max_examples=100, deadline=None)
@given(tables(), st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(drawn, shuffler: random.Random):
    problem, table, rejections, policy = drawn
    mixed = []
    for mapping in (table, rejections):
        items = list(mapping.items())
        shuffler.shuffle(items)
        mixed.append(dict(items))
    assert decide(problem, *mixed, policy) == decide(problem, table, rejections, policy)


@settings(max_examples=100, deadline=None)
@given(tables())
def test_each_candidate_has_a_verdict_and_each_that_was_not_chosen_a_reason(drawn):
    problem, table, rejections, policy = drawn
    decision = decide(problem, table, rejections, policy)
    assert {v.candidate for v in decision.candidates} == {*table, *rejections} - {BASELINE}
    assert len(decision.candidates) == len({*table, *rejections} - {BASELINE})
    assert decision.reason
    for verdict in decision.candidates:
        assert verdict.reason
        assert (verdict.outcome == "chosen") == (verdict.candidate == decision.candidate)
        assert verdict.measurement is table.get(verdict.candidate)
        if verdict.candidate in rejections:
            assert verdict.outcome == "rejected"
            assert "needs a multiple of 16" in verdict.reason
        elif verdict.measurement is not None and verdict.outcome not in ("baseline", "chosen"):
            assert f"{verdict.measurement.speedup:.2f}x" in verdict.reason
    if decision.candidates and decision.candidate != BASELINE:
        assert decision.candidates[0].candidate == decision.candidate


@settings(max_examples=100, deadline=None)
@given(tables())
def test_survives_json(drawn):
    decision = decide(*drawn)
    text = json.dumps(decision.to_dict(), allow_nan=False)
    assert from_plain(Decision, json.loads(text)) == decision
    assert str(decision)


@settings(max_examples=60, deadline=None)
@given(tables())
def test_a_faster_winner_stays_the_winner(drawn):
    problem, table, rejections, policy = drawn
    table = {c: m and replace(m, spread_us=0.0) for c, m in table.items()}
    if not any(passes(problem, c, table, policy) for c in table):
        return
    chosen = decide(problem, table, rejections, policy).candidate
    quicker = replace(table[chosen], latency_us=1e-3, speedup=table[BASELINE].latency_us / 1e-3)
    assert decide(problem, {**table, chosen: quicker}, rejections, policy).candidate == chosen


# Gates


def choose(table, policy=DEFAULT, problem=PLAIN, rejections=None):
    return decide(problem, table, rejections or {}, policy)


@pytest.mark.parametrize(("latency", "wins"), [(67.0, False), (66.6, True)])
def test_what_loses_accuracy_needs_one_and_a_half(latency, wins):
    decision = choose({BASELINE: baseline(), ROW: measured(latency, wrong=1e-3)})
    assert (decision.candidate == ROW) is wins
    if not wins:
        assert "1.5x not reached: 1.49x, similarity_loss 0.001, tolerance 0.005 (cublas/e4m3:row)" in decision.reason


@pytest.mark.parametrize(("latency", "wins"), [(96.0, False), (95.0, True)])
def test_what_loses_nothing_needs_five_percent(latency, wins):
    decision = choose({BASELINE: baseline(), FAST: measured(latency, wrong=1.2e-6)})
    assert (decision.candidate == FAST) is wins
    if not wins:
        assert "1.05x not reached: 1.04x" in decision.reason


def test_unscaled_but_worse_than_the_baseline_needs_one_and_a_half():
    worse = measured(80.0, wrong=1e-4)
    assert choose({BASELINE: baseline(), FAST: worse}).candidate == BASELINE
    assert choose({BASELINE: baseline(), FAST: measured(60.0, wrong=1e-4)}).candidate == FAST


def test_a_recipe_that_measures_like_the_baseline_is_lossy_still():
    assert choose({BASELINE: baseline(), ROW: measured(80.0, wrong=0.0)}).candidate == BASELINE
    assert choose({BASELINE: baseline(), ROW: measured(80.0, wrong=0.0)}, problem=ENCODED).candidate == ROW


def test_error_above_tolerance_is_said_with_figures():
    decision = choose({BASELINE: baseline(), ROW: measured(10.0, wrong=0.02)})
    assert decision.candidate == BASELINE
    assert decision.reason == "error above tolerance: 10.00x, similarity_loss 0.02, tolerance 0.005 (cublas/e4m3:row)"


def test_at_most_a_quarter_worse_than_the_baseline_passes_any_tolerance():
    ruined = {BASELINE: baseline(wrong=0.8), ROW: measured(10.0, wrong=0.99)}
    decision = choose(ruined)
    assert decision.candidate == ROW
    assert "at most 1.25x the framework's own" in decision.reason
    assert choose({**ruined, ROW: measured(10.0, wrong=1.01)}).candidate == BASELINE


def test_a_baseline_that_hits_every_rounding_does_not_make_rounding_a_loss():
    exact = replace(baseline(wrong=0.0), rounding=error(1e-6))
    assert choose({BASELINE: exact, FAST: measured(90.0, wrong=1.2e-6)}).candidate == FAST
    assert choose({BASELINE: exact, FAST: measured(90.0, wrong=1.3e-6)}).candidate == BASELINE


@pytest.mark.parametrize("metric", METRICS)
def test_the_policys_metric_counts(metric):
    figures = dict.fromkeys(METRICS, 1e-3) | {metric: 0.1}
    found = replace(measured(10.0), error=Error(**figures))
    policy = DEFAULT.override(error={"metric": metric})
    decision = choose({BASELINE: baseline(), ROW: found}, policy)
    assert decision.candidate == BASELINE
    assert f"{metric} 0.1, tolerance 0.005" in decision.reason
    others = DEFAULT.override(error={"metric": next(x for x in METRICS if x != metric)})
    assert choose({BASELINE: baseline(), ROW: found}, others).candidate == ROW


def test_without_an_error_nothing_passes():
    unknown = replace(measured(10.0), error=None)
    assert choose({BASELINE: baseline(), FAST: unknown}).candidate == BASELINE


def test_nan_is_no_error_that_passes():
    assert choose({BASELINE: baseline(), FAST: measured(10.0, wrong=math.nan)}).candidate == BASELINE


# Ties


def test_a_gain_inside_the_spread_is_a_tie_and_goes_to_the_baseline():
    for base_spread, spread in ((15.0, 0.0), (0.0, 15.0)):
        decision = choose({BASELINE: baseline(spread=base_spread), FAST: measured(90.0, spread=spread)})
        assert decision.candidate == BASELINE
        assert "1.05x not reached (too noisy to tell): 1.11x" in decision.reason


@pytest.mark.parametrize(("speedup", "wins"), [(1.05, True), (1.0499, False)])
def test_what_reaches_its_gate_exactly_passes(speedup, wins):
    found = replace(measured(90.0), speedup=speedup)
    assert (decide(PLAIN, {BASELINE: baseline(), FAST: found}, {}, DEFAULT).candidate == FAST) == wins


@pytest.mark.parametrize(("latency", "wins"), [(90.0, False), (89.0, True)])
def test_a_difference_of_just_the_spread_is_a_tie(latency, wins):
    found = measured(latency, spread=10.0)
    assert (decide(PLAIN, {BASELINE: baseline(), FAST: found}, {}, DEFAULT).candidate == FAST) == wins


@pytest.mark.parametrize(("spread", "settled"), [(5.0, True), (30.0, False)])
def test_an_undecided_one_that_ties_with_the_winner_leaves_the_choice_open(spread, settled):
    undecided = measured(60.0, spread=spread, settled=False)
    decision = decide(PLAIN, {BASELINE: baseline(), FAST: measured(50.0), Candidate("other"): undecided}, {}, DEFAULT)
    assert decision.candidate == FAST
    assert decision.settled == settled


def test_what_is_not_settled_does_not_win_and_is_not_kept():
    decision = choose({BASELINE: baseline(), FAST: measured(50.0, settled=False)})
    assert decision.candidate == BASELINE
    assert not decision.settled
    assert "too noisy to tell" in decision.reason


def test_at_a_gate_of_nothing_noise_refuses_nobody():
    table = {BASELINE: baseline(spread=90.0), FAST: measured(50.0, spread=60.0, settled=False)}
    policy = DEFAULT.override(gate={"min_speedup": 0.0, "min_speedup_lossless": 0.0})
    assert choose(table, policy).candidate == FAST


def test_what_scatters_by_more_than_it_takes_is_not_kept():
    table = {BASELINE: baseline(spread=150.0), FAST: measured(4.0, spread=1.0)}
    found = choose(table)
    assert (found.candidate, found.settled) == (BASELINE, False)
    calm = choose({**table, BASELINE: baseline(spread=97.0)})
    assert (calm.candidate, calm.settled) == (BASELINE, True)


def test_between_tied_winners_the_stable_order_decides():
    unscaled, row, tensor, blocks, unlisted = (Candidate("x", r) for r in (None, *PAIRS))
    table = {BASELINE: baseline()}
    for candidate in (unlisted, blocks, tensor, row, unscaled):  # the policy lists row, tensor, blocks
        table[candidate] = measured(50.0 - len(table), wrong=1e-4, spread=10.0)
        assert choose(table).candidate == candidate
    names = {BASELINE: baseline(), Candidate("b"): measured(50.0), Candidate("a"): measured(50.0)}
    assert choose(names).candidate == Candidate("a")


def test_a_clear_winner_beats_the_stable_order():
    table = {BASELINE: baseline(), Candidate("a"): measured(50.0, spread=1.0), Candidate("b"): measured(40.0)}
    assert choose(table).candidate == Candidate("b")


# Fallback

OWN = Candidate("bf16_fallback")
MINE = DEFAULT.override(fallback={"too_slow": ["slow_end"], "too_wrong": ["wrong_end"]})
ENDS = {Candidate("slow_end"): measured(99.0), Candidate("wrong_end"): measured(98.0)}


def test_too_slow_goes_down_its_chain():
    base = baseline()
    decision = choose({BASELINE: base, OWN: base, ROW: measured(90.0, wrong=1e-3), **ENDS}, MINE)
    assert decision.candidate == Candidate("slow_end")
    assert "not reached" in decision.reason


def test_too_wrong_goes_down_its_chain():
    base = baseline()
    decision = choose({BASELINE: base, OWN: base, ROW: measured(10.0, wrong=0.1), **ENDS}, MINE)
    assert decision.candidate == Candidate("wrong_end")
    assert decision.reason.startswith("error above tolerance")


def test_where_all_that_lose_accuracy_are_too_wrong_it_is_too_wrong_however_slow():
    base = baseline()
    decision = choose({BASELINE: base, OWN: base, ROW: measured(200.0, wrong=0.1), **ENDS}, MINE)
    assert decision.candidate == Candidate("wrong_end")


@pytest.mark.parametrize(
    "end",
    [
        measured(101.0),  # slower than the framework's own
        measured(99.0, wrong=0.1),
        replace(measured(99.0), error=None),
    ],
)
def test_an_end_that_is_worse_than_the_frameworks_own_is_passed_over(end):
    base = baseline()
    table = {BASELINE: base, OWN: base, ROW: measured(90.0, wrong=1e-3), Candidate("slow_end"): end}
    assert choose(table, MINE).candidate == OWN


def test_a_chain_does_not_lead_past_the_gate_of_what_loses_accuracy():
    base = baseline()
    decision = choose({BASELINE: base, OWN: base, ROW: measured(80.0, wrong=1e-3)})
    assert DEFAULT.fallback.too_slow == ("cublas",)
    assert decision.candidate == OWN
    assert decision.reason == "1.5x not reached: 1.25x, similarity_loss 0.001, tolerance 0.005 (cublas/e4m3:row)"


def test_a_chain_that_serves_says_why_it_did_not_win():
    base = baseline()
    decision = choose({BASELINE: base, OWN: base, Candidate("cublas"): measured(99.0)})
    assert decision.candidate == Candidate("cublas")
    assert "1.05x not reached: 1.01x" in decision.reason


def test_the_reason_is_of_the_one_that_came_closest():
    table = {BASELINE: baseline(), Candidate("near"): measured(99.0), Candidate("far"): measured(200.0)}
    assert "1.01x" in decide(PLAIN, table, {}, DEFAULT).reason
    assert decide(PLAIN, table, {}, DEFAULT).reason.endswith("(near)")
    table = {BASELINE: baseline(), ROW: measured(10.0, wrong=0.1), Candidate("wild"): measured(5.0, wrong=0.1)}
    assert decide(PLAIN, table, {}, DEFAULT).reason.endswith("(wild)")


def test_without_any_backend_the_baseline_serves():
    decision = choose({BASELINE: baseline()})
    assert decision.candidate == BASELINE
    assert decision.reason == "no other backend can run it: none is registered"


def test_rejections_are_the_reason_where_nobody_is_able():
    base = baseline()
    rejected = {ROW: [Rejection("k", "100", "a multiple of 16"), Rejection("arch", "sm80", "sm90")]}
    decision = choose({BASELINE: base, OWN: base}, rejections=rejected)
    assert decision.candidate == OWN
    assert decision.reason == (
        "no other backend can run it: cublas: k is 100; needs a multiple of 16; arch is sm80; needs sm90"
    )


def test_unmeasured_serves_the_own_product_and_says_so():
    decision = choose({OWN: None, ROW: None})
    assert decision.candidate == OWN
    assert decision.reason == "not measured: cublas/e4m3:row"
    assert decision.source == "unmeasured"
    assert decision.speedup is None


# Encoded operands: the baseline has to decode them first


def test_encoded_operands_go_to_what_is_faster_than_decoding():
    own = measured(150.0)  # decodes on each call, where the baseline was given what is decoded
    table = {BASELINE: baseline(), OWN: own, ROW: measured(120.0, wrong=1e-3)}
    decision = choose(table, problem=ENCODED)
    assert decision.candidate == ROW
    assert "1.5x not reached" in decision.reason
    assert "faster than decoding" in decision.reason
    assert choose({**table, ROW: measured(160.0, wrong=1e-3)}, problem=ENCODED).candidate == OWN
    assert choose({**table, ROW: measured(120.0, wrong=0.1)}, problem=ENCODED).candidate == OWN
    assert choose({**table, ROW: measured(140.0, wrong=1e-3, spread=20.0)}, problem=ENCODED).candidate == OWN


def test_asked_for_by_name():
    decision = named(choose({FAST: None}), FAST)
    assert (decision.candidate, decision.reason) == (FAST, "asked for by name")
    assert [v.candidate for v in decision.candidates if v.outcome == "chosen"] == [FAST]
