"""Frameworks and routes that the cases run by: every input meets the own product, cpu_blas and somebody's plugin."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import dispatch
from dispatch.testing import FakeBackend, fake_timings, registered

PLUGIN = "tests_plugin"
LIMITS = {"float64": 1e-13, "float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-2}  # relative L2, by the case list


@dataclass(frozen=True)
class Kit:
    """One framework with helpers to make arrays and to look at them."""

    name: str

    @property
    def room(self) -> Any:
        return dispatch.framework(self.name)

    def array(self, values: Any, dtype: str | None = None, device: str | None = None) -> Any:
        """Return the values as an array of the framework in the dtype of that name."""
        host = np.asarray(values)
        if dtype is not None:
            with np.errstate(all="ignore"):
                host = host.astype(dispatch.framework("numpy").dtype(dtype))
        if self.name == "numpy":
            return host
        if self.name == "jax":
            jnp = pytest.importorskip("jax.numpy")
            return jnp.asarray(host)
        torch = pytest.importorskip("torch")
        made = self.room.asarray(host, torch.empty(0, device=device or "cpu"))
        return made.clone().reshape(host.shape)

    def normal(self, *shape: int, dtype: str = "float32", seed: int = 0, scale: float = 1.0) -> Any:
        """Return seeded normal values, the same in every framework."""
        values = np.random.default_rng(seed).standard_normal(shape) * scale
        return self.array(values.astype(np.float32), dtype)

    def host(self, array: Any) -> np.ndarray:
        """Return the values on the host, in their own dtype."""
        return np.asarray(self.room.to_numpy(array)) if not np.isscalar(array) else np.asarray(array)

    def wide(self, array: Any) -> np.ndarray:
        """Return the values in float64."""
        return self.host(array).astype(np.float64)

    def product(self, a: Any, b: Any) -> np.ndarray:
        """Return a @ b in float64."""
        with np.errstate(all="ignore"):
            return self.wide(a) @ self.wide(b)

    def dtype_of(self, array: Any) -> str:
        return self.room.dtype_name(array)

    def error(self, found: Any, wanted: Any) -> float:
        """Return the relative Frobenius error."""
        wanted = np.asarray(wanted, np.float64)
        assert tuple(found.shape) == wanted.shape
        return float(np.linalg.norm(self.wide(found) - wanted) / max(np.linalg.norm(wanted), 1e-300))

    def close(self, a: Any, b: Any, found: Any, limit: float | None = None) -> None:
        """Assert that `found` is a @ b within the dtype's limit."""
        limit = LIMITS[self.dtype_of(found)] if limit is None else limit
        assert self.error(found, self.product(a, b)) < limit


class Route:
    """A way that products take in a test; `serves` tells whether it really did."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.backend = {"native": None, "cpu_blas": "cpu_blas", "plugin": PLUGIN}[name]

    def matmul(self, a: Any, b: Any, **rest: Any) -> Any:
        return dispatch.matmul(a, b, **rest)

    def serves(self, a: Any, b: Any, **rest: Any) -> bool:
        """Return whether the decision for these arguments is this route's backend."""
        chosen = dispatch.explain(a, b, **rest).backend
        return chosen == self.backend if self.backend else chosen in ("bf16_fallback", "baseline")


@contextmanager
def taking(name: str) -> Iterator[Route]:
    """Make products go by `native`, `cpu_blas` (where it is able) or a `plugin` whose product is the framework's."""
    route = Route(name)
    with ExitStack() as stack:
        if name == "native":
            stack.enter_context(dispatch.use_policy("native"))
        else:
            if name == "plugin":
                stack.enter_context(registered(FakeBackend(PLUGIN)))
            stack.enter_context(fake_timings({str(route.backend): 1.0, "baseline": 100.0}, device_time=True))
        yield route


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _param(name: str) -> Any:
    return pytest.param(name, marks=() if _installed(name) else pytest.mark.skip(reason=f"{name} is not installed"))


FRAMEWORKS = [_param(name) for name in ("numpy", "torch", "jax")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out cpu_blas in JAX, which rejects every problem there, and what only compiles the same again in XLA."""
    items[:] = [item for item in items if not _needless(item)]


def _needless(item: pytest.Item) -> bool:
    chosen = item.callspec.params if hasattr(item, "callspec") else {}
    if chosen.get("kit") != "jax" or "route" not in chosen:
        return False
    plain = chosen["route"] == "native" and item.path.name not in ("test_dtypes.py", "test_weights.py")
    return plain or chosen["route"] == "cpu_blas" or chosen.get("dtype") in ("float16", "uint8")


def _forget() -> None:
    dispatch.forget()
    if dispatch.stored():  # reading is quick, writing is not
        dispatch.clear_store()


@pytest.fixture(autouse=True)
def fresh_store() -> Iterator[None]:
    """No decision of one test, by fake clocks at that, reaches another."""
    _forget()
    yield
    _forget()


@pytest.fixture(params=FRAMEWORKS)
def kit(request: pytest.FixtureRequest) -> Kit:
    return Kit(request.param)


@pytest.fixture
def torch_kit() -> Kit:
    pytest.importorskip("torch")
    return Kit("torch")


@pytest.fixture
def numpy_kit() -> Kit:
    return Kit("numpy")


@pytest.fixture
def jax_kit() -> Kit:
    pytest.importorskip("jax")
    return Kit("jax")


@pytest.fixture(params=["native", "cpu_blas", "plugin"])
def route(request: pytest.FixtureRequest) -> Iterator[Route]:
    """A route that every product of the test takes where it is able."""
    with taking(request.param) as route:
        yield route
