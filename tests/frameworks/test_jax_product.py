"""A product that stands in a JAX trace: what it is decided for, and that a route that rounds is really taken."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import dispatch
from dispatch import NoBackendError, Plan, Problem
from dispatch.testing import FakeBackend, fake_timings, registered

jax = pytest.importorskip("jax")
jnp = jax.numpy
FACTOR = 1.015625  # what the rough backend is off by: bilinear still, and inside of the tolerance


class Rough(FakeBackend):
    """A backend that quantizes, if its recipe is to be believed, and is 1.6% off; it keeps the problems it served."""

    def __init__(self, *recipes: str) -> None:
        super().__init__("rough", recipes=recipes or ("e4m3:row",))
        self.problems: list[Problem] = []

    def plan(self, problem: Problem, config: str | None = None) -> Plan:
        """Return a product that is off by FACTOR."""
        own = dispatch.native(problem)

        def product(*operands: Any) -> Any:
            self.problems.append(problem)
            return own(*operands) * FACTOR

        return product

    def sizes(self, op: str = "matmul") -> set[tuple[Any, ...]]:
        """Return batch, m, n and k of what it served for an op."""
        return {(*x.batch, x.m, x.n, x.k) for x in self.problems if x.op == op}


@contextmanager
def winning(*recipes: str, **policy: Any) -> Iterator[Rough]:
    backend = Rough(*recipes)
    given = {"recipes": {"inputs": ["float32", "bfloat16"]}, **policy}
    with registered(backend), fake_timings({"rough": 1.0, "baseline": 100.0}), dispatch.use_policy(**given):
        yield backend


@pytest.fixture
def rough() -> Iterator[Rough]:
    with winning() as backend:
        yield backend


def array(shape: tuple[int, ...], seed: int, dtype: str = "float32") -> Any:
    return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape) / 4, dtype)


def close(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5), found, wanted)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, wanted)


def biased(a: Any, b: Any) -> Any:
    """What the rough backend gives: its derivatives too are products that are off by FACTOR."""
    return jnp.matmul(a, b) * FACTOR


def primitives(fun: Callable[..., Any], *args: Any) -> list[str]:
    """Return the names of all primitives in a function's jaxpr, inner ones included."""

    def names(jaxpr: Any) -> Iterator[str]:
        for eqn in jaxpr.eqns:
            yield eqn.primitive.name
            for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from names(inner)

    return list(names(jax.make_jaxpr(fun)(*args).jaxpr))


def scanned(product: Any, a: Any, b: Any) -> Any:
    square = b @ b.T
    return jax.lax.scan(lambda carry, _: (product(carry, square) / 8, carry.sum()), a, None, length=3)


def loss(product: Any, a: Any, b: Any) -> Any:
    return jnp.sin(product(a, b)).sum()


TRANSFORMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "jit": lambda p, a, b: jax.jit(p)(a, b),
    "grad": lambda p, a, b: jax.grad(lambda *x: loss(p, *x), (0, 1))(a, b),
    "jitted grad": lambda p, a, b: jax.jit(jax.grad(lambda *x: loss(p, *x), (0, 1)))(a, b),
    "value_and_grad": lambda p, a, b: jax.jit(jax.value_and_grad(lambda x: loss(p, x, b)))(a),
    "jvp": lambda p, a, b: jax.jvp(p, (a, b), (a + 1, b - 1)),
    "jvp of one": lambda p, a, b: jax.jvp(lambda y: p(a, y), (b,), (b - 1,)),
    "linearize": lambda p, a, b: jax.linearize(p, a, b)[1](a, b),
    "linear_transpose of a": lambda p, a, b: jax.linear_transpose(lambda x: p(x, b), a)(p(a, b)),
    "linear_transpose of b": lambda p, a, b: jax.linear_transpose(lambda y: p(a, y), b)(p(a, b)),
    "jacfwd": lambda p, a, b: jax.jacfwd(p, (0, 1))(a, b),
    "jacrev": lambda p, a, b: jax.jacrev(p, (0, 1))(a, b),
    "hessian": lambda p, a, b: jax.hessian(lambda x: loss(p, x, b))(a),
    "mixed second derivatives": lambda p, a, b: jax.jacrev(jax.grad(lambda *x: loss(p, *x)), 1)(a, b),
    "vmap of a": lambda p, a, b: jax.vmap(p, (0, None))(jnp.stack([a, a + 1]), b),
    "vmap of b": lambda p, a, b: jax.vmap(p, (None, 1))(a, jnp.stack([b, b + 1], 1)),
    "vmap of both": lambda p, a, b: jax.vmap(p, (2, 0))(jnp.stack([a, a + 1], 2), jnp.stack([b, b - 1])),
    "vmap of grad": lambda p, a, b: jax.vmap(jax.grad(lambda x: loss(p, x, b)))(jnp.stack([a, a + 1])),
    "vmap of vmap": lambda p, a, b: jax.vmap(jax.vmap(p, (0, None)), (None, 0))(jnp.stack([a, -a]), jnp.stack([b, -b])),
    "scan": scanned,
    "grad of scan": lambda p, a, b: jax.grad(lambda x: scanned(p, x, b)[0].sum())(a),
    "while": lambda p, a, b: jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, p(s[1], b @ b.T) / 8), (0, a))[
        1
    ],
    "cond": lambda p, a, b: jax.lax.cond(a.sum() > 0, lambda x: p(x, b), lambda x: -p(x, b), a),
    "vmap of cond": lambda p, a, b: jax.vmap(
        lambda x: jax.lax.cond(x.sum() > 0, lambda y: p(y, b), lambda y: -p(y, b), x)
    )(jnp.stack([a, -a])),
    "remat": lambda p, a, b: jax.grad(lambda x: jnp.sin(jax.checkpoint(p)(x, b)).sum())(a),
    "broadcast batches": lambda p, a, b: jax.jit(p)(jnp.stack([a, -a])[:, None], jnp.stack([b, b + 1, -b])),
    "grad of broadcast batches": lambda p, a, b: jax.grad(lambda *x: loss(p, *x), (0, 1))(
        jnp.stack([a, -a])[:, None], jnp.stack([b, b + 1, -b])
    ),
    "rows of a batch": lambda p, a, b: jax.jit(jax.grad(lambda *x: loss(p, *x), (0, 1)))(jnp.stack([a, -a]), b),
    "vectors": lambda p, a, b: jax.jit(lambda x, y: (p(x[0], y), p(x, y[:, 0]), p(x[0], y[:, 0])))(a, b),
    "grad of vectors": lambda p, a, b: jax.grad(lambda x: p(x, b).sum() + p(x, b[:, 0]))(a[0]),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=list(TRANSFORMS))
def test_the_winner_serves_every_transform(transform: Callable[[Any, Any, Any], Any], rough: Rough) -> None:
    a, b = array((3, 4), 0), array((4, 5), 1)
    found = transform(dispatch.matmul, a, b)
    assert rough.problems
    close(found, transform(biased, a, b))


@pytest.mark.parametrize("transform", [name for name in TRANSFORMS if "jac" not in name])
def test_transforms_without_jit(transform: str, rough: Rough) -> None:
    a, b = array((3, 4), 0), array((4, 5), 1)
    with jax.disable_jit():
        found = TRANSFORMS[transform](dispatch.matmul, a, b)
    close(found, TRANSFORMS[transform](biased, a, b))


def test_gradients_are_problems_of_their_own(rough: Rough) -> None:
    a, b = array((6, 4), 0), array((4, 5), 1)
    jax.jit(jax.value_and_grad(lambda x, y: dispatch.matmul(x, y).sum(), (0, 1)))(a, b)
    assert rough.sizes() == {(6, 5, 4)}
    assert rough.sizes("dgrad") == {(6, 4, 5)}
    assert rough.sizes("wgrad") == {(4, 5, 6)}


