"""The one embedder of a store: what its vectors were made by, and nothing else may be compared with them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from threading import RLock
from typing import Any

import numpy as np

from reader_rag.errors import StoreError
from reader_rag.store.chunk import Chunk
from reader_rag.store.columns import from_blob, to_blob
from reader_rag.store.database import Database
from reader_rag.store.embed import (
    DEFAULT_EMBEDDER,
    GIVEN_VECTORS,
    Embedder,
    GivenVectors,
    SentenceTransformerEmbedder,
)
from reader_rag.store.progress import Progress, progress_bar
from reader_rag.store.vectors import Floats

_BATCH = 256  # chunks embedded between two saves of what is done


class Encoder:
    """Texts to vectors for one database. `lock` guards the database; it is never held while embedding."""

    def __init__(self, database: Database, lock: RLock, embedder: Embedder | None) -> None:
        self._database = database
        self._lock = lock
        self._embedder = embedder
        if embedder is not None:
            self._check(embedder)

    @property
    def name(self) -> str:
        """Name of the embedder that made the vectors, or will make the first."""
        with self._lock:
            recorded = self._database.get("embedder")
        return recorded or (self._embedder.name if self._embedder else DEFAULT_EMBEDDER)

    def claim(self, dim: int) -> None:
        """Inside a transaction: the first vectors decide which embedder this store belongs to."""
        embedder = self._ready()
        self._check(embedder)
        recorded = self._database.get("dim")
        if recorded is None:
            self._database.put("embedder", embedder.name)
            self._database.put("dim", str(dim))
            if isinstance(embedder, SentenceTransformerEmbedder):
                self._database.put("embedder_source", embedder.source)
        elif dim != int(recorded):
            raise self._wrong_dim(dim, recorded)

    def encode(self, kind: str, texts: Sequence[str]) -> Floats:
        """float32 [len(texts), dim], of length 1, for texts of the kind "query" or "document"."""
        embedder = self._ready()
        encode = embedder.encode_query if kind == "query" else embedder.encode_document
        return self.checked(encode(texts), len(texts), f"the embedder {embedder.name!r}")

    def checked(self, vectors: Any, count: int, origin: str) -> Floats:
        """`count` vectors as float32 [count, dim] of length 1; StoreError if they cannot be compared with ours."""
        try:
            matrix = np.asarray(vectors, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise StoreError(f"{origin} gave no vectors of numbers ({error})") from error
        if matrix.ndim != 2 or len(matrix) != count or not np.isfinite(matrix).all():
            raise StoreError(
                f"{origin} gave shape {matrix.shape} for {count} texts, or NaN: "
                "it must give one finite vector for each text"
            )
        with self._lock:
            recorded = self._database.get("dim")
        if recorded is not None and matrix.shape[1] != int(recorded):
            raise self._wrong_dim(matrix.shape[1], recorded)
        lengths = np.linalg.norm(matrix, axis=1, keepdims=True)
        # What is of length 1 but for rounding stays as it is: normalising twice changes no bit.
        as_it_is = (lengths == 0) | (np.abs(lengths - 1) < 1e-6)
        return np.asarray(matrix / np.where(as_it_is, 1, lengths), dtype=np.float32)

    def embed(self, chunks: Sequence[Chunk], progress: Progress) -> dict[str, Floats]:
        """A vector for each text: the stored one if the store knows the chunk, else a new one.

        New ones are saved aside batch by batch, so that an interrupted add can go on where it was.
        """
        if not chunks:
            return {}
        name = self._ready().name
        with self._lock:
            stored = self._database.query_in(
                "SELECT text, vector FROM chunks WHERE id IN ?", {chunk.id for chunk in chunks}
            )
            vectors = {text: from_blob(blob) for text, blob in stored}
            keys = {
                chunk.text: hashlib.sha256(f"{name}\0{chunk.text}".encode()).hexdigest()
                for chunk in chunks
                if chunk.text not in vectors
            }
            aside = dict(
                self._database.query_in("SELECT key, vector FROM embedded WHERE key IN ?", keys.values())
            )
        vectors |= {text: from_blob(aside[key]) for text, key in keys.items() if key in aside}
        missing = [text for text in keys if text not in vectors]
        with progress_bar(progress, len(missing), "embedding", "chunk") as advance:
            for start in range(0, len(missing), _BATCH):
                batch = missing[start : start + _BATCH]
                made = self.encode("document", batch)
                vectors |= zip(batch, made, strict=True)
                if len(missing) > _BATCH:
                    with self._lock, self._database.transaction():
                        self._database.run_many(
                            "INSERT OR REPLACE INTO embedded VALUES (?, ?)",
                            [(keys[text], to_blob(vector)) for text, vector in zip(batch, made, strict=True)],
                        )
                advance(len(batch))
        return vectors

    def _ready(self) -> Embedder:
        with self._lock:
            if self._embedder is None:
                name, source = self._database.get("embedder"), self._database.get("embedder_source")
                if name == GIVEN_VECTORS:
                    self._embedder = GivenVectors()
                    return self._embedder
                if name is not None and name != DEFAULT_EMBEDDER and source is None:
                    raise StoreError(
                        f"{self._database.store} was made by the embedder object {name!r}: "
                        "pass it to Store.open(folder, embedder=...)"
                    )
                embedder = SentenceTransformerEmbedder(
                    source if name not in (None, DEFAULT_EMBEDDER) else None
                )
                self._check(embedder)
                self._embedder = embedder
            return self._embedder

    def _check(self, embedder: Embedder) -> None:
        """Refuse an embedder whose vectors cannot be compared with the stored ones."""
        made_by, dim = self._database.get("embedder"), self._database.get("dim")
        if made_by is not None and made_by != embedder.name:
            raise StoreError(
                f"{self._database.store} was made by the embedder {made_by!r}, not by {embedder.name!r}: "
                f"open it with {made_by!r}, or index into another folder"
            )
        # A SentenceTransformerEmbedder is known by its name: asking for its dim would load the model.
        known_by_name = isinstance(embedder, SentenceTransformerEmbedder | GivenVectors)
        if dim is not None and not known_by_name and embedder.dim != int(dim):
            raise self._wrong_dim(embedder.dim, dim)

    def _wrong_dim(self, dim: int, recorded: str) -> StoreError:
        return StoreError(
            f"{self._database.store} holds vectors of {recorded} numbers, the embedder gives {dim}: "
            "open it with the embedder that made it, or index into another folder"
        )
