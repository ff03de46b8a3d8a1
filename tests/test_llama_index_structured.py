"""Structured output in LlamaIndex: classes filled in by a grammar, constraints of a call, log-probabilities."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("llama_index.core")
pytest.importorskip("llguidance")

from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.instrumentation.events.llm import (
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import TextNode
from llama_index.core.types import PydanticProgramMode
from llama_index_corpus import Says
from llama_index_fakes import ALL, USER, listening, text_of
from pydantic import BaseModel, Field

from llama_index.llms.reader_rag import ReaderLLM
from reader_rag import Drafting, Reader
from reader_rag.errors import SettingsError
from reader_rag.structured import Constraint

pytestmark = pytest.mark.filterwarnings("ignore:The `json` method is deprecated")  # LlamaIndex's own

PROMPT = PromptTemplate("Describe {what}.")


class Verdict(BaseModel):
    """Bounded, so that a model of random weights ends."""

    subject: str = Field(max_length=6)
    kind: Literal["loop", "branch"]
    lines: int = Field(ge=1, le=9)


class Story(BaseModel):
    """Not bounded."""

    text: str


@pytest.fixture(scope="module")
def reader(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader.load(tiny_model, dtype="float32", device="cpu", cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture
def llm(reader: Reader) -> ReaderLLM:
    return ReaderLLM(reader=reader, max_tokens=100)


async def test_a_class_is_filled_in_the_same_in_all_four_ways(llm: ReaderLLM) -> None:
    streamed = await llm.astream_structured_predict(Verdict, PROMPT, what="a while statement")
    found = [
        llm.structured_predict(Verdict, PROMPT, what="a while statement"),
        await llm.astructured_predict(Verdict, PROMPT, what="a while statement"),
        list(llm.stream_structured_predict(Verdict, PROMPT, what="a while statement"))[-1],
        [partial async for partial in streamed][-1],
    ]
    assert isinstance(found[0], Verdict)
    assert found == [found[0]] * 4


def test_drafts_change_no_field(llm: ReaderLLM, reader: Reader) -> None:
    plain = ReaderLLM(reader=reader, max_tokens=100, drafting=Drafting(sources=()))
    for what in ("a for statement", "an if statement", "a match statement"):
        drafted = llm.structured_predict(Verdict, PROMPT, what=what)
        assert drafted == plain.structured_predict(Verdict, PROMPT, what=what)


def test_a_stream_shows_the_object_grow(reader: Reader) -> None:
    text = '{"subject": "while", "kind": "loop", "lines": 3}'
    llm = ReaderLLM(reader=reader, max_tokens=100, processors=(Says(reader, text),))
    *partials, last = llm.stream_structured_predict(Verdict, PROMPT, what="it")
    assert last == Verdict(subject="while", kind="loop", lines=3)
    subjects = [partial.subject or "" for partial in partials]
    assert subjects == sorted(subjects, key=len)
    assert partials[-1].subject == "while"
    assert len(partials) > 2


def test_a_structured_llm_answers_in_its_class(llm: ReaderLLM) -> None:
    structured = llm.as_structured_llm(Verdict)
    response = structured.chat(USER)
    assert isinstance(response.raw, Verdict)
    assert Verdict.model_validate_json(response.message.content) == response.raw
    assert structured.complete("Why?").raw == response.raw
    assert list(structured.stream_chat(USER))[-1].raw == response.raw


async def test_a_query_engine_takes_a_structured_llm(llm: ReaderLLM) -> None:
    index = VectorStoreIndex([TextNode(text="A loop runs.")], embed_model=MockEmbedding(embed_dim=4))
    engine = index.as_query_engine(llm=llm.as_structured_llm(Verdict))
    response = engine.query("What runs?")
    assert isinstance(response.response, Verdict)
    assert (await engine.aquery("What runs?")).response == response.response


def test_structured_prediction_fires_its_events_around_the_chat(llm: ReaderLLM) -> None:
    with listening() as events:
        found = llm.structured_predict(Verdict, PROMPT, what="it")
    kinds = [type(event).__name__ for event in events if "LLM" in type(event).__name__]
    assert kinds == [
        "LLMStructuredPredictStartEvent",
        "LLMChatStartEvent",
        "LLMChatEndEvent",
        "LLMStructuredPredictEndEvent",
    ]
    assert next(e for e in events if isinstance(e, LLMStructuredPredictStartEvent)).output_cls is Verdict
    assert next(e for e in events if isinstance(e, LLMStructuredPredictEndEvent)).output == found


async def test_an_object_that_was_cut_off_is_an_error_with_the_mend(reader: Reader, llm: ReaderLLM) -> None:
    short = {"llm_kwargs": {"max_tokens": 8}, "what": "it"}
    with pytest.raises(SettingsError, match="Story was cut off after 8 tokens: raise max_tokens"):
        llm.structured_predict(Story, PROMPT, **short)
    with pytest.raises(SettingsError, match="max_tokens"):
        await llm.astructured_predict(Story, PROMPT, **short)
    with pytest.raises(SettingsError, match="max_tokens"):
        list(llm.stream_structured_predict(Story, PROMPT, **short))


def test_a_second_constraint_is_refused(llm: ReaderLLM) -> None:
    with pytest.raises(SettingsError, match="class to fill in"):
        llm.structured_predict(Verdict, PROMPT, llm_kwargs={"constraint": Constraint.json()}, what="it")


def test_a_program_mode_of_ones_own_uses_llama_indexs_programs(reader: Reader) -> None:
    text = 'Sure: {"subject": "while", "kind": "loop", "lines": 3}'  # which the grammar would not let through
    mode = PydanticProgramMode.LLM
    llm = ReaderLLM(
        reader=reader, max_tokens=100, processors=(Says(reader, text),), pydantic_program_mode=mode
    )
    prompt = PromptTemplate("{what}")
    assert llm.structured_predict(Verdict, prompt, what="it").subject == "while"


@pytest.mark.parametrize("method", ALL)
def test_a_constraint_of_a_call_holds_under_every_method(llm: ReaderLLM, method: str) -> None:
    assert text_of(ALL[method](llm, constraint=Constraint.choice(["yes", "no"]))) in {"yes", "no"}
    assert text_of(ALL[method](llm, constraint=Constraint.regex(r"\d{4}-\d\d")))[4] == "-"


def test_a_constraint_of_the_model_holds_for_every_call_and_travels(reader: Reader) -> None:
    llm = ReaderLLM(reader=reader, constraint=Constraint.choice(["yes", "no"]))
    assert llm.complete("Why?").text in {"yes", "no"}
    assert ReaderLLM.from_dict(llm.to_dict()).constraint == llm.constraint


def test_what_cannot_be_a_constraint_is_refused_and_the_model_stays_usable(llm: ReaderLLM) -> None:
    with pytest.raises(SettingsError):
        llm.complete("Why?", constraint="yes or no")
    with pytest.raises(SettingsError, match="cannot be compiled"):
        llm.complete("Why?", constraint=Constraint.regex("(unclosed"))
    assert llm.complete("Why?", max_tokens=2).raw["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("method", ALL)
def test_logprobs_come_on_request(llm: ReaderLLM, method: str) -> None:
    response: Any = ALL[method](llm, max_tokens=4, logprobs=2)
    assert len(response.logprobs) == response.raw["usage"]["completion_tokens"]
    for place in response.logprobs:
        assert 2 <= len(place) <= 3
        assert place[0].logprob == max(
            each.logprob for each in place
        )  # greedy: the token said is the likeliest
        assert sum(math.exp(each.logprob) for each in place) <= 1.0001
    assert ALL[method](llm, max_tokens=4).logprobs is None
