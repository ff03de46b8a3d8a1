"""`watch`: a reader drafts from what any LlamaIndex retriever of the process returns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.dispatcher import instrument_tags
from llama_index.core.schema import MetadataMode, TextNode
from llama_index_fakes import FakeReader, replace_reader

from llama_index.llms.reader_rag import ReaderLLM, watch


@pytest.fixture
def index() -> VectorStoreIndex:
    nodes = [
        TextNode(id_="a", text="A loop may end.", metadata={"file": "for.md"}),
        TextNode(id_="b", text="Break skips else."),
    ]
    return VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=4))


def test_watch_offers_bare_and_prompted_text_of_every_retrieval(
    llm: ReaderLLM, fake: FakeReader, index: VectorStoreIndex
) -> None:
    retriever = index.as_retriever(similarity_top_k=2)
    with watch(llm) as watching:
        assert watching.active
        nodes = retriever.retrieve("loop")
    assert set(fake.pool()) == {
        "A loop may end.",
        "Break skips else.",
        next(n for n in nodes if n.node_id == "a").get_content(MetadataMode.LLM),
    }
    assert {chunk.id for _, chunk in fake.offered} >= {"a", "b"}
    before = len(fake.offered)
    retriever.retrieve("loop")
    assert not watching.active
    assert len(fake.offered) == before


def test_watch_takes_a_bare_reader_and_one_line(fake: FakeReader, index: VectorStoreIndex) -> None:
    watching = watch(fake)
    index.as_query_engine(llm=ReaderLLM(reader=fake)).query("Why?")
    watching.stop()
    watching.stop()
    assert "A loop may end." in fake.pool()


async def test_watch_sees_async_retrieval(llm: ReaderLLM, fake: FakeReader, index: VectorStoreIndex) -> None:
    with watch(llm):
        await asyncio.gather(*(index.as_retriever().aretrieve("loop") for _ in range(3)))
    assert fake.pool().count("A loop may end.") == 3


def test_watch_holds_the_model_weakly(fake: FakeReader, index: VectorStoreIndex) -> None:
    llm = ReaderLLM(reader=fake)
    watching = watch(llm)
    del llm
    assert watching.reader is None
    assert not watching.active
    index.as_retriever().retrieve("loop")
    assert not fake.offered


def test_watch_uses_the_scope_of_the_model_or_the_given_one(
    fake: FakeReader, index: VectorStoreIndex
) -> None:
    llm = ReaderLLM(reader=fake, scope="a")
    with watch(llm):
        index.as_retriever().retrieve("loop")
    with watch(llm, scope="b"):
        index.as_retriever().retrieve("loop")
    assert fake.pool("a") == fake.pool("b") != []
    assert not fake.pool("default")


def test_with_several_scopes_a_retrieval_must_say_whose_it_is(
    fake: FakeReader, index: VectorStoreIndex, caplog: pytest.LogCaptureFixture
) -> None:
    with watch(fake, scope="a"), watch(fake, scope="b"):
        index.as_retriever().retrieve("loop")
        assert not fake.offered
        assert "reader_scope" in caplog.text
        with instrument_tags({"reader_scope": "b"}):
            index.as_retriever().retrieve("loop")
        assert fake.pool("b")
        assert not fake.pool("a")


def test_watching_never_breaks_a_retrieval_but_logs(
    llm: ReaderLLM, fake: FakeReader, index: VectorStoreIndex, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("pool is broken")

    fake.offer = fail  # type: ignore[method-assign]
    with watch(llm):
        assert index.as_retriever().retrieve("loop")
    assert "pool is broken" in caplog.text


def test_one_handler_serves_all_watches(llm: ReaderLLM, fake: FakeReader) -> None:
    with watch(llm), watch(llm), watch(fake):
        names = [type(handler).__name__ for handler in get_dispatcher().event_handlers]
    assert names.count("_Retrievals") == 1


def test_watching_an_unloaded_model_does_not_load_it(
    monkeypatch: pytest.MonkeyPatch, fake: FakeReader, index: VectorStoreIndex
) -> None:
    loads: list[object] = []
    replace_reader(monkeypatch, lambda model: loads.append(model) or fake)
    llm = ReaderLLM()
    with watch(llm):
        index.as_retriever().retrieve("loop")
    assert not loads
    llm.complete("Why?")
    assert "A loop may end." in fake.pool()
