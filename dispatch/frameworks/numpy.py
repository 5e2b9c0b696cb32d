"""The room of NumPy, with ml_dtypes' bfloat16 and FP8."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dispatch._backend import Plan
from dispatch._problem import Operand, Problem
from dispatch.frameworks._base import Again, Forms
from dispatch.frameworks._clock import Call, WallClock
from dispatch.frameworks._cpu import cpu_arch
from dispatch.frameworks._epilogue import activate
from dispatch.frameworks._layout import layout_of
from dispatch.frameworks.arch import Arch


class NumpyRoom:
    """NumPy arrays on the CPU."""

    name = "numpy"
    xp = np

    def is_array_type(self, kind: type) -> bool:
        """Return whether it is ndarray, a subclass, or a scalar's type, which is what two vectors give."""
        return issubclass(kind, np.ndarray | np.generic)

    def key(
        self, a: NDArray[Any], b: NDArray[Any], extra: Hashable = None, bias: NDArray[Any] | None = None
    ) -> Hashable | None:
        """Return dtypes, shapes, strides and `extra`; None for a subclass, whose own product is its own business."""
        if bias is not None:
            if type(bias) is not np.ndarray:
                return None
            extra = bias.dtype, bias.shape, bias.strides, extra
        if type(a) is type(b) is np.ndarray:
            return a.dtype, a.shape, a.strides, b.dtype, b.shape, b.strides, extra
        return None

    def dtype_name(self, array: NDArray[Any]) -> str:
        """Return the dtype's name."""
        return str(array.dtype.name)

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return NumPy's or ml_dtypes' dtype of that name."""
        try:
            return np.dtype(name)
        except TypeError:
            import ml_dtypes

            if (found := getattr(ml_dtypes, name, None)) is None:
                raise TypeError(f"neither NumPy nor ml_dtypes has a dtype {name!r}") from None
            dtype: np.dtype[Any] = np.dtype(found)
            return dtype

    def name_of_dtype(self, dtype: Any) -> str:
        """Return the name of a dtype or of anything that np.dtype takes."""
        return str((self.dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype)).name)

    def cast(self, array: NDArray[Any], dtype: str) -> NDArray[Any]:
        """Return array.astype(dtype)."""
        with np.errstate(all="ignore"):
            return array.astype(self.dtype(dtype))

    def copied(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return a copy, its axes in the same order."""
        return array.copy("K")

    def device(self, array: NDArray[Any]) -> str:
        """Return `cpu`."""
        return "cpu"

    def arch(self, array: NDArray[Any]) -> Arch:
        """Return the processor's arch."""
        return cpu_arch()

    def archs(self) -> list[Arch]:
        """Return the processor's arch."""
        return [cpu_arch()]

    def clash(self, arrays: Sequence[NDArray[Any]]) -> list[str] | None:
        """Return None: there is one device."""
        return None

    def operand(self, array: NDArray[Any]) -> Operand:
        """Return the operand's facts."""
        address = array.__array_interface__["data"][0]
        layout, alignment = layout_of(array.shape, array.strides, array.itemsize, address)
        return Operand(self.dtype_name(array), array.shape[:-2], layout, alignment)

    def promote(self, a: str, b: str) -> str | None:
        """Return np.matmul's dtype, but bfloat16 where that is the common dtype: np.matmul itself gives float32."""
        try:
            own, other = self.dtype(a), self.dtype(b)
            product = np.matmul(np.zeros((1, 1), own), np.zeros((1, 1), other)).dtype.name
        except TypeError:
            return None
        try:
            common = np.result_type(own, other).name
        except TypeError:  # ml_dtypes has none
            return str(product)
        return "bfloat16" if common == "bfloat16" else str(product)

    def modes(self, *arrays: NDArray[Any]) -> tuple[str, ...]:
        """Return (): nothing traces or differentiates NumPy."""
        return ()

    def effective(self, array: NDArray[Any], dtype: str | None = None) -> str:
        """Return the array's dtype, or `dtype`, what it is decoded to."""
        return dtype or self.dtype_name(array)

    def asarray(self, values: NDArray[Any], like: NDArray[Any]) -> NDArray[Any]:
        """Return the values."""
        return values

    def to_numpy(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the array."""
        return array

    def state(self, array: NDArray[Any]) -> Hashable:
        """Return None: an array keeps its memory, and counts no writes."""

    def before_use(self, made: Any, array: NDArray[Any]) -> Callable[[], None] | None:
        """Return None: NumPy never runs ahead."""

    def matmul(self, a: NDArray[Any], b: NDArray[Any]) -> Any:
        """Return np.matmul(a, b)."""
        return np.matmul(a, b)

    def native(self, problem: Problem) -> Plan:
        """Return np.matmul itself, or with what has to follow it.

        np.matmul gives float32 for ml_dtypes' bfloat16: rounded here to the operands' common dtype.
        """
        own = self.promote(problem.a.dtype, problem.b.dtype)
        plain = problem.bias is None and problem.activation is None and problem.out_dtype == own
        return np.matmul if plain and own not in ("bfloat16", None) else _native(self, problem)

    def epilogue(self, product: Any, problem: Problem, bias: NDArray[Any] | None) -> Any:
        """Return activation(product + bias), computed in float32 or wider."""
        out = self.dtype(problem.out_dtype)
        if bias is None and problem.activation is None:
            with np.errstate(all="ignore"):
                return np.asarray(product).astype(out, copy=False)
        wide = _wide(product.dtype, problem, bias)
        with np.errstate(all="ignore"):
            value = np.asarray(product).astype(wide, copy=False)
            value = value if bias is None else value + np.asarray(bias).astype(wide)
            return activate(value, problem.activation).astype(out, copy=False)

    def adapt(self, plan: Plan, forms: Forms | None, problem: Problem, native: Plan, again: Again) -> Plan:
        """Return the plan: NumPy adds nothing to a call."""
        from dispatch.frameworks.operands import formed

        return formed(plan, forms)

    def chosen(self, call: Any) -> Any:
        """Return the whole call."""
        return call

    def whole(self, plan: Plan, call: Any) -> Plan:
        """Return `plan`."""
        return plan

    def deferred(self, call: Any, options: Any) -> None:
        """Return None: nothing waits."""

    def measurable(self, a: NDArray[Any]) -> str | None:
        """Return a reason for complex values: errors are measured in float64."""
        return "complex products are not measured" if a.dtype.kind == "c" else None

    def normal(self, shape: tuple[int, ...], dtype: str, seed: int, device: str | None = None) -> NDArray[Any]:
        """Return random values on the CPU, the only device. Raises ValueError for another."""
        if device not in (None, "cpu"):
            raise ValueError(f"NumPy has no device {device!r}; allowed: cpu")
        random, kind = np.random.default_rng(seed), self.dtype(dtype)
        if kind.kind in "iu":
            return random.integers(0, 8, shape).astype(kind)
        return random.standard_normal(shape, dtype=np.float32).astype(kind)

    def sample(self, problem: Problem, a: Any, b: Any, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return normal random operands like a and b, in their layout."""
        made = [np.empty_like(x) for x in (a, b)]
        for index, out in enumerate(made):
            out[...] = self.normal(out.shape, self.dtype_name(out), seed + index)
        return made[0], made[1]

    def stopwatch(self, calls: Sequence[Call], memory_bytes: int) -> WallClock:
        """Return a wall clock."""
        return WallClock(calls)

    def reference(self, a_rows: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
        """Return the float64 product, a slice of columns at a time."""
        return reference_product(a_rows, b)

    def isolated(self, work: Callable[[], Any]) -> Any:
        """Return work()."""
        with np.errstate(all="ignore"):
            return work()

    def versions(self, array: NDArray[Any]) -> dict[str, str]:
        """Return NumPy's version, its BLAS and its threads."""
        return {"numpy": np.__version__, **_blas(), **thread_settings()}

    def synchronize(self, array: NDArray[Any]) -> None:
        """Return at once: NumPy never runs ahead."""


def _wide(own: np.dtype[Any], problem: Problem, bias: NDArray[Any] | None) -> np.dtype[Any]:
    """Return the dtype of an epilogue: float32 or wider, and that of integers or complex numbers where they stay so."""
    if own.kind == "V":  # ml_dtypes'
        own = np.dtype(np.float32)
    least = np.result_type(own, np.float32) if problem.activation is not None or own.kind == "f" else own
    return least if bias is None or bias.dtype.kind == "V" else np.result_type(least, bias.dtype)


@cache
def _native(room: NumpyRoom, problem: Problem) -> Plan:
    own, out = room.dtype(problem.a.dtype), room.dtype(problem.out_dtype)
    widen = own != out and own.kind in "iuf" and out.kind in "iuf" and np.can_cast(own, out)
    wide = out if widen or (own.kind in "iu" and out.kind == "f") else None

    def native(a: NDArray[Any], b: NDArray[Any], bias: NDArray[Any] | None = None) -> Any:
        if wide is not None:
            a, b = a.astype(wide, copy=False), b.astype(wide, copy=False)
        out = room.epilogue(np.matmul(a, b), problem, bias)
        return out if out.ndim else out[()]  # a scalar for two vectors, as np.matmul gives

    return native


def reference_product(a_rows: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Return a_rows (r, k) by b (k, n) in float64, converting b about 64 MB of float64 at a time."""
    step = max(1, (1 << 23) // max(1, b.shape[0]))
    a64 = a_rows.astype(np.float64)
    out = np.empty((a_rows.shape[0], b.shape[1]))
    with np.errstate(all="ignore"):
        for start in range(0, b.shape[1], step):
            out[:, start : start + step] = a64 @ b[:, start : start + step].astype(np.float64)
    return out


@cache
def _blas() -> dict[str, str]:
    found = np.show_config(mode="dicts")
    blas = found.get("Build Dependencies", {}).get("blas", {}) if found else {}
    return {"blas": f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()}


def thread_settings() -> dict[str, str]:
    """Return the environment's thread counts for BLAS and OpenMP, and the processors that this process may use."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    counts = ",".join(os.environ.get(name, "") for name in names)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"threads": f"{cores}:{counts}"}


ROOM = NumpyRoom()
