"""Conversations: LlamaIndex's chat engines over a tiny real model, whole and streamed, sync and async."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
    SimpleChatEngine,
)
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.instrumentation.events.llm import LLMChatStartEvent
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index_corpus import QUESTION, TEXTS, WordEmbedder
from llama_index_fakes import listening

from llama_index.llms.reader_rag import ReaderLLM, ReaderRetriever
from reader_rag import Chunk, Reader, Store

Ask = Callable[[BaseChatEngine, str], str]


@pytest.fixture(scope="module")
def reader(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """One for all tests: what it has learned can change no text."""
    return Reader.load(tiny_model, dtype="float32", device="cpu", cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture
def llm(reader: Reader) -> ReaderLLM:
    return ReaderLLM(reader=reader, max_tokens=8)


@pytest.fixture
def retriever(tmp_path: Path, llm: ReaderLLM) -> Iterator[ReaderRetriever]:
    with Store.open(tmp_path / "store", embedder=WordEmbedder()) as store:
        store.add(Chunk(f"c{i}", text) for i, text in enumerate(TEXTS))
        yield ReaderRetriever(store, k=1, draft_k=3, reader=llm)


def simple(llm: ReaderLLM, retriever: ReaderRetriever) -> BaseChatEngine:
    return SimpleChatEngine.from_defaults(llm=llm, memory=memory(llm), system_prompt="Be brief.")


def context(llm: ReaderLLM, retriever: ReaderRetriever) -> BaseChatEngine:
    return ContextChatEngine.from_defaults(retriever=retriever, llm=llm, memory=memory(llm))


def condense_plus_context(llm: ReaderLLM, retriever: ReaderRetriever) -> BaseChatEngine:
    return CondensePlusContextChatEngine.from_defaults(retriever=retriever, llm=llm, memory=memory(llm))


def condense_question(llm: ReaderLLM, retriever: ReaderRetriever) -> BaseChatEngine:
    queries = RetrieverQueryEngine.from_args(retriever, llm=llm)
    return CondenseQuestionChatEngine.from_defaults(query_engine=queries, llm=llm, memory=memory(llm))


def memory(llm: ReaderLLM) -> ChatMemoryBuffer:
    # The model's own count of tokens decides what is remembered, so nothing is asked of another tokenizer.
    return ChatMemoryBuffer.from_defaults(token_limit=900, tokenizer_fn=llm.reader.encode)


def chat(engine: BaseChatEngine, message: str) -> str:
    return str(engine.chat(message))


def stream(engine: BaseChatEngine, message: str) -> str:
    return "".join(engine.stream_chat(message).response_gen)


def achat(engine: BaseChatEngine, message: str) -> str:
    return str(asyncio.run(engine.achat(message)))


def astream(engine: BaseChatEngine, message: str) -> str:
    async def ask() -> str:
        response = await engine.astream_chat(message)
        return "".join([piece async for piece in response.async_response_gen()])

    return asyncio.run(ask())


ENGINES = [simple, context, condense_plus_context, condense_question]
WAYS: list[Ask] = [chat, stream, achat, astream]
engines = pytest.mark.parametrize("make", ENGINES)


@engines
def test_a_conversation_is_held_in_all_four_ways(
    make: Callable[..., Any], llm: ReaderLLM, retriever: ReaderRetriever
) -> None:
    firsts = set()
    for ask in WAYS:
        engine = make(llm, retriever)
        with listening() as events:
            first, second = ask(engine, QUESTION).strip(), ask(engine, "And then?").strip()
        # LlamaIndex strips what it remembers of a stream, so a second turn is compared with what was asked there.
        asked = [event.messages for event in events if isinstance(event, LLMChatStartEvent)]
        assert (llm.chat(asked[-1]).message.content or "").strip() == second
        contents = [(message.content or "").strip() for message in engine.chat_history]
        assert contents == [QUESTION, first, "And then?", second]
        firsts.add(first)
    assert len(firsts) == 1
    assert all(firsts)


@engines
def test_a_reset_conversation_starts_anew(
    make: Callable[..., Any], llm: ReaderLLM, retriever: ReaderRetriever
) -> None:
    engine = make(llm, retriever)
    first = chat(engine, QUESTION)
    chat(engine, "And then?")
    engine.reset()
    assert not engine.chat_history
    assert chat(engine, QUESTION) == first


@pytest.mark.parametrize("make", [simple, context])
def test_later_turns_say_what_a_fresh_reader_would(
    make: Callable[..., Any], llm: ReaderLLM, retriever: ReaderRetriever, tiny_model: Path, tmp_path: Path
) -> None:
    engine = make(llm, retriever)
    with listening() as events:
        turns = [chat(engine, text) for text in (QUESTION, "And then?", "Why so?")]
    asked: list[list[ChatMessage]] = [e.messages for e in events if isinstance(e, LLMChatStartEvent)]
    assert len(asked) == 3
    fresh = Reader.load(tiny_model, dtype="float32", device="cpu", cache_dir=tmp_path / "fresh")
    for messages, said in reversed(
        list(zip(asked, turns, strict=True))
    ):  # the last turn finds nothing to reuse
        assert ReaderLLM(reader=fresh, max_tokens=8).chat(messages).message.content == said


def test_a_later_turn_reads_only_what_is_new(llm: ReaderLLM) -> None:
    long = ChatMessage(role="system", content="Answer from the text. " + " ".join(TEXTS * 2))
    asked = [long, ChatMessage(role="user", content=QUESTION)]
    first = llm.chat(asked)
    second = llm.chat([*asked, first.message, ChatMessage(role="user", content="And then?")])
    read = second.raw["usage"]["prompt_tokens"] - second.raw["reader"]["reused_tokens"]
    assert second.raw["reader"]["reused_tokens"] > 0
    assert read < second.raw["usage"]["prompt_tokens"] / 2
