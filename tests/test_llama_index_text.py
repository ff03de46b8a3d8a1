"""Texts of the LlamaIndex face are whole in every script, end at a stop, and are the same under any concurrency."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core.llms import ChatMessage
from llama_index_corpus import Says
from llama_index_fakes import ALL, STREAMED, text_of

from llama_index.llms.reader_rag import ReaderLLM
from reader_rag import Reader


@pytest.fixture(scope="module")
def reader(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """One for all tests: what it has learned can change no text."""
    return Reader.load(tiny_model, dtype="float32", device="cpu", cache_dir=tmp_path_factory.mktemp("cache"))


SCRIPTS = {
    "japanese": "検索した文書から、次の言葉を引用します。",
    "arabic": "القارئ يبحث عن الكلمات التالية في النص.",
    "emoji": "A family 👩‍👩‍👧‍👦, a flag 🏳️‍🌈 and a wave 👋🏽.",
    "code": "def f(x):\n    return {\n        'a': x[1:],  # half\n    }\n\n\nprint(f('ab'))",
}


def saying(reader: Reader, text: str, **options: Any) -> ReaderLLM:
    return ReaderLLM(reader=reader, max_tokens=200, processors=(Says(reader, text),), **options)


@pytest.mark.parametrize("script", SCRIPTS)
def test_deltas_of_every_stream_join_to_the_text(reader: Reader, script: str) -> None:
    text = SCRIPTS[script]
    llm = saying(reader, text)
    assert text_of(ALL["chat"](llm)) == text
    for method, call in STREAMED.items():
        responses = call(llm, documents=[text[:20]])  # with drafts, several tokens come at once
        deltas = [response.delta for response in responses]
        assert "".join(deltas) == text_of(responses[-1]) == text, method
        assert not any("\ufffd" in delta or "<|" in delta for delta in deltas), method


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("stop", ["use of", "、次", "👩‍👧"])
def test_a_stop_text_ends_the_answer_and_is_left_out(reader: Reader, method: str, stop: str) -> None:
    before = "The first, "
    llm = saying(reader, f"{before}{stop} it and the rest.")
    response = ALL[method](llm, stop=[stop, "never said"])
    assert text_of(response) == before
    assert response.raw["finish_reason"] == "stop"


@pytest.mark.parametrize("method", STREAMED)
def test_no_delta_shows_the_beginning_of_a_stop_text(reader: Reader, method: str) -> None:
    responses = STREAMED[method](saying(reader, "One two STOP three"), stop="STOP")
    assert "".join(response.delta for response in responses) == "One two "
    assert not any("S" in response.delta for response in responses)


@pytest.mark.parametrize("method", ALL)
def test_max_tokens_of_a_call_is_kept_to_the_token(reader: Reader, method: str) -> None:
    response = ALL[method](saying(reader, SCRIPTS["code"]), max_tokens=3)
    assert response.raw["usage"]["completion_tokens"] == 3
    assert response.raw["finish_reason"] == "length"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_seed_repeats_a_text_under_every_method(reader: Reader, temperature: float) -> None:
    llm = ReaderLLM(reader=reader, max_tokens=8, temperature=temperature, seed=5)
    assert len({text_of(call(llm)) for call in ALL.values()}) == 1


QUESTIONS = [f"Question {number}: why?" for number in range(8)]


@pytest.fixture
def serial(reader: Reader) -> list[str]:
    llm = ReaderLLM(reader=reader, max_tokens=3)
    return [llm.complete(question).text for question in QUESTIONS]


def test_sixteen_threads_answer_as_one_does(reader: Reader, serial: list[str]) -> None:
    llm = ReaderLLM(reader=reader, max_tokens=3)

    def ask_all(thread: int) -> list[str]:
        order = [*QUESTIONS[thread % 8 :], *QUESTIONS[: thread % 8]]
        texts = {question: llm.complete(question).text for question in order}
        return [texts[question] for question in QUESTIONS]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask_all, range(16))) == [serial] * 16


async def test_thirty_two_calls_at_once_answer_as_one_does(reader: Reader, serial: list[str]) -> None:
    llm = ReaderLLM(reader=reader, max_tokens=3)

    async def stream(question: str) -> str:
        messages = [ChatMessage(role="user", content=question)]
        return "".join([part.delta async for part in await llm.astream_chat(messages)])

    async def whole(question: str) -> str:
        return (await llm.acomplete(question)).text

    texts = await asyncio.gather(*(call(q) for call in (stream, whole, stream, whole) for q in QUESTIONS))
    assert list(texts) == serial * 4
