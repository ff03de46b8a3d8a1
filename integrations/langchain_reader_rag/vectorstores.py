"""A LangChain vector store over a Store: chunks in SQLite, vectors in FAISS, and no pickle."""

# ruff: noqa: A002 - `filter` and `input` are the names that LangChain gives these parameters

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import LangSmithRetrieverParams
from langchain_core.runnables import RunnableConfig
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

from langchain_reader_rag.asking import configured_scope
from langchain_reader_rag.embeddings import embedder_of
from langchain_reader_rag.filters import Filter, document_of, where_of
from reader_rag import Chunk, Store
from reader_rag.errors import SettingsError
from reader_rag.options import refuse_unknown
from reader_rag.store import Embedder, Hit


class ReaderVectorStore(VectorStore):
    """Documents in a folder or in memory, found by the cosine of their embeddings: higher is better.

        store = ReaderVectorStore.from_documents(documents, HuggingFaceEmbeddings(), store="docs.store", reader=llm)
        retriever = store.as_retriever(search_kwargs={"k": 4, "filter": {"kind": "manual"}})

    A document without an id gets one made of its text and metadata, so adding it again changes nothing.
    With a `reader` whatever a search finds, and the nearest `draft_k` chunks, are offered to its drafter.

    Args:
        embedding: a LangChain `Embeddings`, or an embedder, hub id or folder as `Store.open` takes it; None
            is the one that made the store, or the default.
        store: a folder, made if it is missing; a live `Store`, with its own embedder; None is in memory.
        reader: a live Reader, a `ChatReader` or a `ReaderLLM`; without it nothing is offered.
        scope: who may draft from the chunks; None is the reader's own. The config's `reader_scope` comes first.
        draft_k: chunks offered to the reader; never fewer than `k`.

    Raises StoreError if another embedder made the store, or its vectors have another length.
    """

    def __init__(
        self,
        embedding: Embeddings | Embedder | str | None = None,
        store: Store | str | Path | None = None,
        *,
        reader: Any = None,
        scope: str | None = None,
        draft_k: int = 16,
    ) -> None:
        if reader is not None and not hasattr(reader, "offer"):
            raise SettingsError("reader must be a live Reader, a ChatReader or a ReaderLLM")
        if draft_k < 1:
            raise SettingsError(f"draft_k is {draft_k}: offer at least 1 chunk")
        self.reader, self.scope, self.draft_k = reader, scope, draft_k
        self._embeddings = embedding if isinstance(embedding, Embeddings) else None
        self.store = _opened(store, embedding)

    @property
    def embeddings(self) -> Embeddings | None:
        """The LangChain embeddings that this store was given; None if it embeds by itself."""
        return self._embeddings

    # Writing

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: Sequence[str | None] | None = None,
        **options: Any,
    ) -> list[str]:
        """Embed and keep texts, all or none, and give their ids. A text replaces the one with its id."""
        refuse_unknown(options, (), "add_texts()")
        listed = list(texts)
        for name, values in (("metadatas", metadatas), ("ids", ids)):
            if values is not None and len(values) != len(listed):
                raise SettingsError(
                    f"{name} has {len(values)} entries for {len(listed)} texts: give one each"
                )
        return self.store.add(
            _chunk(text, metadata, name)
            for text, metadata, name in zip(
                listed, metadatas or [{}] * len(listed), ids or [None] * len(listed), strict=True
            )
        )

    def delete(self, ids: list[str] | None = None, **options: Any) -> bool:
        """Delete by id, or everything if no ids are given. Unknown ids are no error."""
        refuse_unknown(options, (), "delete()")
        if ids is None:
            self.store.clear()
        else:
            self.store.delete(ids)
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """The documents with these ids, in this order; unknown ids are left out."""
        return [document_of(chunk) for chunk in self.store.get(ids)]

    # Searching

    def similarity_search(
        self,
        query: str,
        k: int = 4,
        filter: Filter | None = None,
        scope: str | None = None,
        **options: Any,
    ) -> list[Document]:
        """The k documents nearest in meaning, best first."""
        found = self.similarity_search_with_score(query, k, filter, scope, **options)
        return [document for document, _ in found]

    def similarity_search_with_score(
        self,
        query: str,
        k: int = 4,
        filter: Filter | None = None,
        scope: str | None = None,
        **options: Any,
    ) -> list[tuple[Document, float]]:
        """The same, each with its cosine."""
        refuse_unknown(options, ("k", "filter", "scope"), "the search")
        _check_k(k)
        hits = self.store.search(query, self._wanted(k), where_of(filter))
        self._offer(hits, scope)
        return [(document_of(hit.chunk), hit.score) for hit in hits[:k]]

    def similarity_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        filter: Filter | None = None,
        scope: str | None = None,
        **options: Any,
    ) -> list[Document]:
        """The k documents nearest to a vector, best first."""
        refuse_unknown(options, ("k", "filter", "scope"), "the search")
        _check_k(k)
        hits = self.store.search_vector(embedding, self._wanted(k), where_of(filter))
        self._offer(hits, scope)
        return [document_of(hit.chunk) for hit in hits[:k]]

    def max_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        scope: str | None = None,
        **options: Any,
    ) -> list[Document]:
        """Of the fetch_k nearest documents k that differ: lambda_mult is 1 for none of it, 0 for the most."""
        return self.max_marginal_relevance_search_by_vector(
            self.store.embed_query(query).tolist(), k, fetch_k, lambda_mult, filter, scope, **options
        )

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        scope: str | None = None,
        **options: Any,
    ) -> list[Document]:
        """The same for a vector."""
        refuse_unknown(options, ("k", "fetch_k", "lambda_mult", "filter", "scope"), "the search")
        _check_k(k)
        where = where_of(filter)
        hits = self.store.search_diverse(embedding, k, fetch_k, lambda_mult, where)
        if self.reader is not None:
            self._offer([*hits, *self.store.search_vector(embedding, self._wanted(k), where)], scope)
        return [document_of(hit.chunk) for hit in hits]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        """LangChain's relevance lies in [0, 1]: the cosine, and 0 where that is negative."""
        return lambda cosine: min(1.0, max(0.0, cosine))

    def as_retriever(self, **options: Any) -> VectorStoreRetriever:
        """A retriever that takes the scope from its config; the options are LangChain's own."""
        tags = options.pop("tags", None) or self._get_retriever_tags()
        return ReaderVectorStoreRetriever(vectorstore=self, tags=tags, **options)

    def _wanted(self, k: int) -> int:
        return k if self.reader is None else max(k, self.draft_k)

    def _offer(self, hits: Sequence[Hit], scope: str | None) -> None:
        if self.reader is not None and hits:
            scope = scope or configured_scope(None) or self.scope
            self.reader.offer([hit.chunk for hit in hits], **({} if scope is None else {"scope": scope}))

    # Making, keeping and loading

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings | Embedder | str | None,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: Sequence[str | None] | None = None,
        **options: Any,
    ) -> Self:
        """A store with these texts; the options are those of the class, such as `store` and `reader`."""
        refuse_unknown(options, ("store", "reader", "scope", "draft_k"), "from_texts()")
        made = cls(embedding, **options)
        try:
            made.add_texts(texts, metadatas, ids=ids)
        except BaseException:
            if not isinstance(options.get("store"), Store):
                made.close()
            raise
        return made

    def save_local(self, folder: str | Path) -> None:
        """Make the store in `folder` like this one; `load_local` opens it. A store with a folder is always saved."""
        self.store.save(folder)

    @classmethod
    def load_local(
        cls, folder: str | Path, embedding: Embeddings | Embedder | str | None = None, **options: Any
    ) -> Self:
        """Open the store in `folder`; StoreError if there is none. Nothing in it is ever unpickled."""
        refuse_unknown(options, ("reader", "scope", "draft_k"), "load_local()")
        made = cls(store=Store.open(folder, embedder_of(embedding), create=False), **options)
        made._embeddings = embedding if isinstance(embedding, Embeddings) else None
        return made

    def close(self) -> None:
        """Close the store: one in memory is gone, one in a folder is kept."""
        self.store.close()

    def __repr__(self) -> str:
        return f"ReaderVectorStore({self.store!r})"


