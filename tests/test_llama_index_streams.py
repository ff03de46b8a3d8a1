"""Ends of the LlamaIndex face: errors reach the caller, leaving ends the work, the event loop stays free."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler
from llama_index_fakes import ALL, AWAITED, TEXT, USER, FakeReader, astream_chat, astream_complete

from llama_index.llms.reader_rag import ReaderLLM
from reader_rag.errors import PromptError


@pytest.mark.parametrize("method", ALL)
def test_an_error_of_the_engine_reaches_the_caller(method: str) -> None:
    fake = FakeReader(fail_after=3)
    with pytest.raises(RuntimeError, match="device is gone"):
        ALL[method](ReaderLLM(reader=fake))
    assert fake.closed.is_set()


@pytest.mark.parametrize("method", ["complete", "stream_complete", "acomplete", "astream_complete"])
def test_a_refused_prompt_reaches_the_caller(llm: ReaderLLM, method: str) -> None:
    def ask() -> None:
        result = getattr(llm, method)("", raw=True)
        if inspect.iscoroutine(result):
            asyncio.run(result)

    with pytest.raises(PromptError):
        ask()


@pytest.mark.parametrize("method", ["stream_complete", "stream_chat"])
def test_leaving_a_stream_ends_the_work(fake: FakeReader, method: str) -> None:
    # The handler keeps the GeneratorExit, and with it the frames of LlamaIndex's own generator.
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm = ReaderLLM(reader=fake, callback_manager=CallbackManager([debug]))
    stream = getattr(llm, method)(USER if "chat" in method else "Why?")
    next(stream)
    stream.close()
    assert fake.closed.is_set()
    assert fake.steps == 1


@pytest.mark.parametrize("method", AWAITED)
async def test_the_loop_stays_free(method: str) -> None:
    fake = FakeReader(delay=0.02)
    llm = ReaderLLM(reader=fake)
    ticks, done = 0, asyncio.Event()

    async def tick() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            await asyncio.sleep(0.002)

    ticker = asyncio.create_task(tick())
    calls: dict[str, Callable[[], Any]] = {
        "acomplete": lambda: llm.acomplete("Why?"),
        "achat": lambda: llm.achat(USER),
        "astream_complete": lambda: astream_complete(llm),
        "astream_chat": lambda: astream_chat(llm),
    }
    await calls[method]()
    done.set()
    await ticker
    assert ticks > 20  # the call takes 0.18 s; a blocked loop ticks once or twice


@pytest.mark.parametrize("method", ["astream_complete", "astream_chat"])
async def test_leaving_an_async_stream_ends_the_work(fake: FakeReader, method: str) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm = ReaderLLM(reader=fake, callback_manager=CallbackManager([debug]))
    stream = await getattr(llm, method)(USER if "chat" in method else "Why?")
    await anext(stream)
    await stream.aclose()
    assert fake.closed.is_set()
    assert fake.steps == 1


@pytest.mark.parametrize("method", AWAITED)
async def test_cancelling_ends_the_work_within_a_step(method: str) -> None:
    fake = FakeReader(delay=0.05)
    llm = ReaderLLM(reader=fake)
    calls: dict[str, Callable[[], Any]] = {
        "acomplete": lambda: llm.acomplete("Why?"),
        "achat": lambda: llm.achat(USER),
        "astream_complete": lambda: astream_complete(llm),
        "astream_chat": lambda: astream_chat(llm),
    }
    task = asyncio.create_task(calls[method]())
    while fake.steps < 2:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(fake.closed.wait, 2)
    assert fake.steps <= 4


async def test_concurrent_streams_keep_their_texts_apart(llm: ReaderLLM) -> None:
    results = await asyncio.gather(*(astream_complete(llm) for _ in range(8)))
    assert {responses[-1].text for responses in results} == {TEXT}


def test_a_stream_may_be_continued_in_another_thread(llm: ReaderLLM) -> None:
    stream = llm.stream_complete("Why?")
    deltas = [next(stream).delta]
    thread = threading.Thread(target=lambda: deltas.extend(part.delta for part in stream))
    thread.start()
    thread.join()
    assert "".join(deltas) == TEXT
