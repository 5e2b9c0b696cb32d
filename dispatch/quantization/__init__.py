"""Scaling recipes applied: reference quantizers, scaled arrays, prepared operands."""
