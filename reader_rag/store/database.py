"""The SQLite file of a store: its schema, transactions, and errors that say how to mend them."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reader_rag.errors import StoreError

FORMAT = 1

# Rows are written once and, thanks to AUTOINCREMENT, never numbered again: what is derived from a row stays
# right as long as the row exists. A chunk whose text changes gets a new row.
_SCHEMA = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE chunks (
        row INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        text TEXT NOT NULL,
        metadata TEXT NOT NULL,  -- JSON
        path TEXT,               -- the file it was read from, if add_paths did
        vector BLOB NOT NULL     -- little-endian float32
    )""",
    "CREATE INDEX chunks_path ON chunks (path)",
    """CREATE TABLE tokens (
        fingerprint TEXT NOT NULL,
        row INTEGER NOT NULL REFERENCES chunks (row) ON DELETE CASCADE,
        ids BLOB NOT NULL,       -- little-endian int32
        PRIMARY KEY (fingerprint, row)
    ) WITHOUT ROWID""",
    "CREATE INDEX tokens_row ON tokens (row)",
    # Vectors of an add that is still running: an interrupted one need not embed them again.
    "CREATE TABLE embedded (key TEXT PRIMARY KEY, vector BLOB NOT NULL) WITHOUT ROWID",
    f"INSERT INTO meta VALUES ('format', '{FORMAT}'), ('generation', '0')",
)
_CHECKED_BYTES = 64 << 20  # files up to this size are checked as a whole when opened (about 0.1 s)
_BATCH = 500  # values in one IN (...)


class Database:
    """One connection, to be used by one thread at a time. Raises StoreError for whatever SQLite reports.

    Without a `path` everything is in memory, and gone when it is closed.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        try:
            self._connection: sqlite3.Connection | None = sqlite3.connect(
                path or ":memory:", timeout=30, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise self._mended(error) from error
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        self.run("PRAGMA foreign_keys = ON")
        if not self.query("SELECT name FROM sqlite_master LIMIT 1"):
            with self.transaction():
                if not self.query(
                    "SELECT name FROM sqlite_master LIMIT 1"
                ):  # else another process was faster
                    for statement in _SCHEMA:
                        self.run(statement)
        tables = {name for (name,) in self.query("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not {"meta", "chunks", "tokens", "embedded"} <= tables:
            raise StoreError(
                f"{self._name} is an SQLite file, but no store of reader_rag: name another folder"
            )
        found = self.get("format") or ""
        if found.isdecimal() and int(found) > FORMAT:
            raise StoreError(
                f"{self._name} has format {found}, this version of reader_rag reads up to {FORMAT}: "
                "pip install --upgrade reader-rag"
            )
        if found != str(FORMAT):
            raise self.corrupted(f"its format is {found!r}")
        if self.path is not None and self.path.stat().st_size <= _CHECKED_BYTES:
            ((verdict,), *_) = self.query("PRAGMA quick_check(1)")
            if verdict != "ok":
                raise self.corrupted(" ".join(verdict.split()))

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    @property
    def store(self) -> str:
        """What messages call the store."""
        return f"the store in {self.path.parent if self.path else 'memory'}"

    @property
    def read_only(self) -> bool:
        return self.path is not None and not (
            os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK)
        )

    @property
    def _name(self) -> str:
        return str(self.path or "the database in memory")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._opened().execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise self._mended(error) from error

    def query_in(self, sql: str, values: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
        """Rows of `sql`, whose `IN ?` means any of `values`."""
        listed = list(values)
        for start in range(0, len(listed), _BATCH):
            batch = listed[start : start + _BATCH]
            yield from self.query(sql.replace("IN ?", f"IN ({', '.join('?' * len(batch))})"), batch)

    def run(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Execute, and give the number of rows changed."""
        try:
            return self._opened().execute(sql, values).rowcount
        except sqlite3.Error as error:
            raise self._mended(error) from error

    def run_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        try:
            self._opened().executemany(sql, rows)
        except sqlite3.Error as error:
            raise self._mended(error) from error

    def get(self, key: str) -> str | None:
        found = self.query("SELECT value FROM meta WHERE key = ?", (key,))
        return str(found[0][0]) if found else None

    def put(self, key: str, value: str) -> None:
        self.run(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (key, value),
        )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of the block's changes, or, if it is left by any exception, none."""
        self.run("BEGIN IMMEDIATE")
        try:
            yield
            self.run("COMMIT")
        except BaseException:
            if self._opened().in_transaction:
                self.run("ROLLBACK")
            raise

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Reads in the block see one state, whatever other processes write meanwhile."""
        self.run("BEGIN")
        try:
            yield
        finally:
            if self._opened().in_transaction:
                self.run("ROLLBACK")

    def copy_to(self, other: Database) -> None:
        """Make the other database like this one, in one transaction of the other."""
        try:
            self._opened().backup(other._opened())
        except sqlite3.Error as error:
            raise other._mended(error) from error

    def corrupted(self, cause: str) -> StoreError:
        return StoreError(
            f"{self._name} is corrupted ({cause}): restore it from a backup, or delete it and index again"
        )

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StoreError(f"{self.store} is closed: open it again with Store.open")
        return self._connection

    def _mended(self, error: sqlite3.Error) -> StoreError:
        cause = str(error)
        if "locked" in cause or "busy" in cause:
            return StoreError(
                f"{self._name} is locked: another process is writing to it; try again when it is done"
            )
        if "readonly" in cause:
            return StoreError(f"{self._name} is read-only: mend its permissions, or copy the folder")
        if "full" in cause:
            return StoreError(f"the disk of {self._name} is full: nothing was changed; free some space")
        if "unable to open" in cause or "disk I/O" in cause:
            return StoreError(f"cannot open {self._name} ({cause}): mend its permissions or the path")
        if isinstance(error, sqlite3.DatabaseError):
            return self.corrupted(cause)
        return StoreError(f"{self._name}: {cause}")
