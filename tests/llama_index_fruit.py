"""Six fruits as nodes of a ReaderVectorStore: what the tests of that store share."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import (
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.vector_stores.types import (
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
)
from store_fakes import HashingEmbedder

from llama_index.llms.reader_rag import ReaderVectorStore

FRUIT = ("apple", "banana", "cherry", "damson", "elderberry", "fig")
WORDS = HashingEmbedder()


class Words(BaseEmbedding):
    """The hashing embedder as LlamaIndex's."""

    def _get_query_embedding(self, query: str) -> list[float]:
        return WORDS.encode_query([query])[0].tolist()

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)

    _get_text_embedding = _get_query_embedding


def vector(text: str) -> list[float]:
    return WORDS.encode_query([text])[0].tolist()


def fruit_nodes() -> list[TextNode]:
    return [
        TextNode(
            id_=name[0],
            text=name,
            embedding=vector(name),
            metadata={"n": n, "kind": "even" if n % 2 == 0 else "odd", "tags": [name[:2], "fruit"]},
            relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"doc{n // 3}")},
        )
        for n, name in enumerate(FRUIT)
    ]


def fruit(store: Any = None, **options: Any) -> ReaderVectorStore:
    made = ReaderVectorStore(store, **options)
    made.add(fruit_nodes())
    return made


def asked(text: str = "apple", k: int = 9, **options: Any) -> VectorStoreQuery:
    return VectorStoreQuery(query_embedding=vector(text), similarity_top_k=k, **options)


def ids(found: Any) -> str:
    return "".join(sorted(found.ids))


def one(key: str, operator: FilterOperator, value: Any) -> MetadataFilters:
    return MetadataFilters(filters=[MetadataFilter(key=key, operator=operator, value=value)])
