"""What the tests of the store share: an embedder without a model, texts, and a look into the database."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from reader_rag.store import Chunk, Store


class HashingEmbedder:
    """Words to buckets: the more words two texts share, the nearer they are."""

    def __init__(self, name: str = "hashing", dim: int = 64) -> None:
        self.name, self.dim = name, dim
        self.documents = 0  # texts encoded so far

    def encode_query(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            for word in text.lower().split():
                vector[zlib.crc32(word.encode()) % self.dim] += 1
        return vectors  # not normalised: the store must do that

    def encode_document(self, texts: Sequence[str]) -> np.ndarray:
        self.documents += len(texts)
        return self.encode_query(texts)


WORDS = [
    "apple",
    "river",
    "stone",
    "cloud",
    "engine",
    "violin",
    "harbour",
    "pepper",
    "glacier",
    "lantern",
    "meadow",
    "copper",
]
TEXTS = [f"{a} {b} {a} number{i}" for i, (a, b) in enumerate((a, b) for a in WORDS for b in WORDS)]


def chunks_of(texts: Sequence[str] = TEXTS) -> list[Chunk]:
    return [Chunk.from_text(text, {"position": i}) for i, text in enumerate(texts)]


def found(store: Store, query: str, k: int = 5) -> list[tuple[str, float]]:
    return [(hit.chunk.id, hit.score) for hit in store.search(query, k)]


def state(store: Store) -> list[tuple[Any, ...]]:
    return store._database.query("SELECT row, id, text, metadata, path, vector FROM chunks ORDER BY row")


def brute_force(texts: Sequence[str], query: str, k: int) -> list[str]:
    embedder = HashingEmbedder()
    matrix, vector = embedder.encode_query(texts), embedder.encode_query([query])[0]
    scores = matrix @ vector / np.linalg.norm(matrix, axis=1) / np.linalg.norm(vector)
    return [texts[i] for i in np.argsort(-scores.round(6), kind="stable")[:k]]
