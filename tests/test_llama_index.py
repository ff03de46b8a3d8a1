"""The LlamaIndex face on a fake Reader: contracts, prompts, options, async, watching. No model is loaded."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core import VectorStoreIndex
from llama_index.core.base.llms.types import ImageBlock, MessageRole
from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload, LlamaDebugHandler
from llama_index.core.callbacks.token_counting import TokenCountingHandler
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.dispatcher import instrument_tags
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionStartEvent,
)
from llama_index.core.llms import LLM, ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode

from llama_index.llms.reader_rag import ReaderLLM, ReaderRetriever, watch
from llama_index.llms.reader_rag import watch as watch_function
from llama_index.llms.reader_rag.llm import SAMPLING_OPTIONS
from reader_rag.errors import MissingExtraError, PromptError, SettingsError
from reader_rag.settings import Drafting
from reader_rag.spans import Span
from reader_rag.stats import Answer, Stats, Step
from reader_rag.store import Chunk

WORDS = ("An ", "else ", "clause ", "", "runs ", "when ", "the ", "loop ", "ends.")
TEXT = "".join(WORDS)
PROMPT_TOKENS = 11
USER = [ChatMessage(role="user", content="Why?")]


class FakeReader:
    """The public face of a Reader; answers WORDS, one word per step, and remembers what it was asked."""

    name = "fake/model"
    context_length = 4096

    def __init__(self, *, template: bool = True, delay: float = 0.0, fail_after: int | None = None) -> None:
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
            for index, word in enumerate(WORDS):
                time.sleep(self.delay)
                if index == self.fail_after:
                    raise RuntimeError("the device is gone")
                self.steps += 1
                yield Step((index,), word)
            answer = Answer(
                text=TEXT,
                tokens=tuple(range(len(WORDS) + 1)),
                finish_reason="stop",
                prompt_tokens=PROMPT_TOKENS,
                stats=Stats(prompt_tokens=PROMPT_TOKENS, tokens=len(WORDS) + 1, passes=5),
                spans=(Span(0, 7, "c", 0, 7),),
            )
            yield Step((len(WORDS),), "", "stop", answer)
        finally:
            self.closed.set()

    def offer(self, chunks: Any, scope: str = "default") -> None:
        self.offered += [(scope, chunk) for chunk in chunks]

    @property
    def asked(self) -> SimpleNamespace:
        return self.requests[-1]

    def pool(self, scope: str = "default") -> list[str]:
        return [chunk.text for owner, chunk in self.offered if owner == scope]


@pytest.fixture
def fake() -> FakeReader:
    return FakeReader()


@pytest.fixture
def llm(fake: FakeReader) -> ReaderLLM:
    return ReaderLLM(reader=fake)


async def _collect(stream: AsyncIterator[Any]) -> list[Any]:
    return [response async for response in stream]


async def _astream_complete(llm: ReaderLLM, **options: Any) -> list[Any]:
    return await _collect(await llm.astream_complete("Why?", **options))


async def _astream_chat(llm: ReaderLLM, **options: Any) -> list[Any]:
    return await _collect(await llm.astream_chat(USER, **options))


WHOLE: dict[str, Callable[..., Any]] = {
    "complete": lambda llm, **options: llm.complete("Why?", **options),
    "chat": lambda llm, **options: llm.chat(USER, **options),
    "acomplete": lambda llm, **options: asyncio.run(llm.acomplete("Why?", **options)),
    "achat": lambda llm, **options: asyncio.run(llm.achat(USER, **options)),
}
STREAMED: dict[str, Callable[..., list[Any]]] = {
    "stream_complete": lambda llm, **options: list(llm.stream_complete("Why?", **options)),
    "stream_chat": lambda llm, **options: list(llm.stream_chat(USER, **options)),
    "astream_complete": lambda llm, **options: asyncio.run(_astream_complete(llm, **options)),
    "astream_chat": lambda llm, **options: asyncio.run(_astream_chat(llm, **options)),
}
ALL: dict[str, Callable[..., Any]] = WHOLE | {
    name: lambda llm, call=call, **options: call(llm, **options)[-1] for name, call in STREAMED.items()
}
AWAITED = {name: call for name, call in ALL.items() if name.startswith("a")}


def text_of(response: Any) -> str:
    return response.text if hasattr(response, "text") else response.message.content


# What a call returns.


def test_it_subclasses_llm_directly_and_implements_every_method() -> None:
    assert ReaderLLM.__bases__ == (LLM,)
    assert ReaderLLM.class_name() == "ReaderLLM"
    assert not inspect.isabstract(ReaderLLM)


@pytest.mark.parametrize("method", ALL)
def test_every_method_gives_the_whole_text_and_the_facts(llm: ReaderLLM, method: str) -> None:
    response = ALL[method](llm)
    assert text_of(response) == TEXT
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 10, "total_tokens": PROMPT_TOKENS + 10}
    assert response.raw["usage"] == usage
    assert response.additional_kwargs == usage
    assert response.raw["finish_reason"] == "stop"
    assert response.raw["reader"]["tokens_per_pass"] == 2.0
    assert response.raw["reader"]["spans"] == [Span(0, 7, "c", 0, 7).to_dict()]
    assert type(response.raw) is dict
    assert json.loads(json.dumps(response.raw)) == response.raw


@pytest.mark.parametrize("method", STREAMED)
def test_deltas_join_to_the_text_and_texts_accumulate(llm: ReaderLLM, method: str) -> None:
    responses = STREAMED[method](llm)
    assert "".join(response.delta for response in responses) == TEXT
    so_far = ""
    for response in responses:
        so_far += response.delta
        assert text_of(response) == so_far
    assert [response.raw is not None for response in responses] == [False] * (len(responses) - 1) + [True]
    assert len(responses) == len(WORDS)  # the empty word adds none, the end adds one


def test_an_answer_without_text_still_ends_with_one_response(
    monkeypatch: pytest.MonkeyPatch, llm: ReaderLLM
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "WORDS", ())
    monkeypatch.setattr(sys.modules[__name__], "TEXT", "")
    assert [response.text for response in llm.stream_complete("Why?")] == [""]
    assert llm.chat(USER).message.content == ""


@pytest.mark.parametrize("method", WHOLE)
def test_a_whole_response_has_no_delta(llm: ReaderLLM, method: str) -> None:
    assert WHOLE[method](llm).delta is None


@pytest.mark.parametrize("method", ALL)
def test_tokens_are_counted_exactly_once(fake: FakeReader, method: str) -> None:
    counter = TokenCountingHandler(tokenizer=lambda text: pytest.fail("counted by another tokenizer"))
    llm = ReaderLLM(reader=fake, callback_manager=CallbackManager([counter]))
    ALL[method](llm)
    assert len(counter.llm_token_counts) == 1
    assert counter.prompt_llm_token_count == PROMPT_TOKENS
    assert counter.completion_llm_token_count == 10


@pytest.mark.parametrize("method", ALL)
def test_one_start_and_one_end_event_per_call(llm: ReaderLLM, method: str) -> None:
    with listening() as events:
        response = ALL[method](llm)
    kinds = [type(event) for event in events]
    start, end = (
        (LLMChatStartEvent, LLMChatEndEvent)
        if "chat" in method
        else (LLMCompletionStartEvent, LLMCompletionEndEvent)
    )
    assert kinds.count(start) == kinds.count(end) == 1
    assert sum("Start" in kind.__name__ and "LLM" in kind.__name__ for kind in kinds) == 1
    ended = next(event for event in events if type(event) is end)
    assert ended.response.raw == response.raw
    assert ended.response.raw["usage"]["prompt_tokens"] == PROMPT_TOKENS


def test_observers_see_the_payload_and_no_secret(fake: FakeReader) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm = ReaderLLM(reader=fake, temperature=0.5, seed=1, callback_manager=CallbackManager([debug]))
    llm.complete("Why?")
    payload = debug.get_event_pairs(CBEventType.LLM)[0][0].payload[EventPayload.SERIALIZED]
    assert payload["model"] == "fake/model"
    assert payload["temperature"] == 0.5
    assert "model_kwargs" not in payload
    assert json.dumps(payload)
    assert "secret" not in repr(ReaderLLM("m", model_kwargs={"token": "secret"}))


def test_the_prompt_may_be_given_by_name_but_once(llm: ReaderLLM) -> None:
    assert llm.complete(prompt="Why?").text == TEXT
    assert list(llm.stream_complete(prompt="Why?"))[-1].text == TEXT
    with pytest.raises(TypeError):
        llm.complete("Why?", prompt="Why?")
    with pytest.raises(ValueError, match="No prompt"):
        llm.complete()


# Prompts.


@pytest.mark.parametrize("method", ["complete", "stream_complete", "acomplete", "astream_complete"])
def test_a_plain_prompt_enters_the_template_as_one_user_message(
    llm: ReaderLLM, fake: FakeReader, method: str
) -> None:
    ALL[method](llm)
    assert fake.asked.prompt == [{"role": "user", "content": "Why?"}]
    assert not fake.asked.raw


@pytest.mark.parametrize("options", [{"raw": True}, {"formatted": True}])
@pytest.mark.parametrize("method", ["complete", "stream_complete", "acomplete", "astream_complete"])
def test_a_raw_or_formatted_prompt_stays_as_it_is(
    fake: FakeReader, method: str, options: dict[str, bool]
) -> None:
    ALL[method](ReaderLLM(reader=fake, system_prompt="Be brief."), **options)
    assert (fake.asked.prompt, fake.asked.raw) == ("Why?", True)


def test_raw_of_the_constructor_is_a_default_that_a_call_overrides(fake: FakeReader) -> None:
    llm = ReaderLLM(reader=fake, raw=True)
    llm.complete("Why?")
    assert fake.asked.raw
    llm.complete("Why?", raw=False)
    assert not fake.asked.raw


def test_a_system_prompt_leads_complete_and_chat_once(fake: FakeReader) -> None:
    llm = ReaderLLM(reader=fake, system_prompt="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    question = {"role": "user", "content": "Why?"}
    llm.complete("Why?")
    assert fake.asked.prompt == [system, question]
    llm.chat(USER)
    assert fake.asked.prompt == [system, question]
    llm.predict(PromptTemplate("Why?"))
    assert fake.asked.prompt == [system, question]
    own = ChatMessage(role="system", content="Rhyme.")
    llm.chat([own, *USER])
    assert fake.asked.prompt == [{"role": "system", "content": "Rhyme."}, question]


def test_completion_to_prompt_formats_instead_of_the_template(fake: FakeReader) -> None:
    llm = ReaderLLM(reader=fake, completion_to_prompt=lambda text: f"Q: {text}\nA:")
    llm.complete("Why?")
    assert (fake.asked.prompt, fake.asked.raw) == ("Q: Why?\nA:", True)
    list(llm.stream_complete("Why?"))
    assert fake.asked.prompt == "Q: Why?\nA:"
    llm.complete("Q: given\nA:", formatted=True)
    assert fake.asked.prompt == "Q: given\nA:"


def test_messages_to_prompt_formats_instead_of_the_template(fake: FakeReader) -> None:
    llm = ReaderLLM(reader=fake, messages_to_prompt=lambda messages: "|".join(m.content for m in messages))
    llm.chat([ChatMessage(role="system", content="S"), *USER])
    assert (fake.asked.prompt, fake.asked.raw) == ("S|Why?", True)


def test_a_model_without_template_gets_llama_index_text_without_documents() -> None:
    fake = FakeReader(template=False)
    llm = ReaderLLM(reader=fake, system_prompt="Be brief.")
    assert not llm.metadata.is_chat_model
    llm.complete("Why?")
    assert (fake.asked.prompt, fake.asked.raw) == ("Be brief.\n\nWhy?", False)
    llm.chat([ChatMessage(role="user", content="Why?", additional_kwargs={"documents": ["A secret text."]})])
    assert (fake.asked.prompt, fake.asked.raw) == ("system: Be brief.\nuser: Why?\nassistant: ", False)
    assert [chunk.text for chunk in fake.asked.chunks] == ["A secret text."]
    llm.predict(PromptTemplate("Say {x}."), x="why")
    # Not raw: control strings in the documents of a query engine must stay text.
    assert (fake.asked.prompt, fake.asked.raw) == ("Be brief.\n\nSay why.", False)
    llm.complete("<s>Why?", raw=True)
    assert (fake.asked.prompt, fake.asked.raw) == ("<s>Why?", True)
    own = ReaderLLM(reader=fake, completion_to_prompt=lambda text: f"<s>{text}</s>")
    own.predict(PromptTemplate("Why?"))
    assert (fake.asked.prompt, fake.asked.raw) == ("<s>Why?</s>", True)


@pytest.mark.parametrize("role", list(MessageRole))
def test_every_role_has_a_name_that_templates_know(
    llm: ReaderLLM, fake: FakeReader, role: MessageRole
) -> None:
    llm.chat([ChatMessage(role=role, content="x"), *USER])
    assert fake.asked.prompt[0]["role"] in {"system", "user", "assistant", "tool"}


def test_images_are_refused_and_no_message_is_an_error(llm: ReaderLLM) -> None:
    with pytest.raises(PromptError, match="ImageBlock"):
        llm.chat([ChatMessage(role="user", blocks=[ImageBlock(url="http://localhost/x.png")])])
    with pytest.raises(PromptError, match="no message"):
        llm.chat([])


# Options.


def test_options_of_a_call_override_those_of_the_model(fake: FakeReader) -> None:
    llm = ReaderLLM(reader=fake, max_tokens=64, temperature=0.7, stop="END", seed=3, repetition_penalty=1.1)
    llm.complete("Why?")
    base = fake.asked.sampling
    assert (base.max_tokens, base.temperature, base.stop, base.seed) == (64, 0.7, ("END",), 3)
    assert base.repetition_penalty == 1.1
    llm.chat(USER, max_tokens=5, temperature=0.1, top_p=0.9, top_k=7, min_p=0.1, seed=9, stop=["a", "b"])
    own = fake.asked.sampling
    assert (own.max_tokens, own.temperature, own.top_p, own.top_k) == (5, 0.1, 0.9, 7)
    assert (own.min_p, own.seed, own.stop, own.repetition_penalty) == (0.1, 9, ("a", "b"), 1.1)
    llm.complete("Why?", stop="one", max_tokens=None)
    assert (fake.asked.sampling.stop, fake.asked.sampling.max_tokens) == (("one",), 64)
    llm.temperature = 0.2
    llm.complete("Why?")
    assert fake.asked.sampling.temperature == 0.2


def test_every_sampling_option_is_a_field() -> None:
    assert set(SAMPLING_OPTIONS) <= set(ReaderLLM.model_fields)


@pytest.mark.parametrize("method", ALL)
def test_an_unknown_option_of_a_call_raises_with_the_known_ones(
    llm: ReaderLLM, fake: FakeReader, method: str
) -> None:
    with pytest.raises(SettingsError, match=r"max_new_tokens.*max_tokens.*temperature"):
        ALL[method](llm, max_new_tokens=5)
    assert not fake.requests


def test_an_unknown_option_of_the_constructor_raises_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"device_map.*device.*max_tokens"):
        ReaderLLM("m", device_map="auto")


@pytest.mark.parametrize("options", [{"temperature": -1}, {"top_p": 0}, {"max_tokens": 0}])
def test_a_value_out_of_range_raises_at_once(llm: ReaderLLM, options: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        ReaderLLM("m", **options)
    with pytest.raises(SettingsError):
        llm.complete("Why?", **options)


def test_reader_and_options_of_loading_exclude_each_other(fake: FakeReader) -> None:
    with pytest.raises(SettingsError, match=r"model, dtype.*Reader\.load"):
        ReaderLLM("m", reader=fake, dtype="float32")


def test_options_of_loading_cannot_change_later(llm: ReaderLLM) -> None:
    with pytest.raises(ValueError, match="frozen"):
        llm.dtype = "float32"


def test_scope_and_drafting_reach_the_reader(fake: FakeReader) -> None:
    drafting = Drafting(sources=())
    ReaderLLM(reader=fake, scope="tenant-a", drafting=drafting).complete("Why?")
    assert (fake.asked.scope, fake.asked.drafting) == ("tenant-a", drafting)


def test_metadata_sizes_prompts_by_the_model(fake: FakeReader) -> None:
    metadata = ReaderLLM(reader=fake, max_tokens=99).metadata
    assert (metadata.context_window, metadata.num_output) == (4096, 99)
    assert metadata.is_chat_model
    assert not metadata.is_function_calling_model
    assert metadata.model_name == "fake/model"
    assert ReaderLLM(reader=fake, context_window=512).metadata.context_window == 512


# Documents.


def test_documents_of_a_call_and_of_messages_reach_the_drafter_alone(
    llm: ReaderLLM, fake: FakeReader
) -> None:
    node = TextNode(id_="n1", text="A loop may end.", metadata={"file": "for.md"})
    scored = NodeWithScore(node=TextNode(id_="n2", text="Break skips else."), score=0.5)
    message = ChatMessage(role="user", content="Why?", additional_kwargs={"documents": [node, scored]})
    llm.chat([message], documents=[Chunk("c", "A chunk."), "A text."])
    assert fake.asked.prompt == [{"role": "user", "content": "Why?"}]
    assert [chunk.text for chunk in fake.asked.chunks] == [
        "A loop may end.",
        node.get_content(MetadataMode.LLM),
        "Break skips else.",
        "A chunk.",
        "A text.",
    ]
    assert [chunk.id for chunk in fake.asked.chunks][::2] == ["n1", "n2", Chunk.from_text("A text.").id]
    llm.complete("Why?", documents=node)
    assert fake.asked.chunks[0].id == "n1"


def test_what_cannot_be_drafted_from_is_refused(llm: ReaderLLM) -> None:
    for documents in ([3], 3):
        with pytest.raises(SettingsError, match="int"):
            llm.complete("Why?", documents=documents)


# Loading.


def replace_reader(monkeypatch: pytest.MonkeyPatch, shared: Callable[..., FakeReader]) -> None:
    """Let `Reader.shared` be the function given, without importing torch."""
    module = SimpleNamespace(Reader=SimpleNamespace(shared=shared))
    monkeypatch.setitem(sys.modules, "reader_rag.reader", module)  # type: ignore[arg-type]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, fake: FakeReader) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def share(*args: Any, **options: Any) -> FakeReader:
        calls.append((args, options))
        return fake

    replace_reader(monkeypatch, share)
    return calls


def test_the_model_loads_once_at_first_use(shared: list[Any]) -> None:
    llm = ReaderLLM("org/model", dtype="float32", context_window=512, max_tokens=9)
    assert llm.to_payload()["model"] == "org/model"
    assert llm.to_payload()["temperature"] == 0.0
    assert "reader" not in repr(llm)
    assert not shared
    llm.complete("Why?")
    llm.chat(USER)
    assert shared == [(("org/model",), {"dtype": "float32", "context": 512})]
    assert llm.to_payload()["context_window"] == 512


def test_defaults_ask_for_the_plain_shared_reader(shared: list[Any]) -> None:
    assert ReaderLLM().reader is ReaderLLM(progress=False).reader
    assert shared == [((None,), {})] * 2
    path = Path("folder")
    assert ReaderLLM(path).model == "folder"
    live = SimpleNamespace(name_or_path="live/model")
    assert ReaderLLM(live, tokenizer=live).model == "live/model"


async def test_async_calls_load_the_model_off_the_loop(
    monkeypatch: pytest.MonkeyPatch, fake: FakeReader
) -> None:
    threads: list[int] = []

    def share(*args: Any) -> FakeReader:
        threads.append(threading.get_ident())
        return fake

    replace_reader(monkeypatch, share)
    await ReaderLLM().acomplete("Why?")
    await _astream_chat(ReaderLLM())
    assert len(threads) == 2
    assert threading.get_ident() not in threads


def test_chunks_offered_before_loading_wait_for_the_model(shared: list[Any], fake: FakeReader) -> None:
    llm = ReaderLLM(scope="a")
    llm.offer([Chunk("1", "first")])
    llm.offer([Chunk("2", "second")], scope="b")
    assert not shared
    llm.complete("Why?")
    assert (fake.pool("a"), fake.pool("b")) == (["first"], ["second"])
    llm.offer([Chunk("3", "third")])
    assert fake.pool("a") == ["first", "third"]


def test_copies_share_the_engine_and_pickles_leave_it_behind(shared: list[Any], fake: FakeReader) -> None:
    llm = ReaderLLM("org/model", temperature=0.3)
    llm.complete("Why?")
    assert copy.deepcopy(llm).reader is fake
    assert llm.model_copy().reader is fake
    assert len(shared) == 1
    again = pickle.loads(pickle.dumps(llm))
    assert (again.model, again.temperature) == ("org/model", 0.3)
    again.complete("Why?")
    assert shared[1] == (("org/model",), {})
    rebuilt = ReaderLLM.from_dict(llm.to_dict())
    assert (rebuilt.model, rebuilt.temperature) == ("org/model", 0.3)


# Ends, errors and the event loop.


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
        "astream_complete": lambda: _astream_complete(llm),
        "astream_chat": lambda: _astream_chat(llm),
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
        "astream_complete": lambda: _astream_complete(llm),
        "astream_chat": lambda: _astream_chat(llm),
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
    results = await asyncio.gather(*(_astream_complete(llm) for _ in range(8)))
    assert {responses[-1].text for responses in results} == {TEXT}


def test_a_stream_may_be_continued_in_another_thread(llm: ReaderLLM) -> None:
    stream = llm.stream_complete("Why?")
    deltas = [next(stream).delta]
    thread = threading.Thread(target=lambda: deltas.extend(part.delta for part in stream))
    thread.start()
    thread.join()
    assert "".join(deltas) == TEXT


# Watching foreign retrievers.


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
    shared: list[Any], fake: FakeReader, index: VectorStoreIndex
) -> None:
    llm = ReaderLLM()
    with watch(llm):
        index.as_retriever().retrieve("loop")
    assert not shared
    llm.complete("Why?")
    assert "A loop may end." in fake.pool()


# The package.


def test_public_names() -> None:
    import llama_index.llms.reader_rag as package

    assert sorted(package.__all__) == ["ReaderLLM", "ReaderRetriever", "watch"]
    assert watch_function is package.watch
    assert ReaderRetriever is package.ReaderRetriever
    import llama_index
    import llama_index.llms

    assert getattr(llama_index, "__file__", None) is None
    assert getattr(llama_index.llms, "__file__", None) is None


def test_without_llama_index_the_import_names_the_command() -> None:
    assert issubclass(MissingExtraError, ImportError)
    script = (
        "import sys; sys.modules['llama_index.core'] = None\n"
        "try:\n    import llama_index.llms.reader_rag\n"
        "except ImportError as error:\n    print(type(error).__name__, error)"
    )
    folders = {str(Path(folder).resolve()) for folder in sys.path if folder}
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sorted(folders)!r}\n{script}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith("MissingExtraError")
    assert 'pip install "reader-rag[llama-index]"' in result.stdout


class _Recorder(BaseEventHandler):
    events: list[Any]

    @classmethod
    def class_name(cls) -> str:
        return "Recorder"

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.events.append(event)


class listening:  # noqa: N801 - reads as a statement
    """The events of all dispatchers while the block runs."""

    def __enter__(self) -> list[Any]:
        self.handler = _Recorder(events=[])
        get_dispatcher().add_event_handler(self.handler)
        return self.handler.events

    def __exit__(self, *error: object) -> None:
        get_dispatcher().event_handlers.remove(self.handler)
