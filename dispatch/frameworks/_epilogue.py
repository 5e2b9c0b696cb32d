"""Activations for the rooms whose framework has none, in float64 NumPy: the definition that errors are measured by."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

_erf = np.frompyfunc(math.erf, 1, 1)


def activate(x: NDArray[Any], activation: str | None) -> NDArray[Any]:
    """Return activation(x) in the dtype of x: relu, gelu (by erf), gelu_tanh or silu; NaN and Inf as in torch.

    gelu: x/2 (1 + erf(x / sqrt 2)); gelu_tanh: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), both from
    Hendrycks and Gimpel, arXiv:1606.08415; silu: x / (1 + exp(-x)).
    """
    if activation is None:
        return x
    with np.errstate(all="ignore"):
        if activation == "relu":
            return np.asarray(np.maximum(x, np.zeros((), x.dtype)))
        if activation == "gelu":
            return np.asarray(x * 0.5 * (1.0 + np.asarray(_erf(x * math.sqrt(0.5)), dtype=x.dtype)), x.dtype)
        if activation == "gelu_tanh":
            inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
            return np.asarray(x * 0.5 * (1.0 + np.tanh(inner)), x.dtype)
        return np.asarray(x / (1.0 + np.exp(-x)), x.dtype)