def test_a_gradient_in_eager_calls_is_decided_on_its_own_values(rough: Rough) -> None:
    jax.grad(lambda x, y: loss(dispatch.matmul, x, y), (0, 1))(array((7, 4), 0), array((4, 9), 1))
    kept = {d.problem.op: d for d in dispatch.stored() if {d.problem.m, d.problem.n, d.problem.k} == {7, 9, 4}}
    assert set(kept) == {"matmul", "dgrad", "wgrad"}
    assert kept["matmul"].measurement.error_data == "caller"


def test_rows_of_a_stack_are_summed_in_one_wgrad(rough: Rough) -> None:
    a, b = array((2, 3, 4), 0), array((4, 5), 1)
    jax.jit(jax.value_and_grad(lambda x, y: dispatch.matmul(x, y).sum(), (0, 1)))(a, b)
    assert rough.sizes("wgrad") == {(4, 5, 6)}
    assert rough.sizes("dgrad") == {(6, 4, 5)}


def test_e5m2_gradients_by_rule() -> None:
    rules = [
        {"match": {"op": "dgrad"}, "recipes": {"allow": ["e5m2:row@e4m3:row"]}},
        {"match": {"op": "wgrad"}, "recipes": {"allow": ["e4m3:row@e5m2:row"]}},
    ]
    a, b = array((8, 4), 0, "bfloat16"), array((4, 5), 1, "bfloat16")
    with winning("e4m3:row", "e5m2:row@e4m3:row", "e4m3:row@e5m2:row", rules=rules) as backend:
        jax.jit(jax.value_and_grad(lambda x, y: dispatch.matmul(x, y).sum(), (0, 1)))(a, b)
    recipes = {problem.op: str(problem.recipe) for problem in backend.problems}
    assert recipes == {"matmul": "e4m3:row", "dgrad": "e5m2:row@e4m3:row", "wgrad": "e4m3:row@e5m2:row"}


def test_gradients_may_be_kept_from_quantizing() -> None:
    a, b = array((8, 3), 0), array((3, 5), 1)
    with winning(rules=[{"match": {"op": ["dgrad", "wgrad"]}, "recipes": {"allow": []}}]):
        value, grad = jax.jit(jax.value_and_grad(lambda x: dispatch.matmul(x, b).sum()))(a)
    close((value, grad), (biased(a, b).sum(), jnp.broadcast_to(b.sum(1), a.shape)))


@pytest.mark.parametrize(
    ("axes", "sizes"),
    [((0, None), (21, 5, 4)), ((None, 0), (3, 35, 4)), ((0, 0), (7, 3, 5, 4)), ((None, 2), (3, 35, 4))],
)
def test_vmap_makes_one_problem(axes: tuple[Any, Any], sizes: tuple[int, ...], rough: Rough) -> None:
    def stacked(shape: tuple[int, ...], axis: int | None) -> Any:
        return array(shape, 0) if axis is None else jnp.moveaxis(array((7, *shape), 1), 0, axis)

    a, b = stacked((3, 4), axes[0]), stacked((4, 5), axes[1])
    mapped = jax.vmap(dispatch.matmul, axes)
    found = jax.jit(mapped)(a, b)
    assert rough.sizes() == {sizes}
    assert not {"scan", "while"} & set(primitives(mapped, a, b))
    close(found, jax.vmap(biased, axes)(a, b))


def test_a_bias_and_an_activation_are_fused_unless_differentiated(rough: Rough) -> None:
    a, b, bias = array((3, 4), 0), array((4, 5), 1), array((5,), 2)

    def layer(x: Any, y: Any, z: Any) -> Any:
        return dispatch.matmul(x, y, bias=z, activation="gelu_tanh")

    jax.jit(layer)(a, b, bias)
    jax.jit(jax.vmap(layer, (0, None, None)))(jnp.stack([a, a]), b, bias)
    assert {(x.bias, x.activation) for x in rough.problems} == {("float32", "gelu_tanh")}
    assert rough.sizes() == {(3, 5, 4), (6, 5, 4)}
    rough.problems.clear()
    found = jax.jit(jax.grad(lambda *x: layer(*x).sum(), (0, 1, 2)))(a, b, bias)
    assert {(x.bias, x.activation) for x in rough.problems} == {(None, None)}
    close(found, jax.grad(lambda x, y, z: jax.nn.gelu(biased(x, y) + z).sum(), (0, 1, 2))(a, b, bias))


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (None, None, 0), (1, 0, 0)])
def test_vmap_of_an_epilogue(axes: tuple[Any, ...], rough: Rough) -> None:
    operands = [array((3, 4), 0), array((4, 5), 1), array((5,), 2)]
    given = [x if axis is None else jnp.stack([x, x + 1], axis) for x, axis in zip(operands, axes, strict=True)]
    found = jax.jit(jax.vmap(lambda x, y, z: dispatch.matmul(x, y, bias=z, activation="silu"), axes))(*given)
    (rounded,) = {float(problem.activation is not None) for problem in rough.problems}
    inside = (lambda x, y, z: jax.nn.silu(jnp.matmul(x, y) + z) * FACTOR) if rounded else None
    close(found, jax.vmap(inside or (lambda x, y, z: jax.nn.silu(biased(x, y) + z)), axes)(*given))


