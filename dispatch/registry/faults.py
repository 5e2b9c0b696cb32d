"""What a plugin's code raised or said, told so that nothing else is raised in telling it."""

from __future__ import annotations

from collections.abc import Iterable

from dispatch._backend import Rejection


def said(error: BaseException) -> str:
    """Return the error's kind and text; of one whose own text cannot be had, that."""
    return f"{type(error).__name__}: {text_of(error)}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error speaks of memory: MemoryError, torch's OutOfMemoryError, JAX's RESOURCE_EXHAUSTED."""
    text = text_of(error)
    return (
        isinstance(error, MemoryError)
        or "OutOfMemory" in type(error).__name__
        or "RESOURCE_EXHAUSTED" in text
        or "out of memory" in text.lower()
    )


def broken(reason: str) -> list[Rejection]:
    """Return the rejection of a backend that failed."""
    return [Rejection("fault", reason, "a backend that works")]


def checked(rejections: Iterable[Rejection]) -> list[Rejection]:
    """Return what a backend says of a problem. Raises TypeError if that is anything but rejections."""
    found = list(rejections)
    if not all(isinstance(reason, Rejection) for reason in found):
        raise TypeError(f"rejections() returned {found!r}; each has to be a dispatch.Rejection")
    return found


def text_of(error: BaseException) -> str:
    """Return the text of an error, or that it has none."""
    try:
        return str(error)
    except Exception:  # a plugin's own error class
        return "(its text cannot be had)"
