"""ReaderRetriever: k nodes for the prompt, draft_k chunks for the drafter."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core.schema import MetadataMode, QueryBundle
from llama_index_corpus import QUESTION, TEXTS, WordEmbedder

from llama_index.llms.reader_rag import ReaderRetriever
from reader_rag.errors import SettingsError, StoreError
from reader_rag.store import Chunk, Store

if TYPE_CHECKING:
    pass


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
