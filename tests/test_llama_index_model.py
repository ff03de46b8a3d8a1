"""The LlamaIndex face over a tiny real model: what a Reader answers, under every method."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core.llms import ChatMessage
from llama_index.core.schema import TextNode
from llama_index_corpus import QUESTION, TEXTS, as_default

from llama_index.llms.reader_rag import ReaderLLM
from reader_rag.errors import PromptError
from reader_rag.settings import Drafting

if TYPE_CHECKING:
    from reader_rag import Reader


@pytest.fixture
def llm(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> ReaderLLM:
    return as_default(reader, monkeypatch)


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
