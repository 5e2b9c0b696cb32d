"""Timing in JAX: wall clock on a CPU, and on a GPU the device time of chained products in one executable."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dispatch._backend import Plan
from dispatch.frameworks._clock import Call, WallClock

L2_BYTES = 128 << 20  # JAX does not tell; no L2 is larger today (B200: 126 MB)
MOST_SETS = 16
SHORT, LONGER = 2, 16  # products in the short chain, and how many more there are in the long one at most
LEAST_US = 1000.0  # of difference between the chains that one timing adds up


def blocking(call: Plan) -> Plan:
    """Return `call` that returns when its result is there."""

    def blocked(*operands: Any) -> Any:
        return jax.tree.map(lambda x: x.block_until_ready(), call(*operands))

    return blocked


class JaxWallClock(WallClock):
    """Wall clock, with every result waited for."""

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__([(blocking(call), operands) for call, operands in calls])


class JaxDeviceClock:
    """A stopwatch of device time.

    Each call is compiled into two chains, of SHORT products and of more; an optimization barrier lets each begin only
    after the one before, on the next set of operands, and every result is returned, so that none is dead code. The
    difference of the two times has no launch cost in it.
    """

    device_time = True

    def __init__(self, calls: Sequence[Call], memory_bytes: int) -> None:
        self._calls = calls
        self._copies: dict[int, list[Any]] = {}
        sizes = [sum(x.nbytes for x in jax.tree.leaves(operands)) or 1 for _, operands in calls]
        wanted, most = -(-2 * L2_BYTES // min(sizes)), memory_bytes // max(sizes)
        self._sets = max(1, min(MOST_SETS, wanted, most))
        self._memory = memory_bytes
        self._chains: dict[int, tuple[Any, Any, int, int]] = {}
        self._rotated = [self._rotate(operands) for _, operands in calls]

    def _rotate(self, operands: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Return the sets of one call's operands; calls share the copies of the operands that they share."""

        def copies(x: Any) -> list[Any]:
            return self._copies.setdefault(id(x), [x, *(x.copy() for _ in range(self._sets - 1))])

        return [jax.tree.map(lambda x, i=i: copies(x)[i], operands) for i in range(self._sets)]

    def round(self, order: Sequence[int]) -> list[float]:
        """Run each call of `order` once and return microseconds a call, in that order."""
        return [self._time(index) for index in order]

    def prepare(self) -> None:
        """Compile every call's chains and run them."""
        self._chains = {index: self._chain(index) for index in range(len(self._calls))}

    def _chain(self, index: int) -> tuple[Any, Any, int, int]:
        call, sets = self._calls[index][0], self._rotated[index]
        result = jax.eval_shape(call, *sets[0])
        more = max(1, min(LONGER, self._memory // max(1, result.size * result.dtype.itemsize) - SHORT))
        short, long = (self._compiled(call, sets, length) for length in (SHORT, SHORT + more))
        gauge = min(self._run(long, sets) - self._run(short, sets) for _ in range(3))
        return short, long, more, max(1, min(50, int(LEAST_US / max(gauge, 1.0))))

    def _time(self, index: int) -> float:
        sets = self._rotated[index]
        short, long, more, repeats = self._chains[index]
        spent = sum(self._run(long, sets) - self._run(short, sets) for _ in range(repeats)) / repeats
        return max(spent / more, 0.01)

    def _run(self, chain: Callable[..., Any], sets: list[tuple[Any, ...]]) -> float:
        start = time.perf_counter_ns()
        jax.block_until_ready(chain(sets))
        return (time.perf_counter_ns() - start) / 1e3

    def _compiled(self, call: Plan, sets: list[tuple[Any, ...]], length: int) -> Callable[..., Any]:
        def chain(sets: list[tuple[Any, ...]]) -> Any:
            out: list[Any] = []
            for i in range(length):
                operands = sets[i % len(sets)]
                if out:
                    operands, out[-1] = jax.lax.optimization_barrier((operands, out[-1]))
                out.append(call(*operands))
            return out

        compiled: Callable[..., Any] = jax.jit(chain).lower(sets).compile()
        self._run(compiled, sets)
        return compiled
