"""The LangChain models over a Reader of forty lines: what each call must do, without a model."""

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langchain_core")

from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_fakes import ANSWER, FakeReader, Log, faces, text_of

from langchain_reader_rag import ChatReader, ReaderLLM
from reader_rag import Chunk, Drafting, Reader
from reader_rag.errors import PromptError, SettingsError

ROOT = Path(__file__).resolve().parent.parent
PATHS = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "integrations")])}


@pytest.fixture
def fake() -> FakeReader:
    return FakeReader()


@pytest.fixture(autouse=True)
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(Reader, "shared", refuse)


# Answers


def test_chat_answers_with_usage_and_stats(fake: FakeReader) -> None:
    said = [SystemMessage("s"), HumanMessage("q"), AIMessage("a"), ("human", "r")]
    message = ChatReader(reader=fake).invoke(said)
    assert message.content == ANSWER
    assert message.usage_metadata == {"input_tokens": 7, "output_tokens": 8, "total_tokens": 15}
    assert message.response_metadata["model_name"] == "fake"
    assert message.response_metadata["finish_reason"] == "stop"
    reader = message.response_metadata["reader"]
    assert reader["tokens_per_pass"] == 4.0
    assert reader["spans"][0]["chunk_id"] == "c1"
    assert fake.calls[0]["prompt"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "r"},
    ]
    assert not fake.calls[0]["raw"]


def test_text_generations_carry_usage_and_stats(fake: FakeReader) -> None:
    result = ReaderLLM(reader=fake).generate(["q", "r"])
    info = result.generations[1][0].generation_info
    assert info["token_usage"] == {"prompt_tokens": 7, "completion_tokens": 8, "total_tokens": 15}
    assert (info["finish_reason"], info["model_name"]) == ("stop", "fake")
    assert info["reader"]["passes"] == 2
    assert result.llm_output["token_usage"]["total_tokens"] == 30
    assert [call["prompt"] for call in fake.calls] == ["q", "r"]


def test_raw_is_an_option_of_the_text_model_and_of_its_calls(fake: FakeReader) -> None:
    ReaderLLM(reader=fake).invoke("q")
    ReaderLLM(reader=fake, raw=True).invoke("q")
    ReaderLLM(reader=fake).invoke("q", raw=True)
    list(ReaderLLM(reader=fake).stream("q", raw=True))
    assert [call["raw"] for call in fake.calls] == [False, True, True, True]


def test_messages_reach_a_text_model_as_langchain_writes_them(fake: FakeReader) -> None:
    ReaderLLM(reader=fake).invoke([SystemMessage("s"), HumanMessage("q")])
    assert fake.calls[0]["prompt"] == "System: s\nHuman: q"


def test_chat_streams_text_then_one_chunk_with_the_usage(fake: FakeReader) -> None:
    chunks = list(ChatReader(reader=fake).stream("q"))
    assert "".join(str(chunk.text) for chunk in chunks) == ANSWER
    assert [chunk.usage_metadata is not None for chunk in chunks] == [False] * 8 + [True]
    assert chunks[-1].content == ""
    assert chunks[-1].chunk_position == "last"
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    whole = ChatReader(reader=fake).invoke("q")
    assert isinstance(total, AIMessageChunk)
    assert total.usage_metadata == whole.usage_metadata
    assert total.response_metadata.items() >= {"model_name": "fake", "finish_reason": "stop"}.items()
    assert total.response_metadata["reader"] == whole.response_metadata["reader"]


def test_text_streams_end_with_the_same_facts_as_a_generation(fake: FakeReader) -> None:
    llm = ReaderLLM(reader=fake)
    assert "".join(llm.stream("q")) == ANSWER == llm.invoke("q")
    chunks = list(llm._stream("q"))
    assert [chunk.generation_info is not None for chunk in chunks] == [False] * 8 + [True]
    assert chunks[-1].generation_info == llm.generate(["q"]).generations[0][0].generation_info


def test_usage_is_counted_once_by_langchains_own_counter(fake: FakeReader) -> None:
    counter = UsageMetadataCallbackHandler()
    list(ChatReader(reader=fake).stream("q", config={"callbacks": [counter]}))
    ChatReader(reader=fake).invoke("q", config={"callbacks": [counter]})
    assert counter.usage_metadata["fake"]["total_tokens"] == 30


@faces
def test_an_empty_answer_is_an_answer(face: Any) -> None:
    model = face(reader=FakeReader(""))
    assert text_of(model.invoke("q")) == ""
    assert "".join(text_of(chunk) for chunk in model.stream("q")) == ""


@faces
def test_stop_of_a_call_replaces_that_of_the_model(face: Any, fake: FakeReader) -> None:
    model = face(reader=fake, stop=["piece"])
    assert text_of(model.invoke("q")) == "A chunk is a retrieved "
    assert text_of(model.invoke("q", stop=["chunk"])) == "A "
    assert "".join(text_of(chunk) for chunk in model.stream("q", stop=["chunk"])) == "A "
    assert text_of(model.batch(["q"], stop=["is"])[0]) == "A chunk "
    assert text_of(face(reader=fake, stop="is").invoke("q")) == "A chunk "


