"""The target model's own n-gram statistics over all requests of a scope, saved with the model."""

import logging
import os
import tempfile
import zipfile
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from reader_rag.draft.source import Row

T = TypeVar("T")

log = logging.getLogger("reader_rag")

ORDERS = 4  # contexts of 1 to 4 tokens
LATEST = 4  # predictions kept per context
TURNS = 32  # contexts that one eviction may spare before it must drop one
FORMAT = 1

# What CPython takes, rounded up: a test compares the sum with tracemalloc.
_ENTRY_BYTES = 300
_ROW_BYTES = 480
_FOLLOWER_BYTES = 60

# (sightings, latest predictions); never changed in place, so reading needs no lock
Entry = tuple[float, tuple[Row, ...]]
Keys = tuple[int, ...]
"""A tail's last 1 to ORDERS tokens as one exact integer per order: 32 bits a token, the oldest token highest."""
Stamp = tuple[int, int, int]


def longer(keys: Keys, token: int) -> Keys:
    """The keys of the tail with one more token."""
    if len(keys) < ORDERS:
        return (token, *[key << 32 | token for key in keys])
    one, two, three, _ = keys
    return token, one << 32 | token, two << 32 | token, three << 32 | token


def keys_of(context: Sequence[int]) -> Keys:
    keys: Keys = ()
    for token in context[-ORDERS:]:
        keys = longer(keys, token)
    return keys


def _row_bytes(row: Row) -> int:
    return _ROW_BYTES + _FOLLOWER_BYTES * len(row)


