"""Flax: a dot_general to inject into its layers, linen's and nnx's, with the module's path as the product's scope.

    nn.Dense(1024, dot_general_cls=dispatch.integrations.flax.LinenDotGeneral)        # linen
    dispatch.integrations.flax.Einsum((64, 8, 32), "bsd,dhk->bshk")                    # in place of linen's
    dispatch.integrations.flax.convert(model, scope="encoder")                         # nnx: every layer in it

Parameters stay where they were, under the names they had: optimizers and checkpoints see no difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen, nnx

import dispatch
from dispatch.integrations.jax import DelayedScaling

Array = Any
_Model = TypeVar("_Model", bound=nnx.Module)


@dataclass(frozen=True, slots=True)
class DotGeneral:
    """A dispatched jax.lax.dot_general, to be passed as `dot_general=`; equal to another of the same options.

    scope: where in the model the product stands. policy: a Policy, name or path; the one in force if None. backend:
    use this one or raise NoBackendError.
    """

    scope: str | None = None
    policy: dispatch.Policy | str | None = None
    backend: str | None = None

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        **options: Any,
    ) -> Array:
        """Return the product as jax.lax.dot_general does; options: its others, such as out_sharding."""
        room: Any = dispatch.framework("jax")
        choice = room.choice(self.policy, self.backend, self.scope)
        options |= {"precision": precision, "preferred_element_type": preferred_element_type}
        return room.dot_general(lhs, rhs, dimension_numbers, choice, **options)

    def einsum(self, *operands: Any, **options: Any) -> Array:
        """Return jnp.einsum of the operands with this dot_general."""
        return jnp.einsum(*operands, _dot_general=self, **options)


class LinenDotGeneral(linen.Module):  # type: ignore[misc]
    """What linen's layers take as `dot_general_cls`: a DotGeneral whose scope is the layer's path. It has no variables.

    policy, backend: as in DotGeneral; set by functools.partial.
    """

    policy: dispatch.Policy | str | None = None
    backend: str | None = None

    @linen.compact  # type: ignore[untyped-decorator]
    def __call__(self, *operands: Any, **options: Any) -> Array:
        """Return the product as jax.lax.dot_general does."""
        scope = ".".join(self.path[:-1]) or None
        return DotGeneral(scope, self.policy, self.backend)(*operands, **options)


class Einsum(linen.Einsum):  # type: ignore[misc]
    """linen's Einsum, which takes no dot_general, with a dispatched product; its scope is the layer's path.

    Of the same name, so that layers that are not named, and their parameters, are called the same. policy, backend: as
    in DotGeneral.
    """

    policy: dispatch.Policy | str | None = None
    backend: str | None = None

    @linen.compact  # type: ignore[untyped-decorator]
    def __call__(self, inputs: Array, einsum_str: str | None = None) -> Array:
        """Return the product of the inputs and the kernel by the equation, and the bias added, as linen's Einsum does.

        Raises ValueError for an equation without `->` or of other than two operands.
        """
        equation = linen.merge_param("einsum_str", self.einsum_str, einsum_str).replace(" ", "")
        if "->" not in equation or equation.count(",") != 1:
            raise ValueError(f"einsum_str = {equation!r}: allowed: two operands, and what comes of them after '->'")
        kernel, bias, shape = self.param("kernel", self.kernel_init, self.shape, self.param_dtype), None, ()
        if self.use_bias:
            own, shape = self._get_bias_shape(equation, inputs, kernel)
            bias = self.param("bias", self.bias_init, own, self.param_dtype)
        inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        product = DotGeneral(".".join(self.path) or None, self.policy, self.backend)
        options = {"precision": self.precision, "preferred_element_type": self.preferred_element_type}
        out = product.einsum(equation, inputs, kernel, **options)
        return out if bias is None else out + jnp.reshape(bias, shape)


class LinenDelayedDotGeneral(linen.Module):  # type: ignore[misc]
    """A LinenDotGeneral with delayed scaling; its state is in the collection `delayed_scaling`, an Amax an operand.

    The state moves where the collection is mutable, `apply(variables, x, mutable=["delayed_scaling"])`, and not in
    `init`. scaling: set by functools.partial. For layers whose products have no batch dimensions.
    """

    scaling: DelayedScaling = DelayedScaling()

    @linen.compact  # type: ignore[untyped-decorator]
    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
    ) -> Array:
        """Return the product of both operands quantized. precision: as XLA likes."""
        kept = [self.variable("delayed_scaling", name, self.scaling.start) for name in ("lhs", "rhs")]
        out, *after = self.scaling.dot_general(
            *(lhs, rhs, dimension_numbers, kept[0].value, kept[1].value),
            scope=".".join(self.path[:-1]) or None,
            out_dtype=preferred_element_type,
        )
        if self.is_mutable_collection("delayed_scaling") and not self.is_initializing():
            for variable, amax in zip(kept, after, strict=True):
                variable.value = amax
        return out


class DelayedState(nnx.Variable):  # type: ignore[misc]
    """The Amax of one operand in an nnx model."""


class DelayedDotGeneral(nnx.Module):  # type: ignore[misc]
    """A DotGeneral with delayed scaling, whose state is two variables of kind DelayedState."""

    def __init__(self, scaling: DelayedScaling, scope: str | None = None) -> None:
        self.scaling, self.scope = scaling, scope
        self.lhs, self.rhs = DelayedState(scaling.start()), DelayedState(scaling.start())

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        **options: Any,
    ) -> Array:
        """Return the product of both operands quantized; the state moves. precision, options: as XLA likes."""
        kept = self.lhs.get_value(), self.rhs.get_value()
        out, *after = self.scaling.dot_general(
            lhs, rhs, dimension_numbers, *kept, scope=self.scope, out_dtype=preferred_element_type
        )
        self.lhs.set_value(after[0])
        self.rhs.set_value(after[1])
        return out


def convert(
    model: _Model,
    *,
    scope: str = "",
    policy: dispatch.Policy | str | None = None,
    backend: str | None = None,
    delayed: DelayedScaling | None = None,
) -> _Model:
    """Return an nnx model, changed in place: the products of its Linear, LinearGeneral and Einsum are dispatched.

    Attention's projections are LinearGeneral, and among them. scope: put before each layer's path. policy, backend: as
    in DotGeneral. delayed: Linear and LinearGeneral without batch axes get delayed scaling, with its own policy and
    backend. A layer that was given another dot_general than JAX's keeps it.
    """
    for path, layer in list(nnx.iter_modules(model)):
        name = ".".join(filter(None, [scope, *map(str, path)])) or None
        product = DotGeneral(name, policy, backend)
        if isinstance(layer, nnx.Linear | nnx.LinearGeneral) and _is_own(layer.dot_general):
            if delayed is None or getattr(layer, "batch_axis", None):
                layer.dot_general = product
            else:
                layer.dot_general = nnx.data(DelayedDotGeneral(delayed, name))
        elif isinstance(layer, nnx.Einsum) and layer.einsum_op in (jnp.einsum, None):
            layer.einsum_op = product.einsum
    return model


def _is_own(dot_general: Any) -> bool:
    return dot_general is None or dot_general is jax.lax.dot_general or isinstance(dot_general, DotGeneral)
