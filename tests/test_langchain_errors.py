"""A call that cannot be served says so under LangChain's names and under ours, and the next call is served."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("langchain_core")

from langchain_core.exceptions import (
    ContextOverflowError,
    ModelInvalidRequestError,
    ModelNotFoundError,
    ModelTimeoutError,
)
from langchain_core.messages import HumanMessage
from langchain_fakes import ANSWER, FakeReader, faces, text_of

from langchain_reader_rag import ChatReader
from reader_rag import Reader
from reader_rag.errors import ContextError, LoadError, PromptError, SettingsError

WAYS = {
    "invoke": lambda face, prompt, options: face.invoke(prompt, **options),
    "stream": lambda face, prompt, options: list(face.stream(prompt, **options)),
    "batch": lambda face, prompt, options: face.batch([prompt], **options),
    "ainvoke": lambda face, prompt, options: asyncio.run(face.ainvoke(prompt, **options)),
}
every_way = pytest.mark.parametrize("ask", WAYS.values(), ids=WAYS)


@faces
@every_way
@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({"max_new_tokens": 3}, SettingsError),
        ({"temperature": -1}, SettingsError),
        ({"documents": [3]}, PromptError),
        ({"scope": ""}, SettingsError),
    ],
)
def test_a_bad_call_is_an_invalid_request_of_langchain_and_an_error_of_ours(
    face: Any, ask: Any, options: dict[str, Any], ours: type[Exception]
) -> None:
    model = face(reader=FakeReader())
    with pytest.raises(ModelInvalidRequestError) as found:
        ask(model, "q", options)
    assert isinstance(found.value, ours)
    assert text_of(model.invoke("q")) == ANSWER


@every_way
def test_content_that_is_no_text_is_an_invalid_request(ask: Any) -> None:
    image = [HumanMessage([{"type": "image_url", "image_url": {"url": "x"}}])]
    with pytest.raises(ModelInvalidRequestError, match="image_url"):
        ask(ChatReader(reader=FakeReader()), image, {})


@faces
@every_way
def test_a_prompt_longer_than_the_context_is_langchains_overflow(face: Any, ask: Any, reader: Reader) -> None:
    model = face(reader=reader, max_tokens=2)
    with pytest.raises(ContextOverflowError, match="takes 1024") as found:
        ask(model, "text " * 2000, {})
    assert isinstance(found.value, ContextError)
    assert isinstance(text_of(model.invoke("Why?")), str)


@faces
def test_a_model_that_is_not_there_is_not_found(face: Any) -> None:
    with pytest.raises(ModelNotFoundError, match="no model at") as found:
        face(model="/no/such/model").invoke("q")
    assert isinstance(found.value, LoadError)


@faces
def test_a_timeout_is_pythons_and_langchains_and_not_to_be_retried(face: Any) -> None:
    with pytest.raises(ModelTimeoutError) as found:
        face(reader=FakeReader(seconds=0.02), timeout=0.03).invoke("q")
    assert isinstance(found.value, TimeoutError)
    assert not found.value.is_retryable


@faces
@every_way
def test_an_empty_scope_of_the_config_is_refused_instead_of_becoming_the_default(face: Any, ask: Any) -> None:
    nobody = {"config": {"configurable": {"reader_scope": ""}}}
    with pytest.raises(SettingsError, match="reader_scope is empty"):
        ask(face(reader=FakeReader()), "q", nobody)