def test_a_retrace_measures_nothing(rough: Rough) -> None:
    a, b = array((11, 4), 0), array((4, 5), 1)
    jax.jit(lambda x, y: dispatch.matmul(x, y))(a, b)
    measured = dispatch.stats()["measured"]
    for _ in range(3):
        jax.jit(lambda x, y: dispatch.matmul(x, y) + 1)(a, b)
    assert dispatch.stats()["measured"] == measured


def test_what_fails_while_lowering_is_served_by_the_own_product() -> None:
    def broken(*operands: Any) -> Any:
        raise RuntimeError("no kernel for that")

    a, b = array((13, 4), 0), array((4, 5), 1)
    backend = FakeBackend("broken", broken)
    with registered(backend), fake_timings({"broken": 1.0, "baseline": 100.0}):
        close(jax.jit(dispatch.matmul)(a, b), a @ b)
        assert "no kernel for that" in dispatch.stats()["quarantined"]["broken"]


def test_a_backend_that_is_asked_for_and_cannot_is_an_error_under_jit(rough: Rough) -> None:
    a, b = array((3, 4), 0), array((4, 5), 1)
    close(jax.jit(lambda x: dispatch.matmul(x, b, backend="rough"))(a), biased(a, b))
    with pytest.raises(NoBackendError, match="not registered"):
        jax.jit(lambda x: dispatch.matmul(x, b, backend="nobody"))(a)


def test_scopes_and_policies_of_the_trace_are_kept() -> None:
    rules = [{"match": {"scope": "exact.*"}, "recipes": {"allow": []}}]
    a, b = array((3, 4), 0), array((4, 5), 1)

    def both(x: Any) -> Any:
        with dispatch.use_policy("native"):
            own = dispatch.matmul(x, b)
        return own, dispatch.matmul(x, b, scope="exact.head"), dispatch.matmul(x, b, scope="mlp")

    with winning(rules=rules):
        found = jax.jit(both)(a)
    close(found, (a @ b, a @ b, biased(a, b)))


@pytest.mark.parametrize("saved", [True, False])
def test_checkpoint_policies_know_the_result_by_name(saved: bool) -> None:
    names = jax.checkpoint_policies.save_only_these_names
    policy = names("dispatch_matmul") if saved else jax.checkpoint_policies.nothing_saveable
    b = array((4, 4), 1)

    def layer(x: Any) -> Any:
        return jnp.sin(dispatch.matmul(jnp.sin(dispatch.matmul(x, b)), b)).sum()

    found = primitives(jax.grad(jax.checkpoint(layer, policy=policy)), array((3, 4), 0))
    assert found.count("dispatch_dot_general") == (4 if saved else 6)


def test_an_exported_function_has_the_own_product(rough: Rough) -> None:
    a, b = array((3, 4), 0), array((4, 5), 1)
    exported = jax.export.export(jax.jit(jax.value_and_grad(lambda x: dispatch.matmul(x, b).sum())))(a)
    close(exported.call(a), jax.value_and_grad(lambda x: (x @ b).sum())(a))
    assert not rough.problems