@faces
def test_options_of_a_call_reach_the_sampling(face: Any, fake: FakeReader) -> None:
    model = face(reader=fake, temperature=0.2, seed=1)
    model.invoke("q", temperature=0.9, max_tokens=3, top_p=0.5, top_k=5, min_p=0.1, seed=4)
    list(model.stream("q", seed=5))
    model.bind(seed=6, repetition_penalty=1.2).invoke("q")
    one, two, three = (call["sampling"] for call in fake.calls)
    assert (one.temperature, one.max_tokens, one.top_p, one.top_k, one.min_p) == (0.9, 3, 0.5, 5, 0.1)
    assert (one.seed, two.seed, three.seed) == (4, 5, 6)
    assert (two.temperature, three.repetition_penalty) == (0.2, 1.2)
    assert model.temperature == 0.2


@faces
def test_an_unknown_option_of_a_call_raises_with_the_known_ones(face: Any, fake: FakeReader) -> None:
    model = face(reader=fake)
    for call in (model.invoke, model.batch, lambda q, **options: list(model.stream(q, **options))):
        with pytest.raises(SettingsError, match=r"max_token'.*did you mean 'max_tokens'.*documents"):
            call(["q"], max_token=3)
    with pytest.raises(SettingsError, match="temperature"):
        model.invoke("q", temperature=-1)
    assert not fake.calls


@faces
def test_drafting_is_per_face_and_per_call(face: Any, fake: FakeReader) -> None:
    off = Drafting(sources=())
    face(reader=fake, drafting=off).invoke("q")
    face(reader=fake).invoke("q", drafting=off)
    face(reader=fake).invoke("q")
    assert [call["drafting"] for call in fake.calls] == [off, off, None]


@faces
def test_callbacks_come_in_order(face: Any, fake: FakeReader) -> None:
    log = Log()
    list(face(reader=fake).stream("q", config={"callbacks": [log]}))
    assert log.events[0] == "start"
    assert log.events[-1] == "end"
    assert set(log.events[1:-1]) == {"token"}
    assert "".join(log.tokens) == ANSWER
    log = Log()
    face(reader=fake).invoke("q", config={"callbacks": [log]})
    assert log.events == ["start", "end"]


@faces
async def test_async_callbacks_come_in_the_same_order(face: Any, fake: FakeReader) -> None:
    log = Log()
    async for _ in face(reader=fake).astream("q", config={"callbacks": [log]}):
        pass
    assert (log.events[0], log.events[-1], "".join(log.tokens)) == ("start", "end", ANSWER)


def test_streaming_true_streams_inside_invoke(fake: FakeReader) -> None:
    log = Log()
    message = ChatReader(reader=fake, streaming=True).invoke("q", config={"callbacks": [log]})
    assert message.content == ANSWER
    assert "".join(log.tokens) == ANSWER


@faces
def test_an_error_of_the_model_reaches_the_caller_and_the_callbacks(face: Any) -> None:
    model, log = face(reader=FakeReader(fail_at=2)), Log()
    with pytest.raises(RuntimeError, match="the model broke"):
        model.invoke("q", config={"callbacks": [log]})
    with pytest.raises(RuntimeError, match="the model broke"):
        list(model.stream("q", config={"callbacks": [log]}))
    assert [event for event in log.events if event != "token"] == ["start", "error"] * 2


@faces
def test_leaving_a_stream_closes_it(face: Any, fake: FakeReader) -> None:
    for _ in face(reader=fake).stream("q"):
        break
    assert (fake.closed, fake.made) == (1, 1)


@faces
def test_timeout_ends_a_request_that_takes_too_long(face: Any) -> None:
    fake = FakeReader(seconds=0.02)
    with pytest.raises(TimeoutError, match=r"timeout=0\.03"):
        face(reader=fake, timeout=0.03).invoke("q")
    assert fake.made < 8
    assert fake.closed == 1


@faces
def test_tokens_are_counted_by_the_models_tokenizer(face: Any, fake: FakeReader) -> None:
    assert face(reader=fake).get_num_tokens("four") == 4
    assert face(reader=fake).get_token_ids("ab") == [97, 98]
    assert face(reader=fake, custom_get_token_ids=lambda text: [1]).get_num_tokens("four") == 1


# Caches


@faces
def test_cached_answers_ignore_documents_and_scopes_but_not_options(face: Any, fake: FakeReader) -> None:
    model = face(reader=fake, cache=InMemoryCache())
    model.invoke("q", documents=["one"])
    model.invoke("q", documents=["two"], scope="b", drafting=Drafting(sources=()))
    model.invoke("q")
    assert len(fake.calls) == 1
    model.invoke("q", temperature=0.7, seed=1)
    model.invoke("q", temperature=0.7, seed=2)
    model.invoke("q", temperature=0.7, seed=1)
    model.invoke("q", stop=["x"])
    assert len(fake.calls) == 4


# Documents


