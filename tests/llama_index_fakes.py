"""What the tests of the LlamaIndex face share: a Reader of sixty lines, every way to call, the events that fire."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import ChatMessage

from llama_index.llms.reader_rag import ReaderLLM
from reader_rag.errors import PromptError
from reader_rag.spans import Span
from reader_rag.stats import Answer, Stats, Step
from reader_rag.store import Chunk

WORDS = ("An ", "else ", "clause ", "", "runs ", "when ", "the ", "loop ", "ends.")
TEXT = "".join(WORDS)
PROMPT_TOKENS = 11
USER = [ChatMessage(role="user", content="Why?")]


class FakeReader:
    """The public face of a Reader; answers `words`, one word per step, and remembers what it was asked."""

    name = "fake/model"
    context_length = 4096
    tokenizer = SimpleNamespace(chat_template=None, added_tokens_decoder={}, decode=str)

    def __init__(
        self,
        *,
        words: Sequence[str] = WORDS,
        template: bool = True,
        delay: float = 0.0,
        fail_after: int | None = None,
    ) -> None:
        self.words = words
        self.has_chat_template = template
        self.delay = delay
        self.fail_after = fail_after
        self.requests: list[SimpleNamespace] = []
        self.offered: list[tuple[str, Chunk]] = []
        self.steps = 0
        self.closed = threading.Event()

    def stream(
        self,
        prompt: Any,
        *,
        sampling: Any = None,
        chunks: Any = (),
        drafting: Any = None,
        scope: str = "default",
        raw: bool = False,
    ) -> Iterator[Step]:
        if prompt == "":
            raise PromptError("the prompt has no tokens; pass a question")
        asked = {
            "sampling": sampling,
            "chunks": tuple(chunks),
            "drafting": drafting,
            "scope": scope,
            "raw": raw,
        }
        self.requests.append(SimpleNamespace(prompt=prompt, **asked))
        return self._run()

    def _run(self) -> Iterator[Step]:
        try:
            for index, word in enumerate(self.words):
                time.sleep(self.delay)
                if index == self.fail_after:
                    raise RuntimeError("the device is gone")
                self.steps += 1
                yield Step((index,), word)
            answer = Answer(
                text="".join(self.words),
                tokens=tuple(range(len(self.words) + 1)),
                finish_reason="stop",
                prompt_tokens=PROMPT_TOKENS,
                stats=Stats(prompt_tokens=PROMPT_TOKENS, tokens=len(self.words) + 1, passes=5),
                spans=(Span(0, 7, "c", 0, 7),),
            )
            yield Step((len(self.words),), "", "stop", answer)
        finally:
            self.closed.set()

    def offer(self, chunks: Any, scope: str = "default") -> None:
        self.offered += [(scope, chunk) for chunk in chunks]

    @property
    def asked(self) -> SimpleNamespace:
        return self.requests[-1]

    def pool(self, scope: str = "default") -> list[str]:
        return [chunk.text for owner, chunk in self.offered if owner == scope]


async def collect(stream: AsyncIterator[Any]) -> list[Any]:
    return [response async for response in stream]


async def astream_complete(llm: ReaderLLM, **options: Any) -> list[Any]:
    return await collect(await llm.astream_complete("Why?", **options))


async def astream_chat(llm: ReaderLLM, **options: Any) -> list[Any]:
    return await collect(await llm.astream_chat(USER, **options))


WHOLE: dict[str, Callable[..., Any]] = {
    "complete": lambda llm, **options: llm.complete("Why?", **options),
    "chat": lambda llm, **options: llm.chat(USER, **options),
    "acomplete": lambda llm, **options: asyncio.run(llm.acomplete("Why?", **options)),
    "achat": lambda llm, **options: asyncio.run(llm.achat(USER, **options)),
}
STREAMED: dict[str, Callable[..., list[Any]]] = {
    "stream_complete": lambda llm, **options: list(llm.stream_complete("Why?", **options)),
    "stream_chat": lambda llm, **options: list(llm.stream_chat(USER, **options)),
    "astream_complete": lambda llm, **options: asyncio.run(astream_complete(llm, **options)),
    "astream_chat": lambda llm, **options: asyncio.run(astream_chat(llm, **options)),
}
ALL: dict[str, Callable[..., Any]] = WHOLE | {
    name: lambda llm, call=call, **options: call(llm, **options)[-1] for name, call in STREAMED.items()
}
AWAITED = {name: call for name, call in ALL.items() if name.startswith("a")}


def text_of(response: Any) -> str:
    return response.text if hasattr(response, "text") else response.message.content


def replace_reader(monkeypatch: pytest.MonkeyPatch, shared: Callable[..., FakeReader]) -> None:
    """Let `Reader.shared` be the function given, without importing torch."""
    module = SimpleNamespace(Reader=SimpleNamespace(shared=shared))
    monkeypatch.setitem(sys.modules, "reader_rag.reader", module)  # type: ignore[arg-type]


class Recorder(BaseEventHandler):
    events: list[Any]

    @classmethod
    def class_name(cls) -> str:
        return "Recorder"

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.events.append(event)


class listening:  # noqa: N801 - reads as a statement
    """The events of all dispatchers while the block runs."""

    def __enter__(self) -> list[Any]:
        self.handler = Recorder(events=[])
        get_dispatcher().add_event_handler(self.handler)
        return self.handler.events

    def __exit__(self, *error: object) -> None:
        get_dispatcher().event_handlers.remove(self.handler)
