"""A transformer block in Equinox, with plain and with dispatched products: parameters and their loss."""

from __future__ import annotations

from typing import Any

import equinox
import jax
import jax.numpy as jnp

from dispatch.integrations.equinox import convert

Array = Any


class Block(equinox.Module):
    """Attention and MLP, each beside its input, of (sequence, width) bfloat16."""

    attention: equinox.nn.MultiheadAttention
    up: equinox.nn.Linear
    down: equinox.nn.Linear
    norms: list[equinox.nn.LayerNorm]

    def __init__(self, width: int, hidden: int, heads: int, key: Any) -> None:
        one, two, three = jax.random.split(key, 3)
        self.attention = equinox.nn.MultiheadAttention(heads, width, key=one)
        self.up = equinox.nn.Linear(width, hidden, key=two)
        self.down = equinox.nn.Linear(hidden, width, key=three)
        self.norms = [equinox.nn.LayerNorm(width) for _ in range(2)]

    def __call__(self, x: Array) -> Array:
        """Return the block's output."""
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y)
        y = jax.vmap(self.up)(jax.vmap(self.norms[1])(x))
        return x + jax.vmap(self.down)(jax.nn.silu(y))


def model(width: int, hidden: int, heads: int, *, dispatched: bool) -> tuple[Any, Any]:
    """Return init(seed, x) -> parameters and apply(parameters, x)."""

    def made(key: Any) -> Any:
        plain = Block(width, hidden, heads, key)
        return equinox.partition(convert(plain) if dispatched else plain, equinox.is_array)

    shapes, static = equinox.filter_eval_shape(made, jax.random.key(0))
    tree = jax.tree.structure(shapes)

    def init(seed: int, x: Array) -> list[Array]:
        key = jax.random.key(seed)
        leaves: list[Array] = jax.tree.leaves(
            jax.jit(lambda: equinox.filter(Block(width, hidden, heads, key), equinox.is_array))()
        )
        return leaves

    def apply(parameters: list[Array], x: Array) -> Array:
        arrays = jax.tree.unflatten(tree, [leaf.astype(jnp.bfloat16) for leaf in parameters])
        return jax.vmap(equinox.combine(arrays, static))(x)

    return init, apply