@faces
def test_documents_of_a_call_reach_the_drafter_and_not_the_prompt(face: Any, fake: FakeReader) -> None:
    documents = [Document(id="d", page_content="one", metadata={"page": 1}), Chunk("c", "two"), "three"]
    model, log = face(reader=fake), Log()
    model.invoke("q", documents=documents, config={"callbacks": [log]})
    list(model.stream("q", documents=documents))
    for call in fake.calls:
        assert [chunk.text for chunk in call["chunks"]] == ["one", "two", "three"]
        assert [chunk.id for chunk in call["chunks"]][:2] == ["d", "c"]
        assert call["chunks"][0].metadata == {"page": 1}
        assert "one" not in str(call["prompt"])
    assert "documents" not in log.params[0]
    with pytest.raises(PromptError, match="Document"):
        model.invoke("q", documents=[3])


def test_documents_that_travel_with_messages_reach_the_drafter(fake: FakeReader) -> None:
    tool = ToolMessage("found", tool_call_id="1", artifact=[Document(page_content="one"), object()])
    human = HumanMessage("q", additional_kwargs={"documents": [{"page_content": "two"}, "three"]})
    ChatReader(reader=fake).invoke([human, tool], documents="four")
    assert sorted(chunk.text for chunk in fake.calls[0]["chunks"]) == ["four", "one", "three", "two"]
    assert fake.calls[0]["prompt"][-1] == {"role": "tool", "content": "found", "tool_call_id": "1"}
    ChatReader(reader=fake).invoke([ToolMessage("x", tool_call_id="1", artifact={"any": "thing"})])
    assert fake.calls[1]["chunks"] == []


def test_text_blocks_are_joined_and_other_content_is_refused(fake: FakeReader) -> None:
    chat = ChatReader(reader=fake)
    chat.invoke([HumanMessage([{"type": "text", "text": "one "}, "two"])])
    assert fake.calls[0]["prompt"][0]["content"] == "one two"
    with pytest.raises(PromptError, match="image_url"):
        chat.invoke([HumanMessage([{"type": "image_url", "image_url": {"url": "http://x"}}])])
    broken = {"type": "invalid_tool_call", "name": None, "args": "{", "id": None, "error": "cut off"}
    with pytest.raises(PromptError, match="could not be read"):
        chat.invoke([HumanMessage("q"), AIMessage("", invalid_tool_calls=[broken])])
    with pytest.raises(PromptError, match="no message"):
        chat.invoke([])


# Batches and scopes


@faces
def test_a_batch_keeps_the_order(face: Any, fake: FakeReader) -> None:
    model = face(reader=fake)
    assert [text_of(answer) for answer in model.batch(["a", "b", "c"])] == [ANSWER] * 3
    model.batch(["a", "b", "c"], config={"max_concurrency": 2})
    assert len(fake.calls) == 6
    assert model.batch([]) == []


@faces
def test_a_batch_returns_exceptions_when_asked(face: Any) -> None:
    answers = face(reader=FakeReader(fail_at=0)).batch(["a", "b"], return_exceptions=True)
    assert [type(answer) for answer in answers] == [RuntimeError] * 2


@faces
def test_the_config_names_the_scope_on_every_path(face: Any, fake: FakeReader) -> None:
    model, config = face(reader=fake, scope="own"), {"configurable": {"reader_scope": "a"}}
    model.invoke("q")
    model.invoke("q", config)
    list(model.stream("q", config))
    (RunnableLambda(lambda q: q) | model).invoke("q", config)
    list((RunnableLambda(lambda q: q) | model).stream("q", config))
    RunnableLambda(lambda q: model.invoke(q)).invoke("q", config)
    model.invoke("q", config, scope="b")
    assert [call["scope"] for call in fake.calls] == ["own", "a", "a", "a", "a", "a", "b"]


@faces
async def test_the_config_names_the_scope_on_every_async_path(face: Any, fake: FakeReader) -> None:
    model, config = face(reader=fake), {"configurable": {"reader_scope": "a"}}
    await model.ainvoke("q", config)
    async for _ in model.astream("q", config):
        pass
    await (RunnableLambda(lambda q: q) | model).ainvoke("q", config)
    async for _ in (RunnableLambda(lambda q: q) | model).astream("q", config):
        pass
    await model.abatch(["q"], [config])
    assert [call["scope"] for call in fake.calls] == ["a"] * 5


@faces
async def test_a_batch_may_hold_requests_of_several_scopes(face: Any, fake: FakeReader) -> None:
    configs = [{"configurable": {"reader_scope": scope}} for scope in ("a", "b", "a")]
    model = face(reader=fake)
    model.batch(["1", "2", "3"], configs)
    await model.abatch(["1", "2", "3"], configs)
    asked = {(str(call["prompt"])[-5:].strip("'}]"), call["scope"]) for call in fake.calls}
    assert {(prompt[-1], scope) for prompt, scope in asked} == {("1", "a"), ("2", "b"), ("3", "a")}


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
def test_events_of_the_third_version_name_the_scope_too(fake: FakeReader) -> None:
    config = {"configurable": {"reader_scope": "a"}}
    stream = ChatReader(reader=fake).stream_events("q", config, version="v3")
    assert "".join(stream.text) == ANSWER
    assert fake.calls[0]["scope"] == "a"
