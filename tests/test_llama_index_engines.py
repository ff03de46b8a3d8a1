"""LlamaIndex's engines over a store and a tiny real model: queries, conversations, Settings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.token_counting import TokenCountingHandler
from llama_index.core.chat_engine import ContextChatEngine, SimpleChatEngine
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import TextNode
from llama_index_corpus import QUESTION, TEXTS, WordEmbedder, as_default

from llama_index.llms.reader_rag import ReaderLLM, ReaderRetriever, watch
from reader_rag.store import Chunk, Store

if TYPE_CHECKING:
    from reader_rag import Reader


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", embedder=WordEmbedder()) as store:
        store.add(Chunk(f"c{i}", text, {"title": f"Part {i}", "start": i}) for i, text in enumerate(TEXTS))
        yield store


@pytest.fixture
def llm(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> ReaderLLM:
    return as_default(reader, monkeypatch)


@pytest.mark.parametrize("mode", [ResponseMode.COMPACT, ResponseMode.REFINE, ResponseMode.TREE_SUMMARIZE])
def test_query_engines_answer_whole_streamed_and_async(
    llm: ReaderLLM, store: Store, mode: ResponseMode
) -> None:
    retriever = ReaderRetriever(store, k=2, draft_k=4, reader=llm)
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode=mode)
    streaming = RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode=mode, streaming=True)

    async def ask() -> tuple[str, str]:
        whole = await engine.aquery(QUESTION)
        streamed = await streaming.aquery(QUESTION)
        return str(whole), "".join([token async for token in streamed.async_response_gen()])

    response = engine.query(QUESTION)
    streamed = "".join(streaming.query(QUESTION).response_gen)
    texts = {str(response), streamed, *asyncio.run(ask())}
    assert len(texts) == 1
    assert texts.pop()
    assert [node.text for node in response.source_nodes] == [
        hit.chunk.text for hit in store.search(QUESTION, k=2)
    ]


def test_settings_take_the_model_and_watch_takes_a_foreign_retriever(llm: ReaderLLM) -> None:
    offered: list[str] = []
    offer = llm.reader.offer
    llm.reader.offer = lambda chunks, scope: (offered.extend(c.text for c in chunks), offer(chunks, scope))
    index = VectorStoreIndex([TextNode(text=text) for text in TEXTS], embed_model=MockEmbedding(embed_dim=8))
    engine = index.as_query_engine(similarity_top_k=2)
    unwatched = str(engine.query(QUESTION))
    assert not offered
    with watch(llm):
        assert str(engine.query(QUESTION)) == unwatched
    assert len(offered) == 2


def test_chat_engines_hold_a_conversation(llm: ReaderLLM, store: Store) -> None:
    simple = SimpleChatEngine.from_defaults(llm=llm)
    first = str(simple.chat("Why?"))
    assert first
    streamed = "".join(simple.stream_chat("And then?").response_gen)
    history = [message.content for message in simple.chat_history]
    assert history == ["Why?", first, "And then?", streamed.strip()]  # LlamaIndex strips what it remembers
    context = ContextChatEngine.from_defaults(retriever=ReaderRetriever(store, k=1, reader=llm), llm=llm)
    assert str(context.chat(QUESTION))
    assert str(asyncio.run(context.achat("Why?")))


def test_a_query_is_counted_by_the_model_itself(reader: Reader, store: Store, llm: ReaderLLM) -> None:
    counter = TokenCountingHandler(tokenizer=lambda text: pytest.fail("counted by another tokenizer"))
    Settings.callback_manager = CallbackManager([counter])
    engine = RetrieverQueryEngine.from_args(ReaderRetriever(store, k=1, reader=llm), llm=llm)
    engine.query(QUESTION)
    assert len(counter.llm_token_counts) == 1
    assert 0 < counter.completion_llm_token_count <= 12
    assert counter.prompt_llm_token_count > reader.count_tokens(TEXTS[0])