class ReaderVectorStoreRetriever(VectorStoreRetriever):
    """LangChain's retriever over a vector store, which also knows whose request it serves."""

    def invoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        """The documents found; `k=`, `filter=` and `scope=` of the call come before the retriever's own."""
        return super().invoke(input, config, **_with_scope(config, kwargs))

    async def ainvoke(
        self, input: str, config: RunnableConfig | None = None, **kwargs: Any
    ) -> list[Document]:
        """The documents found; the event loop stays free."""
        return await super().ainvoke(input, config, **_with_scope(config, kwargs))

    def _get_ls_params(self, **kwargs: Any) -> LangSmithRetrieverParams:
        """Names the scope too, so that `watch` never puts these chunks into another."""
        params = super()._get_ls_params(**kwargs)
        scope = (self.search_kwargs | kwargs).get("scope") or self.vectorstore.scope  # type: ignore[attr-defined]
        return {**params, "reader_scope": scope} if scope else params  # type: ignore[typeddict-unknown-key]


def _opened(store: Any, embedding: Any) -> Store:
    if isinstance(store, Store):
        if embedding is not None:
            raise SettingsError("a live store has its embedder already: leave embedding out")
        return store
    if store is None:
        return Store.in_memory(embedder_of(embedding))
    if isinstance(store, str | Path):
        return Store.open(store, embedder_of(embedding))
    raise SettingsError(f"store must be a Store or a folder, not {type(store).__name__}")


def _chunk(text: str, metadata: Mapping[str, Any] | None, name: str | None) -> Chunk:
    if name:
        return Chunk(name, text, metadata or {})
    content = json.dumps([text, metadata or {}], sort_keys=True, default=repr)
    return Chunk(hashlib.sha256(content.encode()).hexdigest()[:16], text, metadata or {})


def _check_k(k: int) -> None:
    if k < 1:
        raise SettingsError(f"k is {k}: ask for at least 1 document")


def _with_scope(config: RunnableConfig | None, options: dict[str, Any]) -> dict[str, Any]:
    scope = configured_scope(config)
    return options if scope is None or "scope" in options else {**options, "scope": scope}
