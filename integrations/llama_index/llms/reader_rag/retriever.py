"""A LlamaIndex retriever over a reader_rag store."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index.llms.reader_rag.llm import ReaderLLM
from llama_index.llms.reader_rag.nodes import node_from
from reader_rag.errors import SettingsError
from reader_rag.store import Hit, Store

if TYPE_CHECKING:
    from reader_rag import Reader

DEFAULT_DRAFT_K = 16


class ReaderRetriever(BaseRetriever):
    """Retrieves k nodes for the prompt, and draft_k >= k chunks for the reader to draft from.

        retriever = ReaderRetriever("store", k=4, draft_k=16, reader=llm)
        engine = RetrieverQueryEngine.from_args(retriever, llm=llm)

    Args:
        store: a `Store`, or the folder of one that exists.
        k: nodes returned, best first; scores are cosines, higher is better.
        draft_k: chunks offered to the reader's pool; by default the larger of k and 16.
        reader: the `Reader` or `ReaderLLM` that will answer; without it nothing is offered.
        scope: the pool that is fed; by default that of the `ReaderLLM`, or "default".
        options: those of LlamaIndex's BaseRetriever (callback_manager, object_map, objects, verbose).

    Raises:
        SettingsError: k < 1 or draft_k < k.
        StoreError: the folder holds no readable store.
    """

    def __init__(
        self,
        store: Store | str | Path,
        k: int = 4,
        draft_k: int | None = None,
        reader: "Reader | ReaderLLM | None" = None,
        scope: str | None = None,
        **options: Any,
    ) -> None:
        if k < 1:
            raise SettingsError(f"k must be at least 1, got {k}")
        if draft_k is None:
            draft_k = max(k, DEFAULT_DRAFT_K)
        if draft_k < k:
            raise SettingsError(f"draft_k is {draft_k}, less than k={k}: raise it or leave it out")
        self.store = store if isinstance(store, Store) else Store.open(store, create=False)
        self.k = k
        self.draft_k = draft_k
        self.reader = reader
        own = reader.scope if isinstance(reader, ReaderLLM) else "default"
        self.scope = own if scope is None else scope
        super().__init__(**options)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        # LlamaIndex has no string to embed for an empty question; the store says what is wrong with it.
        hits = self._search(query_bundle.embedding_strs or [query_bundle.query_str])
        if self.reader is not None:
            self.reader.offer([hit.chunk for hit in hits], scope=self.scope)
        return [NodeWithScore(node=node_from(hit.chunk), score=hit.score) for hit in hits[: self.k]]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)

    def _search(self, queries: Sequence[str]) -> list[Hit]:
        """The draft_k best hits over all queries: a transform such as HyDE asks with more than one text."""
        draft_k = self.draft_k if self.reader is not None else self.k
        best: dict[str, Hit] = {}
        for query in queries:
            for hit in self.store.search(query, k=draft_k):
                if hit.chunk.id not in best or hit.score > best[hit.chunk.id].score:
                    best[hit.chunk.id] = hit
        return sorted(best.values(), key=lambda hit: -hit.score)[:draft_k]
