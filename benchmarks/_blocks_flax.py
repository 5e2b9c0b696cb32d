"""A transformer block in Flax, linen and nnx, with plain and with dispatched products: parameters and their loss."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from dispatch.integrations.flax import LinenDotGeneral, convert

Array = Any


class LinenBlock(linen.Module):
    """Attention and MLP, each beside its input, of (batch, sequence, width) bfloat16."""

    width: int
    hidden: int
    heads: int
    product: Any = None

    @linen.compact
    def __call__(self, x: Array) -> Array:
        """Return the block's output."""
        options: dict[str, Any] = {"dtype": jnp.bfloat16}
        attention = linen.MultiHeadDotProductAttention(
            self.heads, qkv_dot_general_cls=self.product, out_dot_general_cls=self.product, **options
        )
        x = x + attention(linen.LayerNorm(**options)(x))
        y = linen.Dense(self.hidden, dot_general_cls=self.product, **options)(linen.LayerNorm(**options)(x))
        return x + linen.Dense(self.width, dot_general_cls=self.product, **options)(linen.silu(y))


class NnxBlock(nnx.Module):
    """The same in nnx."""

    def __init__(self, width: int, hidden: int, heads: int, rngs: nnx.Rngs) -> None:
        options: dict[str, Any] = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.norms = nnx.List([nnx.LayerNorm(width, **options) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, **options)
        self.up, self.down = nnx.Linear(width, hidden, **options), nnx.Linear(hidden, width, **options)

    def __call__(self, x: Array) -> Array:
        """Return the block's output."""
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.silu(self.up(self.norms[1](x))))


def linen_model(width: int, hidden: int, heads: int, *, dispatched: bool) -> tuple[Any, Any]:
    """Return init(seed, x) -> parameters and apply(parameters, x)."""
    model = LinenBlock(width, hidden, heads, LinenDotGeneral if dispatched else None)
    plain = LinenBlock(width, hidden, heads)
    return (lambda seed, x: plain.init(jax.random.key(seed), x)), model.apply


def nnx_model(width: int, hidden: int, heads: int, *, dispatched: bool) -> tuple[Any, Any]:
    """Return init(seed, x) -> parameters and apply(parameters, x)."""

    def made(seed: int) -> Any:
        model = NnxBlock(width, hidden, heads, nnx.Rngs(seed))
        return convert(model) if dispatched else model

    graph, _, rest = nnx.split(made(0), nnx.Param, ...)

    def init(seed: int, x: Array) -> Any:
        return nnx.state(made(seed), nnx.Param)

    return init, lambda parameters, x: nnx.merge(graph, parameters, rest)(x)
