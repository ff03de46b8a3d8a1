"""The LlamaIndex vector store: nodes come back as they were, filters, documents, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core import Document
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
from llama_index_fruit import FRUIT, WORDS, asked, fruit, fruit_nodes, ids, one, vector

from llama_index.llms.reader_rag import ReaderVectorStore
from reader_rag.errors import ReaderError
from reader_rag.store import Store

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
