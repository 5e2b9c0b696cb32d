"""How often a problem is measured whose operands say nothing of other data, being constant or not finite."""

from __future__ import annotations

import threading
from collections import Counter

MOST = 1024  # calls from one time to the next, once it has been in vain often


class Patience:
    """Counts, for each problem, how often measuring was in vain and how many calls have to pass before the next time.

    After the first time none, then 1, 3, 7 ...: a weight that is still zero costs little, however often it is used.
    """

    def __init__(self) -> None:
        self._in_vain: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._lock = threading.Lock()

    def passes(self, key: str) -> bool:
        """Return whether this call has to pass; it is counted."""
        with self._lock:
            waiting = self._waiting[key] > 0
            self._waiting[key] -= waiting
            return waiting

    def in_vain(self, key: str) -> None:
        """Take note that the operands said nothing."""
        with self._lock:
            self._in_vain[key] += 1
            self._waiting[key] = min(2 ** (self._in_vain[key] - 1), MOST) - 1

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._in_vain.clear()
            self._waiting.clear()
