"""Retrieved nodes reach the drafter by themselves, however LlamaIndex runs the query.

The model is told to quote a text that was retrieved but did not enter the prompt, and drafts from chunks alone:
a token accepted from "chunks" can have come by the retrieval only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.instrumentation.dispatcher import instrument_tags
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.workflow import Event, StartEvent, StopEvent, Workflow, step
from llama_index_corpus import QUESTION, TEXTS, Says, WordEmbedder
from llama_index_fakes import listening

from llama_index.llms.reader_rag import ReaderLLM, ReaderRetriever, watch
from reader_rag import Chunk, Drafting, Store

if TYPE_CHECKING:
    from reader_rag import Reader

QUOTED = TEXTS[2]


class FirstOnly(BaseNodePostprocessor):
    """Keeps one node for the prompt; the others have been retrieved all the same."""

    def _postprocess_nodes(self, nodes: list[NodeWithScore], query_bundle: Any = None) -> list[NodeWithScore]:
        return [node for node in nodes if node.text == TEXTS[0]]


@pytest.fixture
def llm(reader: Reader) -> ReaderLLM:
    return quoting(reader)


def quoting(reader: Reader, **options: Any) -> ReaderLLM:
    says, drafting = Says(reader, QUOTED), Drafting(sources=("chunks",))
    return ReaderLLM(reader=reader, max_tokens=64, processors=(says,), drafting=drafting, **options)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", embedder=WordEmbedder()) as store:
        store.add(Chunk(f"c{i}", text) for i, text in enumerate(TEXTS))
        yield store


@pytest.fixture
def foreign() -> BaseRetriever:
    nodes = [TextNode(text=text) for text in TEXTS]
    return VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=4)).as_retriever(similarity_top_k=6)


def engine(retriever: BaseRetriever, llm: ReaderLLM, streaming: bool = False) -> RetrieverQueryEngine:
    return RetrieverQueryEngine.from_args(
        retriever, llm=llm, streaming=streaming, node_postprocessors=[FirstOnly()]
    )


def query(retriever: BaseRetriever, llm: ReaderLLM) -> list[str]:
    return [str(engine(retriever, llm).query(QUESTION))]


def stream(retriever: BaseRetriever, llm: ReaderLLM) -> list[str]:
    return ["".join(engine(retriever, llm, streaming=True).query(QUESTION).response_gen)]


def gather(retriever: BaseRetriever, llm: ReaderLLM) -> list[str]:
    async def ask() -> list[str]:
        return [
            str(r) for r in await asyncio.gather(*(engine(retriever, llm).aquery(QUESTION) for _ in "ab"))
        ]

    return asyncio.run(ask())


def astream(retriever: BaseRetriever, llm: ReaderLLM) -> list[str]:
    async def ask() -> list[str]:
        response = await engine(retriever, llm, streaming=True).aquery(QUESTION)
        return ["".join([piece async for piece in response.async_response_gen()])]

    return asyncio.run(ask())


class Found(Event):
    text: str


class RagWorkflow(Workflow):
    """Retrieval and answer as steps: each runs in a task of its own."""

    def __init__(self, retriever: BaseRetriever, llm: ReaderLLM) -> None:
        super().__init__(timeout=60)
        self.retriever, self.llm = retriever, llm

    @step
    async def retrieve(self, event: StartEvent) -> Found:
        nodes = await self.retriever.aretrieve(event.question)
        return Found(text=nodes[0].text)

    @step
    async def answer(self, event: Found) -> StopEvent:
        response = await self.llm.acomplete(f"{TEXTS[0]}\n\n{QUESTION}")
        return StopEvent(result=response)


def counted(ask: Callable[..., list[str]], *args: Any) -> tuple[list[str], list[int]]:
    """The answers, and for each call of the model how many tokens were accepted from chunks."""
    with listening() as events:
        texts = ask(*args)
    answers = [event.response.raw for event in events if isinstance(event, LLMChatEndEvent)]
    return texts, [raw["reader"]["accepted_by_source"].get("chunks", 0) for raw in answers]


ways = pytest.mark.parametrize("ask", [query, stream, gather, astream])


@ways
def test_our_retriever_feeds_the_drafter_with_what_did_not_fit_the_prompt(
    ask: Callable[..., list[str]], llm: ReaderLLM, store: Store
) -> None:
    texts, accepted = counted(ask, ReaderRetriever(store, k=1, draft_k=6, reader=llm), llm)
    assert set(texts) == {QUOTED}
    assert len(accepted) == len(texts)
    assert min(accepted) > 0


@ways
def test_watch_does_the_same_for_a_foreign_retriever(
    ask: Callable[..., list[str]], llm: ReaderLLM, foreign: BaseRetriever
) -> None:
    texts, accepted = counted(ask, foreign, llm)
    assert (set(texts), max(accepted)) == ({QUOTED}, 0)
    with watch(llm):
        texts, accepted = counted(ask, foreign, llm)
    assert set(texts) == {QUOTED}
    assert min(accepted) > 0


@pytest.mark.parametrize("watched", [True, False])
async def test_steps_of_a_workflow_hand_chunks_on(
    watched: bool, llm: ReaderLLM, store: Store, foreign: BaseRetriever
) -> None:
    retriever = foreign if watched else ReaderRetriever(store, k=1, draft_k=6, reader=llm)
    if watched:
        with watch(llm):
            response = await RagWorkflow(retriever, llm).run(question=QUESTION)
    else:
        response = await RagWorkflow(retriever, llm).run(question=QUESTION)
    assert response.text == QUOTED
    assert response.raw["reader"]["accepted_by_source"]["chunks"] > 0


def test_a_scope_never_drafts_from_what_another_retrieved(
    reader: Reader, store: Store, foreign: BaseRetriever
) -> None:
    ours, theirs = quoting(reader, scope="ours"), quoting(reader, scope="theirs")
    own = ReaderRetriever(store, k=1, draft_k=6, reader=theirs)
    with watch(ours), watch(theirs), instrument_tags({"reader_scope": "theirs"}):
        assert counted(query, own, theirs)[1][0] > 0
        assert counted(query, foreign, theirs)[1][0] > 0
    assert counted(query, own, ours)[1] == [0]
    with watch(ours), watch(theirs), instrument_tags({"reader_scope": "ours"}):
        assert counted(query, foreign, ours)[1][0] > 0


def test_documents_of_one_call_serve_that_call_alone(llm: ReaderLLM) -> None:
    node = TextNode(text=QUOTED)
    given = llm.complete(QUESTION, documents=[node])
    assert given.raw["reader"]["accepted_by_source"]["chunks"] > 0
    assert [span["chunk_id"] for span in given.raw["reader"]["spans"]] == [node.node_id]
    later = llm.complete(QUESTION)
    assert later.text == given.text == QUOTED
    assert not later.raw["reader"]["accepted_by_source"]
    assert not later.raw["reader"]["spans"]


def test_a_span_is_the_same_text_in_the_answer_and_in_the_node(llm: ReaderLLM) -> None:
    node = TextNode(text=f"Before it. {QUOTED} After it.")
    response = llm.complete(QUESTION, documents=[node])
    [span] = response.raw["reader"]["spans"]
    quoted = response.text[span["start"] : span["end"]]
    assert quoted == node.text[span["chunk_start"] : span["chunk_end"]]
    assert len(quoted) > 20