def symbolic(fun: Callable[..., Any], columns: int) -> Any:
    """Return fun exported for any number of rows."""
    rows = jax.export.symbolic_shape(f"rows, {columns}")
    return jax.export.export(jax.jit(fun))(jax.ShapeDtypeStruct(rows, jnp.float32))


@pytest.mark.parametrize("kind", ["array", "fused", "prepared", "scaled", "fp8", "integer"])
def test_shapes_that_are_not_known_have_the_own_product(kind: str, rough: Rough) -> None:
    a, b = array((3, 4), 0), array((4, 5), 1)
    plain = {"array": b, "prepared": dispatch.prepare(b), "scaled": dispatch.quantize(b, "e4m3:row", axis=-2)}
    dtype = {"fp8": "float8_e4m3fn", "integer": "int32"}.get(kind, "float32")

    def product(x: Any) -> Any:
        if kind == "fused":
            return dispatch.matmul(x, b, bias=b[0], activation="relu")
        return dispatch.matmul(x.astype(dtype), plain.get(kind, b.astype(dtype)))

    found = symbolic(product, 4).call(a)
    assert not rough.problems
    wanted = jax.nn.relu(a @ b + b[0]) if kind == "fused" else a.astype(dtype) @ b.astype(dtype)
    np.testing.assert_allclose(found.astype("float32"), wanted.astype("float32"), rtol=0.06, atol=0.06)


@pytest.mark.parametrize("precision", ["highest", "bfloat16", "tensorfloat32"])
def test_the_default_precision_of_the_trace_counts(precision: str) -> None:
    a, b = array((3, 4), 0), array((4, 5), 1)
    seen = []

    def look(*operands: Any) -> Any:
        seen.append(jax.config.jax_default_matmul_precision)
        return jnp.matmul(*operands)

    with registered(FakeBackend("looking", look)), fake_timings({"looking": 1.0, "baseline": 100.0}):
        with jax.default_matmul_precision(precision):
            text = jax.jit(dispatch.matmul).lower(a, b).as_text()
            own = jax.jit(jnp.matmul).lower(a, b).as_text()
        assert len(seen) > 1, "measured, and lowered"
        assert None not in seen  # JAX has several names for one: bfloat16 is default
    line = next(x for x in own.splitlines() if "dot_general" in x)
    wanted = line[line.index("precision") :].partition(" :")[0]
    assert wanted in text
    assert jax.config.jax_default_matmul_precision is None


def test_debug_nans_blames_no_backend(rough: Rough) -> None:
    a, b = array((3, 4), 0), array((4, 5), 1)
    spoiled = b.at[0, 0].set(jnp.nan)  # here: the debugger would stop this already
    product = jax.jit(dispatch.matmul)
    with jax.debug_nans(True):
        for known in (product, dispatch.matmul):
            close(known(a, b), biased(a, b))
        for bad in (product, dispatch.matmul, lambda x, y: jax.grad(lambda z: dispatch.matmul(z, y).sum())(x)):
            with pytest.raises(FloatingPointError):
                bad(a, spoiled)
        close(dispatch.matmul(a, b), biased(a, b))
    assert not dispatch.stats()["quarantined"].get("rough")


def test_debug_nans_is_off_while_candidates_are_measured() -> None:
    """Set for every thread, it would raise before the measurement finds what is not finite."""
    a, b = array((3, 14), 0), array((14, 5), 1)
    broken = FakeBackend("nan", lambda *operands: jnp.matmul(*operands) * jnp.nan)
    before = jax.config.jax_debug_nans
    with registered(broken), fake_timings({"nan": 1.0, "baseline": 100.0}):
        jax.config.update("jax_debug_nans", True)
        try:
            close(jax.jit(dispatch.matmul)(a, b), a @ b)
        finally:
            jax.config.update("jax_debug_nans", before)
        assert "not finite" in dispatch.stats()["quarantined"]["nan"]


