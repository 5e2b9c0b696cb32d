"""PreparedOperand: forms made once, never stale, and usable outside the place that they were made in."""

import copy
import gc
import threading
import time

import numpy as np
import pytest

import dispatch
from dispatch.frameworks import framework
from dispatch.quantization import PreparedOperand, prepare, quantize

jax = pytest.importorskip("jax", reason="compares all three frameworks")
torch = pytest.importorskip("torch", reason="compares all three frameworks")
jnp = jax.numpy


class Counting:
    """A maker of forms that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, array):
        self.calls += 1
        return quantize(array, "e4m3:row")


def decoded(prepared, make):
    return prepared.form("row", make).dequantize()


@pytest.mark.parametrize("array", [np.ones((4, 8)), torch.ones(4, 8), jnp.ones((4, 8))], ids=["numpy", "torch", "jax"])
def test_makes_each_form_once_and_lazily(array):
    row, block = Counting(), Counting()
    prepared = prepare(array)
    assert row.calls == 0
    first = prepared.form(("row", -1), row)
    assert prepared.form(("row", -1), row) is first
    assert prepared.form(("block", -1), block) is not first
    assert (row.calls, block.calls) == (1, 1)


def test_tells_what_it_holds():
    w = torch.ones(4, 8, dtype=torch.bfloat16)
    prepared = prepare(w)
    assert prepared.array is w
    assert (prepared.shape, prepared.ndim, prepared.dtype) == ((4, 8), 2, "bfloat16")
    assert repr(prepared) == "PreparedOperand(torch, bfloat16, shape=(4, 8), forms=0)"
    prepared.form("row", Counting())
    assert repr(prepared) == "PreparedOperand(torch, bfloat16, shape=(4, 8), forms=1)"


def test_prepares_once():
    prepared = prepare(np.ones((2, 2)))
    assert isinstance(prepared, PreparedOperand)
    assert prepare(prepared) is prepared


def test_refuses_what_is_quantized_and_what_is_no_array():
    with pytest.raises(TypeError, match="quantized already"):
        prepare(quantize(np.ones((2, 2)), "e4m3:row"))
    with pytest.raises(TypeError, match="list is no array; allowed: an array of numpy, torch, jax"):
        prepare([[1.0]])


def change_by_optimizer(w):
    w.grad = torch.ones_like(w)
    torch.optim.SGD([w], lr=1.0).step()


def change_by_copy(w):
    with torch.no_grad():
        w.copy_(torch.full_like(w, 7.0))


def change_by_fill(w):
    with torch.no_grad():
        w.fill_(3.0)


def change_through_a_view(w):
    with torch.no_grad():
        w.view(-1)[:].mul_(5.0)


def change_by_load_state_dict(w):
    module = torch.nn.Module()
    module.w = w
    module.load_state_dict({"w": torch.full_like(w, 2.0)})


@pytest.mark.parametrize(
    "change",
    [change_by_optimizer, change_by_copy, change_by_fill, change_through_a_view, change_by_load_state_dict],
)
@pytest.mark.parametrize("view", [lambda w: w, lambda w: w.mT], ids=["weight", "transposed"])
def test_forms_follow_an_array_changed_in_place(change, view):
    w = torch.nn.Parameter(torch.ones(4, 8))
    prepared, make = prepare(view(w)), Counting()
    for calls in (1, 2):
        assert torch.equal(decoded(prepared, make), view(w).detach())
        assert torch.equal(decoded(prepared, make), view(w).detach())
        assert make.calls == calls
        version = prepared.version
        change(w)
        assert prepared.version > version
    assert torch.equal(decoded(prepared, make), view(w).detach())


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("view", [lambda w: w, lambda w: w.mT, lambda w: w[2:]], ids=["weight", "transposed", "part"])
def test_forms_follow_a_fused_optimizer_which_moves_no_version(optimizer, view):
    w = torch.nn.Parameter(torch.ones(4, 8))
    prepared, make = prepare(view(w)), Counting()
    step = getattr(torch.optim, optimizer)([w], lr=0.5, fused=True).step
    w.grad = torch.ones_like(w)
    for calls in (1, 2):
        assert torch.equal(decoded(prepared, make), view(w).detach())
        assert make.calls == calls
        step()
    assert torch.equal(decoded(prepared, make), view(w).detach())


def test_a_form_of_a_frozen_weight_outlives_the_steps_of_others():
    frozen, w = torch.nn.Parameter(torch.ones(4, 8), requires_grad=False), torch.nn.Parameter(torch.ones(4, 8))
    prepared, make = prepare(frozen), Counting()
    decoded(prepared, make)
    w.grad = torch.ones_like(w)
    torch.optim.SGD([frozen, w], lr=0.5, fused=True).step()
    decoded(prepared, make)
    assert make.calls == 1


def test_all_forms_are_dropped_when_the_array_changes():
    w = torch.ones(4, 8)
    prepared = prepare(w)
    prepared.form("one", Counting())
    prepared.form("two", Counting())
    w.fill_(2.0)
    prepared.form("one", Counting())
    assert repr(prepared).endswith("forms=1)")


def write_to_data(w):
    w.data.fill_(3.0)


def write_to_numpy_alias(w):
    w.numpy()[:] = 4.0


@pytest.mark.parametrize("write", [write_to_data, write_to_numpy_alias])
def test_refresh_follows_writes_that_move_no_version(write):
    w = torch.ones(4, 8)
    prepared, make = prepare(w), Counting()
    decoded(prepared, make)
    write(w)
    prepared.refresh()
    assert torch.equal(decoded(prepared, make), w)
    assert make.calls == 2


def test_refresh_follows_a_numpy_array():
    w = np.ones((4, 8), np.float32)
    prepared, make = prepare(w), Counting()
    decoded(prepared, make)
    w[:] = 5
    prepared.refresh()
    assert prepared.version is None
    assert (decoded(prepared, make) == 5).all()


def test_an_inference_tensor_has_no_version():
    with torch.inference_mode():
        w = torch.ones(4, 8)
    prepared, make = prepare(w), Counting()
    assert prepared.version is None
    decoded(prepared, make)
    decoded(prepared, make)
    assert make.calls == 1
    with torch.inference_mode():
        w.fill_(2.0)
    prepared.refresh()
    assert torch.equal(decoded(prepared, make), torch.full((4, 8), 2.0))


def test_a_form_made_in_inference_mode_serves_training():
    w, x = torch.ones(8, 4), torch.ones(2, 8, requires_grad=True)
    prepared = prepare(w)
    with torch.inference_mode():
        form = prepared.form("decoded", lambda b: quantize(b, "e4m3:row").dequantize())
    assert not form.is_inference()
    (x @ form).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 8), 4.0))


def test_a_form_keeps_no_graph():
    w = torch.nn.Parameter(torch.ones(4, 8))
    assert not prepare(w).form("doubled", lambda b: b * 2).requires_grad


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad, jax.linearize], ids=lambda f: f.__name__)
def test_a_form_made_inside_a_jax_transform_serves_outside(transform):
    prepared, make = prepare(jnp.ones((8, 4))), Counting()

    def product(x):
        return (x @ decoded(prepared, make)).sum()

    x = jnp.ones((2, 8))
    transform(product, x) if transform is jax.linearize else transform(product)(x)
    assert make.calls == 1
    assert isinstance(prepared.form("row", make).data, jax.Array)
    assert not isinstance(prepared.form("row", make).data, jax.core.Tracer)
    assert (np.asarray(decoded(prepared, make)) == 1).all()
    assert make.calls == 1


def test_forms_of_a_tracer_are_not_kept():
    kept = []

    @jax.jit
    def product(x, w):
        prepared = prepare(w)
        kept.append(prepared)
        return x @ decoded(prepared, Counting()) + x @ decoded(prepared, Counting())

    assert (product(jnp.ones((2, 8)), jnp.ones((8, 4))) == 16).all()
    assert kept[0].form("row", lambda _: "made anew") == "made anew"


def test_forms_made_under_graph_capture_are_not_kept(monkeypatch):
    room = framework("torch")
    prepared, make = prepare(torch.ones(4, 8)), Counting()
    with monkeypatch.context() as patch:
        patch.setattr(type(room), "modes", lambda *_: ("captured",))
        decoded(prepared, make)
    decoded(prepared, make)
    assert make.calls == 2
    with monkeypatch.context() as patch:
        patch.setattr(type(room), "modes", lambda *_: ("captured",))
        decoded(prepared, make)
    assert make.calls == 2


@pytest.mark.parametrize("array", [torch.ones(4, 8), jnp.ones((4, 8))], ids=["torch", "jax"])
def test_threads_that_race_for_a_form_make_it_once(array):
    prepared, make = prepare(array), Counting()
    start = threading.Barrier(16)
    forms = []

    def slow(b):
        time.sleep(0.05)
        return make(b)

    def ask():
        start.wait()
        forms.append(prepared.form("row", slow))

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert make.calls == 1
    assert len(forms) == 16
    assert len({id(form) for form in forms}) == 1


def test_one_form_does_not_wait_for_another():
    prepared = prepare(torch.ones(4, 8))
    entered, release = threading.Event(), threading.Event()

    def blocking(_):
        entered.set()
        assert release.wait(60)
        return "slow"

    thread = threading.Thread(target=prepared.form, args=("slow", blocking))
    thread.start()
    assert entered.wait(60)
    assert prepared.form("fast", lambda _: "fast") == "fast"
    assert prepared.form("nested", lambda _: prepared.form("inner", lambda _: "inner")) == "inner"
    release.set()
    thread.join()
    assert prepared.form("slow", blocking) == "slow"


def test_a_form_that_was_being_made_while_the_array_changed_is_not_kept():
    w = torch.ones(4, 8)
    prepared = prepare(w)
    entered, release = threading.Event(), threading.Event()

    def make(b):
        value = b.clone()
        entered.set()
        assert release.wait(60)
        return value

    thread = threading.Thread(target=prepared.form, args=("copy", make))
    thread.start()
    assert entered.wait(60)
    w.fill_(2.0)
    release.set()
    thread.join()
    assert torch.equal(prepared.form("copy", torch.clone), w)


def test_a_maker_that_raises_leaves_nothing_behind():
    prepared = prepare(np.ones((4, 8), np.float32))

    def failing(_):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        prepared.form("row", failing)
    assert (decoded(prepared, Counting()) == 1).all()


def test_an_address_used_again_brings_back_no_form():
    for i in range(5):
        w = torch.full((64, 64), float(i))
        assert torch.equal(decoded(prepare(w), Counting()), w)
        del w
        gc.collect()


def test_a_copy_makes_forms_of_its_own_array():
    w = torch.nn.Parameter(torch.ones(4, 8))
    prepared = prepare(w)
    decoded(prepared, Counting())
    copied, new = copy.deepcopy((prepared, w))
    assert copied.array is new
    change_by_fill(new)
    assert torch.equal(decoded(copied, Counting()), torch.full((4, 8), 3.0))
    assert torch.equal(decoded(prepared, Counting()), torch.ones(4, 8))


@pytest.mark.parametrize("name", dispatch.installed())
def test_a_known_product_with_a_weight_is_looked_up_as_any_other(name, monkeypatch):
    from dispatch import _api

    room = dispatch.framework(name)
    a, b, c = (room.normal((24, 24), "float32", seed, "cpu") for seed in range(3))
    weight, other = dispatch.prepare(b), dispatch.prepare(c)
    first = room.to_numpy(dispatch.matmul(a, weight))
    plain = room.to_numpy(dispatch.matmul(a, b))
    monkeypatch.setattr(_api, "request", lambda *arguments: pytest.fail("a known call was described anew"))
    assert np.array_equal(room.to_numpy(dispatch.matmul(a, weight)), first)
    assert np.array_equal(room.to_numpy(dispatch.matmul(a, b)), plain)
    np.testing.assert_allclose(
        room.to_numpy(dispatch.matmul(a, other)), room.to_numpy(a) @ room.to_numpy(c), rtol=1e-4, atol=1e-4
    )


def test_forms_follow_an_array_that_is_given_other_memory():
    weight = torch.ones(4, 6)
    prepared, made = prepare(weight), []
    prepared.form("key", lambda array: made.append(tuple(array.shape)))
    weight.data = torch.ones(4, 3)
    prepared.form("key", lambda array: made.append(tuple(array.shape)))
    weight.data = torch.ones(4, 3, dtype=torch.float64)
    prepared.form("key", lambda array: made.append(tuple(array.shape)))
    prepared.form("key", lambda array: made.append("again"))
    assert made == [(4, 6), (4, 3), (4, 3)]


def test_the_transpose_of_a_backward_pass_follows_the_array():
    array = torch.arange(12.0).reshape(3, 4)
    operand = dispatch.prepare(array)
    first = operand.turned()
    assert operand.turned() is first
    array.data = torch.ones(3, 4)  # other memory: a view of the old one says nothing of it
    second = operand.turned()
    assert torch.equal(second.array, torch.ones(4, 3))
    assert second.form("sum", torch.sum) == 12.0
    array.data.mul_(2.0)  # which moves no version
    operand.refresh()
    assert operand.turned().form("sum", torch.sum) == 24.0


def test_forms_belong_to_one_backend_not_to_its_name():
    from dispatch.frameworks.operands import forming
    from dispatch.testing import FakeBackend

    a, b = (torch.ones(8, 8).bfloat16() for _ in range(2))
    asked = dispatch.explain(a, prepare(b)).problem
    scaled = asked.proposing(dispatch.RecipePair.parse("e4m3:row"))
    weight, backends = prepare(b), [FakeBackend("same"), FakeBackend("same")]
    for index, backend in enumerate(backends):
        backend.prepare = lambda operand, recipe, *, axis, index=index: index
    assert [forming(backend, scaled)((a, weight))[1] for backend in (*backends, *backends)] == [0, 1, 0, 1]


# As a JAX pytree


def test_a_jax_array_is_its_one_leaf():
    prepared = prepare(jnp.ones((4, 8)))
    decoded(prepared, Counting())
    paths, tree = jax.tree_util.tree_flatten_with_path({"w": prepared})
    assert [jax.tree_util.keystr(path) for path, _ in paths] == ["['w'].array"]
    assert paths[0][1] is prepared.array
    assert tree == jax.tree.structure({"w": prepare(jnp.zeros((3, 3)))}), "forms are no part of the structure"
    again = jax.tree.unflatten(tree, [prepared.array])["w"]
    assert (again.array is prepared.array, again.shape, again.dtype) == (True, (4, 8), "float32")
    assert repr(again).endswith("forms=0)")


def test_what_is_mapped_over_the_leaf_leaves_no_form_of_another_array():
    prepared, make = prepare(jnp.ones((4, 8))), Counting()
    decoded(prepared, make)
    updated = jax.tree.map(lambda w: w * 3, prepared)
    assert (np.asarray(decoded(updated, make)) == 3).all()
    assert (np.asarray(decoded(prepared, make)) == 1).all()
    assert make.calls == 2


@pytest.mark.parametrize(
    "leaf", [None, object(), jax.ShapeDtypeStruct((4, 8), jnp.float32)], ids=["None", "object", "shape"]
)
def test_is_rebuilt_with_leaves_that_are_no_arrays(leaf):
    tree = jax.tree.structure(prepare(jnp.ones((4, 8))))
    assert jax.tree.unflatten(tree, [leaf]).array is leaf


def test_passes_through_jit_vmap_scan_and_grad():
    x, w = jnp.ones((2, 8)), jnp.arange(32.0).reshape(8, 4)
    prepared, stack = prepare(w), prepare(jnp.stack([w, w + 1, w + 2]))
    wanted = np.asarray(x @ w)
    np.testing.assert_array_equal(jax.jit(dispatch.matmul)(x, prepared), wanted)
    back = jax.jit(lambda p: p)(prepared)
    assert isinstance(back, PreparedOperand)
    np.testing.assert_array_equal(back.array, w)
    mapped = jax.vmap(dispatch.matmul, (None, 0))(x, stack)
    _, scanned = jax.lax.scan(lambda carry, p: (carry, dispatch.matmul(x, p)), None, stack)
    for i in range(3):
        np.testing.assert_array_equal(mapped[i], x @ (w + i))
        np.testing.assert_array_equal(scanned[i], x @ (w + i))
    grad = jax.grad(lambda p: dispatch.matmul(x, p).sum())(prepared)
    assert isinstance(grad, PreparedOperand)
    np.testing.assert_array_equal(grad.array, jnp.full((8, 4), 2.0))
    carried, _ = jax.lax.scan(lambda p, _: (jax.tree.map(lambda a: a + 1, p), None), prepared, None, length=3)
    np.testing.assert_array_equal(carried.array, w + 3)


def test_a_checkpoint_keeps_the_array():
    import pickle

    params = {"up": prepare(jnp.arange(8.0).reshape(2, 4)), "down": quantize(jnp.ones((4, 8)), "e4m3:row", axis=-2)}
    leaves, tree = jax.tree.flatten(params)
    stored = pickle.dumps([np.asarray(leaf) for leaf in leaves])
    restored = jax.tree.unflatten(tree, [jnp.asarray(leaf) for leaf in pickle.loads(stored)])
    np.testing.assert_array_equal(restored["up"].array, params["up"].array)
    np.testing.assert_array_equal(restored["down"].dequantize(), params["down"].dequantize())
    assert restored["down"].recipe == params["down"].recipe
    whole = pickle.loads(pickle.dumps(params))
    np.testing.assert_array_equal(whole["up"].array, params["up"].array)
    np.testing.assert_array_equal(whole["down"].dequantize(), params["down"].dequantize())


def test_a_prepared_tracer_is_measured_as_what_it_is_quantized_in_each_call():
    from dispatch.testing import FakeBackend, fake_timings, registered

    asked = []
    backend = FakeBackend("asked", recipes=("e4m3:row",), on_plan=asked.append)
    x, weight = jnp.ones((4, 24), "bfloat16"), prepare(jnp.ones((24, 8), "bfloat16"))
    with registered(backend), fake_timings({"asked": 1.0, "baseline": 100.0}):
        jax.jit(dispatch.matmul)(x, weight)
        assert {one.b.prepared for one in asked} == {False}
        asked.clear()
        jax.jit(lambda x: dispatch.matmul(x, weight))(x)  # closed over, it has values
        assert {one.b.prepared for one in asked} == {True}


def test_of_other_frameworks_jax_trees_rebuild_what_they_were():
    jax = pytest.importorskip("jax")
    dispatch.prepare(jax.numpy.ones((3, 3)))  # JAX knows the class from here on
    weight = torch.ones(4, 6)
    found = jax.tree.map(lambda leaf: leaf, {"w": prepare(weight)})["w"]
    made = []
    for _ in range(2):
        found.form("key", lambda array: made.append(float(array.sum())))
        weight.mul_(3)
        found.form("key", lambda array: made.append(float(array.sum())))
    assert made == [24.0, 72.0, 216.0]
    for leaf in (None, "x", 3):
        assert repr(leaf) in repr(jax.tree.map(lambda _, leaf=leaf: leaf, prepare(jax.numpy.ones((3, 3)))))
