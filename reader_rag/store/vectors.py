"""The nearest vectors: FAISS where it is installed, one matrix product otherwise, with the same answer.

Rows are int64 numbers that the store never reuses, vectors float32 [n, dim] of length 1, scores cosines.
"""

from __future__ import annotations

import logging
import sys
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

logger = logging.getLogger("reader_rag")

Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

MATMUL_LIMIT = 20_000  # above this many vectors FAISS is worth installing
_TIE = np.float32(
    1e-6
)  # backends round differently; closer scores than this count as equal when candidates are cut


@lru_cache(maxsize=1)
def import_faiss() -> Any | None:
    """FAISS, or None where it is not installed. The only place that imports it."""
    try:
        import faiss
    except ImportError as error:
        logger.info("searching without FAISS (%s)", error)
        return None
    if sys.platform == "darwin":
        faiss.omp_set_num_threads(1)  # two OpenMP runtimes, torch's and FAISS's, crash each other on macOS
    return faiss


class Vectors(Protocol):
    """A set of vectors, each under its row."""

    @property
    def rows(self) -> Rows: ...
    def add(self, rows: Rows, vectors: Floats) -> None: ...
    def remove(self, rows: Rows) -> None: ...
    def candidates(self, query: Floats, k: int) -> tuple[Rows, Floats]:
        """The k best rows (or all, if fewer) and about their scores, best first."""

    def take(self, rows: Rows) -> Floats:
        """The vectors of these rows."""


class FaissVectors:
    """An exact inner-product index with row numbers as ids."""

    def __init__(self, dim: int, index: Any = None) -> None:
        faiss = import_faiss()
        assert faiss is not None
        self._index = faiss.IndexIDMap2(faiss.IndexFlatIP(dim)) if index is None else index
        self._faiss = faiss

    @property
    def rows(self) -> Rows:
        return np.asarray(self._faiss.vector_to_array(self._index.id_map), dtype=np.int64)

    def add(self, rows: Rows, vectors: Floats) -> None:
        self._index.add_with_ids(np.ascontiguousarray(vectors), rows)

    def remove(self, rows: Rows) -> None:
        self._index.remove_ids(rows)

    def candidates(self, query: Floats, k: int) -> tuple[Rows, Floats]:
        scores, rows = self._index.search(query[None], min(k, self._index.ntotal))
        return rows[0], scores[0]

    def take(self, rows: Rows) -> Floats:
        return np.asarray(self._index.reconstruct_batch(rows), dtype=np.float32)

    def to_bytes(self) -> bytes:
        return bytes(self._faiss.serialize_index(self._index).tobytes())

    @classmethod
    def from_bytes(cls, content: bytes, dim: int, count: int) -> FaissVectors | None:
        """The index in `content`, or None if it is not one of ours with `count` vectors of `dim` numbers."""
        faiss = import_faiss()
        assert faiss is not None
        try:
            index = faiss.deserialize_index(np.frombuffer(content, dtype=np.uint8))
        except RuntimeError:  # FAISS wraps every C++ exception in this
            return None
        if not isinstance(index, faiss.IndexIDMap2) or (index.d, index.ntotal) != (dim, count):
            return None
        return cls(dim, index)


class MatrixVectors:
    """The same by a matrix product: for small stores on machines without FAISS."""

    def __init__(self, dim: int) -> None:
        self._rows: Rows = np.empty(0, np.int64)
        self._matrix: Floats = np.empty((0, dim), np.float32)

    @property
    def rows(self) -> Rows:
        return self._rows

    def add(self, rows: Rows, vectors: Floats) -> None:
        if len(self._rows) < MATMUL_LIMIT <= len(self._rows) + len(rows):
            logger.warning('this store is large enough for FAISS: pip install "reader-rag[retrieval]"')
        # Kept sorted by row, for `take`.
        order = np.argsort(np.concatenate([self._rows, rows]), kind="stable")
        self._matrix = np.concatenate([self._matrix, vectors])[order]
        self._rows = np.concatenate([self._rows, rows])[order]

    def remove(self, rows: Rows) -> None:
        keep = ~np.isin(self._rows, rows)
        self._rows, self._matrix = self._rows[keep], self._matrix[keep]

    def candidates(self, query: Floats, k: int) -> tuple[Rows, Floats]:
        scores = self._matrix @ query
        best = np.argsort(-scores, kind="stable")[:k]
        return self._rows[best], scores[best]

    def take(self, rows: Rows) -> Floats:
        return np.asarray(self._matrix[np.searchsorted(self._rows, rows)], dtype=np.float32)


def empty_vectors(dim: int) -> Vectors:
    return MatrixVectors(dim) if import_faiss() is None else FaissVectors(dim)


def nearest(vectors: Vectors, query: Floats, k: int) -> tuple[Rows, Floats]:
    """The k best rows and their cosines, best first, equal scores by lower row.

    Candidates are scored again one by one, so that neither the backend nor the order of adding decides
    between equals: the same text in two files has the same vector.
    """
    fetch = k + 8
    while True:
        rows, scores = vectors.candidates(query, fetch)
        if len(rows) < fetch or scores[-1] < scores[k - 1] - _TIE:
            break
        fetch *= 2
    scores = (vectors.take(rows) * query).sum(axis=1, dtype=np.float32)
    order = np.lexsort((rows, -scores))[:k]
    return rows[order], scores[order]


def diverse(vectors: Floats, query: Floats, k: int, relevance: float) -> list[int]:
    """Positions of up to k vectors, each near the query and far from those chosen before it.

    The next one maximises relevance * cos(v, query) - (1 - relevance) * max cos(v, chosen), earlier ones first
    among equals: maximal marginal relevance (Carbonell and Goldstein, 1998). vectors: float32 [n, dim] of length 1.
    """
    near = vectors @ query
    chosen: list[int] = []
    repeated = np.zeros(len(vectors), np.float32)  # the largest cosine to what is chosen
    left = np.ones(len(vectors), bool)
    while len(chosen) < min(k, len(vectors)):
        gain = relevance * near - (1 - relevance) * repeated
        best = int(np.argmax(np.where(left, gain, -np.inf)))
        likeness = vectors @ vectors[best]
        repeated = np.maximum(repeated, likeness) if chosen else likeness
        chosen.append(best)
        left[best] = False
    return chosen
