"""Equinox: a Linear whose product is dispatched, and `convert` for every Linear of a tree.

    model = dispatch.integrations.equinox.convert(model, scope="encoder")

The leaves stay as and where they were: optimizers and checkpoints see no difference.
"""

from __future__ import annotations

from typing import Any, TypeVar

import equinox
import jax

import dispatch
from dispatch.integrations.jax import DelayedScaling

Array = Any
_Tree = TypeVar("_Tree")


class Linear(equinox.nn.Linear):  # type: ignore[misc]
    """equinox.nn.Linear with a dispatched product; under jax.vmap one product of all rows.

    scope: where in the model it stands. policy: a Policy, name or path; the one in force if None. backend: use this
    one or raise NoBackendError.
    """

    scope: str | None = equinox.field(static=True, default=None)
    policy: dispatch.Policy | str | None = equinox.field(static=True, default=None)
    backend: str | None = equinox.field(static=True, default=None)

    def __init__(
        self,
        in_features: Any,
        out_features: Any,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        key: Any,
        scope: str | None = None,
        policy: dispatch.Policy | str | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, use_bias, dtype, key=key)
        self.scope, self.policy, self.backend = scope, policy, backend

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        """Return weight @ x + bias; x: (in_features,), or () where that is "scalar"."""
        if "scalar" in (self.in_features, self.out_features):
            return super().__call__(x, key=key)
        room: Any = dispatch.framework("jax")
        choice = room.choice(self.policy, self.backend, self.scope)
        out = room.dot_general(x, self.weight, (((0,), (1,)), ((), ())), choice)
        return out if self.bias is None else out + self.bias


class DelayedLinear(equinox.Module):  # type: ignore[misc]
    """equinox.nn.Linear with delayed scaling: called with rows and the model's state, it returns rows and state.

    Made of a Linear, whose arrays it keeps: `model, state = equinox.nn.make_with_state(Model)(...)` as for every layer
    with state. Not for use under vmap: rows are one product as they are.
    """

    linear: equinox.nn.Linear
    scaling: DelayedScaling = equinox.field(static=True)
    scope: str | None = equinox.field(static=True)
    of_x: equinox.nn.StateIndex
    of_weight: equinox.nn.StateIndex

    def __init__(
        self, linear: equinox.nn.Linear, scaling: DelayedScaling | None = None, scope: str | None = None
    ) -> None:
        self.linear, self.scaling, self.scope = linear, scaling or DelayedScaling(), scope
        self.of_x, self.of_weight = (equinox.nn.StateIndex(self.scaling.start()) for _ in range(2))

    def __call__(self, x: Array, state: equinox.nn.State) -> tuple[Array, equinox.nn.State]:
        """Return x @ weight.T + bias, and the state after it; x: (..., in_features)."""
        numbers = (((x.ndim - 1,), (1,)), ((), ()))
        kept = state.get(self.of_x), state.get(self.of_weight)
        out, of_x, of_weight = self.scaling.dot_general(x, self.linear.weight, numbers, *kept, scope=self.scope)
        out = out if self.linear.bias is None else out + self.linear.bias
        return out, state.set(self.of_x, of_x).set(self.of_weight, of_weight)


def convert(
    tree: _Tree, *, scope: str = "", policy: dispatch.Policy | str | None = None, backend: str | None = None
) -> _Tree:
    """Return the tree with each equinox.nn.Linear in it as a Linear of this module; subclasses of it stay.

    scope: put before each layer's path. policy, backend: as in Linear.
    """

    def converted(path: Any, node: Any) -> Any:
        if type(node) not in (equinox.nn.Linear, Linear):
            return node
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return _linear(node, ".".join(filter(None, [scope, name])) or None, policy, backend)

    leaf = lambda node: isinstance(node, equinox.nn.Linear)  # noqa: E731
    out: _Tree = jax.tree_util.tree_map_with_path(converted, tree, is_leaf=leaf)
    return out


def _linear(own: equinox.nn.Linear, scope: str | None, policy: Any, backend: str | None) -> Linear:
    """Return a Linear with the arrays of `own`, none made anew."""
    made = object.__new__(Linear)
    names = ("weight", "bias", "in_features", "out_features", "use_bias")
    values = {name: getattr(own, name) for name in names} | {"scope": scope, "policy": policy, "backend": backend}
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made
