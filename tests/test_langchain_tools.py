"""Tools, structured output and log-probabilities of ChatReader, over a tiny model that really runs."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("langchain_core")
pytest.importorskip("llguidance")

from langchain_core.caches import InMemoryCache
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_fakes import FakeReader, Log, faces, text_of
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from langchain_reader_rag import ChatReader, ReaderLLM
from reader_rag import Drafting, Reader
from reader_rag.errors import PromptError, SettingsError
from reader_rag.structured import Constraint

OFF = Drafting(sources=())


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=6)
    kind: Literal["reader", "writer"]


class Named(TypedDict):
    """A name."""

    kind: Literal["reader", "writer"]


@tool
def get_weather(place: Literal["Oslo", "Quito"], days: Literal[1, 2, 3]) -> str:
    """The weather at a place."""
    return f"{place}: sun for {days} days"


@tool
def clock() -> str:
    """The time."""
    return "noon"


@pytest.fixture(scope="module")
def live(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader.load(
        tiny_model, dtype="float32", device="cpu", width=8, cache_dir=tmp_path_factory.mktemp("cache")
    )


@pytest.fixture
def chat(live: Reader) -> ChatReader:
    return ChatReader(reader=live, tool_format="hermes", max_tokens=120)


def joined(stream: Any) -> Any:
    full = None
    for chunk in stream:
        full = chunk if full is None else full + chunk
    return full


# Tools


@pytest.mark.parametrize("choice", ["any", "required", True, "get_weather", "clock"])
async def test_a_call_comes_out_of_every_way_to_ask(chat: ChatReader, choice: Any) -> None:
    bound = chat.bind_tools([get_weather, clock], tool_choice=choice)
    messages = [
        bound.invoke("the weather?"),
        joined(bound.stream("the weather?")),
        await bound.ainvoke("the weather?"),
        bound.invoke("the weather?", drafting=OFF),
    ]
    full = None
    async for chunk in bound.astream("the weather?"):
        full = chunk if full is None else full + chunk
    calls = [(m.tool_calls[0]["name"], m.tool_calls[0]["args"]) for m in [*messages, full]]
    assert all(call == calls[0] for call in calls)
    assert all(len(m.tool_calls) == 1 and m.content == "" for m in [*messages, full])
    name, args = calls[0]
    assert name == choice or choice in ("any", "required", True)
    assert {"get_weather": get_weather, "clock": clock}[name].invoke(args)
    assert len({m.tool_calls[0]["id"] for m in messages}) == len(messages)


def test_a_tools_result_goes_back_to_the_model(live: Reader) -> None:
    chat = ChatReader(reader=live, tool_format="hermes", max_tokens=160, tool_choice="first")
    bound = chat.bind_tools([get_weather])
    question = HumanMessage("the weather?")
    call = bound.invoke([question])
    result = get_weather.invoke(call.tool_calls[0])
    assert isinstance(result, ToolMessage)
    final = bound.invoke([question, call, result], max_tokens=8)
    assert isinstance(final, AIMessage)
    assert final.tool_calls == []
    assert final.usage_metadata["input_tokens"] == chat.get_num_tokens_from_messages(
        [question, call, result], tools=[get_weather]
    )


def test_tools_reach_the_reader_as_openai_functions() -> None:
    fake = FakeReader()
    chat = ChatReader(reader=fake)
    bound = chat.bind_tools([get_weather, Person, {"name": "f", "parameters": {}}], parallel_tool_calls=False)
    log = Log()
    bound.invoke(
        [HumanMessage("q"), AIMessage("", tool_calls=[{"name": "f", "args": {"a": "日"}, "id": "1"}])],
        {"callbacks": [log]},
    )
    sent = fake.calls[0]
    assert [each["function"]["name"] for each in sent["tools"]] == ["get_weather", "Person", "f"]
    assert (sent["tool_choice"], sent["parallel_tool_calls"]) == ("auto", False)
    assert sent["prompt"][1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": "日"}}
    with pytest.raises(SettingsError, match="bind some"):
        chat.invoke("q", tool_choice="any")


def test_a_cut_call_is_an_invalid_one(chat: ChatReader) -> None:
    bound = chat.bind_tools([get_weather], tool_choice="any")
    for message in (bound.invoke("q", max_tokens=9), joined(bound.stream("q", max_tokens=9))):
        assert (message.tool_calls, message.content) == ([], "")
        assert message.invalid_tool_calls[0]["error"] == "max_tokens cut it off"
        with pytest.raises(PromptError, match="more max_tokens"):
            chat.invoke([HumanMessage("q"), message])


def test_a_model_without_a_format_refuses_tools_and_stays_usable(live: Reader) -> None:
    chat = ChatReader(reader=live, max_tokens=4)
    with pytest.raises(PromptError, match='tool_format="hermes"'):
        chat.bind_tools([clock]).invoke("q")
    assert chat.invoke("q").usage_metadata["output_tokens"] <= 4
    assert not chat.profile["tool_calling"]
    assert ChatReader(reader=live, tool_format="hermes").profile["tool_calling"]


# Structured output


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
async def test_answers_are_of_the_schema_by_every_method(chat: ChatReader, method: Any) -> None:
    model = chat.with_structured_output(Person, method=method)
    person = model.invoke("who?")
    assert isinstance(person, Person)
    assert await model.ainvoke("who?") == person
    assert list(model.stream("who?"))[-1] == person
    assert model.batch(["who?"] * 3) == [person] * 3
    for schema in (
        Named,
        Person.model_json_schema(),
        {"type": "object", "properties": {"kind": {"enum": ["reader"]}}},
    ):
        if method == "function_calling" and isinstance(schema, dict) and "title" not in schema:
            continue  # a tool has a name
        found = chat.with_structured_output(schema, method=method).invoke("who?")
        assert isinstance(found, dict)
        assert found.get("kind", "reader") in ("reader", "writer")


def test_include_raw_keeps_the_message_and_the_error(chat: ChatReader) -> None:
    model = chat.with_structured_output(Person, include_raw=True)
    found = model.invoke("who?")
    assert json.loads(found["raw"].content)["name"] == found["parsed"].name
    assert found["parsing_error"] is None
    short = ChatReader(reader=chat, max_tokens=5)
    found = short.with_structured_output(Person, include_raw=True).invoke("who?")
    assert found["parsed"] is None
    assert isinstance(found["parsing_error"], OutputParserException)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("schema", [Person, Person.model_json_schema()])
def test_an_answer_that_was_cut_off_raises(chat: ChatReader, method: Any, schema: Any) -> None:
    short = ChatReader(reader=chat, tool_format="hermes", max_tokens=12)
    model = short.with_structured_output(schema, method=method)
    with pytest.raises(OutputParserException, match="max_tokens"):
        model.invoke("who?")
    with pytest.raises(OutputParserException, match="max_tokens"):
        list(model.stream("who?"))


def test_any_json_object_by_json_mode(live: Reader) -> None:
    chat = ChatReader(reader=live, max_tokens=300, logit_bias={live.encode("}")[0]: 40.0})
    assert isinstance(chat.with_structured_output(method="json_mode").invoke("q"), dict)
    assert isinstance(json.loads(chat.invoke("q", response_format={"type": "json_object"}).content), dict)


@faces
def test_constraints_are_options_of_every_call(face: Any, live: Reader) -> None:
    model, choice = face(reader=live), Constraint.choice(["yes", "no"])
    assert text_of(model.invoke("q", constraint=choice)) in ("yes", "no")
    assert text_of(face(reader=live, constraint=choice).invoke("q")) in ("yes", "no")
    assert "".join(text_of(chunk) for chunk in model.bind(constraint=choice).stream("q")) in ("yes", "no")


def test_response_format_is_understood_as_openai_writes_it(live: Reader) -> None:
    chat = ChatReader(reader=live, max_tokens=120)
    shape = {"type": "json_schema", "json_schema": {"name": "P", "schema": Person.model_json_schema()}}
    assert Person.model_validate_json(chat.invoke("q", response_format=shape).content)
    plain = chat.invoke("q", max_tokens=5)
    assert chat.invoke("q", max_tokens=5, response_format={"type": "text"}).content == plain.content
    for wrong in ("json", {"type": "xml"}, {"type": "json_schema"}):
        with pytest.raises(SettingsError, match="json_object"):
            chat.invoke("q", response_format=wrong)
    with pytest.raises(SettingsError, match="not both"):
        chat.invoke("q", response_format={"type": "json_object"}, constraint=Constraint.json())


def test_what_cannot_be_a_schema_raises_before_anything_runs(chat: ChatReader) -> None:
    for schema, says in (
        ({"type": "object", "properties": {"a": {"type": "nothing"}}}, "cannot be compiled"),
        (3, "no schema"),
        (None, "give a schema"),
    ):
        with pytest.raises(SettingsError, match=says):
            chat.with_structured_output(schema)
    with pytest.raises(SettingsError, match="choose from json_schema"):
        chat.with_structured_output(Person, method="xml")  # type: ignore[arg-type]


def test_cached_answers_are_told_apart_by_schema_and_tools(live: Reader) -> None:
    chat = ChatReader(reader=live, cache=InMemoryCache(), max_tokens=160, tool_format="hermes")
    yes = chat.invoke("q", constraint=Constraint.choice(["yes"]))
    no = chat.invoke("q", constraint=Constraint.choice(["no"]))
    assert (yes.content, no.content) == ("yes", "no")
    first = chat.bind_tools([clock], tool_choice="any").invoke("q")
    assert chat.bind_tools([clock], tool_choice="any").invoke("q").tool_calls == first.tool_calls
    assert (
        chat.bind_tools([get_weather], tool_choice="any").invoke("q").tool_calls[0]["name"] == "get_weather"
    )


# Log-probabilities, and another model


def test_logprobs_on_request_in_openais_shape(live: Reader) -> None:
    chat = ChatReader(reader=live, max_tokens=12)
    message = chat.invoke("hello", logprobs=2)
    streamed = joined(chat.stream("hello", logprobs=2, drafting=OFF))
    content = message.response_metadata["logprobs"]["content"]
    assert streamed.response_metadata["logprobs"]["content"] == content
    assert len(content) == message.usage_metadata["output_tokens"]
    assert len(content[0]["top_logprobs"]) == 2
    assert content[0]["logprob"] == content[0]["top_logprobs"][0]["logprob"] < 0
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    assert "logprobs" not in chat.invoke("hello").response_metadata
    asked = ChatReader(reader=live, logprobs=True).invoke("hello", max_tokens=2)
    assert asked.response_metadata["logprobs"]["content"][0]["top_logprobs"] == []
    info = (
        ReaderLLM(reader=live, max_tokens=3, logprobs=0).generate(["hello"]).generations[0][0].generation_info
    )
    assert len(info["logprobs"]["content"]) == 3


@faces
def test_a_call_may_name_another_model(face: Any, live: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    other = FakeReader("other")

    def shared(model: Any = None, **options: Any) -> FakeReader:
        asked.append(model)
        return other

    monkeypatch.setattr(Reader, "shared", shared)
    model = face(reader=live, max_tokens=4, temperature=0.5)
    assert text_of(model.invoke("q", model="some/other")) == "other"
    assert "".join(text_of(chunk) for chunk in model.stream("q", model="some/other")) == "other"
    assert asked == ["some/other"] * 2
    assert other.calls[0]["sampling"].temperature == 0.5
    assert text_of(model.invoke("q", model=live.name, seed=1)) == text_of(model.invoke("q", seed=1))
