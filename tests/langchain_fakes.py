"""What the tests of the LangChain faces share: a Reader of forty lines, a store, a log of callbacks."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("langchain_core")

import numpy as np
from langchain_core.callbacks import BaseCallbackHandler

from langchain_reader_rag import ChatReader, ReaderLLM
from reader_rag import Answer, Chunk, Span, Stats, Step
from reader_rag.store.chunk import Hit

ANSWER = "A chunk is a retrieved piece of text."


class FakeReader:
    """A Reader's public face over a fixed answer: one word a step, and a record of every call."""

    name, dtype, device, width, context_length, tokenizer = "fake", "float32", "cpu", 4, 512, None

    def __init__(self, text: str = ANSWER, *, seconds: float = 0.0, fail_at: int | None = None) -> None:
        self.text, self.seconds, self.fail_at = text, seconds, fail_at
        self.calls: list[dict[str, Any]] = []
        self.offered: list[tuple[str, list[str]]] = []
        self.made = self.closed = 0

    def stream(self, prompt: Any, **options: Any) -> Iterator[Step]:
        self.calls.append({"prompt": prompt, **options})
        sampling, said = options["sampling"], ""
        words = [word + " " for word in self.text.split(" ")]
        words[-1] = words[-1][:-1]
        cuts = [self.text.find(stop) for stop in sampling.stop if stop in self.text]
        whole = self.text[: min(cuts)] if cuts else self.text
        try:
            for number, word in enumerate(words[: sampling.max_tokens]):
                time.sleep(self.seconds)
                if number == self.fail_at:
                    raise RuntimeError("the model broke")
                self.made += 1
                piece = whole[len(said) : len(said) + len(word)]
                said += piece
                yield Step((number,), piece)
                if said == whole:
                    break
            stats = Stats(prompt_tokens=7, tokens=number + 1, passes=2, scope=options["scope"])
            spans = (Span(0, 7, "c1", 0, 7),)
            reason = "stop" if said == whole else "length"
            tokens = tuple(range(number + 1))
            yield Step((), "", reason, Answer(said, tokens, reason, 7, stats, spans))
        finally:
            self.closed += 1

    def submit(self, prompt: Any, **options: Any) -> "FakeTicket":
        return FakeTicket(self.stream(prompt, **options))

    def offer(self, chunks: Any, scope: str = "default") -> None:
        self.offered.append((scope, [chunk.text for chunk in chunks]))

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]


class FakeTicket:
    """A stream that was put in the queue."""

    def __init__(self, steps: Any) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def cancel(self) -> None:
        self.steps.close()


class FakeStore:
    """Chunks c0, c1, ... in the order of their number, whatever is asked."""

    def __init__(self, size: int = 30) -> None:
        self.chunks = [Chunk(f"c{n}", f"text {n}", {"n": n}) for n in range(size)]
        self.asked: list[tuple[str, int]] = []

    def search(self, query: str, k: int = 4) -> list[Hit]:
        self.asked.append((query, k))
        return [Hit(chunk, 1.0 - n / 100) for n, chunk in enumerate(self.chunks[:k])]


class LetterEmbedder:
    """Texts as counts of letters: enough to search by, and nothing to load."""

    name, dim = "letters", 26

    def encode_query(self, texts: Sequence[str]) -> np.ndarray:
        counts = [[1.0 + text.lower().count(c) for c in "abcdefghijklmnopqrstuvwxyz"] for text in texts]
        vectors = np.asarray(counts, dtype=np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    encode_document = encode_query


class Log(BaseCallbackHandler):
    """The names of the callbacks in the order in which they came."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.tokens: list[str] = []
        self.params: list[dict[str, Any]] = []

    def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("start")
        self.params.append(kwargs["invocation_params"])

    on_llm_start = on_chat_model_start

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.events.append("token")
        self.tokens.append(token)

    def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("end")

    def on_llm_error(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("error")

    def on_retriever_end(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("retrieved")


FACES = [ChatReader, ReaderLLM]
faces = pytest.mark.parametrize("face", FACES)


def text_of(output: Any) -> str:
    return output if isinstance(output, str) else str(output.text)


async def collect(stream: AsyncIterator[Any]) -> str:
    return "".join([text_of(chunk) async for chunk in stream])


async def ticks(work: Any, every: float = 0.005) -> tuple[int, Any]:
    """How often a task that wants the loop `every` some seconds got it while `work` ran, and what `work` gave."""
    count = 0

    async def tick() -> None:
        nonlocal count
        while True:
            await asyncio.sleep(every)
            count += 1

    ticker = asyncio.create_task(tick())
    try:
        result = await work
    finally:
        ticker.cancel()
    return count, result
