"""What the core asks of a framework's room."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from dispatch._backend import Plan
from dispatch._problem import Operand, Problem
from dispatch.frameworks._clock import Call
from dispatch.frameworks.arch import Arch

Array = Any
"""An array of the room's framework."""

Forms = Callable[[tuple[Any, ...]], tuple[Any, ...]]
"""From a call's operands to those that a plan takes: a prepared operand gives its form."""

Again = Callable[[Array, Array, str, dict[str, str | None]], Array]
"""A dispatched product for a backward pass, by its problem's op: `dgrad` or `wgrad`.

It adds to the dict, by op, which plugin's backend serves it (None: the own product does), once that is known.
"""


class Stopwatch(Protocol):
    """Times calls on one device; see `Framework.stopwatch`."""

    device_time: bool
    """True for time on a GPU (medians decide), False for wall clock on a CPU (minima decide)."""

    def prepare(self) -> None:
        """Compile, capture and warm up every call, so that no round has that in it."""

    def round(self, order: Sequence[int]) -> list[float]:
        """Run each call of `order` (indices into the calls) once and return microseconds a call, in that order."""


class Framework(Protocol):
    """One framework: NumPy, torch or JAX."""

    name: str

    @property
    def xp(self) -> Any:
        """The array namespace: abs, amax, where, isfinite, reshape, concatenate ... with axis= and keepdims=."""

    def is_array_type(self, kind: type) -> bool:
        """Return whether `kind` is an array type of this framework, a tracer's included."""

    # What an array is

    def key(self, a: Array, b: Array, extra: Hashable = None, bias: Array | None = None) -> Hashable | None:
        """Return what a plan for these operands and a bias depends on, and `extra`; None: only native products do."""

    def dtype_name(self, array: Array) -> str:
        """Return the ml_dtypes name of the array's dtype: `bfloat16`, `float8_e4m3fn`, `int8` ..."""

    def dtype(self, name: str) -> Any:
        """Return the framework's dtype of that name. Raises TypeError if it has none."""

    def name_of_dtype(self, dtype: Any) -> str:
        """Return the ml_dtypes name of anything that the framework takes for a dtype. Raises TypeError."""

    def cast(self, array: Array, dtype: str) -> Array:
        """Return the array in the dtype of that name, by the framework's own conversion, on the same device."""

    def copied(self, array: Array) -> Array:
        """Return a copy of the array on its device, or itself where nothing can write to it."""

    def device(self, array: Array) -> str:
        """Return where the array lives: `cpu`, `cuda:1` ..., and for a sharded array all of its devices."""

    def arch(self, array: Array) -> Arch:
        """Return the architecture of the array's device."""

    def archs(self) -> list[Arch]:
        """Return the architectures that this framework can use on this machine."""

    def clash(self, arrays: Sequence[Array]) -> list[str] | None:
        """Return the device of each array if the framework would not multiply across them, else None."""

    def operand(self, array: Array) -> Operand:
        """Return dtype, batch, layout and alignment of an array of at least two dimensions."""

    def promote(self, a: str, b: str) -> str | None:
        """Return the dtype of a product by the framework's own rule, or None where it refuses the pair."""

    def modes(self, *arrays: Array) -> tuple[str, ...]:
        """Return which of problem.MODES hold now for a call with these arrays."""

    def effective(self, array: Array, dtype: str | None = None) -> str:
        """Return the dtype that the native product would compute in: autocast's, else the array's.

        dtype: of what the array is decoded to before it is multiplied, if it is.
        """

    def asarray(self, values: NDArray[Any], like: Array) -> Array:
        """Return NumPy values as an array on the device of `like`."""

    def to_numpy(self, array: Array) -> NDArray[Any]:
        """Return the values on the host; a dtype that NumPy lacks comes as its ml_dtypes one."""

    def state(self, array: Array) -> Hashable:
        """Return what is another once the array was written to or given other memory; None where that never shows."""

    def before_use(self, made: Any, array: Array) -> Callable[[], None] | None:
        """Return what has to run before each use of `made`, arrays just launched on the device of `array`, or None.

        With CUDA, another stream than the one that they are made on has to wait for them.
        """

    # Products

    def matmul(self, a: Array, b: Array) -> Array:
        """Return the framework's own product: the baseline where nothing is fused."""

    def native(self, problem: Problem) -> Plan:
        """Return the baseline for arrays of any rank: the own product, then bias, activation and out_dtype."""

    def epilogue(self, product: Array, problem: Problem, bias: Array | None) -> Array:
        """Return activation(product + bias) computed in float32 (float64 for float64), rounded once to out_dtype."""

    def adapt(self, plan: Plan, forms: Forms | None, problem: Problem, native: Plan, again: Again) -> Plan:
        """Return `plan` for calls by this framework's rules: autograd, autocast, transforms, jit.

        forms: where an operand is a ScaledArray or a PreparedOperand, makes them into what the plan takes.
        native: the baseline for the same operands, decoded where need be. again: a dispatched product, for a backward
        pass.
        """

    def chosen(self, call: Any) -> Any:
        """Return the part of a Request that is chosen, mostly all: what a derivative is needed of is none of it."""

    def whole(self, plan: Plan, call: Any) -> Plan:
        """Return the plan of a call from `plan`, that of the part that was chosen."""

    def deferred(self, call: Any, options: Any) -> Array | None:
        """Return a product that a trace holds until its shapes are known, or None: it is chosen for now.

        call, options: a Request and its Options.
        """

    # Measuring

    def measurable(self, a: Array) -> str | None:
        """Return why nothing may be measured now (a graph is being captured ...), or None."""

    def normal(self, shape: tuple[int, ...], dtype: str, seed: int, device: str | None = None) -> Array:
        """Return normal random values (integers of 0 to 7 for an integer dtype); device: the default one if None."""

    def sample(self, problem: Problem, a: Array, b: Array, seed: int) -> tuple[Array, Array]:
        """Return normal random operands of the problem's shapes, dtypes and layouts, on the device of a and b."""

    def stopwatch(self, calls: Sequence[Call], memory_bytes: int) -> Stopwatch:
        """Return a stopwatch for `calls`, their operands rotated past a GPU's cache within `memory_bytes`."""

    def reference(self, a_rows: Array, b: Array) -> NDArray[Any]:
        """Return a_rows (r, k) by b (k, n) in float64 on the host, whatever flags are set."""

    def isolated(self, work: Callable[[], Any]) -> Any:
        """Return work(), run where no trace and no gradient sees it."""

    def versions(self, array: Array) -> dict[str, str]:
        """Return everything outside the problem that a choice depends on: versions, driver, device name, flags."""

    def synchronize(self, array: Array) -> None:
        """Wait until the device of `array` is idle; raises what it was hiding."""
