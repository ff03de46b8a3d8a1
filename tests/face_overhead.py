"""What each face adds to a 100-token answer, over a Reader that answers at once.

    PYTHONPATH=.:integrations python tests/face_overhead.py

One token per step is the dearest case for a face: drafting brings several tokens in a step.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from langchain_reader_rag import ChatReader
from langchain_reader_rag import ReaderLLM as LangChainLLM
from llama_index.llms.reader_rag import ReaderLLM as LlamaIndexLLM
from reader_rag.stats import Answer, Stats, Step

TOKENS = 100
ROUNDS = 15
QUESTION = "Why does the else clause of a loop run?"


class InstantReader:
    """A Reader's public face whose model takes no time."""

    name, dtype, device, width, rows, context_length, mode = "instant", "float32", "cpu", 16, 1, 4096, "exact"
    has_chat_template = True
    tokenizer = SimpleNamespace(chat_template=None, added_tokens_decoder={})

    def stream(self, prompt: Any, **options: Any) -> Iterator[Step]:
        return self._steps()

    def submit(self, prompt: Any, **options: Any) -> InstantTicket:
        return InstantTicket(self._steps())

    def _steps(self) -> Iterator[Step]:
        for number in range(TOKENS - 1):
            yield Step((number,), "word ")
        stats = Stats(prompt_tokens=9, tokens=TOKENS, passes=TOKENS)
        answer = Answer("word " * TOKENS, tuple(range(TOKENS)), "length", 9, stats)
        yield Step((TOKENS - 1,), "word ", "length", answer)


class InstantTicket:
    """What `submit` gives."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps

    def __iter__(self) -> Iterator[Step]:
        return self._steps

    def cancel(self) -> None:
        """There is nothing to stop."""


def faces() -> dict[str, Callable[[], Any]]:
    """Every way to get a whole answer, by the name it goes by in the documentation."""
    reader: Any = InstantReader()
    chat, text = ChatReader(reader=reader), LangChainLLM(reader=reader)
    llm = LlamaIndexLLM(reader=reader)

    async def consume(stream: Any) -> None:
        async for _ in stream:
            pass

    async def awaited(method: Any) -> None:
        await consume(await method(QUESTION))

    return {
        "LangChain ChatReader.invoke": lambda: chat.invoke(QUESTION),
        "LangChain ChatReader.stream": lambda: list(chat.stream(QUESTION)),
        "LangChain ChatReader.astream": lambda: asyncio.run(consume(chat.astream(QUESTION))),
        "LangChain ReaderLLM.invoke": lambda: text.invoke(QUESTION),
        "LangChain ReaderLLM.stream": lambda: list(text.stream(QUESTION)),
        "LlamaIndex ReaderLLM.complete": lambda: llm.complete(QUESTION),
        "LlamaIndex ReaderLLM.stream_complete": lambda: list(llm.stream_complete(QUESTION)),
        "LlamaIndex ReaderLLM.astream_complete": lambda: asyncio.run(awaited(llm.astream_complete)),
    }


def measure(rounds: int = ROUNDS) -> dict[str, float]:
    """Milliseconds that each face adds to the bare steps: medians of rounds in which all take turns."""
    bare = InstantReader()
    ways = {"bare": lambda: list(bare.stream(QUESTION)), **faces()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    median = {name: statistics.median(times[1:]) for name, times in seconds.items()}  # the first warms up
    return {name: 1000 * (median[name] - median["bare"]) for name in ways if name != "bare"}


if __name__ == "__main__":
    for name, added in measure().items():
        print(f"{name:40}{added:7.2f} ms")
