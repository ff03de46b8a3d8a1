"""The LlamaIndex vector store among others: folders, storage contexts, indices, and the drafter of a model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core import Document, StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.instrumentation.dispatcher import instrument_tags
from llama_index.core.schema import (
    TextNode,
)
from llama_index.core.vector_stores.types import (
    FilterOperator,
)
from llama_index_fakes import FakeReader
from llama_index_fruit import FRUIT, WORDS, Words, asked, fruit, one

from llama_index.llms.reader_rag import ReaderLLM, ReaderRetriever, ReaderVectorStore
from reader_rag.errors import StoreError
from reader_rag.store import Chunk, Store

# Folders and the storage context


def test_a_folder_is_there_again_and_knows_whose_vectors_it_holds(tmp_path: Path) -> None:
    fruit(tmp_path / "store").close()
    store = ReaderVectorStore(str(tmp_path / "store"))
    assert store.is_embedding_query
    assert store.query(asked("fig", 1)).ids == ["f"]
    with pytest.raises(StoreError, match="made by the embedder 'given vectors'"):
        ReaderVectorStore(tmp_path / "store", embedder=WORDS)


def test_a_store_with_an_embedder_of_its_own_embeds_nodes_and_questions(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store", WORDS) as made:
        made.add([Chunk("c1", "the else clause of a loop", {"title": "Loops", "start": 3})])
        store = ReaderVectorStore(made)
        assert not store.is_embedding_query
        index = VectorStoreIndex.from_vector_store(store, embed_model=MockEmbedding(embed_dim=3))
        index.insert_nodes([TextNode(id_="c2", text="a break statement")])
        found = index.as_retriever(similarity_top_k=1).retrieve("break statement")
        assert [node.node_id for node in found] == ["c2"]
        assert made.search("else clause", 1)[0].chunk.id == "c1"
        assert store.get_nodes(["c1"])[0].metadata == {"title": "Loops", "start": 3}
        retriever = ReaderRetriever(made, k=1)
        assert retriever.retrieve("break statement")[0].node.metadata == {}


def test_an_index_in_memory_persists_and_comes_back(tmp_path: Path) -> None:
    documents = [Document(text=name, id_=f"doc-{name}", metadata={"name": name}) for name in FRUIT]
    store = ReaderVectorStore()
    context = StorageContext.from_defaults(vector_store=store)
    index = VectorStoreIndex.from_documents(documents, storage_context=context, embed_model=Words())
    index.delete_ref_doc("doc-banana")
    index.insert(Document(text="grape", id_="doc-grape"))
    context.persist(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name == "default__vector_store.json"]

    loaded = ReaderVectorStore.from_persist_dir(str(tmp_path))
    again = load_index_from_storage(
        StorageContext.from_defaults(persist_dir=str(tmp_path), vector_store=loaded), embed_model=Words()
    )
    found = again.as_retriever(similarity_top_k=9).retrieve("grape")
    assert sorted(node.text for node in found) == sorted({*FRUIT, "grape"} - {"banana"})
    assert found[0].text == "grape"
    assert found[0].score == pytest.approx(1)
    context.persist(tmp_path)  # a second time, over the first
    with pytest.raises(StoreError, match=r"no persisted ReaderVectorStore at .*: persist"):
        ReaderVectorStore.from_persist_dir(str(tmp_path / "nowhere"))


def test_persisting_a_store_with_a_folder_copies_nothing(tmp_path: Path) -> None:
    store = fruit(tmp_path / "own")
    StorageContext.from_defaults(vector_store=store).persist(tmp_path / "context")
    assert not (tmp_path / "context" / "default__vector_store.store").exists()
    assert (tmp_path / "own" / "vectors.faiss").exists()


# Nodes reach the drafter


async def test_what_a_query_finds_reaches_the_drafter_in_the_scope_of_the_request() -> None:
    reader = FakeReader()
    store = fruit(reader=ReaderLLM(reader=reader, scope="own"), draft_k=4)
    index = VectorStoreIndex.from_vector_store(store, embed_model=Words())
    for options in ({}, {"vector_store_query_mode": "mmr"}):
        reader.offered.clear()
        retriever = index.as_retriever(similarity_top_k=2, **options)
        assert len(retriever.retrieve("fig")) == 2
        assert {scope for scope, _ in reader.offered} == {"own"}
        assert len({chunk.id for _, chunk in reader.offered if len(chunk.id) == 1}) >= 4
        with instrument_tags({"reader_scope": "tenant"}):
            retriever.retrieve("fig")
            await retriever.aretrieve("fig")
            await asyncio.gather(*(retriever.aretrieve("fig") for _ in range(2)))
        assert {scope for scope, _ in reader.offered} == {"own", "tenant"}


def test_an_answer_over_the_store_quotes_its_nodes() -> None:
    reader = FakeReader()
    store = fruit(reader=reader, draft_k=1)
    engine = VectorStoreIndex.from_vector_store(store, embed_model=Words()).as_query_engine(
        llm=ReaderLLM(reader=reader), similarity_top_k=2
    )
    response = engine.query("cherry")
    assert response.source_nodes[0].text == "cherry"
    offered = {chunk.text for _, chunk in reader.offered}
    assert {node.text for node in response.source_nodes} <= offered
    assert any("kind: even" in text for text in offered)  # as the prompt has it, too


def test_a_filtered_query_offers_nothing_else() -> None:
    reader = FakeReader()
    store = fruit(reader=reader, draft_k=6, scope="a")
    store.query(asked("apple", 1, filters=one("kind", FilterOperator.EQ, "odd")))
    assert {chunk.id for _, chunk in reader.offered if len(chunk.id) == 1} == set("bdf")
    assert {scope for scope, _ in reader.offered} == {"a"}