def test_strict_promotion_is_about_the_callers_dtypes(rough: Rough) -> None:
    a, b = array((3, 4), 0, "bfloat16"), array((4, 5), 1, "bfloat16")
    with jax.numpy_dtype_promotion("strict"):
        for run in (dispatch.matmul, jax.jit(dispatch.matmul, static_argnames="activation")):
            found = run(a, b, bias=b[0], activation="relu")
            assert found.dtype == a.dtype
    wanted = jax.nn.relu(biased(a, b) + b[0])
    np.testing.assert_allclose(found.astype("float32"), wanted.astype("float32"), rtol=2e-2, atol=2e-2)


def test_native_choices_lower_to_the_own_product() -> None:
    a, b = array((2, 3, 4), 0), array((4, 5), 1)
    with dispatch.use_policy("native"):
        text = jax.jit(dispatch.matmul).lower(a, b).compile().as_text()
    assert "custom-call" not in text
    found = [line for line in text.splitlines() if " dot(" in line]
    assert len(found) == 1


def test_x64_decides_what_a_trace_multiplies(rough: Rough) -> None:
    with jax.enable_x64(True):
        a, b = jnp.ones((3, 4)), jnp.ones((4, 5))
        found = jax.jit(jax.grad(lambda x: dispatch.matmul(x, b).sum()))(a)
        assert str(found.dtype) == "float64"
    assert {x.a.dtype for x in rough.problems} <= {"float64"}
    assert str(jax.jit(dispatch.matmul)(array((3, 4), 0), array((4, 5), 1)).dtype) == "float32"


def test_dtypes_of_mixed_operands_and_wide_results() -> None:
    a, b = array((3, 4), 0, "bfloat16"), array((4, 5), 1)
    for given, options in (((a, b), {}), ((a, a.T), {"out_dtype": "float32"}), ((b.T, a.T), {"out_dtype": "bfloat16"})):

        def ours(x: Any, y: Any, options: Any = options) -> Any:
            return dispatch.matmul(x, y, **options).astype("float32").sum()

        def theirs(x: Any, y: Any, options: Any = options) -> Any:
            wide = jnp.promote_types(x.dtype, y.dtype)
            out = jnp.matmul(x, y, preferred_element_type=jnp.promote_types(options.get("out_dtype", wide), wide))
            return out.astype(options.get("out_dtype", wide)).astype("float32").sum()

        found, wanted = (jax.jit(jax.value_and_grad(f, (0, 1)))(*given) for f in (ours, theirs))
        assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, wanted)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(*(np.float32(v) for v in (x, y)), rtol=0.02), found, wanted
        )


def decoded(q: Any) -> Any:
    return q.dequantize("float32")


SCALED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "jit": lambda p, a, q: jax.jit(p)(a, q),
    "vector": lambda p, a, q: jax.jit(p)(a[0], q),
    "stack": lambda p, a, q: jax.jit(p)(jnp.stack([a, -a]), q),
    "grad": lambda p, a, q: jax.jit(jax.grad(lambda x: jnp.sin(p(x, q)).sum()))(a),
    "jvp": lambda p, a, q: jax.jvp(lambda x: p(x, q), (a,), (a + 1,)),
    "hessian": lambda p, a, q: jax.hessian(lambda x: jnp.square(p(x, q)).sum())(a[:1]),
    "vmap of a": lambda p, a, q: jax.jit(jax.vmap(p, (0, None)))(jnp.stack([a, -a]), q),
    "vmap of rows": lambda p, a, q: jax.jit(jax.vmap(p, (0, None)))(a, q),
    "vmap of both": lambda p, a, q: jax.jit(jax.vmap(p))(
        *(jax.tree.map(lambda x: jnp.stack([x, x]), y) for y in (a, q))
    ),
    "scan": lambda p, a, q: jax.lax.scan(lambda c, _: (p(c, q)[:, :4] / 8, c.sum()), a, None, length=3),
    "remat": lambda p, a, q: jax.grad(lambda x: jnp.sin(jax.checkpoint(p)(x, q)).sum())(a),
}


