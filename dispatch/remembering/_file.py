"""The store's file: found, checked, and opened only if it can be trusted to be ours."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Final

APPLICATION_ID: Final = 0x67656D6D  # "gemm"
SCHEMA_VERSION: Final = 1
BUSY_S: Final = 5.0

_TABLE: Final = "CREATE TABLE records (key TEXT PRIMARY KEY, record TEXT NOT NULL, created TEXT NOT NULL)"
_REASONS: Final = {
    sqlite3.SQLITE_NOTADB: ("it is not an SQLite database", "Delete it"),
    sqlite3.SQLITE_CORRUPT: ("it is damaged", "Delete it"),
    sqlite3.SQLITE_FULL: ("the disk is full", "Free some space"),
    sqlite3.SQLITE_BUSY: (f"another process kept it locked for {BUSY_S:g} s", "End that process"),
    sqlite3.SQLITE_READONLY: ("it is read-only", "Make it writable"),
}


class UnusableError(Exception):
    """Why the file cannot serve, and what to do; `broken` if it holds nothing that can be read."""

    def __init__(self, reason: str, advice: str = "", broken: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.broken = reason, broken
        elsewhere = "set DISPATCH_CACHE_DIR to a folder that you own"
        self.advice = f"{advice}, or {elsewhere}" if advice else f"S{elsewhere[1:]}"

    @classmethod
    def by(cls, error: Exception) -> UnusableError:
        """Return what `error`, of SQLite or the system, means for the file."""
        if isinstance(error, UnusableError):
            return error
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the primary result code
        broken = code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
        reason, advice = _REASONS.get(code, (f"it cannot be used ({error})", ""))
        return cls(reason, advice, broken)

    @classmethod
    def read_only(cls) -> UnusableError:
        """Return the problem of a store that serves what it has and takes nothing new."""
        return cls(*_REASONS[sqlite3.SQLITE_READONLY])


def check_home() -> None:
    """Raise UnusableError if the user has no folder to keep a cache in: HOME is missing, `/` or empty."""
    home = Path(os.path.expanduser("~"))
    if not os.environ.get("XDG_CACHE_HOME", "").strip() and (home == Path("/") or not home.is_dir()):
        raise UnusableError(f"there is no home folder (HOME={os.environ.get('HOME')!r})")


def open_file(path: Path) -> tuple[sqlite3.Connection, bool]:
    """Return a connection to the store at `path`, made if it is missing, and whether it can be written.

    Raises UnusableError, sqlite3.Error or OSError; a file that is not ours is never written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(path.parent)
    folder_writable = os.access(path.parent, os.W_OK)
    if not path.exists():
        if not folder_writable:
            raise UnusableError("it does not exist and its folder is not writable")
    elif not path.is_file():
        raise UnusableError("it is not a regular file", "Move it away")
    else:
        _check_owner(path)
        if not (folder_writable and os.access(path, os.W_OK)):
            return _open_read_only(path), False
    return _open_writable(path), True


def _check_owner(path: Path) -> None:
    owner = path.stat().st_uid
    if owner not in (os.geteuid(), 0):  # whoever owns it could choose for us
        raise UnusableError(f"{path} belongs to another user (uid {owner})")


def _connect(path: Path, options: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{options}"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    connection.text_factory = bytes  # text that is not UTF-8 is a miss, not an error
    return connection


def _open_writable(path: Path) -> sqlite3.Connection:
    connection = _connect(path, "mode=rwc")
    try:
        if not _is_ours(connection):
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                if not _is_ours(connection):  # else another process was first
                    connection.execute(_TABLE)
                    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection


def _open_read_only(path: Path) -> sqlite3.Connection:
    """Return a connection that reads: with locks, or as `immutable` where they fail and no unfinished write waits."""
    unfinished = Path(f"{path}-journal").exists()
    for options in ("mode=ro", "mode=ro&immutable=1"):
        connection = _connect(path, options)
        try:
            if _is_ours(connection):
                return connection
            raise UnusableError("it is empty and read-only", "Make it writable")
        except BaseException as error:
            connection.close()
            if unfinished or "immutable" in options or not isinstance(error, sqlite3.OperationalError):
                raise
    raise AssertionError("the second attempt returns or raises")


def _is_ours(connection: sqlite3.Connection) -> bool:
    """Return True for a store, False for an empty database. Raises UnusableError for any other."""
    facts = "(SELECT count(*) FROM sqlite_master), application_id, user_version"
    query = f"SELECT {facts} FROM pragma_application_id, pragma_user_version"  # one statement: one state of the file
    tables, application, version = connection.execute(query).fetchall()[0]
    if (tables, application, version) == (0, 0, 0):
        return False
    if application != APPLICATION_ID:
        raise UnusableError("it is another program's SQLite database", "Move it away")
    if version != SCHEMA_VERSION:
        raise UnusableError(
            f"it has schema version {version}; this gemm-dispatch reads {SCHEMA_VERSION}", "Upgrade gemm-dispatch"
        )
    return True
