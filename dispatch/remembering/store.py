"""The decision store: records by key in one SQLite file, or in memory where the file cannot serve."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from platformdirs import user_cache_path

from dispatch.remembering._file import UnusableError, check_home, open_file

MAX_ROWS: Final = 100_000
MAX_IN_MEMORY: Final = 10_000
SWEEP_EVERY: Final = 256  # puts between two removals of the oldest rows

# Held while SQLite works and across a fork, so that a child never inherits an operation in flight.
_lock: Final = threading.RLock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_inherited: Final[list[sqlite3.Connection]] = []  # SQLite forbids a child to use or to close its parent's


class StoreWarning(RuntimeWarning):
    """The decision store cannot keep decisions; new ones last for this process only."""


def key_of(facts: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hex, of `facts` as canonical JSON: the order of keys does not matter."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class DecisionStore:
    """JSON records by key, shared by processes; opened at first use and safe in threads and forked children.

    path: the file; None stands for decisions.sqlite in $DISPATCH_CACHE_DIR, or in the user's cache folder. Nothing here
    raises for want of a usable file: it warns once (StoreWarning) and keeps at most MAX_IN_MEMORY records in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._default = path, False
        self._memory: dict[str, str] = {}
        self._held: list[tuple[int, sqlite3.Connection]] = []  # (pid, connection), at most one
        self._start()
        weakref.finalize(self, _close, self._held)

    def _start(self) -> None:
        self._pid = os.getpid()
        self._reads = self._writes = True
        self._problem: UnusableError | None = None

    @property
    def path(self) -> Path:
        """The file, existing or not."""
        if self._path is None:
            folder = os.environ.get("DISPATCH_CACHE_DIR")
            self._default = not folder
            base = os.path.expanduser(folder) if folder else user_cache_path("gemm-dispatch", appauthor=False)
            self._path = Path(base).absolute() / "decisions.sqlite"
        return self._path

    @property
    def state(self) -> str:
        """`ok`, or why what is put does not last; opens the file."""
        with _lock:
            self._connection()
            if self._problem is not None:
                return self._problem.reason
            return "ok" if self._writes else UnusableError.read_only().reason

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the record last put under `key`, or None; one that cannot be read as JSON counts as none."""
        with _lock:
            if key in self._memory:
                return _record(self._memory[key])
            rows = self._read("SELECT record FROM records WHERE key = ?", key)
        return _record(rows[0][0]) if rows else None

    def put(self, key: str, record: Mapping[str, Any]) -> None:
        """Keep `record` under `key` in place of what was there. Raises TypeError if JSON cannot hold it."""
        text = json.dumps(record)
        with _lock:
            if self._write(_insert, key, text) is None:
                self._memory.pop(key, None)
                self._memory[key] = text
                while len(self._memory) > MAX_IN_MEMORY:
                    del self._memory[next(iter(self._memory))]

    def entries(self) -> list[tuple[str, dict[str, Any]]]:
        """Return every (key, record) that can be read, oldest first."""
        with _lock:
            rows = self._read("SELECT key, record FROM records ORDER BY rowid")
            texts = {key.decode(errors="replace"): text for key, text in rows}
            for key, text in self._memory.items():
                texts.pop(key, None)
                texts[key] = text
        return [(key, record) for key, text in texts.items() if (record := _record(text)) is not None]

    def clear(self) -> int:
        """Remove every record and return how many there were; a broken file is replaced, a foreign one is left."""
        with _lock:
            self._connection()
            if self._problem is not None and self._problem.broken:
                self._delete_file()
            count = len(self._memory) + (self._write(_delete_all) or 0)
            self._memory.clear()
        return count

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with _lock:
            _close(self._held)

    def _read(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        connection = self._connection()
        if connection is None:
            return []
        try:
            return connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            self._reads = False
            self._give_up(UnusableError.by(error))
            return []

    def _write(self, change: Callable[..., int], *values: str) -> int | None:
        """Return how many rows `change` wrote or removed, or None if the file keeps nothing."""
        connection = self._connection()
        if connection is None or not self._writes:
            self._give_up(UnusableError.read_only())
            return None
        try:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                return change(connection, *values)
        except sqlite3.Error as error:
            self._give_up(UnusableError.by(error))
            return None

    def _connection(self) -> sqlite3.Connection | None:
        if self._pid != os.getpid():
            _close(self._held)
            self._start()
        if not self._held and self._reads:
            try:
                path = self.path
                if self._default:
                    check_home()
                connection, writable = open_file(path)
                self._writes &= writable
                self._held.append((self._pid, connection))
            except (UnusableError, sqlite3.Error, OSError) as error:
                self._reads = False
                self._give_up(UnusableError.by(error))
        return self._held[0][1] if self._held and self._reads else None

    def _give_up(self, problem: UnusableError) -> None:
        self._writes = False
        if self._problem is None:
            self._problem = problem
            text = f"{self.path}: {problem.reason}. New decisions last for this process only. {problem.advice}."
            warnings.warn(text, StoreWarning, stacklevel=4)

    def _delete_file(self) -> None:
        _close(self._held)
        try:
            for suffix in ("", "-journal", "-wal", "-shm"):
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        except OSError:
            return
        self._start()


def _insert(connection: sqlite3.Connection, key: str, text: str) -> int:
    row = (key, text, datetime.now(UTC).isoformat(timespec="seconds"))
    done = connection.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", row)
    if done.lastrowid and done.lastrowid % SWEEP_EVERY == 0:
        old = "SELECT rowid FROM records ORDER BY rowid DESC LIMIT -1 OFFSET ?"
        connection.execute(f"DELETE FROM records WHERE rowid IN ({old})", (MAX_ROWS,))
    return done.rowcount


def _delete_all(connection: sqlite3.Connection) -> int:
    return connection.execute("DELETE FROM records").rowcount


def _record(text: Any) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _close(held: list[tuple[int, sqlite3.Connection]]) -> None:
    while held:
        pid, connection = held.pop()
        if pid == os.getpid():
            connection.close()
        else:
            _inherited.append(connection)
