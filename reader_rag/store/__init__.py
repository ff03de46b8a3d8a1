"""Chunks of text in a folder, found by meaning, with their token arrays."""

from reader_rag.store.chunk import Chunk, Hit
from reader_rag.store.embed import DEFAULT_EMBEDDER, Embedder, GivenVectors, SentenceTransformerEmbedder
from reader_rag.store.files import Report
from reader_rag.store.split import split_text
from reader_rag.store.store import Store

__all__ = [
    "DEFAULT_EMBEDDER",
    "Chunk",
    "Embedder",
    "GivenVectors",
    "Hit",
    "Report",
    "SentenceTransformerEmbedder",
    "Store",
    "split_text",
]
