"""What the FP8 backends tell the guard in JAX: of each operand that a call quantizes, as it was and as it is then."""

from __future__ import annotations

from typing import Any

from dispatch import FP8_DTYPES, Operand, Problem, framework, watch

Array = Any


def quantized_in_call(operand: Operand) -> bool:
    """Return whether an operand is an array that a call quantizes."""
    return not operand.prepared and operand.recipe is None and operand.dtype not in FP8_DTYPES


class Ears:
    """Where a plan tells of its operands. It is made in plan(), where the guard says whether it wants to be told."""

    def __init__(self, problem: Problem) -> None:
        wanted, pair = watch(), problem.recipe
        self._hears: dict[str, Any] = {}
        if wanted is None or pair is None:
            return
        for side, operand, recipe in (("a", problem.a, pair.a), ("b", problem.b, pair.b)):
            if quantized_in_call(operand):
                self._hears[side] = wanted.by_ratios(side, recipe, problem.k), recipe

    def tell(self, **operands: tuple[Array, int, Array, Array]) -> None:
        """Put into the program what tells of operands `a` and `b`.

        Each is the array, its contracted axis, its codes (rows, k) and its scales: one, one for each row, or (row
        blocks, k blocks). Those that a call does not quantize are passed over, and all where nobody listens.
        """
        sides = []
        for side, (x, axis, codes, scale) in operands.items():
            if side in self._hears:
                hear, recipe = self._hears[side]
                blocks = scale if scale.ndim == 2 else scale.reshape(-1, 1)
                sides.append((hear, x, codes, axis, blocks, recipe.block(*codes.shape)))
        if sides:
            room: Any = framework("jax")
            room.tell(sides)
