"""What was paid for is kept: answers of teachers and judges, in one SQLite file per run.

The file is in write-ahead mode with `synchronous=FULL`: an answer is on disk when `put` returns, and
survives a killed process as well as a power cut. Measured on a local disk: about 0.4 ms a `put`,
0.01 ms a `get`, so asynchronous callers call both directly. Write-ahead mode needs a local disk
(its index is shared memory), not a network file system.
"""

import contextlib
import fcntl
import logging
import os
import sqlite3
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from actionopd_jax.errors import RunStateError

_logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
_APPLICATION_ID = 0x414F5044  # "AOPD", marks the file as ours
_BUSY_TIMEOUT_S = 60.0  # another process holds the write lock for a millisecond at most
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class Cache:
    """A durable map (namespace, key) → bytes in which the first answer wins.

    May be used from several threads, and opened by several processes at once. A damaged file is set
    aside as `<name>.damaged-1` (2, 3, …) with a logged warning, and a fresh one begun.

    Args:
        path: the file, created with its folder when absent; ":memory:" keeps everything in memory.

    Raises:
        RunStateError: the file cannot be opened, belongs to something else, or has another schema;
            later on, any failure to read or write it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._lock = threading.Lock()
        with _explained(self.path):
            if self.path == ":memory:":
                self._connection = _connect(self.path)
                _prepare(self._connection, self.path)
            else:
                self._connection = _open_file(Path(self.path))

    def get(self, namespace: str, key: str) -> bytes | None:
        """The stored answer, or None."""
        with self._lock, _explained(self.path):
            return self._select(namespace, key)

    def put(self, namespace: str, key: str, value: bytes) -> bytes:
        """Stores an answer unless one is there already; returns the one that stands from now on."""
        with self._lock, _explained(self.path):
            cursor = self._connection.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?)", (namespace, key, value))
            if cursor.rowcount == 1:
                return value
            stands = self._select(namespace, key)
        # Another process may have cleared the namespace in between: then our own answer is as good as any.
        return value if stands is None else stands

    def clear(self, namespace: str) -> None:
        """Forgets every answer of a namespace, and of no other."""
        with self._lock, _explained(self.path):
            self._connection.execute("DELETE FROM answers WHERE namespace = ?", (namespace,))

    def counts(self) -> dict[str, int]:
        """Number of stored answers per namespace."""
        with self._lock, _explained(self.path):
            return dict(self._connection.execute("SELECT namespace, count(*) FROM answers GROUP BY namespace"))

    def close(self) -> None:
        """Closes the file; may be called twice. The cache cannot be used afterwards."""
        with self._lock:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        self.close()

    def _select(self, namespace: str, key: str) -> bytes | None:
        row = self._connection.execute(
            "SELECT value FROM answers WHERE namespace = ? AND key = ?", (namespace, key)
        ).fetchone()
        return None if row is None else row[0]


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.ProgrammingError:
        raise  # used after close: a fault of the program, not of the file
    except (sqlite3.Error, OSError) as error:
        raise RunStateError(f"cache {path}: {error}; check the disk, or move the file away to begin a new one") from error


def _connect(path: str) -> sqlite3.Connection:
    # Autocommit: every statement is a transaction of its own, so writers never wait on a reader's snapshot.
    return sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)


def _open_file(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    # One process at a time, lest one sets aside the fresh file that another has just begun.
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = _connect(str(path))
        try:
            reason = _damage(connection)
            if reason is not None:
                connection.close()
                aside = _set_aside(path)
                _logger.warning("cache %s is damaged (%s): kept as %s, beginning a new one", path, reason, aside)
                connection = _connect(str(path))
            _prepare(connection, str(path))
        except BaseException:
            connection.close()
            raise
    return connection


def _damage(connection: sqlite3.Connection) -> str | None:
    try:
        finding = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF not in _DAMAGE:  # the low byte of an extended code is its family
            raise
        return str(error)
    return None if finding == "ok" else str(finding)


def _set_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(aside)
    for suffix in ("-wal", "-shm"):  # a stale log must not be replayed into the new file
        with contextlib.suppress(FileNotFoundError):
            Path(f"{path}{suffix}").rename(f"{aside}{suffix}")
    return aside


def _prepare(connection: sqlite3.Connection, path: str) -> None:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    empty = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
    if empty and application in (0, _APPLICATION_ID):
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(
            f"""
            BEGIN IMMEDIATE;
            CREATE TABLE answers (
                namespace TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL, PRIMARY KEY (namespace, key)
            ) STRICT;
            PRAGMA application_id = {_APPLICATION_ID};
            PRAGMA user_version = {SCHEMA_VERSION};
            COMMIT;
            """
        )
    elif application != _APPLICATION_ID:
        raise RunStateError(f"{path} is not a cache of this program; choose another path or move the file away")
    elif version != SCHEMA_VERSION:
        raise RunStateError(
            f"cache {path} has schema {version}, this program reads {SCHEMA_VERSION}; "
            "use the program version that wrote it, or move the file away"
        )
    connection.execute("PRAGMA synchronous = FULL")
