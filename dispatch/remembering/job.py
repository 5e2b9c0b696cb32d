"""The key-value store of a job of several processes, torch's or JAX's: who writes a key first is the one who decides.

Nothing is waited for but the store's own answer: a process may never meet a problem that the others do.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

WAIT_S: Final = 10.0
PREFIX: Final = "gemm-dispatch/"


class Job(Protocol):
    """What a job's processes have in common. Raises whatever its store raises.

    store: the framework's own, one object for as long as the job lasts.
    """

    store: Any

    def get(self, key: str) -> str | None:
        """Return what was written under a key, or None."""

    def first(self, key: str, text: str) -> str:
        """Write `text` under a key unless something is there; return what is there then."""


class TorchJob:
    """torch.distributed's default store, shared by the processes of the default group."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def get(self, key: str) -> str | None:
        """Return what was written under a key, or None."""
        return self.store.get(key).decode() if self.store.check([key]) else None

    def first(self, key: str, text: str) -> str:
        """Write `text` under a key unless something is there; return what is there then."""
        found: bytes = self.store.compare_set(key, "", text)
        return found.decode()


class JaxJob:
    """The coordinator of jax.distributed."""

    def __init__(self, client: Any) -> None:
        self.store = client

    def get(self, key: str) -> str | None:
        """Return what was written under a key, or None."""
        try:
            found: str = self.store.key_value_try_get(key)
        except Exception as error:
            if "NOT_FOUND" not in str(error):
                raise
            return None
        return found

    def first(self, key: str, text: str) -> str:
        """Write `text` under a key unless something is there; return what is there then."""
        try:
            self.store.key_value_set(key, text)
        except Exception as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return str(self.store.blocking_key_value_get(key, int(WAIT_S * 1000)))
        return text


_inherited: list[Job] = []
"""Of a forked child, the job of its parent: over one connection two processes would take each other's answers."""


def current() -> Job | None:
    """Return the job that this process is one of several in, or None. Imports nothing."""
    found = _found()
    return None if found is not None and any(found.store is job.store for job in _inherited) else found


def _forked() -> None:
    found = _found()
    _inherited[:] = [] if found is None else [found]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _found() -> Job | None:
    torch = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized() and torch.get_world_size() > 1:
        return TorchJob(torch.distributed_c10d._get_default_store())
    state: Any = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    if getattr(state, "client", None) is not None and (state.num_processes or 1) > 1:
        return JaxJob(state.client)
    return None


class Agreement:
    """Texts by key that the processes of a job agree on; outside of a job, each process with itself.

    lost: why the others could not be asked in time, once that has happened: then nobody is asked any more.
    """

    def __init__(self, job: Callable[[], Job | None] = current, wait_s: float = WAIT_S) -> None:
        self._job, self._wait_s = job, wait_s
        self.lost: str | None = None

    def of(self) -> Any:
        """Return what tells one job from another: its store; None outside of a job."""
        job = self._job()
        return None if job is None else getattr(job, "store", job)

    def get(self, key: str) -> str | None:
        """Return the text under a key, or None where nobody wrote one or nobody can be asked."""
        return self._asked(lambda job: job.get(PREFIX + key), None)

    def first(self, key: str, text: str) -> str | None:
        """Return the text that the job agrees on: `text` if nobody was earlier, None if nobody can be asked."""
        return self._asked(lambda job: job.first(PREFIX + key, text), text)

    def _asked(self, ask: Callable[[Job], str | None], alone: str | None) -> str | None:
        """Return the store's answer within `wait_s`, None where there is none; `alone` outside of a job."""
        job = self._job()
        if job is None:
            return alone
        if self.lost is not None:
            return None
        answers: list[str | None] = []
        faults: list[str] = []

        def work() -> None:
            try:
                answers.append(ask(job))
            except Exception as error:  # a framework's store may raise anything
                faults.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=work, name="dispatch-asking", daemon=True)
        thread.start()
        thread.join(self._wait_s)
        if not answers:
            self.lost = faults[0] if faults else f"no answer within {self._wait_s:g} s"
            return None
        return answers[0]
