"""The room of JAX, on the CPU and on CUDA: eager, and under every trace."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from numpy.typing import NDArray

from dispatch._backend import Plan
from dispatch._problem import Operand, Problem
from dispatch.frameworks import _jax_guard, _jax_policy
from dispatch.frameworks import _jax_product as standing
from dispatch.frameworks import _jax_scaled as by_scaled
from dispatch.frameworks import _jax_sharding as spread
from dispatch.frameworks._base import Again, Forms
from dispatch.frameworks._clock import Call
from dispatch.frameworks._cpu import cpu_arch
from dispatch.frameworks._jax_clock import JaxDeviceClock, JaxWallClock
from dispatch.frameworks._layout import WIDEST
from dispatch.frameworks._thread import in_a_thread
from dispatch.frameworks.arch import Arch
from dispatch.frameworks.request import Request
from dispatch.measuring.watch import telling
from dispatch.policies.policy import Policy, current_policy, load_policy
from dispatch.quantization import ScaledArray

Array = Any
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_SINGLE = jax.sharding.SingleDeviceSharding


class JaxRoom:
    """JAX arrays and tracers."""

    name = "jax"
    xp = jnp

    def is_array_type(self, kind: type) -> bool:
        """Return whether it is an array's or a tracer's type."""
        return issubclass(kind, jax.Array | Tracer)

    def key(self, a: Array, b: Array, extra: Hashable = None, bias: Array | None = None) -> Hashable | None:
        """Return avals, devices and `extra`, or None.

        None for an array spread over several devices, for shapes that are not known yet, and for what is no array.
        """
        if bias is not None and (extra := self.key(bias, bias, extra)) is None:
            return None
        try:
            where: Any = _stage(a) if isinstance(a, Tracer) else a.sharding
            there: Any = _stage(b) if isinstance(b, Tracer) else b.sharding
        except AttributeError:
            return None
        for sharding in (where, there):
            if type(sharding) not in (_SINGLE, tuple) and (sharding is None or sharding.num_devices > 1):
                return None
        own, other = a.aval, b.aval
        if own.weak_type or other.weak_type:
            return None
        return own, other, where, there, extra

    def dtype_name(self, array: Array) -> str:
        """Return the dtype's name."""
        return str(array.dtype.name)

    def dtype(self, name: str) -> Any:
        """Return the dtype of that name."""
        try:
            return jnp.dtype(name)
        except TypeError:
            raise TypeError(f"JAX has no dtype {name!r}") from None

    def name_of_dtype(self, dtype: Any) -> str:
        """Return the name of a dtype, a scalar type or the name itself; of 64 bits only where they are enabled."""
        return str(jax.dtypes.canonicalize_dtype(jnp.dtype(dtype)).name)

    def cast(self, array: Array, dtype: str) -> Array:
        """Return array.astype(dtype)."""
        return array.astype(dtype)

    def copied(self, array: Array) -> Array:
        """Return the array: nothing writes to one."""
        return array

    def device(self, array: Array) -> str:
        """Return `platform:index` of every device, or the default device for a tracer."""
        devices = [spread.default_device()] if isinstance(array, Tracer) else array.devices()
        return ",".join(sorted(_device_name(device) for device in devices))

    def arch(self, array: Array) -> Arch:
        """Return the compute capability's arch, or the processor's."""
        return _device_arch(spread.default_device() if isinstance(array, Tracer) else next(iter(array.devices())))

    def archs(self) -> list[Arch]:
        """Return the arch of every device of every backend that is there."""
        return list(dict.fromkeys([*map(_device_arch, jax.devices()), *map(_device_arch, jax.devices("cpu"))]))

    def clash(self, arrays: Sequence[Array]) -> list[str] | None:
        """Return the devices if committed arrays are on different ones."""
        fixed = [x.devices() for x in arrays if not isinstance(x, Tracer) and x.committed]
        return [self.device(x) for x in arrays] if any(x != fixed[0] for x in fixed) else None

    def operand(self, array: Array) -> Operand:
        """Return the operand's facts; JAX keeps arrays packed."""
        return Operand(self.dtype_name(array), tuple(array.shape[:-2]), "row", WIDEST)

    def promote(self, a: str, b: str) -> str | None:
        """Return jnp.promote_types."""
        try:
            return str(jnp.promote_types(a, b).name)
        except TypeError:
            return None

    def modes(self, *arrays: Any) -> tuple[str, ...]:
        """Return `traced` for tracers."""
        return ("traced",) if any(isinstance(x, Tracer) for x in jax.tree.leaves(arrays)) else ()

    def effective(self, array: Array, dtype: str | None = None) -> str:
        """Return the array's dtype, or `dtype`, what it is decoded to."""
        return dtype or self.dtype_name(array)

    def asarray(self, values: NDArray[Any], like: Array) -> Array:
        """Return the values on the device of `like`."""
        if isinstance(like, Tracer):
            return jnp.asarray(values)
        return jax.device_put(values, next(iter(like.devices())))

    def to_numpy(self, array: Array) -> NDArray[Any]:
        """Return the values on the host."""
        return np.asarray(array)

    def state(self, array: Any) -> Hashable:
        """Return None: arrays never change."""

    def before_use(self, made: Any, array: Any) -> Callable[[], None] | None:
        """Return None: JAX knows what waits for what."""

    def matmul(self, a: Array, b: Array) -> Array:
        """Return jnp.matmul(a, b)."""
        return jnp.matmul(a, b)

    def native(self, problem: Problem) -> Plan:
        """Return jnp.matmul, or what JAX itself has where the product stands in a trace, with what follows it."""
        plain = problem.bias is None and problem.activation is None
        own = self.promote(problem.a.dtype, problem.b.dtype)
        if not plain or problem.out_dtype != own:
            return _native(self, problem)
        return standing.as_it_stands if problem.op != "matmul" or "traced" in problem.modes else jnp.matmul

    def epilogue(self, product: Array, problem: Problem, bias: Array | None) -> Array:
        """Return activation(product + bias), computed in float32 or wider; of concrete arrays in one launch."""
        follow = _epilogue if isinstance(product, Tracer) or isinstance(bias, Tracer) else _compiled_epilogue
        return follow(problem.activation, problem.out_dtype, product, bias)

    def adapt(self, plan: Plan, forms: Forms | None, problem: Problem, native: Plan, again: Again) -> Plan:
        """Return `plan` compiled once, with the native product's derivatives."""
        return _differentiable(plan, forms, native)

    def chosen(self, call: Request) -> Request:
        """Return the whole call: what is traced is taken apart where it is lowered."""
        return call

    def whole(self, plan: Plan, call: Request) -> Plan:
        """Return `plan`."""
        return plan

    def deferred(self, call: Request, options: Any) -> Array | None:
        """Return a product in the trace that is decided when that is lowered, or None.

        None where nothing is traced or lowering has come, and for what is decided while tracing: raw FP8, integers,
        prepared operands, and ScaledArrays where b is none, or no matrix. Weak types are the native product's.
        """
        quantized = by_scaled.serves(call.a, call.b)
        if standing.lowering.get() or call.shapes is None or not (call.plain or quantized):
            return None
        plain = [x for x in call.operands if not isinstance(x, ScaledArray)]
        scaled = [x for x in (call.a, call.b) if isinstance(x, ScaledArray)]
        if not any(isinstance(x, Tracer) for x in (*plain, *(y for x in scaled for y in (x.data, x.scale)))):
            return None
        if any(x.aval.weak_type or self.dtype_name(x) not in _FLOATS for x in plain):
            return None
        choice = standing.Choice(options.policy, options.backend, options.scope)
        own = self.promote(*(x.dtype if isinstance(x, ScaledArray) else self.dtype_name(x) for x in (call.a, call.b)))
        assert own is not None
        out_dtype = own if call.out_dtype is None else self.name_of_dtype(call.out_dtype)
        preferred = _preferred(self, own, out_dtype)
        unfused = out_dtype in (own, preferred) and call.bias is None and call.activation is None
        apply = _same if unfused else partial(_epilogue, call.activation, out_dtype)
        epilogue = standing.Epilogue(call.activation, out_dtype, preferred, apply)
        multiply = by_scaled.matmul if quantized else standing.matmul
        return multiply(call.a, call.b, call.bias, choice, epilogue)

    def dot_general(
        self, lhs: Array, rhs: Array, dimension_numbers: Any, choice: standing.Choice, **params: Any
    ) -> Array:
        """Return jax.lax.dot_general's product, dispatched; params: its own. Other dtypes than floats are its own."""
        if not {self.dtype_name(lhs), self.dtype_name(rhs)} <= set(_FLOATS):
            own: Array = jax.lax.dot_general(lhs, rhs, dimension_numbers, **params)
            return own
        return standing.dot_general(lhs, rhs, dimension_numbers, choice, **params)

    def lying(self, x: Array, axis: int) -> tuple[Array, int]:
        """Return a matrix as it lies in memory, and which of its axes is contracted there."""
        return standing.lying(x, axis)

    def tell(self, sides: Sequence[Any]) -> None:
        """Let a program tell the guard of rows that it quantizes; sides: `_jax_guard.Side` each."""
        _jax_guard.tell(sides)

    def choice(self, policy: Any, backend: str | None, scope: str | None) -> standing.Choice:
        """Return what a dot_general depends on beside its operands; policy: a Policy, name or path, None: in force."""
        given = current_policy() if policy is None else policy
        return standing.Choice(given if isinstance(given, Policy) else load_policy(given), backend, scope)

    def measurable(self, a: Any) -> str | None:
        """Return a reason for complex values, whose errors are not measured, and while XLA compiles for a mesh of GPUs.

        Traces are none: see isolated.
        """
        return "complex products are not measured" if a.dtype.kind == "c" else spread.compiling()

    def measure_parts(self) -> int:
        """Decide the products of parts of a mesh that were not known when XLA compiled; return how many those were."""
        return spread.measure_parts()

    def normal(self, shape: tuple[int, ...], dtype: str, seed: int, device: str | None = None) -> Array:
        """Return random values from a key of its own."""
        key = jax.random.key(seed)
        if jnp.issubdtype(self.dtype(dtype), jnp.floating):
            values = jax.random.normal(key, shape, jnp.float32).astype(dtype)
        else:
            values = jax.random.randint(key, shape, 0, 8).astype(dtype)
        return values if device is None else jax.device_put(values, _device_named(device))

    def sample(self, problem: Problem, a: Array, b: Array, seed: int) -> tuple[Array, Array]:
        """Return normal random arrays of the shapes and dtypes of a and b."""
        return self._like(a, seed), self._like(b, seed + 1)

    def _like(self, like: Array, seed: int) -> Array:
        made = self.normal(like.shape, self.dtype_name(like), seed)
        return made if isinstance(like, Tracer) else jax.device_put(made, like.sharding)

    def stopwatch(self, calls: Sequence[Call], memory_bytes: int) -> JaxDeviceClock | JaxWallClock:
        """Return chained device time on a GPU, a wall clock on the CPU."""
        on_gpu = any(device.platform == "gpu" for x in jax.tree.leaves(calls[0][1]) for device in x.devices())
        return JaxDeviceClock(calls, memory_bytes) if on_gpu else JaxWallClock(calls)

    def reference(self, a_rows: Array, b: Array) -> NDArray[Any]:
        """Return the float64 product, computed where the arrays are, a slice of columns at a time."""
        with jax.enable_x64(True):
            step = max(1, (1 << 23) // max(1, b.shape[0]))
            a64 = a_rows.astype(np.float64)
            dot = partial(jnp.matmul, precision="highest")
            parts = [dot(a64, b[:, i : i + step].astype(np.float64)) for i in range(0, b.shape[1], step)]
            return np.concatenate([np.asarray(part) for part in parts], 1)

    def isolated(self, work: Callable[[], Any]) -> Any:
        """Return work() from a fresh thread, where no trace is active, with this thread's device, x64 and precision.

        What is for debugging is off there: a candidate's NaN is for the measurement to find.
        """
        x64, precision = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision
        device = jax.config.jax_default_device

        @contextmanager
        def within() -> Iterator[None]:
            with jax.enable_x64(x64), jax.default_matmul_precision(precision), _as_users_do(device):
                yield

        return in_a_thread(work, within)

    def versions(self, array: Array) -> dict[str, str]:
        """Return versions, device, driver and the settings that change a product."""
        device = spread.default_device() if isinstance(array, Tracer) else next(iter(array.devices()))
        facts = {
            "jax": jax.__version__,
            "jaxlib": jax.lib.__version__,
            "x64": str(jax.config.jax_enable_x64),
            "precision": str(jax.config.jax_default_matmul_precision),
            "device": device.device_kind,
        }
        if device.platform != "gpu":
            return facts
        return {**facts, "platform": str(device.client.platform_version).replace("\n", " ")}

    def synchronize(self, array: Array) -> None:
        """Wait for the array."""
        if not isinstance(array, Tracer):
            array.block_until_ready()


def _device_arch(device: Any) -> Arch:
    if device.platform == "gpu":
        return Arch.cuda(*map(int, device.compute_capability.split(".")))
    return cpu_arch() if device.platform == "cpu" else Arch(device.platform)


def _device_named(name: str) -> Any:
    for platform in dict.fromkeys((jax.default_backend(), "cpu")):
        for device in jax.local_devices(backend=platform):
            if _device_name(device) == name:
                return device
    raise ValueError(f"JAX has no device {name!r} here")


def _device_name(device: Any) -> str:
    platform = "cuda" if device.platform == "gpu" else device.platform
    return platform if platform == "cpu" and device.id == 0 else f"{platform}:{device.id}"


def _activate(x: Array, activation: str | None) -> Array:
    if activation is None:
        return x
    if activation in ("gelu", "gelu_tanh"):
        return jax.nn.gelu(x, approximate=activation == "gelu_tanh")
    return jax.nn.relu(x) if activation == "relu" else jax.nn.silu(x)


@cache
def _native(room: JaxRoom, problem: Problem) -> Plan:
    preferred = _preferred(room, room.promote(problem.a.dtype, problem.b.dtype), problem.out_dtype)

    def native(a: Array, b: Array, bias: Array | None = None) -> Array:
        return room.epilogue(standing.as_it_stands(a, b, preferred), problem, bias)

    return native


def _preferred(room: JaxRoom, own: str | None, out_dtype: str) -> str | None:
    """Return the dtype to accumulate into where it is not the operands' own."""
    wider = out_dtype in ("float32", "float64") and own in ("float16", "bfloat16", "float32")
    whole = own is not None and jnp.issubdtype(own, jnp.integer) and own != out_dtype
    whole = whole and jnp.promote_types(own, out_dtype).name == out_dtype
    return out_dtype if wider or whole else None


def _stage(tracer: Any) -> tuple[str, Any] | None:
    """Return what a tracer has in the place of a device, or None where its shape is symbolic, as for jax.export.

    What is decided at lowering is not for other traces, and what is decided for one device not for another platform's.
    """
    if not all(isinstance(size, int) for size in tracer.shape):
        return None
    stage = ("telling" if telling.get() else "lowering") if standing.lowering.get() else "traced"
    return stage, spread.default_device()


@contextmanager
def _as_users_do(device: Any) -> Iterator[None]:
    with jax.default_device(device), jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        yield


def _same(product: Array, bias: Array | None) -> Array:
    return product


def _epilogue(activation: str | None, out_dtype: str, product: Array, bias: Array | None) -> Array:
    if bias is None and activation is None:
        return product.astype(out_dtype)
    floating = jnp.issubdtype(product.dtype, jnp.floating)
    least = np.float32 if activation is not None or floating else product.dtype
    with jax.numpy_dtype_promotion("standard"):  # what is promoted here is no choice of the caller's
        wide = jnp.promote_types(product.dtype, least)
        wide = wide if bias is None else jnp.promote_types(wide, bias.dtype)
    value = product.astype(wide)
    value = value if bias is None else value + bias.astype(wide)
    return _activate(value, activation).astype(out_dtype)


_compiled_epilogue = jax.jit(_epilogue, static_argnums=(0, 1))


def _differentiable(plan: Plan, forms: Forms | None, native: Plan) -> Plan:
    """Return `plan` whose tangents are the native product's: forward and reverse mode both work.

    What a backend's `prepare` returned enters beside the arrays, and has to be a pytree of arrays.
    """

    def run(operands: tuple[Any, ...], formed: tuple[Any, ...]) -> Any:
        return plan(*(formed or operands))

    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        return run_jvp(*primals), jax.jvp(native, primals[0], tangents[0])[1]

    run_jvp = jax.custom_jvp(run)
    run_jvp.defjvp(rule)
    compiled = jax.jit(run_jvp)

    def product(*operands: Any) -> Any:
        if forms is None and standing.lowering.get():
            return plan(*operands)  # differentiated and mapped already; the plan may see how operands lie
        if forms is None:
            return compiled(operands, ())
        arrays = tuple(getattr(x, "array", x) for x in operands)
        return compiled(arrays, forms(operands))

    return product


_jax_policy.join()
ROOM = JaxRoom()
