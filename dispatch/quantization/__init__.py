"""Scaled arrays, the reference quantizers that make them, and operands prepared once for many products."""

from dispatch.quantization.prepared import PreparedOperand, prepare
from dispatch.quantization.reference import quantize
from dispatch.quantization.scaled_array import ScaledArray

__all__ = ["PreparedOperand", "ScaledArray", "prepare", "quantize"]
