"""The LangChain vector store: LangChain's own suite, filters, diversity, folders, and chunks for the drafter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langchain_tests")

from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_fakes import ANSWER, FakeReader, LetterEmbedder, ticks
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from langchain_reader_rag import ChatReader, ReaderLLM, ReaderRetriever, ReaderVectorStore, watch
from reader_rag import Store
from reader_rag.errors import ReaderError, SettingsError, StoreError

FRUIT = ("apple", "banana", "cherry", "damson", "elderberry", "fig")


class Letters(Embeddings):
    """Texts by their letters, as a LangChain embedding."""

    model_name = "letters"

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return LetterEmbedder().encode_query(texts).tolist()

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def fruit(**options: Any) -> ReaderVectorStore:
    documents = [
        Document(id=name[0], page_content=name, metadata={"n": n, "even": n % 2 == 0, "tags": [name[:2]]})
        for n, name in enumerate(FRUIT)
    ]
    return ReaderVectorStore.from_documents(documents, Letters(), **options)


def ids(documents: list[Document]) -> str:
    return "".join(str(document.id) for document in documents)


# LangChain's own suites


class TestInAFolder(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, tmp_path: Path) -> Iterator[ReaderVectorStore]:
        store = ReaderVectorStore(self.get_embeddings(), tmp_path / "store")
        yield store
        store.close()


class TestInMemory(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self) -> Iterator[ReaderVectorStore]:
        store = ReaderVectorStore(self.get_embeddings())
        yield store
        store.close()


class TestAsARetriever(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> Any:
        return lambda k=4: fruit().as_retriever(search_kwargs={"k": k})

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {}

    @property
    def retriever_query_example(self) -> str:
        return "cherry"


# Adding


def test_a_document_without_an_id_gets_one_of_its_text_and_metadata() -> None:
    store = ReaderVectorStore(Letters())
    pages = [Document(page_content="the same", metadata={"page": page}) for page in (1, 2)]
    first = store.add_documents(pages)
    assert len(set(first)) == 2
    assert store.add_documents(pages) == first
    assert len(store.store) == 2
    assert store.add_texts(["a", "b"], [{}, {"x": 1}], ids=["one", None])[0] == "one"
    assert pages[0].id is None


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda s: s.add_texts(["a", "b"], [{}]), "metadatas has 1 entries for 2 texts"),
        (lambda s: s.add_texts(["a"], ids=["x", "y"]), "ids has 2 entries for 1 texts"),
        (lambda s: s.add_texts(["a"], batch_size=3), "has no option 'batch_size'"),
        (lambda s: s.add_texts([" "]), "is empty: leave the chunk out"),
        (lambda s: s.add_texts(["a"], [{"when": object()}]), "not JSON"),
        (lambda s: s.similarity_search("a", fetch_k=3), "has no option 'fetch_k'"),
        (lambda s: s.similarity_search("a", k=0), "k is 0"),
        (lambda s: s.similarity_search(" "), "query is empty"),
        (lambda s: s.similarity_search("a", filter=3), "filter must be a dict or a function"),
        (lambda s: s.similarity_search("a", filter={"n": {"$near": 3}}), r"no operator '\$near'; it has"),
        (lambda s: s.similarity_search("a", filter={"$nor": []}), r"no '\$nor'"),
        (lambda s: s.similarity_search("a", filter={"$and": {}}), "takes a list of filters"),
        (lambda s: s.similarity_search("a", filter={"$not": []}), "takes a filter"),
        (lambda s: s.similarity_search("a", filter={"n": {"$in": 3}}), "takes a list of values"),
        (lambda s: s.similarity_search_by_vector([1.0, 2.0]), "26 numbers, the embedder gives 2"),
        (lambda s: s.max_marginal_relevance_search("a", lambda_mult=7), "between 0"),
        (lambda s: s.delete("a"), r"pass \['a'\]"),
        (lambda s: ReaderVectorStore("no such/model/folder"), "no embedder at"),
        (lambda s: ReaderVectorStore(3), "must be a LangChain Embeddings, not int"),
        (lambda s: ReaderVectorStore(Letters(), 3), "a Store or a folder, not int"),
        (lambda s: ReaderVectorStore(Letters(), s.store), "leave embedding out"),
        (lambda s: ReaderVectorStore(Letters(), reader=3), "live Reader"),
        (lambda s: ReaderVectorStore(Letters(), draft_k=0), "at least 1"),
        (lambda s: ReaderVectorStore.from_texts(["a"], Letters(), folder="x"), "no option 'folder'"),
    ],
)
def test_what_cannot_be_done_is_refused_and_the_store_stays_usable(use: Any, message: str) -> None:
    store = fruit()
    with pytest.raises(ReaderError, match=message):
        use(store)
    assert len(store.store) == len(FRUIT)
    assert ids(store.similarity_search("fig", k=1)) == "f"


# Searching


def test_scores_are_cosines_and_relevance_lies_between_0_and_1() -> None:
    class Signed(Letters):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return [[1.0, 0.0] if text == "apple" else [-1.0, 0.1] for text in texts]

    store = ReaderVectorStore.from_texts(["apple", "banana"], Signed())
    [(_, best), (_, worst)] = store.similarity_search_with_score("apple", k=2)
    assert best == pytest.approx(1)
    assert worst == pytest.approx(-0.995, abs=1e-3)
    relevances = [score for _, score in store.similarity_search_with_relevance_scores("apple", k=2)]
    assert relevances == [pytest.approx(1), 0.0]
    retriever = store.as_retriever(
        search_type="similarity_score_threshold", search_kwargs={"score_threshold": 0.5}
    )
    assert [document.page_content for document in retriever.invoke("apple")] == ["apple"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"n": 3}, "d"),
        ({"n": [1, 4, 9]}, "be"),
        ({"n": {"$gte": 2, "$lt": 4}}, "cd"),
        ({"n": {"$gt": 4}, "even": True}, ""),
        ({"even": {"$ne": True}}, "bdf"),
        ({"even": {"$neq": True}}, "bdf"),
        ({"n": {"$lte": 0}}, "a"),
        ({"n": {"$in": [0, 5]}}, "af"),
        ({"n": {"$nin": [0, 5]}}, "bcde"),
        ({"n": {"$eq": 5}}, "f"),
        ({"tags": {"$contains": "ch"}}, "c"),
        ({"missing": None}, "abcdef"),
        ({"missing": {"$gt": 1}}, ""),
        ({"n": {"$gt": "1"}}, ""),
        ({"$or": [{"n": 0}, {"n": {"$gt": 4}}]}, "af"),
        ({"$and": [{"even": True}, {"n": {"$gt": 0}}]}, "ce"),
        ({"$not": {"even": True}, "n": {"$gt": 1}}, "df"),
        ({}, "abcdef"),
        (lambda document: document.page_content.endswith("y"), "ce"),
        (lambda document: document.id == "b", "b"),
    ],
)
def test_a_filter_says_which_documents_may_be_found(given: Any, expected: str) -> None:
    store = fruit()
    assert "".join(sorted(ids(store.similarity_search("apple", k=9, filter=given)))) == expected
    assert "".join(sorted(ids(store.max_marginal_relevance_search("apple", k=9, filter=given)))) == expected


def test_a_diverse_search_passes_over_repetitions() -> None:
    store = ReaderVectorStore.from_texts(
        ["aaa b", "aaa bb", "aaa c", "zzz"], Letters(), ids=["1", "2", "3", "4"]
    )
    assert ids(store.max_marginal_relevance_search("aaa b", k=2, lambda_mult=1.0)) == "12"
    assert ids(store.max_marginal_relevance_search("aaa b", k=2, lambda_mult=0.1)) == "14"
    vector = Letters().embed_query("aaa b")
    assert ids(store.max_marginal_relevance_search_by_vector(vector, k=2, lambda_mult=0.1)) == "14"
    assert ids(store.similarity_search_by_vector(vector, k=2)) == "12"
    mmr = store.as_retriever(search_type="mmr", search_kwargs={"k": 2, "lambda_mult": 0.1})
    assert ids(mmr.invoke("aaa b")) == "14"


async def test_every_async_method_does_what_its_twin_does_off_the_loop() -> None:
    class Slow(Letters):
        def embed_query(self, text: str) -> list[float]:
            time.sleep(0.1)
            return super().embed_query(text)

    store = await ReaderVectorStore.afrom_texts(list(FRUIT), Slow(), ids=[name[0] for name in FRUIT])
    vector = Letters().embed_query("fig")
    assert await store.asimilarity_search("fig", 2) == store.similarity_search("fig", 2)
    assert await store.asimilarity_search_with_score("fig", 2) == store.similarity_search_with_score("fig", 2)
    assert await store.asimilarity_search_by_vector(vector, 2) == store.similarity_search_by_vector(vector, 2)
    assert await store.amax_marginal_relevance_search(
        "fig", 3, lambda_mult=0.2
    ) == store.max_marginal_relevance_search("fig", 3, lambda_mult=0.2)
    assert ids(await store.amax_marginal_relevance_search_by_vector(vector, 1)) == "f"
    assert ids(await store.aget_by_ids(["b", "x", "a"])) == "ba"
    searched, _ = await ticks(store.asimilarity_search("fig"))
    assert searched > 5
    assert await store.aadd_texts(["grape"], ids=["g"]) == ["g"]
    assert await store.aadd_documents([Document(id="h", page_content="honeydew")]) == ["h"]
    assert await store.adelete(["g", "h"])
    assert len(store.store) == len(FRUIT)
    assert await store.adelete()
    assert len(store.store) == 0


# Folders


def test_a_store_in_a_folder_is_there_again(tmp_path: Path) -> None:
    fruit(store=tmp_path / "store").close()
    store = ReaderVectorStore(Letters(), tmp_path / "store")
    assert ids(store.similarity_search("cherry", k=1)) == "c"
    store.close()
    live = Store.open(tmp_path / "store", embedder=store.store._encoder._embedder)
    assert ids(ReaderVectorStore(store=live).similarity_search("cherry", k=1)) == "c"
    assert ids(ReaderRetriever(store=live, k=1).invoke("cherry")) == "c"
    live.close()


def test_saved_and_loaded_under_the_names_of_the_faiss_store(tmp_path: Path) -> None:
    fruit().save_local(tmp_path / "store")
    loaded = ReaderVectorStore.load_local(tmp_path / "store", Letters())
    assert loaded.embeddings is not None
    assert loaded.similarity_search_with_score("apple", 6) == fruit().similarity_search_with_score("apple", 6)
    assert not list((tmp_path / "store").glob("*.pkl"))
    loaded.close()
    with pytest.raises(StoreError, match="no such folder"):
        ReaderVectorStore.load_local(tmp_path / "none", Letters())
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "index.pkl").write_bytes(b"\x80\x04.")
    with pytest.raises(StoreError, match="never read"):
        ReaderVectorStore.load_local(tmp_path / "pickled", Letters())
    with pytest.raises(SettingsError, match="allow_dangerous_deserialization"):
        ReaderVectorStore.load_local(tmp_path / "store", Letters(), allow_dangerous_deserialization=True)


def test_another_embedding_than_the_stored_is_refused(tmp_path: Path) -> None:
    fruit(store=tmp_path / "store").close()
    with pytest.raises(StoreError, match=r"made by the embedder 'Letters:letters', not by 'Deterministic"):
        ReaderVectorStore(DeterministicFakeEmbedding(size=26), tmp_path / "store")

    class Wider(Letters):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return [[*vector, 1.0] for vector in super().embed_documents(texts)]

    Wider.__name__ = "Letters"
    with pytest.raises(StoreError, match="26 numbers, the embedder gives 27"):
        ReaderVectorStore(Wider(), tmp_path / "store")


def test_a_failed_beginning_leaves_no_open_file(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="empty"):
        ReaderVectorStore.from_texts(["good", " "], Letters(), store=tmp_path / "store")
    store = ReaderVectorStore(Letters(), tmp_path / "store")
    assert len(store.store) == 0
    store.close()


# Chunks reach the drafter by themselves


@pytest.mark.parametrize("search_type", ["similarity", "mmr", "similarity_score_threshold"])
async def test_what_is_retrieved_reaches_the_drafter_in_the_scope_of_the_request(search_type: str) -> None:
    fake = FakeReader()
    store = fruit(reader=ReaderLLM(reader=fake, scope="own"), draft_k=4)
    threshold = {"score_threshold": 0.1} if search_type == "similarity_score_threshold" else {}
    retriever = store.as_retriever(search_type=search_type, search_kwargs={"k": 2, **threshold})
    config = {"configurable": {"reader_scope": "a"}}
    assert len(retriever.invoke("fig")) == 2
    retriever.invoke("fig", config)
    await retriever.ainvoke("fig", config)
    (RunnableLambda(lambda q: q) | retriever).invoke("fig", config)
    assert [scope for scope, _ in fake.offered] == ["own", "a", "a", "a"]
    assert all(len(set(texts)) >= 4 for _, texts in fake.offered)


@pytest.mark.parametrize("face", [ChatReader, ReaderLLM])
async def test_a_chain_over_the_store_drafts_from_it_on_every_path(face: Any) -> None:
    fake = FakeReader()
    store = fruit(reader=fake, draft_k=3)
    write = RunnableLambda(lambda documents: "\n\n".join(document.page_content for document in documents))
    chain = (
        {"context": store.as_retriever(search_kwargs={"k": 1}) | write, "question": RunnablePassthrough()}
        | ChatPromptTemplate.from_template("{context}\n\n{question}")
        | face(reader=fake)
        | StrOutputParser()
    )
    assert chain.invoke("fig") == ANSWER
    assert "".join(chain.stream("fig")) == ANSWER
    assert chain.batch(["fig", "fig"]) == [ANSWER] * 2
    assert await chain.ainvoke("fig") == ANSWER
    assert await asyncio.gather(*(chain.ainvoke("fig") for _ in range(3))) == [ANSWER] * 3
    assert [len(texts) for _, texts in fake.offered] == [3] * 8
    assert {scope for scope, _ in fake.offered} == {"default"}


def test_without_a_reader_nothing_is_offered_and_watch_sees_the_documents() -> None:
    fake = FakeReader()
    store = fruit(scope="tenant")
    with watch(fake):
        store.as_retriever(search_kwargs={"k": 2}).invoke("fig")
    assert [(scope, len(texts)) for scope, texts in fake.offered] == [("tenant", 2)]