@pytest.mark.parametrize("transform", SCALED.values(), ids=list(SCALED))
def test_transforms_of_a_product_by_a_weight_quantized_once(transform: Any, rough: Rough) -> None:
    """Values are the chosen plan's, derivatives the own product's of what the weight stands for."""
    a, q = array((3, 4), 0), dispatch.quantize(array((4, 5), 1), "e4m3:row", axis=-2)
    found = transform(dispatch.matmul, a, q)
    assert rough.problems
    assert {str(problem.b.recipe) for problem in rough.problems} == {"e4m3:row"}
    wanted = transform(lambda x, y: jnp.matmul(x, decoded(y)), a, q)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0.06, atol=0.06), found, wanted)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, wanted)


def test_an_epilogue_is_fused_into_a_product_by_a_weight_quantized_once(rough: Rough) -> None:
    a, bias, q = array((3, 4), 0), array((5,), 2), dispatch.quantize(array((4, 5), 1), "e4m3:row", axis=-2)
    found = jax.jit(lambda *x: dispatch.matmul(x[0], x[1], bias=x[2], activation="silu"))(a, q, bias)
    close(found, jax.nn.silu(a @ decoded(q) + bias) * FACTOR)
    assert {(x.bias, x.activation) for x in rough.problems} == {("float32", "silu")}


def test_an_exported_product_by_a_weight_quantized_once_is_the_own(rough: Rough) -> None:
    a, q = array((3, 4), 0), dispatch.quantize(array((4, 5), 1), "e4m3:row", axis=-2)
    text = jax.export.export(
        jax.jit(lambda x, data, scale: dispatch.matmul(x, dispatch.ScaledArray(data, scale, q.recipe, -2, q.dtype)))
    )(a, q.data, q.scale).mlir_module()
    assert not rough.problems
    assert "dot_general" in text


def test_a_product_by_a_weight_quantized_once_is_transposed_as_the_own(rough: Rough) -> None:
    a, q = array((3, 4), 0), dispatch.quantize(array((4, 5), 1), "e4m3:row", axis=-2)
    cotangent = array((3, 5), 2)
    (found,) = jax.linear_transpose(lambda x: dispatch.matmul(x, q), a)(cotangent)
    close(found, cotangent @ decoded(q).T)


def test_layers_of_one_shape_are_measured_once(rough: Rough) -> None:
    """What is measured while tracing is of random operands, whatever the scope."""
    a, b = array((17, 4), 0), array((4, 5), 1)
    before = dispatch.stats()["measured"]
    jax.jit(lambda x: [dispatch.matmul(x, b, scope=f"layers.{i}") for i in range(4)])(a)
    assert dispatch.stats()["measured"] == before + 1
    for i in range(2):
        dispatch.matmul(a, b, scope=f"layers.{i}")
    assert dispatch.stats()["measured"] == before + 3


@pytest.mark.parametrize("traced", ["random", "calibrated"])
def test_error_under_tracing_counts_as_the_policy_says(traced: str) -> None:
    """Under `calibrated` what rounds serves a jitted program only after dispatch.calibrate saw real batches."""
    a, b = (jnp.asarray(np.random.default_rng(seed).normal(size=(19, 19)), "float32") for seed in (0, 1))

    def model(x: Any) -> Any:
        return jnp.sin(dispatch.matmul(jnp.cos(dispatch.matmul(x, b, scope="up")), b, scope="down"))

    wanted = {"random": biased, "calibrated": jnp.matmul}[traced]
    with winning(error={"traced": traced}) as backend:
        close(jax.jit(model)(a), jnp.sin(wanted(jnp.cos(wanted(a, b)), b)))
        assert bool(backend.problems) == (traced == "random")
        decisions = dispatch.calibrate(jax.jit(model), a, a + 1)
        assert len(decisions) == 2
        assert {x.measurement.error_data for x in decisions} == {"calibration"}
        close(jax.jit(lambda x: model(x) + 0)(a), jnp.sin(biased(jnp.cos(biased(a, b)), b)))


def test_a_function_that_was_compiled_before_calibration_is_traced_again() -> None:
    a, b = (jnp.asarray(np.random.default_rng(seed).normal(size=(21, 21)), "float32") for seed in (0, 1))
    traces = []

    @jax.jit
    def model(x: Any) -> Any:
        traces.append(x)
        return dispatch.matmul(x, b)

    with winning(error={"traced": "calibrated"}):
        close(model(a), a @ b)
        assert dispatch.calibrate(model, a, a + 1)
        before = len(traces)
        for _ in range(3):
            close(model(a), biased(a, b))
        assert len(traces) == before + 1


