"""LlamaIndex end to end: query engines, chat engines and retrievers over a store and a tiny real model."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("llama_index.core")

from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.token_counting import TokenCountingHandler
from llama_index.core.chat_engine import ContextChatEngine, SimpleChatEngine
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import ChatMessage
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import MetadataMode, QueryBundle, TextNode

from llama_index.llms.reader_rag import ReaderLLM, ReaderRetriever, watch
from reader_rag.errors import PromptError, SettingsError, StoreError
from reader_rag.settings import Drafting
from reader_rag.store import Chunk, Store

if TYPE_CHECKING:
    from reader_rag import Reader

QUESTION = "what does else after a loop mean"
TEXTS = (
    "The else clause of a loop runs when the loop ends without break.",
    "A break statement ends the nearest loop and skips its else clause.",
    "The try statement runs its finally clause whatever happens.",
    "A class statement makes a new class object.",
    "The with statement enters a context and leaves it at the end.",
    "An import statement binds a module to a name.",
)


class WordEmbedder:
    """Hashed bags of words: texts with common words are near each other."""

    name = "words"
    dim = 64

    def encode_query(self, texts: Sequence[str]) -> np.ndarray[Any, Any]:
        vectors = np.full((len(texts), self.dim), 1e-6, dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.lower().split():
                vectors[row, zlib.crc32(word.strip(".,").encode()) % self.dim] += 1
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    encode_document = encode_query


class Pool:
    """Stands where a Reader does, and keeps what is offered."""

    def __init__(self) -> None:
        self.offers: list[tuple[str, list[Chunk]]] = []

    def offer(self, chunks: Sequence[Chunk], scope: str = "default") -> None:
        self.offers.append((scope, list(chunks)))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", embedder=WordEmbedder()) as store:
        store.add(Chunk(f"c{i}", text, {"title": f"Part {i}", "start": i}) for i, text in enumerate(TEXTS))
        yield store


@pytest.fixture
def llm(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> ReaderLLM:
    """The tiny model as LlamaIndex's default, with its own tokenizer for all counts."""
    llm = ReaderLLM(reader=reader, max_tokens=12)
    for name in ("_llm", "_tokenizer", "_callback_manager"):
        monkeypatch.setattr(Settings, name, None)
    monkeypatch.setattr("llama_index.core.global_tokenizer", None)
    Settings.llm, Settings.tokenizer = llm, reader.encode
    return llm


# The retriever.


def test_k_nodes_for_the_prompt_and_draft_k_chunks_for_the_drafter(store: Store) -> None:
    pool = Pool()
    nodes = ReaderRetriever(store, k=2, draft_k=5, reader=pool, scope="a").retrieve(QUESTION)
    hits = store.search(QUESTION, k=5)
    assert [(node.node_id, node.text, node.score) for node in nodes] == [
        (hit.chunk.id, hit.chunk.text, hit.score) for hit in hits[:2]
    ]
    assert nodes[0].score > nodes[1].score
    assert pool.offers == [("a", [hit.chunk for hit in hits])]
    assert nodes[0].metadata == {"title": "Part 0", "start": 0}
    assert "start" not in nodes[0].get_content(MetadataMode.LLM)
    assert "Part 0" in nodes[0].get_content(MetadataMode.LLM)


async def test_async_retrieval_gives_the_same_off_the_loop(store: Store) -> None:
    retriever = ReaderRetriever(store, k=3, reader=Pool())
    expected = [node.node_id for node in retriever.retrieve(QUESTION)]
    results = await asyncio.gather(*(retriever.aretrieve(QUESTION) for _ in range(4)))
    assert [[node.node_id for node in nodes] for nodes in results] == [expected] * 4


def test_a_folder_will_do_and_no_reader_is_needed(store: Store) -> None:
    pool = Pool()
    with Store.open(store.folder, embedder=WordEmbedder()) as again:
        assert len(ReaderRetriever(again).retrieve(QUESTION)) == 4
    assert ReaderRetriever(str(store.folder), k=1, reader=pool).draft_k == 16


def test_several_texts_of_one_query_are_searched_together(store: Store) -> None:
    bundle = QueryBundle("zzz", custom_embedding_strs=[TEXTS[3], TEXTS[5]])
    nodes = ReaderRetriever(store, k=2).retrieve(bundle)
    assert {node.text for node in nodes} == {TEXTS[3], TEXTS[5]}


def test_bad_options_and_questions_of_the_retriever(store: Store, tmp_path: Path) -> None:
    for options in ({"k": 0}, {"k": 4, "draft_k": 3}):
        with pytest.raises(SettingsError):
            ReaderRetriever(store, **options)
    with pytest.raises(TypeError, match="top"):
        ReaderRetriever(store, top=3)
    with pytest.raises(StoreError):
        ReaderRetriever(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="empty"):
        ReaderRetriever(store).retrieve("")


# The model.


def test_every_method_gives_what_the_reader_gives(llm: ReaderLLM, reader: Reader) -> None:
    answer = reader.generate("Why?", sampling=llm._sampling({}))
    messages = [ChatMessage(role="user", content="Why?")]

    async def ask() -> list[Any]:
        return [
            (await llm.acomplete("Why?")).text,
            (await llm.achat(messages)).message.content,
            [part async for part in await llm.astream_complete("Why?")][-1].text,
            "".join([part.delta async for part in await llm.astream_chat(messages)]),
        ]

    texts = [
        llm.complete("Why?").text,
        llm.chat(messages).message.content,
        "".join(part.delta for part in llm.stream_complete("Why?")),
        "".join(part.delta for part in llm.stream_chat(messages)),
        *asyncio.run(ask()),
    ]
    assert texts == [answer.text] * 8
    usage = llm.complete("Why?").raw["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (answer.prompt_tokens, len(answer.tokens))


def test_documents_and_drafting_change_no_text(llm: ReaderLLM, reader: Reader) -> None:
    plain = ReaderLLM(reader=reader, max_tokens=12, drafting=Drafting(sources=())).complete(QUESTION)
    drafted = llm.complete(QUESTION, documents=[*TEXTS, plain.text])
    assert drafted.text == plain.text
    assert plain.raw["reader"]["tokens_per_pass"] == 1.0
    assert not plain.raw["reader"]["drafted_by_source"]
    assert drafted.raw["reader"]["passes"] <= plain.raw["reader"]["passes"]


def test_spans_name_the_chunk(llm: ReaderLLM) -> None:
    text = llm.complete(QUESTION, max_tokens=64).text
    response = llm.complete(QUESTION, max_tokens=64, documents=[TextNode(id_="n1", text=text)])
    assert response.text == text
    assert [span["chunk_id"] for span in response.raw["reader"]["spans"]] == ["n1"]


def test_a_prompt_longer_than_the_context_is_refused(llm: ReaderLLM) -> None:
    with pytest.raises(PromptError):
        llm.complete("why " * 5000)


# Engines.


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
