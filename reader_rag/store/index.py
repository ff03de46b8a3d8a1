"""The search index of a store: derived from its database, kept in a file, replaceable at any time.

The database records generation, count and checksum of `vectors.faiss`. A file that is behind is brought up to
date; one that is missing, half-written or not the recorded one is rebuilt. Neither shows but in the log.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from reader_rag.errors import StoreError
from reader_rag.store.database import Database
from reader_rag.store.vectors import FaissVectors, Floats, Vectors, empty_vectors, import_faiss, nearest

logger = logging.getLogger("reader_rag")


class SearchIndex:
    """Nearest rows of the chunks in a database. The caller holds the lock."""

    def __init__(self, database: Database) -> None:
        self.path = database.path and database.path.with_name("vectors.faiss")
        self._database = database
        self._vectors: Vectors | None = None
        self._generation = -1  # of the database, when the vectors were last like it
        self._rebuilt = False  # from a file that was missing, wrong or behind

    def nearest(self, query: Floats, k: int) -> list[tuple[int, float]]:
        """The k best rows with their cosines, best first; query is float32 [dim], of length 1."""
        vectors = self._synced()
        if not len(vectors.rows):
            return []
        rows, scores = nearest(vectors, query, k)
        return list(zip(rows.tolist(), scores.tolist(), strict=True))

    def save_if_rebuilt(self) -> None:
        """Save after the first search that found the file unusable: the next process finds it right."""
        if self._rebuilt:
            self._rebuilt = False
            self.save()

    def save(self) -> None:
        """Write the index and record it, unless the file is right. A failure costs a rebuild, no more."""
        if self.path is None or import_faiss() is None or self._database.read_only:
            return
        if self._database.get("dim") is None:
            return
        vectors, record = self._synced(), self._record()
        assert isinstance(vectors, FaissVectors)
        if record is not None and record["generation"] == self._generation and self._read(record) is not None:
            return
        content = vectors.to_bytes()
        record = {"generation": self._generation, "count": len(vectors.rows), "sha256": _sha256(content)}
        try:
            _write_whole(self.path, content)
            with self._database.transaction():
                self._database.put("vectors", json.dumps(record))
        except (OSError, StoreError) as error:
            logger.info("the search index was not saved and will be rebuilt: %s", error)

    def _synced(self) -> Vectors:
        """The vectors as the database has them. Rows never change, so comparing row sets is enough."""
        generation = int(self._database.get("generation") or 0)
        dim = int(self._database.get("dim") or 0)
        if self._vectors is None:
            self._vectors, self._generation = self._load(dim)
            self._rebuilt = self._generation != generation
        if self._generation != generation:
            vectors, self._vectors = self._vectors, None  # if this fails, start afresh next time
            rows = np.array(
                [row for (row,) in self._database.query("SELECT row FROM chunks")], dtype=np.int64
            )
            gone, new = np.setdiff1d(vectors.rows, rows), np.setdiff1d(rows, vectors.rows)
            if len(gone):
                vectors.remove(gone)
            if len(new):
                found = self._database.query_in("SELECT row, vector FROM chunks WHERE row IN ?", new.tolist())
                added, blobs = zip(*found, strict=True)
                if any(len(blob) != 4 * dim for blob in blobs):
                    raise self._database.corrupted(f"a vector has not {dim} numbers")
                matrix = np.frombuffer(b"".join(blobs), dtype="<f4").reshape(-1, dim)
                vectors.add(np.array(added, dtype=np.int64), matrix.astype(np.float32))
            self._vectors, self._generation = vectors, generation
        return self._vectors

    def _load(self, dim: int) -> tuple[Vectors, int]:
        """Vectors and their generation: from the file if it is the recorded one, else none and -1."""
        record = self._record()
        if import_faiss() is None or record is None:
            return empty_vectors(dim), -1
        content = self._read(record)
        vectors = None if content is None else FaissVectors.from_bytes(content, dim, record["count"])
        if vectors is None:
            logger.info("rebuilding %s from store.db: missing, or not what was saved", self.path)
            return empty_vectors(dim), -1
        return vectors, record["generation"]

    def _record(self) -> dict[str, Any] | None:
        """Generation, count and sha256 of the file last saved."""
        record: dict[str, Any] | None = json.loads(self._database.get("vectors") or "null")
        return record

    def _read(self, record: dict[str, Any]) -> bytes | None:
        """The file, if it is the recorded one: FAISS trusts what it reads, so it must read only what we wrote."""
        if self.path is None:
            return None
        try:
            content = self.path.read_bytes()
        except OSError:
            return None
        return content if _sha256(content) == record["sha256"] else None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file so that readers find the old content or the new, whenever the machine stops."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name, too, must reach the disk
        finally:
            os.close(folder)
