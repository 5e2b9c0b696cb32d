"""dispatch.matmul inside torch.compile: torch's own product, reached at once."""

from __future__ import annotations

from typing import Any


def traced(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    out_dtype: Any = None,
    policy: Any = None,
    backend: str | None = None,
    scope: str | None = None,
) -> Any:
    """Return the product; Dynamo traces this in place of dispatch.matmul, whose table and policy it cannot."""
    from dispatch.frameworks import _torch_product

    return _torch_product.traced(a, b, bias, activation, out_dtype, backend)