@pytest.mark.parametrize(("recipes", "chosen"), [((None,), True), (("e4m3:row",), False)])
def test_a_small_gain_counts_under_jit_where_nothing_is_lost(recipes: tuple[Any, ...], chosen: bool) -> None:
    """1.2 times as fast is above min_speedup_lossless (1.05), and below min_speedup (1.5)."""
    a, b, seen = array((23, 4), 0), array((4, 5), 1), []

    def product(*operands: Any) -> Any:
        seen.append(operands)
        return jnp.matmul(*operands)

    policy = dispatch.use_policy(recipes={"inputs": ["float32"]})
    backend = FakeBackend("small", product, recipes=recipes)
    with registered(backend), fake_timings({"small": 10.0, "baseline": 12.0}), policy:
        found = jax.jit(jax.value_and_grad(lambda *x: dispatch.matmul(*x).sum(), (0, 1)))(a, b)
        kept = [d for d in dispatch.stored() if d.problem.m == 23 and d.problem.op == "matmul"]
    close(found, jax.value_and_grad(lambda *x: jnp.matmul(*x).sum(), (0, 1))(a, b))
    assert {d.backend == "small" for d in kept} == {chosen}
    assert seen  # measured in either case


def test_the_jaxpr_is_the_own_one_but_for_the_name() -> None:
    a, up, down = array((2, 6, 4), 0), array((4, 8), 1), array((8, 4), 2)

    def trained(product: Any) -> Any:
        return jax.grad(lambda *x: jnp.sin(product(jax.nn.silu(product(x[0], x[1])), x[2])).sum(), (0, 1, 2))

    def counted(product: Any) -> dict[str, int]:
        names = primitives(trained(product), a, up, down)
        return {name: names.count(name) for name in set(names)}

    ours, own = counted(dispatch.matmul), counted(jnp.matmul)
    assert ours.pop("dispatch_dot_general") == own.pop("dot_general") == 6
    assert "dot_general" not in ours
    # A name for jax.checkpoint, and the transposition that lays a weight's gradient out as the weight.
    assert {name for name in ours if ours[name] != own.get(name, 0)} <= {"name", "transpose"}


NUMBERS = {
    "rows": ((6, 4), (4, 5), (((1,), (0,)), ((), ()))),
    "a weight laid out as (n, k)": ((6, 4), (5, 4), (((1,), (1,)), ((), ()))),
    "columns": ((4, 6), (4, 5), (((0,), (0,)), ((), ()))),
    "a stack of rows": ((2, 6, 4), (4, 5), (((2,), (0,)), ((), ()))),
    "several dimensions": ((6, 2, 4), (2, 4, 3, 5), (((1, 2), (0, 1)), ((), ()))),
    "a batch": ((2, 6, 4), (2, 4, 5), (((2,), (1,)), ((0,), (0,)))),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=list(NUMBERS))
def test_native_products_and_gradients_compile_to_the_own(numbers: Any, dtype: str) -> None:
    """Every dot has the dimensions of JAX's: XLA on a CPU took ten times as long for others."""
    a, b = array(numbers[0], 0, dtype), array(numbers[1], 1, dtype)
    room: Any = dispatch.framework("jax")
    choice = room.choice("native", None, None)

    def compiled(product: Any) -> list[str]:
        def loss(*operands: Any) -> Any:
            return jnp.sin(product(*operands, numbers[2]).astype("float32")).sum()

        text = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(a, b).compile().as_text()
        dots = [line for line in text.splitlines() if " dot(" in line]
        return sorted(
            re.sub(r"^.*?= |%[\w.-]+|, (metadata|frontend_attributes|backend_config)=.*", "", x) for x in dots
        )

    found = compiled(lambda x, y, of: room.dot_general(x, y, of, choice))
    assert len(found) == 3
    assert found == compiled(jax.lax.dot_general)
