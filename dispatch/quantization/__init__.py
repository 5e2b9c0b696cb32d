"""Scaled arrays: FP8 values with the scales that decode them."""

from dispatch.quantization.scaled_array import ScaledArray

__all__ = ["ScaledArray"]