class NgramTable:
    """The latest predictions after every context of 1 to 4 tokens, for one model and one scope; shared by its requests.

    At most `limit` bytes: the context that was added longest ago goes first, but one that was seen again meanwhile
    stays for another turn with half its sightings (the clock rule).
    """

    def __init__(self, limit: int = 64 << 20) -> None:
        self.limit = limit
        self.tables: tuple[dict[int, Entry], ...] = tuple({} for _ in range(ORDERS))  # by order
        self._turns: tuple[deque[int], ...] = tuple(deque() for _ in range(ORDERS))
        # A row is shared by all contexts that end at its position: how many hold it, by its id.
        self._holders: dict[int, int] = {}
        self._bytes = 0
        self._lock = Lock()
        self._saved: Stamp | None = None  # the file that this table was loaded from or saved to

    def __len__(self) -> int:
        return sum(map(len, self.tables))

    @property
    def nbytes(self) -> int:
        """Estimated memory of all entries."""
        return self._bytes

    def add(self, contexts: Sequence[Sequence[int]], rows: Sequence[Row], orders: int = ORDERS) -> None:
        """Learns that after the last tokens of contexts[j] the model expected rows[j]."""
        self.learn([keys_of(context)[:orders] for context in contexts], rows)

    def learn(self, contexts: Sequence[Keys], rows: Sequence[Row]) -> None:
        """`add` for contexts that are keys already: of as many orders as there are keys."""
        with self._lock:
            for keys, row in zip(contexts, rows, strict=True):
                if row:
                    self._add(keys, row)
            while self._bytes > self.limit and self._evict():
                pass

    def _add(self, keys: Keys, row: Row) -> None:
        fresh: Entry = (1.0, (row,))  # one object for all orders that see their context for the first time
        for key, table, turns in zip(keys, self.tables, self._turns, strict=False):
            entry = table.get(key)
            if entry is None:
                table[key] = fresh
                turns.append(key)
                self._bytes += _ENTRY_BYTES
                continue
            seen, rows = entry
            if len(rows) == LATEST:
                self._release(rows[-1])
                rows = rows[:-1]
            table[key] = seen + 1.0, (row, *rows)
        self._hold(row, len(keys))

    def _hold(self, row: Row, times: int) -> None:
        held = self._holders.get(id(row), 0)
        if not held:
            self._bytes += _row_bytes(row)
        self._holders[id(row)] = held + times

    def _release(self, row: Row) -> None:
        left = self._holders[id(row)] - 1
        if left:
            self._holders[id(row)] = left
        else:
            del self._holders[id(row)]
            self._bytes -= _row_bytes(row)

    def _evict(self) -> bool:
        """Drops one context, of the order that holds most; False where nothing is left."""
        sizes = [len(turns) for turns in self._turns]
        order = sizes.index(max(sizes))
        table, turns = self.tables[order], self._turns[order]
        for turn in range(TURNS if turns else 0):
            key = turns.popleft()
            seen, rows = table[key]
            if seen >= 2.0 and turn < TURNS - 1:
                table[key] = seen / 2.0, rows
                turns.append(key)
                continue
            del table[key]
            self._bytes -= _ENTRY_BYTES
            for row in rows:
                self._release(row)
            return True
        return False

    def lookup(self, context: Sequence[int]) -> list[tuple[int, float, tuple[Row, ...]]]:
        """(order, sightings, latest predictions) of the known suffixes of `context`, the longest first."""
        keys = keys_of(context)
        found = []
        for order in range(len(keys), 0, -1):
            entry = self.tables[order - 1].get(keys[order - 1])
            if entry is not None:
                found.append((order, *entry))
        return found

    def copy(self) -> "NgramTable":
        """A table that knows the same; what either learns from now on, the other does not."""
        twin = NgramTable(self.limit)
        with self._lock:
            twin.tables = tuple(table.copy() for table in self.tables)
            twin._turns = tuple(turns.copy() for turns in self._turns)
            twin._holders = self._holders.copy()
            twin._bytes, twin._saved = self._bytes, self._saved
        return twin

    def merge(self, other: "NgramTable") -> None:
        """Takes in what another table learned: its contexts count as older than all of this one's own.

        Where both know a context, the sightings are the larger of the two, because both may have begun as one table.
        """
        with self._lock:
            for table, turns, theirs in zip(self.tables, self._turns, other.tables, strict=True):
                for context in reversed(list(theirs)):
                    seen, rows = theirs[context]
                    own = table.get(context)
                    if own is None:
                        table[context] = seen, rows
                        turns.appendleft(context)
                        self._bytes += _ENTRY_BYTES
                        fresh = rows
                    else:
                        fresh = tuple(row for row in rows if row not in own[1])[: LATEST - len(own[1])]
                        table[context] = max(seen, own[0]), own[1] + fresh
                    for row in fresh:
                        self._hold(row, 1)
            while self._bytes > self.limit and self._evict():
                pass

    def save(self, path: str | os.PathLike[str], key: str) -> None:
        """Writes the table to `path` (.npz, no pickle), whole or not at all; `key` names the model it belongs to.

        What another process has saved there since this table was loaded is merged in first.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _only_saver(path.parent):
            if _stamp(path) not in (None, self._saved):
                self.merge(NgramTable.load(path, key, self.limit))
            self._write(path, key)
            self._saved = _stamp(path)

    def _write(self, path: Path, key: str) -> None:
        with self._lock:
            copies = [[(context, *table[context]) for context in turns] for table, turns in self._queues()]
        rows = {id(row): row for entries in copies for _, _, latest in entries for row in latest}
        numbers = {name: number for number, name in enumerate(rows)}
        arrays: dict[str, Any] = {"format": np.int64(FORMAT), "key": np.array(key)}
        for order, entries in enumerate(copies, start=1):
            packed = b"".join(context.to_bytes(4 * order, "big") for context, _, _ in entries)
            arrays[f"contexts{order}"] = np.frombuffer(packed, ">i4").reshape(-1, order).astype(np.int32)
            arrays[f"seen{order}"] = np.array([seen for _, seen, _ in entries], np.float32)
            arrays[f"kept{order}"] = np.array([len(latest) for _, _, latest in entries], np.int32)
            flat = [numbers[id(row)] for _, _, latest in entries for row in latest]
            arrays[f"rows{order}"] = np.array(flat, np.int32)
        arrays["lengths"] = np.array([len(row) for row in rows.values()], np.int32)
        arrays["tokens"] = np.array([token for row in rows.values() for token in row], np.int32)
        arrays["probs"] = np.array([prob for row in rows.values() for prob in row.values()], np.float32)

        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez_compressed(file, **arrays)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str], key: str, limit: int = 64 << 20) -> "NgramTable":
        """Reads what `save` wrote; empty where there is no file, or one of another model or format.

        A damaged file is renamed to *.bad, with a warning: a cache must never stop a reader from starting.
        """
        path = Path(path)
        stamp = _stamp(path)
        if stamp is None:
            return cls(limit)
        try:
            with np.load(path, allow_pickle=False) as arrays:
                if int(arrays["format"]) != FORMAT or str(arrays["key"]) != key:
                    log.warning("n-grams in %s belong to another model or version: starting empty", path)
                    return cls(limit)
                table = cls._restore({name: arrays[name] for name in arrays.files}, limit)
                table._saved = stamp
                return table
        except (OSError, ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            aside = path.with_name(path.name + ".bad")
            log.warning(
                "n-grams in %s cannot be read (%s): starting empty, file kept as %s", path, error, aside.name
            )
            with suppress(
                OSError
            ):  # an unwritable folder: the file stays where it is, and save() will say so
                os.replace(path, aside)
            return cls(limit)

    @classmethod
    def _restore(cls, arrays: dict[str, NDArray[Any]], limit: int) -> "NgramTable":
        self = cls(limit)
        tokens, probs = arrays["tokens"].tolist(), arrays["probs"].tolist()
        pairs = list(zip(tokens, probs, strict=True))
        rows = [dict(row) for row in _cut(pairs, arrays["lengths"].tolist())]
        for order, (table, turns) in enumerate(self._queues(), start=1):
            contexts = [keys_of(context)[-1] for context in arrays[f"contexts{order}"].tolist()]
            kept = _cut(
                [rows[number] for number in arrays[f"rows{order}"].tolist()], arrays[f"kept{order}"].tolist()
            )
            for context, seen, latest in zip(contexts, arrays[f"seen{order}"].tolist(), kept, strict=True):
                table[context] = seen, tuple(latest)
                turns.append(context)
                self._bytes += _ENTRY_BYTES
                for row in latest:
                    self._hold(row, 1)
        while self._bytes > self.limit and self._evict():
            pass
        return self

    def _queues(self) -> list[tuple[dict[int, Entry], deque[int]]]:
        """Table and eviction queue of each order: the queue holds exactly the table's contexts."""
        return list(zip(self.tables, self._turns, strict=True))


def _stamp(path: Path) -> Stamp | None:
    """Tells one saved file from the next; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


@contextmanager
def _only_saver(folder: Path) -> Iterator[None]:
    """Keeps other processes from saving into `folder` meanwhile, where the system can lock a folder."""
    try:
        import fcntl
    except ImportError:  # Windows: two processes that save at once keep the last one's table
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _cut(items: Sequence[T], lengths: Sequence[int]) -> list[Sequence[T]]:
    """Consecutive pieces of the given lengths, which must use up all items."""
    pieces = []
    start = 0
    for length in lengths:
        pieces.append(items[start : start + length])
        start += length
    if start != len(items):
        raise ValueError(f"{len(items)} items, but lengths that sum to {start}")
    return pieces
