"""The LangChain faces over a real model and a real store: chains, batches, streams, and one loaded Reader."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langchain_core")

from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_fakes import LetterEmbedder, Log, collect, faces, text_of

from langchain_reader_rag import ChatReader, ReaderLLM, ReaderRetriever, watch
from reader_rag import Chunk, Drafting, Reader, Sampling, Store
from reader_rag.errors import PromptError, StoreError

TEXTS = [f"Chunk {n}: the reader looks up how a text goes on, and the model verifies it." for n in range(8)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", LetterEmbedder()) as store:
        store.add([Chunk.from_text(text) for text in TEXTS])
        yield store


def rag(retriever: Any, model: Any) -> Any:
    prompt = ChatPromptTemplate.from_template("Use these notes.\n{context}\n\nQuestion: {question}")
    write = RunnableLambda(lambda documents: "\n\n".join(document.page_content for document in documents))
    question = {"context": retriever | write, "question": RunnablePassthrough()}
    return question | prompt | model | StrOutputParser()


@faces
async def test_a_chain_gives_one_text_on_every_path(face: Any, reader: Reader, store: Store) -> None:
    model = face(reader=reader, max_tokens=24)
    chain = rag(ReaderRetriever(store=store, reader=model, k=2, draft_k=6), model)
    answer = chain.invoke("what is a chunk?")
    assert answer
    assert "".join(chain.stream("what is a chunk?")) == answer
    assert await chain.ainvoke("what is a chunk?") == answer
    assert await collect(chain.astream("what is a chunk?")) == answer
    assert chain.batch(["what is a chunk?"] * 3) == [answer] * 3
    assert await chain.abatch(["what is a chunk?"] * 2) == [answer] * 2
    plain = face(reader=reader, max_tokens=24, drafting=Drafting(sources=()))
    assert rag(ReaderRetriever(store=store, k=2), plain).invoke("what is a chunk?") == answer


@faces
def test_a_face_says_what_its_reader_says(face: Any, reader: Reader) -> None:
    sampling = Sampling(max_tokens=20, temperature=0.8, seed=3, stop=("zzz",))
    expected = reader.generate("what is a chunk?", sampling=sampling)
    model = face(reader=reader, temperature=0.8, max_tokens=20)
    assert text_of(model.invoke("what is a chunk?", stop=["zzz"], seed=3)) == expected.text
    assert (
        "".join(text_of(c) for c in model.stream("what is a chunk?", stop=["zzz"], seed=3)) == expected.text
    )


def test_usage_and_stats_are_the_readers_own(reader: Reader) -> None:
    messages = [SystemMessage("be brief"), HumanMessage("hello"), AIMessage("yes"), HumanMessage("go on")]
    chat = ChatReader(reader=reader, max_tokens=10)
    message = chat.invoke(messages, documents=[Document(page_content=TEXTS[0])])
    assert message.usage_metadata["input_tokens"] == chat.get_num_tokens_from_messages(messages)
    assert message.usage_metadata["output_tokens"] <= 10
    facts = message.response_metadata
    assert facts["model_name"] == reader.name
    assert facts["finish_reason"] in {"stop", "length"}
    assert facts["reader"]["tokens"] == message.usage_metadata["output_tokens"]
    assert facts["reader"]["mode"] == "exact"
    assert isinstance(facts["reader"]["spans"], list)
    assert chat.get_num_tokens("the reader") == reader.count_tokens("the reader")


def test_the_template_is_used_unless_raw(reader: Reader) -> None:
    def prompt_tokens(**options: Any) -> int:
        result = ReaderLLM(reader=reader, max_tokens=1, **options).generate(["hello"])
        return int(result.generations[0][0].generation_info["token_usage"]["prompt_tokens"])

    assert prompt_tokens(raw=True) < prompt_tokens() == len(reader.encode_prompt("hello"))


@faces
def test_stop_cuts_invoke_stream_and_batch_alike(face: Any, reader: Reader) -> None:
    model = face(reader=reader, max_tokens=30)
    whole = text_of(model.invoke("hello"))
    stop = whole[len(whole) // 2 :][:2]
    cut = whole[: whole.index(stop)]
    assert text_of(model.invoke("hello", stop=[stop])) == cut
    assert "".join(text_of(chunk) for chunk in model.stream("hello", stop=[stop])) == cut
    assert text_of(model.batch(["hello"], stop=[stop])[0]) == cut


@faces
async def test_cancelling_a_stream_frees_the_reader(face: Any, reader: Reader) -> None:
    model = face(reader=reader, max_tokens=200)
    expected = text_of(model.invoke("hello", max_tokens=12))

    async def first_chunks() -> None:
        async for _ in model.astream("hello"):
            await asyncio.sleep(0.01)

    task = asyncio.create_task(first_chunks())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert text_of(await model.ainvoke("hello", max_tokens=12)) == expected


@faces
def test_watch_feeds_a_foreign_retrievers_documents_to_the_drafter(face: Any, reader: Reader) -> None:
    foreign = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
    foreign.add_documents([Document(page_content=text) for text in TEXTS[:3]])
    model, log = face(reader=reader, max_tokens=16), Log()
    chain = rag(foreign.as_retriever(search_kwargs={"k": 3}), model)
    expected = chain.invoke("what is a chunk?")
    with watch(model):
        assert chain.invoke("what is a chunk?", {"callbacks": [log]}) == expected
    assert log.events == ["retrieved", "start", "end"]


def test_a_face_loads_a_folder_once_and_shares_it(tiny_model: Path, tmp_path: Path) -> None:
    options = {"model": tiny_model, "dtype": "float32", "device": "cpu", "width": 4, "cache_dir": tmp_path}
    llm, chat = ReaderLLM(**options, max_tokens=4), ChatReader(**options)
    llm.offer([TEXTS[0]])
    assert llm._live is None
    llm.invoke("hello")
    assert chat.load() is llm.load()


def test_errors_say_what_to_mend(reader: Reader, tmp_path: Path) -> None:
    llm = ReaderLLM(reader=reader)
    with pytest.raises(PromptError, match="empty"):
        llm.invoke("")
    with pytest.raises(PromptError, match="tokens"):
        llm.invoke("word " * 3000)
    with pytest.raises(StoreError):
        ReaderRetriever(store=tmp_path / "nowhere").invoke("q")


def test_a_retriever_opens_a_folder(store: Store, tmp_path: Path) -> None:
    retriever = ReaderRetriever(store=tmp_path / "store", embedder=LetterEmbedder(), k=3)
    documents = retriever.invoke("reader")
    assert len(documents) == 3
    assert documents[0].metadata["score"] >= documents[2].metadata["score"]
    assert documents[0].id == store.search("reader", 1)[0].chunk.id
