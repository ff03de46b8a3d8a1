"""A LlamaIndex vector store over a Store: nodes in SQLite, vectors in FAISS, ids that are never used twice."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    DEFAULT_PERSIST_DIR,
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)
from llama_index_instrumentation.dispatcher import active_instrument_tags
from pydantic import Field, PrivateAttr

from llama_index.llms.reader_rag.filters import where_of
from llama_index.llms.reader_rag.llm import ReaderLLM
from llama_index.llms.reader_rag.nodes import REF_DOC_ID, chunk_from, chunks_from, node_from
from llama_index.llms.reader_rag.watch import SCOPE_TAG
from reader_rag.errors import SettingsError, StoreError
from reader_rag.store import Embedder, GivenVectors, Hit, Store

if TYPE_CHECKING:
    from reader_rag import Reader

_SEARCH_OPTIONS = {"mmr_threshold", "mmr_prefetch_factor", "mmr_prefetch_k"}


class ReaderVectorStore(BasePydanticVectorStore):
    """Nodes in a folder or in memory, found by the cosine of their embeddings: higher is better.

        store = ReaderVectorStore("nodes.store", reader=llm)
        index = VectorStoreIndex(nodes, storage_context=StorageContext.from_defaults(vector_store=store))
        index = VectorStoreIndex.from_vector_store(store)  # in the next process

    The vectors are LlamaIndex's, made by `embed_model`. A store that has an embedder of its own, as one made by
    `reader-rag index` has, embeds nodes and questions itself, so that vectors of two models never meet.

    Args:
        store: a folder, made if it is missing; a live `Store`; None is in memory.
        embedder: the embedder of a folder's store, as `Store.open` takes it; by default the one that made it,
            or, in a new store, LlamaIndex's `embed_model`.
        reader: the `Reader` or `ReaderLLM` that will answer: what a query finds, and the nearest `draft_k`
            nodes, are offered to its drafter. Without it nothing is.
        scope: the pool that is fed; by default that of the `ReaderLLM`, or "default". A query inside
            `instrument_tags({"reader_scope": ...})` feeds that one.
        draft_k: nodes offered to the reader; never fewer than a query asks for.

    Raises:
        StoreError: the folder holds no readable store, or another embedder made it.
    """

    stores_text: bool = True
    is_embedding_query: bool = True
    scope: str = Field(default="default", description="The pool that is fed.")
    draft_k: int = Field(default=16, ge=1, description="Nodes offered to the reader.")

    _store: Store = PrivateAttr()
    _reader: Any = PrivateAttr(default=None)

    def __init__(
        self,
        store: Store | str | Path | None = None,
        *,
        embedder: Embedder | str | None = None,
        reader: "Reader | ReaderLLM | None" = None,
        scope: str | None = None,
        draft_k: int = 16,
    ) -> None:
        if reader is not None and not hasattr(reader, "offer"):
            raise SettingsError("reader must be a live Reader or a ReaderLLM")
        if draft_k < 1:
            raise SettingsError(f"draft_k is {draft_k}: offer at least 1 node")
        opened = _opened(store, embedder)
        super().__init__(stores_text=True, is_embedding_query=not opened.embeds)
        own = reader.scope if isinstance(reader, ReaderLLM) else "default"
        self.scope = own if scope is None else scope
        self.draft_k = draft_k
        self._store = opened
        self._reader = reader

    @classmethod
    def class_name(cls) -> str:
        return "ReaderVectorStore"

    @property
    def client(self) -> Store:
        """The Store behind this face."""
        return self._store

    # Writing

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Keep nodes, all or none, and give their ids. A node replaces the one with its id."""
        _refuse(kwargs, set(), "add()")
        chunks = [chunk_from(node) for node in nodes]
        if self._store.embeds:
            return self._store.add(chunks)
        bare = next((node.node_id for node in nodes if node.embedding is None), None)
        if bare is not None:
            raise StoreError(
                f"node {bare!r} has no embedding: add it through a VectorStoreIndex, or open the store with embedder="
            )
        return self._store.add(chunks, vectors=[node.get_embedding() for node in nodes])

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete the nodes that were made of this document; an unknown one is no error."""
        _refuse(delete_kwargs, set(), "delete()")
        self._store.delete(self._store.ids_with(REF_DOC_ID, ref_doc_id))

    def delete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """Delete the nodes with these ids that meet these filters; unknown ids are no error."""
        _refuse(delete_kwargs, set(), "delete_nodes()")
        if node_ids is None and filters is None:
            raise SettingsError("delete_nodes() needs node_ids or filters; clear() deletes everything")
        self._store.delete([chunk.id for chunk in self._store.chunks(where_of(filters, node_ids))])

    def clear(self) -> None:
        """Delete all nodes."""
        self._store.clear()

    # Reading

    def get_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """The nodes with these ids, in this order, or all, that meet the filters."""
        where = where_of(filters)
        chunks = self._store.chunks() if node_ids is None else self._store.get(node_ids)
        return [node_from(chunk) for chunk in chunks if where is None or where(chunk)]

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The nodes nearest to the query, best first, with their cosines.

        The modes are DEFAULT and MMR; the latter takes `mmr_threshold` (1 relevant, 0 diverse) and
        `mmr_prefetch_factor` or `mmr_prefetch_k`, as LlamaIndex's own store does.
        """
        _refuse(kwargs, _SEARCH_OPTIONS, "query()")
        # An index that was made of a store alone names no nodes, by an empty list: all may be found.
        where = where_of(query.filters, query.node_ids or None, query.doc_ids or None)
        k, vector = query.similarity_top_k, self._vector(query)
        offered = 0 if self._reader is None else self.draft_k
        if query.mode == VectorStoreQueryMode.DEFAULT:
            hits = self._store.search_vector(vector, max(k, offered), where)
            self._offer(hits)
            return _result(hits[:k])
        if query.mode == VectorStoreQueryMode.MMR:
            threshold = query.mmr_threshold
            threshold = kwargs.get("mmr_threshold", 0.5) if threshold is None else threshold
            fetch_k = int(kwargs.get("mmr_prefetch_k") or k * kwargs.get("mmr_prefetch_factor", 4))
            hits = self._store.search_diverse(vector, k, fetch_k, threshold, where)
            if offered:
                self._offer([*hits, *self._store.search_vector(vector, max(k, offered), where)])
            return _result(hits)
        mode = str(getattr(query.mode, "value", query.mode))  # LlamaIndex passes on a plain text as it is
        raise SettingsError(f"a store of vectors cannot answer a query of mode {mode!r}: use default or mmr")

    def _vector(self, query: VectorStoreQuery) -> Any:
        if self._store.embeds and query.query_str:
            return self._store.embed_query(query.query_str)
        if query.query_embedding is None:
            raise StoreError(
                "the query has no embedding: ask through a VectorStoreIndex, or give query_embedding"
            )
        return query.query_embedding

    def _offer(self, hits: Sequence[Hit]) -> None:
        if self._reader is not None and hits:
            scope = active_instrument_tags.get().get(SCOPE_TAG, self.scope)
            self._reader.offer(chunks_from([node_from(hit.chunk) for hit in hits]), scope=scope)

    # Async: the same in a worker thread, so that the event loop stays free

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        return await asyncio.to_thread(self.add, nodes, **kwargs)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        await asyncio.to_thread(self.delete, ref_doc_id, **delete_kwargs)

    async def adelete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        await asyncio.to_thread(self.delete_nodes, node_ids, filters, **delete_kwargs)

    async def aclear(self) -> None:
        await asyncio.to_thread(self.clear)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        return await asyncio.to_thread(self.get_nodes, node_ids, filters)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        return await asyncio.to_thread(self.query, query, **kwargs)

    # Keeping and loading

    def persist(self, persist_path: str, fs: Any = None) -> None:
        """Save a store in memory beside LlamaIndex's other files; one with a folder is saved in it already."""
        _refuse_remote(fs)
        self._store.save(self._store.folder or _folder_for(persist_path))

    @classmethod
    def from_persist_path(cls, persist_path: str, fs: Any = None, **options: Any) -> "ReaderVectorStore":
        """Open what `persist` saved; the options are those of the class."""
        _refuse_remote(fs)
        folder = _folder_for(persist_path)
        if not (folder / "store.db").exists():
            raise StoreError(
                f"no persisted ReaderVectorStore at {folder}: persist the storage context first; "
                "a store with a folder of its own is opened by ReaderVectorStore(folder)"
            )
        return cls(folder, **options)

    @classmethod
    def from_persist_dir(
        cls,
        persist_dir: str = DEFAULT_PERSIST_DIR,
        namespace: str = "default",
        fs: Any = None,
        **options: Any,
    ) -> "ReaderVectorStore":
        """Open what a StorageContext persisted: pass it to `StorageContext.from_defaults(vector_store=...)`."""
        return cls.from_persist_path(
            str(Path(persist_dir) / f"{namespace}__vector_store.json"), fs, **options
        )

    def close(self) -> None:
        """Close the store: one in memory is gone, one in a folder is kept."""
        self._store.close()


