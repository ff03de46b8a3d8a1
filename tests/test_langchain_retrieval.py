"""The LangChain retriever, `watch` and whole chains over a Reader of forty lines."""

from typing import Any

import pytest

pytest.importorskip("langchain_core")

from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_fakes import ANSWER, FakeReader, FakeStore, Log, collect, faces

from langchain_reader_rag import ChatReader, ReaderLLM, ReaderRetriever, watch
from reader_rag import Reader
from reader_rag.errors import SettingsError


@pytest.fixture
def fake() -> FakeReader:
    return FakeReader()


def foreign_retriever(*texts: str) -> Any:
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
    store.add_documents([Document(id=f"d{n}", page_content=text) for n, text in enumerate(texts)])
    return store.as_retriever(search_kwargs={"k": len(texts)})


# The retriever


def test_a_retriever_returns_k_documents_and_offers_draft_k_chunks(fake: FakeReader) -> None:
    store = FakeStore()
    retriever = ReaderRetriever(store=store, reader=fake, k=2, draft_k=5)
    documents = retriever.invoke("q")
    assert [document.id for document in documents] == ["c0", "c1"]
    assert documents[1].page_content == "text 1"
    assert documents[1].metadata == {"n": 1, "score": 0.99}
    assert fake.offered == [("default", [f"text {n}" for n in range(5)])]
    assert len(retriever.invoke("q", k=7)) == 7
    assert len(fake.offered[1][1]) == 7


def test_a_retriever_without_a_reader_searches_k_only() -> None:
    store = FakeStore()
    assert len(ReaderRetriever(store=store, k=3).invoke("q")) == 3
    assert store.asked == [("q", 3)]


async def test_a_retriever_works_async_and_in_a_scope(fake: FakeReader) -> None:
    config = {"configurable": {"reader_scope": "a"}}
    llm = ReaderLLM(reader=fake, scope="own")
    retriever = ReaderRetriever(store=FakeStore(), reader=llm, k=1, draft_k=1)
    assert len(await retriever.ainvoke("q", config, k=2)) == 2
    await retriever.ainvoke("q")
    retriever.invoke("q", config)
    (RunnableLambda(lambda q: q) | retriever).invoke("q", config)
    assert [scope for scope, _ in fake.offered] == ["a", "own", "a", "a"]


def test_a_retriever_refuses_what_it_cannot_use(fake: FakeReader) -> None:
    for bad, reason in (({"k": 0}, "k"), ({"draftk": 1}, "did you mean"), ({"reader": 3}, "live Reader")):
        with pytest.raises(ValueError, match=reason):
            ReaderRetriever(store=FakeStore(), **bad)
    with pytest.raises(ValueError, match="store must be"):
        ReaderRetriever(store=3)
    with pytest.raises(SettingsError, match="at least 1"):
        ReaderRetriever(store=FakeStore()).invoke("q", k=0)


def test_chunks_wait_for_a_model_that_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, fake: FakeReader
) -> None:
    llm = ReaderLLM(model="m")
    chat = ChatReader(reader=llm)
    ReaderRetriever(store=FakeStore(), reader=llm, k=1, draft_k=2).invoke("q")
    chat.offer([Document(page_content="more")], scope="a")
    monkeypatch.setattr(Reader, "shared", lambda model=None, **options: fake)
    chat.invoke("q")
    assert sorted(fake.offered) == [("a", ["more"]), ("default", ["text 0", "text 1"])]


# watch()


def rag(retriever: Any, model: Any) -> Any:
    prompt = ChatPromptTemplate.from_template("{context}\n\n{question}")
    write = RunnableLambda(lambda documents: "\n\n".join(document.page_content for document in documents))
    question = {"context": retriever | write, "question": RunnablePassthrough()}
    return question | prompt | model | StrOutputParser()


