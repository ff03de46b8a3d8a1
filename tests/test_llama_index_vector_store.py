"""The LlamaIndex vector store: nodes come back as they were, filters, documents, folders, indices, and the drafter."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core import Document, StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.instrumentation.dispatcher import instrument_tags
from llama_index.core.schema import (
    ImageNode,
    IndexNode,
    MetadataMode,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)
from llama_index_fakes import FakeReader
from store_fakes import HashingEmbedder

from llama_index.llms.reader_rag import ReaderLLM, ReaderRetriever, ReaderVectorStore
from reader_rag.errors import ReaderError, StoreError
from reader_rag.store import Chunk, Store

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


# Nodes


def test_it_is_a_vector_store_that_holds_texts() -> None:
    store = ReaderVectorStore()
    assert isinstance(store, BasePydanticVectorStore)
    assert store.stores_text
    assert store.is_embedding_query
    assert isinstance(store.client, Store)
    assert store.class_name() == "ReaderVectorStore"


@pytest.mark.parametrize(
    "node",
    [
        fruit_nodes()[0],
        TextNode(
            id_="x",
            text="日本語 and {braces}\n",
            metadata={"b": 1, "a": None, "nested": {"x": [1.5, "y"]}, "doc_id": "the user's own"},
            excluded_llm_metadata_keys=["b"],
            excluded_embed_metadata_keys=["a"],
            metadata_template="{key}={value}",
            text_template="{metadata_str} | {content}",
            metadata_separator=" ; ",
            start_char_idx=3,
            end_char_idx=9,
            relationships={
                NodeRelationship.SOURCE: RelatedNodeInfo(node_id="d", metadata={"file": "f"}),
                NodeRelationship.NEXT: RelatedNodeInfo(node_id="y"),
            },
        ),
        IndexNode(id_="i", text="about an index", index_id="other"),
        ImageNode(id_="p", text="a picture's caption", image_url="http://example.org/p.png"),
    ],
    ids=["plain", "rich", "index", "image"],
)
def test_a_node_comes_back_as_it_was(node: TextNode, tmp_path: Path) -> None:
    given = node.model_copy(update={"embedding": [1.0, 0.0]})
    ReaderVectorStore(tmp_path / "store").add([given])
    [back] = ReaderVectorStore(tmp_path / "store").get_nodes()
    assert back.model_dump() == {**back.model_dump(), **node.model_dump(exclude={"embedding", "class_name"})}
    assert list(back.metadata) == list(node.metadata)
    for mode in MetadataMode:
        assert back.get_content(mode) == node.get_content(mode)
    assert back.ref_doc_id == node.ref_doc_id
    assert type(back) is type(node)


def test_a_whole_document_comes_back_as_a_node() -> None:
    store = ReaderVectorStore()
    store.add([Document(id_="d", text="a document", metadata={"title": "T"}, embedding=[1.0])])
    [back] = store.get_nodes()
    assert (back.node_id, back.text, back.metadata) == ("d", "a document", {"title": "T"})


def test_a_node_replaces_the_one_with_its_id_and_ids_are_never_used_twice() -> None:
    store = fruit()
    rows = [row for (row,) in store.client._database.query("SELECT row FROM chunks")]
    store.add([TextNode(id_="a", text="apricot", embedding=vector("apricot"))])
    assert len(store.get_nodes()) == len(FRUIT)
    assert store.query(asked("apricot", 1)).nodes[0].text == "apricot"
    store.delete_nodes(["f"])
    store.add([TextNode(id_="g", text="grape", embedding=vector("grape"))])
    assert store.client._database.query("SELECT row FROM chunks WHERE id = 'g'")[0][0] > max(rows) + 1
    store.clear()
    assert store.get_nodes() == []
    assert store.query(asked()).ids == []


def test_nodes_are_given_in_the_order_asked_for_or_of_adding() -> None:
    store = fruit()
    assert [node.node_id for node in store.get_nodes()] == list("abcdef")
    assert [node.node_id for node in store.get_nodes(["e", "nobody", "b"])] == ["e", "b"]


def test_a_document_is_deleted_with_all_its_nodes() -> None:
    store = fruit()
    store.delete("doc0")
    store.delete("unknown")
    assert [node.node_id for node in store.get_nodes()] == list("def")
    assert ids(store.query(asked("apple"))) == "def"


# Queries


def test_similarities_are_cosines_best_first() -> None:
    found = fruit().query(asked("cherry", 3))
    assert found.ids[0] == "c"
    assert found.similarities[0] == pytest.approx(1)
    assert found.similarities == sorted(found.similarities, reverse=True)
    assert [node.node_id for node in found.nodes] == found.ids


def one(key: str, operator: FilterOperator, value: Any) -> MetadataFilters:
    return MetadataFilters(filters=[MetadataFilter(key=key, operator=operator, value=value)])


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (one("n", FilterOperator.EQ, 3), "d"),
        (one("n", FilterOperator.NE, 3), "abcef"),
        (one("n", FilterOperator.GT, 3), "ef"),
        (one("n", FilterOperator.GTE, 3), "def"),
        (one("n", FilterOperator.LT, 1), "a"),
        (one("n", FilterOperator.LTE, 1), "ab"),
        (one("n", FilterOperator.GT, "3"), ""),
        (one("n", FilterOperator.IN, [1, 4]), "be"),
        (one("n", FilterOperator.NIN, [1, 4]), "acdf"),
        (one("tags", FilterOperator.ANY, ["ap", "fi"]), "af"),
        (one("tags", FilterOperator.ALL, ["fruit", "ba"]), "b"),
        (one("tags", FilterOperator.CONTAINS, "ch"), "c"),
        (one("kind", FilterOperator.CONTAINS, "ev"), "ace"),
        (one("kind", FilterOperator.TEXT_MATCH, "dd"), "bdf"),
        (one("kind", FilterOperator.TEXT_MATCH, "DD"), ""),
        (one("kind", FilterOperator.TEXT_MATCH_INSENSITIVE, "DD"), "bdf"),
        (one("nothing", FilterOperator.IS_EMPTY, None), "abcdef"),
        (one("kind", FilterOperator.IS_EMPTY, None), ""),
        (one("nothing", FilterOperator.EQ, 1), ""),
        (one("nothing", FilterOperator.NE, 1), "abcdef"),
        (one("ref_doc_id", FilterOperator.EQ, "doc1"), "def"),
        (MetadataFilters(filters=[]), "abcdef"),
        (
            MetadataFilters(
                filters=[
                    MetadataFilters(
                        filters=[MetadataFilter(key="n", value=0), MetadataFilter(key="n", value=5)],
                        condition=FilterCondition.OR,
                    ),
                    MetadataFilter(key="kind", value="odd"),
                ]
            ),
            "f",
        ),
        (
            MetadataFilters(
                filters=[MetadataFilter(key="n", value=0), MetadataFilter(key="n", value=5)],
                condition=FilterCondition.NOT,
            ),
            "bcde",
        ),
    ],
)
def test_every_operator_filters_queries_reads_and_deletions(filters: MetadataFilters, expected: str) -> None:
    store = fruit()
    assert ids(store.query(asked(filters=filters))) == expected
    assert ids(store.query(asked(filters=filters, mode=VectorStoreQueryMode.MMR))) == expected
    assert "".join(node.node_id for node in store.get_nodes(filters=filters)) == expected
    store.delete_nodes(filters=filters)
    assert "".join(node.node_id for node in store.get_nodes()) == "".join(
        sorted(set("abcdef") - set(expected))
    )


def test_every_operator_of_llama_index_is_known() -> None:
    values = {"in": [1], "nin": [1], "any": ["a"], "all": ["a"]}
    for operator in FilterOperator:
        fruit().query(asked(filters=one("kind", operator, values.get(operator.value, "a"))))


def test_a_query_may_name_nodes_and_documents() -> None:
    store = fruit()
    assert ids(store.query(asked(node_ids=["a", "f", "x"]))) == "af"
    assert ids(store.query(asked(doc_ids=["doc1"]))) == "def"
    assert ids(store.query(asked(doc_ids=["doc1"], node_ids=["a", "e"]))) == "e"
    store.delete_nodes(["a", "b", "d"], filters=one("kind", FilterOperator.EQ, "odd"))
    assert "".join(node.node_id for node in store.get_nodes()) == "acef"


def test_a_diverse_query_passes_over_repetitions() -> None:
    store = ReaderVectorStore()
    for n, text in enumerate(["red apple", "red apple", "red apple pie", "green pear"]):
        store.add([TextNode(id_=str(n), text=text, embedding=vector(text))])

    def found(threshold: float | None, **options: Any) -> str:
        query = asked("red apple", 2, mode=VectorStoreQueryMode.MMR, mmr_threshold=threshold)
        return "".join(store.query(query, **options).ids)

    assert found(1.0) == "01"
    assert found(0.2) == "03"
    assert found(None, mmr_threshold=0.2) == "03"
    assert found(0.2, mmr_prefetch_k=3) == "02"
    assert found(0.2, mmr_prefetch_factor=1) == "01"


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda s: s.query(asked(mode=VectorStoreQueryMode.HYBRID)), "mode 'hybrid': use default or mmr"),
        (lambda s: s.query(asked(mode="sparse")), "mode 'sparse': use default or mmr"),
        (lambda s: s.query(asked(), top=3), "no option 'top'; it has: mmr_"),
        (lambda s: s.query(asked(k=0)), "k is 0"),
        (lambda s: s.query(VectorStoreQuery(query_str="apple")), "the query has no embedding"),
        (lambda s: s.query(VectorStoreQuery(query_embedding=[1.0])), "64 numbers, the embedder gives 1"),
        (lambda s: s.query(asked(filters=one("n", FilterOperator.IN, 3))), "takes a list"),
        (lambda s: s.query(asked(filters=one("n", FilterOperator.TEXT_MATCH, 3))), "takes a text"),
        (lambda s: s.add([TextNode(id_="q", text="quince")]), "'q' has no embedding: add it through"),
        (lambda s: s.add([TextNode(text=" ", embedding=vector("x"))]), "is empty"),
        (lambda s: s.add([], batch=1), "no option 'batch'; it has none"),
        (lambda s: s.delete_nodes(), r"needs node_ids or filters; clear\(\)"),
        (lambda s: ReaderVectorStore(3), "a Store or a folder, not int"),
        (lambda s: ReaderVectorStore(s.client, embedder=WORDS), "leave embedder out"),
        (lambda s: ReaderVectorStore(reader=3), "live Reader"),
        (lambda s: ReaderVectorStore(draft_k=0), "at least 1"),
        (lambda s: s.persist("x.json", fs=object()), "local folder"),
    ],
)
def test_what_cannot_be_done_is_refused_and_the_store_stays_usable(use: Any, message: str) -> None:
    store = fruit()
    with pytest.raises(ReaderError, match=message):
        use(store)
    assert store.query(asked("fig", 1)).ids == ["f"]
    assert len(store.get_nodes()) == len(FRUIT)


async def test_every_async_method_does_what_its_twin_does() -> None:
    store = ReaderVectorStore()
    assert await store.async_add(fruit_nodes()) == list("abcdef")
    assert (await store.aquery(asked("fig", 2))).ids == store.query(asked("fig", 2)).ids
    assert [node.node_id for node in await store.aget_nodes(["b"])] == ["b"]
    await store.adelete("doc1")
    await store.adelete_nodes(["a"])
    assert [node.node_id for node in await store.aget_nodes()] == ["b", "c"]
    await store.aclear()
    assert await store.aget_nodes() == []


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