def _opened(store: Any, embedder: Any) -> Store:
    if isinstance(store, Store):
        if embedder is not None:
            raise SettingsError("a live store has its embedder already: leave embedder out")
        return store
    if store is None:
        return Store.in_memory(embedder or GivenVectors())
    if not isinstance(store, str | Path):
        raise SettingsError(f"store must be a Store or a folder, not {type(store).__name__}")
    if embedder is not None:
        return Store.open(store, embedder)
    try:
        return Store.open(store, GivenVectors())
    except StoreError:  # an embedder of its own made it; if anything else is wrong, this says so again
        return Store.open(store, create=False)


def _result(hits: Sequence[Hit]) -> VectorStoreQueryResult:
    return VectorStoreQueryResult(
        nodes=[node_from(hit.chunk) for hit in hits],
        similarities=[hit.score for hit in hits],
        ids=[hit.chunk.id for hit in hits],
    )


def _folder_for(persist_path: str) -> Path:
    """A folder beside the JSON file that LlamaIndex names, so that its own loader never takes it for one."""
    return Path(persist_path).with_suffix(".store")


def _refuse_remote(fs: Any) -> None:
    if fs is not None and not isinstance(fs, LocalFileSystem):
        raise SettingsError("a ReaderVectorStore is kept in a local folder: leave fs out")


def _refuse(options: dict[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(options) - known)
    if unknown:
        has = f"it has: {', '.join(sorted(known))}" if known else "it has none"
        raise SettingsError(f"{where} has no option {unknown[0]!r}; {has}")
