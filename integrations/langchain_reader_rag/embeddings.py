"""LangChain's Embeddings, as what a Store embeds with."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from langchain_core.embeddings import Embeddings

from reader_rag.errors import SettingsError
from reader_rag.store import Embedder


def embedder_of(embedding: Any) -> Embedder | str | None:
    """The embedder of a Store for a LangChain `Embeddings`; what a Store takes itself is passed on."""
    if isinstance(embedding, Embeddings):
        return LangChainEmbedder(embedding)
    if embedding is None or isinstance(embedding, str) or hasattr(embedding, "encode_query"):
        return embedding  # type: ignore[no-any-return]
    raise SettingsError(
        f"embedding must be a LangChain Embeddings, not {type(embedding).__name__}: wrap it in a class "
        "with embed_documents and embed_query"
    )


class LangChainEmbedder:
    """A LangChain `Embeddings` as the embedder of a Store, known by its class and model name."""

    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings
        named = (getattr(embeddings, name, None) for name in ("model_name", "model", "model_id"))
        model = next((name for name in named if isinstance(name, str)), None)
        self.name = type(embeddings).__name__ + (f":{model}" if model else "")

    @cached_property
    def dim(self) -> int:
        """The length of a vector, found by embedding a word."""
        return len(self._embeddings.embed_query("length"))

    def encode_query(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        return np.asarray([self._embeddings.embed_query(text) for text in texts], dtype=np.float32)

    def encode_document(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        return np.asarray(self._embeddings.embed_documents(list(texts)), dtype=np.float32)
