"""The LlamaIndex face on a fake Reader: what every call returns and tells observers, and the package itself."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload, LlamaDebugHandler
from llama_index.core.callbacks.token_counting import TokenCountingHandler
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionStartEvent,
)
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index_fakes import (
    ALL,
    PROMPT_TOKENS,
    STREAMED,
    TEXT,
    USER,
    WHOLE,
    WORDS,
    FakeReader,
    listening,
    text_of,
)

from llama_index.llms.reader_rag import ReaderLLM, ReaderRetriever
from llama_index.llms.reader_rag import watch as watch_function
from reader_rag.errors import MissingExtraError
from reader_rag.spans import Span


def test_it_is_a_function_calling_llm_that_implements_every_method() -> None:
    assert issubclass(ReaderLLM, FunctionCallingLLM)
    assert not issubclass(ReaderLLM, CustomLLM)  # whose async methods block, and whose chat is counted twice
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


def test_an_answer_without_text_still_ends_with_one_response() -> None:
    llm = ReaderLLM(reader=FakeReader(words=()))
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


@pytest.mark.parametrize("method", STREAMED)
def test_events_of_a_stream_come_in_the_order_of_its_deltas(llm: ReaderLLM, method: str) -> None:
    with listening() as events:
        responses = STREAMED[method](llm)
    ours = [event for event in events if type(event).__name__.startswith(("LLMChat", "LLMCompletion"))]
    order = [type(event).__name__.removeprefix("LLM").removesuffix("Event") for event in ours]
    kind = "Chat" if "chat" in method else "Completion"
    assert order == [f"{kind}Start", *[f"{kind}InProgress"] * len(responses), f"{kind}End"]
    assert [event.response.delta for event in ours[1:-1]] == [response.delta for response in responses]


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


def test_public_names() -> None:
    import llama_index.llms.reader_rag as package

    assert sorted(package.__all__) == ["ReaderLLM", "ReaderRetriever", "ReaderVectorStore", "watch"]
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
