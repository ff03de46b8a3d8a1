"""The nouns of the store: a chunk of text, and a chunk found by a search."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reader_rag.errors import SettingsError, StoreError


@dataclass(frozen=True, slots=True)
class Chunk:
    """A retrievable piece of text with a stable id.

    Metadata is whatever JSON can hold; a copy is kept. Two chunks are equal if id, text and metadata are.
    Raises StoreError if id or text is no string, or holds half a surrogate pair.
    """

    id: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_text("id", self.id)
        _check_text("text", self.text)
        if not self.id:
            raise StoreError(
                "the id of a chunk is empty: name it, or let Chunk.from_text make one of the text"
            )
        object.__setattr__(self, "metadata", _copy(self.metadata))

    @classmethod
    def from_text(cls, text: str, metadata: Mapping[str, Any] | None = None) -> Chunk:
        """The chunk of `text` whose id is the first 16 hex digits of the text's SHA-256."""
        _check_text("text", text)
        digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
        return cls(digest[:16], text, {} if metadata is None else metadata)


@dataclass(frozen=True, slots=True)
class Hit:
    """A chunk found by a search; `score` is the cosine of chunk and query: higher is better, 1.0 the most."""

    chunk: Chunk
    score: float


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise StoreError(f"the {name} of a chunk must be a str, not {type(value).__name__}: convert it first")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise StoreError(
            f"the {name} of a chunk holds half a surrogate pair at character {error.start}, which cannot be "
            'stored: repair it with text.encode("utf-8", "replace").decode()'
        ) from error


def _copy(metadata: object) -> dict[str, Any]:
    if not isinstance(metadata, Mapping):
        kind = type(metadata).__name__
        raise StoreError(f"the metadata of a chunk must be a mapping, not {kind}: pass a dict")
    return dict(metadata)


def as_chunks(chunks: Sequence[Chunk | str]) -> tuple[Chunk, ...]:
    """Chunks as they are and texts as chunks; SettingsError for anything else, a single text included."""
    if isinstance(chunks, str | Chunk):
        raise SettingsError("chunks is one chunk; pass a list of chunks or texts")
    taken = []
    for chunk in chunks:
        if not isinstance(chunk, Chunk | str):
            raise SettingsError(f"a chunk is a {type(chunk).__name__}; pass Chunk objects or texts")
        taken.append(Chunk.from_text(chunk) if isinstance(chunk, str) else chunk)
    return tuple(taken)