@faces
async def test_watch_takes_chunks_from_any_retriever_on_every_path(face: Any, fake: FakeReader) -> None:
    chain = rag(foreign_retriever("one", "two"), face(reader=fake))
    with watch(fake):
        assert chain.invoke("q") == ANSWER
        assert "".join(chain.stream("q")) == ANSWER
        assert chain.batch(["q", "r"]) == [ANSWER] * 2
        assert await chain.ainvoke("q") == ANSWER
        assert await collect(chain.astream("q")) == ANSWER
        assert await chain.abatch(["q", "r"]) == [ANSWER] * 2
    chain.invoke("q")
    assert [(scope, sorted(texts)) for scope, texts in fake.offered] == [("default", ["one", "two"])] * 8
    assert "one" in str(fake.calls[0]["prompt"])


def test_watch_follows_the_scope_of_the_request(fake: FakeReader) -> None:
    llm = ReaderLLM(reader=fake, scope="own")
    chain = rag(foreign_retriever("one"), llm)
    with watch(llm):
        chain.invoke("q")
        chain.invoke("q", {"configurable": {"reader_scope": "a"}})
    with watch(llm, scope="b"):
        chain.invoke("q")
    assert [scope for scope, _ in fake.offered] == ["own", "a", "b"]


def test_watch_puts_the_chunks_of_our_retriever_into_no_other_scope(fake: FakeReader) -> None:
    with watch(fake):
        ReaderRetriever(store=FakeStore(), k=1, scope="tenant").invoke("q")
        ReaderRetriever(store=FakeStore(), k=1).invoke("q", {"configurable": {"reader_scope": "other"}})
    assert [scope for scope, _ in fake.offered] == ["tenant", "other"]


def test_watching_loads_nothing_and_ends_with_its_reader(fake: FakeReader) -> None:
    llm = ReaderLLM(model="m")
    handle = watch(llm)
    foreign_retriever("one").invoke("q")
    assert len(llm._waiting) == 1
    handle.stop()
    handle.stop()
    foreign_retriever("one").invoke("q")
    assert len(llm._waiting) == 1
    short = watch(ReaderLLM(model="m"))
    foreign_retriever("one").invoke("q")
    assert short._target() is None
    with pytest.raises(SettingsError, match="live Reader"):
        watch("model")


def test_several_readers_may_watch_and_one_broken_retriever_changes_nothing(fake: FakeReader) -> None:
    other = FakeReader()

    def broken(query: str) -> list[Document]:
        raise RuntimeError("no index")

    with watch(fake), watch(other):
        with pytest.raises(RuntimeError, match="no index"):
            RunnableLambda(broken).invoke("q")
        foreign_retriever("one").invoke("q")
        foreign_retriever("", "").invoke("q")
    assert fake.offered == other.offered == [("default", ["one"])]


async def test_watching_hides_no_event_from_other_handlers(fake: FakeReader) -> None:
    llm, log = ReaderLLM(reader=fake), Log()
    with watch(llm):
        await llm.ainvoke("q", config={"callbacks": [log]})
        events = [event["event"] async for event in llm.astream_events("q", version="v2")]
    assert log.events == ["start", "end"]
    assert events[0] == "on_llm_start"


# A chain


async def test_a_chain_of_our_own_parts(fake: FakeReader) -> None:
    log = Log()
    llm = ReaderLLM(reader=fake)
    retriever = ReaderRetriever(store=FakeStore(), reader=llm, k=2)
    write = RunnableLambda(lambda documents: " ".join(document.page_content for document in documents))
    chain = {"context": retriever | write} | PromptTemplate.from_template("Use: {context}") | llm
    pieces = list(chain.stream("q", config={"callbacks": [log]}))
    assert len(pieces) >= 8
    assert "".join(pieces) == ANSWER
    assert fake.calls[0]["prompt"] == "Use: text 0 text 1"
    assert log.events[:2] == ["retrieved", "start"]
    assert len(fake.offered[0][1]) == 16
    events = [event["event"] async for event in chain.astream_events("q", version="v2")]
    assert events.count("on_llm_stream") >= 8
