"""What the FP8 backends say alike of their operands."""

from __future__ import annotations

from dispatch import FORMATS, FP8_DTYPES, Operand, Rejection, ScalingRecipe


def operand_rejections(name: str, operand: Operand, recipe: ScalingRecipe | None) -> list[Rejection]:
    """Return why an operand cannot stand under a recipe, None for one that is to be multiplied as it is."""
    if recipe is None:
        kind = operand.dtype if operand.recipe is None else str(operand.recipe)
        return [Rejection(name, kind, "not quantized")] if operand.encoded else []
    if operand.recipe is not None:
        wrong = operand.recipe != recipe
        return [Rejection(name, f"quantized as {operand.recipe}", str(recipe))] if wrong else []
    if operand.dtype in FP8_DTYPES and (FORMATS[recipe.dtype], "tensor") != (operand.dtype, recipe.granularity):
        return [Rejection(name, f"{operand.dtype} without scales", f"what {recipe} quantizes, or a ScaledArray")]
    return []
