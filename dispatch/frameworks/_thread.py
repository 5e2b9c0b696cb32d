"""Work in a thread of its own: what the caller's thread has in force, a trace or a capture, does not reach there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


def in_a_thread(work: Callable[[], Any], within: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Return work(), run in a thread of its own within the context that `within` makes there; raises what it raises."""
    result: list[Any] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            with within():
                result.append(work())
        except BaseException as error:  # a plugin's code may raise anything
            failure.append(error)

    thread = threading.Thread(target=body, name="dispatch-measuring", daemon=True)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]
