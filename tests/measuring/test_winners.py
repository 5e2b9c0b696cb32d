"""Every recipe is a candidate: data where granularity matters lead to different winners, by measured errors."""

from __future__ import annotations

import numpy as np
import pytest

import dispatch
from dispatch import RecipePair, use_policy
from dispatch.measuring.error import compare
from dispatch.testing import FakeBackend, fake_timings, registered

M, N, K = 256, 64, 512
TENSOR, ROW, BLOCKS, SQUARES = "e4m3:tensor", "e4m3:row", "e4m3:1x128@e4m3:128x128", "e4m3:128x128"
LATENCY = {TENSOR: 1.0, SQUARES: 2.0, ROW: 3.0, BLOCKS: 4.0}
"""The coarser the faster, so that the winner is the coarsest that passes."""


class Quantized(FakeBackend):
    """The product of what the reference quantizer makes of the operands, by any recipe."""

    def __init__(self):
        super().__init__("fp8", recipes=tuple(LATENCY))

    def plan(self, problem, config=None):
        return lambda a, b: product(a, b, problem.recipe)


def product(a, b, pair):
    left, right = dispatch.quantize(a, pair.a), dispatch.quantize(b, pair.b, axis=-2)
    return left.dequantize("float32") @ right.dequantize("float32")


def normal():
    rng = np.random.default_rng(0)
    return rng.standard_normal((M, K)).astype(np.float32), rng.standard_normal((K, N)).astype(np.float32)


def one_element():
    a, b = normal()
    a[5, 7] = 1e6
    return a, b


def scaled_rows():
    a, b = normal()
    return a * np.logspace(-6, 6, M).astype(np.float32)[:, None], b


def scaled_block_of_k():
    a, b = normal()
    a[:, 128:256] *= 1e5
    b[128:256] *= 1e-5
    return a, b


def outlier_columns():
    """Columns of `a` that b multiplies by nothing much: what counts is in the others."""
    a, b = normal()
    a[:, 130:140] *= 1e5
    b[130:140] *= 1e-7
    return a, b


def heavy_tails():
    a, b = normal()
    rng = np.random.default_rng(1)
    return a / rng.random((M, K)).astype(np.float32) ** 2, b


def mixed():
    """Rows and blocks of k at scales of their own."""
    a, b = scaled_block_of_k()
    return a * np.logspace(-6, 6, M).astype(np.float32)[:, None], b


WINNERS = {
    normal: TENSOR,
    one_element: ROW,
    scaled_rows: ROW,
    scaled_block_of_k: SQUARES,
    outlier_columns: None,
    heavy_tails: ROW,
    mixed: BLOCKS,
}


def ruined(make, recipe):
    """Return the share of rows with a similarity_loss above 0.005, of all rows, and the worst."""
    a, b = make()
    found = product(a, b, RecipePair.parse(recipe)).astype(np.float64)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    losses = [compare(found[i : i + 1], exact[i : i + 1]).similarity_loss for i in range(M)]
    return np.mean(np.array(losses) > 0.005), max(losses)


@pytest.mark.parametrize(
    ("make", "shares"),
    [
        (normal, {TENSOR: 0, SQUARES: 0, ROW: 0, BLOCKS: 0}),
        (one_element, {TENSOR: 1, ROW: 0, BLOCKS: 0}),
        (scaled_rows, {TENSOR: 0.6, SQUARES: 0.26, ROW: 0, BLOCKS: 0}),
        (scaled_block_of_k, {TENSOR: 1, ROW: 1, SQUARES: 0, BLOCKS: 0}),
    ],
)
def test_which_rows_a_recipe_ruins(make, shares):
    for recipe, share in shares.items():
        assert ruined(make, recipe)[0] == pytest.approx(share, abs=0.12 if 0 < share < 1 else 0.005), recipe


@pytest.mark.parametrize("make", WINNERS, ids=lambda make: make.__name__)
def test_the_fastest_recipe_that_is_accurate_enough_wins(make, tmp_path, monkeypatch):
    a, b = make()
    recipes = {"allow": list(LATENCY), "inputs": ["float32"], "accumulation": ["fast", "promoted"]}

    def latency(name):
        return next((us for recipe, us in LATENCY.items() if f"/{recipe}" in f"{name}/"), 100.0)

    dispatch.clear_store()
    with registered(Quantized()), fake_timings(latency), use_policy(recipes=recipes):
        decision = dispatch.explain(a, b)
    dispatch.clear_store()
    winner = WINNERS[make]
    assert str(decision.candidate.recipe) == str(winner if winner is None else RecipePair.parse(winner)), str(decision)
    for verdict in decision.candidates:
        if verdict.candidate.backend == "fp8":
            recipe = str(verdict.candidate.recipe)
            assert (verdict.outcome == "too wrong") == (ruined(make, recipe)[1] > 0.005), str(decision)
