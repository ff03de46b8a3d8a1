"""Function calling in LlamaIndex: chats with tools, predict_and_call, agents, over a tiny model with a Hermes template."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_index.core")
pytest.importorskip("llguidance")

from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ToolCallResult
from llama_index.core.base.llms.types import MessageRole, ToolCallBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools import FunctionTool, QueryEngineTool
from llama_index_corpus import Says
from llama_index_fakes import USER, FakeReader

from llama_index.llms.reader_rag import ReaderLLM
from reader_rag import Drafting, Reader
from reader_rag.errors import PromptError, SettingsError

# How LlamaIndex itself uses pydantic.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20"),
    pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince211"),
]

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 20, "b": 22}}\n</tool_call>'
QUESTION = "What is 20 + 22?"


@pytest.fixture(scope="module")
def reader(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tokenizer.chat_template = TEMPLATE
    return Reader.load(
        model, tokenizer, dtype="float32", device="cpu", cache_dir=tmp_path_factory.mktemp("cache")
    )


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


def today() -> str:
    """The day."""
    return "Monday"


TOOLS = [FunctionTool.from_defaults(add), FunctionTool.from_defaults(today)]


def saying(reader: Reader, *turns: str, **options: Any) -> ReaderLLM:
    return ReaderLLM(reader=reader, max_tokens=120, processors=(Says(reader, *turns),), **options)


def calls_of(llm: ReaderLLM, response: Any) -> list[tuple[str, dict[str, Any]]]:
    calls = llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
    assert all(isinstance(call, ToolSelection) and call.tool_id for call in calls)
    return [(call.tool_name, call.tool_kwargs) for call in calls]


async def asked_in_four_ways(llm: ReaderLLM, **options: Any) -> list[Any]:
    """The last response of every way to chat with tools."""
    streamed = await llm.astream_chat_with_tools(TOOLS, QUESTION, **options)
    return [
        llm.chat_with_tools(TOOLS, QUESTION, **options),
        await llm.achat_with_tools(TOOLS, QUESTION, **options),
        list(llm.stream_chat_with_tools(TOOLS, QUESTION, **options))[-1],
        [response async for response in streamed][-1],
    ]


def test_a_template_with_tools_makes_a_function_calling_model(reader: Reader) -> None:
    assert ReaderLLM(reader=reader).metadata.is_function_calling_model
    assert not ReaderLLM(reader=FakeReader()).metadata.is_function_calling_model
    assert ReaderLLM(reader=FakeReader(), tool_format="hermes").metadata.is_function_calling_model
    with pytest.raises(SettingsError, match="hermes"):
        ReaderLLM("m", tool_format="esperanto")


async def test_a_call_is_the_same_in_all_four_ways_and_never_in_the_text(reader: Reader) -> None:
    llm = saying(reader, "One moment. " + CALL)
    for response in await asked_in_four_ways(llm):
        assert calls_of(llm, response) == [("add", {"a": 20, "b": 22})]
        assert response.message.content.strip() == "One moment."
        assert response.message.role == MessageRole.ASSISTANT
        assert response.raw["finish_reason"] == "stop"


def test_deltas_show_no_part_of_a_call(reader: Reader) -> None:
    responses = list(saying(reader, "One moment. " + CALL).stream_chat_with_tools(TOOLS, QUESTION))
    assert "".join(response.delta for response in responses).strip() == "One moment."
    assert [bool(calls_of(ReaderLLM(reader=reader), r)) for r in responses] == [False] * (
        len(responses) - 1
    ) + [True]


async def test_a_required_call_is_made_by_any_model_and_drafts_do_not_change_it(reader: Reader) -> None:
    llm = ReaderLLM(reader=reader, max_tokens=120)
    plain = ReaderLLM(reader=reader, max_tokens=120, drafting=Drafting(sources=()))
    # "today" takes nothing, so even a model of random weights ends its call.
    asked = {"tool_required": True, "tool_choice": "today"}
    for each in (llm, plain):
        assert [calls_of(each, r) for r in await asked_in_four_ways(each, **asked)] == [[("today", {})]] * 4


def test_an_answer_without_a_call_is_an_error_only_if_asked(reader: Reader) -> None:
    llm = saying(reader, "No tool is needed.")
    response = llm.chat_with_tools(TOOLS, QUESTION)
    assert response.message.content == "No tool is needed."
    assert calls_of(llm, response) == []
    with pytest.raises(ValueError, match="tool_required"):
        llm.get_tool_calls_from_response(response)


@pytest.mark.parametrize(("parallel", "count"), [(True, 2), (False, 1)])
def test_several_calls_are_made_only_where_they_are_allowed(
    reader: Reader, parallel: bool, count: int
) -> None:
    llm = saying(reader, f"{CALL}\n{CALL}" if parallel else CALL)
    response = llm.chat_with_tools(TOOLS, QUESTION, allow_parallel_tool_calls=parallel)
    calls = llm.get_tool_calls_from_response(response)
    assert len(calls) == len({call.tool_id for call in calls}) == count


def test_a_call_that_was_cut_off_is_told(reader: Reader) -> None:
    response = saying(reader, CALL).chat_with_tools(TOOLS, QUESTION, max_tokens=12)
    assert response.raw["finish_reason"] == "length"
    assert response.raw["broken_calls"]
    assert not [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]


def test_predict_and_call_runs_the_tool(reader: Reader) -> None:
    response = saying(reader, CALL).predict_and_call(TOOLS, QUESTION)
    assert response.response == "42"
    assert [source.tool_name for source in response.sources] == ["add"]
    assert asyncio.run(saying(reader, CALL).apredict_and_call(TOOLS, QUESTION)).response == "42"


@pytest.mark.parametrize("workflow", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
async def test_an_agent_calls_a_tool_and_answers_with_its_result(
    reader: Reader, workflow: bool, streaming: bool
) -> None:
    llm = saying(reader, CALL, "It is 42.")
    if workflow:
        agent: Any = AgentWorkflow.from_tools_or_functions(TOOLS, llm=llm)
    else:
        agent = FunctionAgent(tools=TOOLS, llm=llm, streaming=streaming)
    handler = agent.run(user_msg=QUESTION)
    results = [event async for event in handler.stream_events() if isinstance(event, ToolCallResult)]
    response = await handler
    assert str(response) == "It is 42."
    assert [(r.tool_name, r.tool_kwargs, str(r.tool_output)) for r in results] == [
        ("add", {"a": 20, "b": 22}, "42")
    ]


def test_a_query_engine_can_be_a_tool(reader: Reader) -> None:
    from llama_index.core import MockEmbedding, VectorStoreIndex
    from llama_index.core.schema import TextNode

    index = VectorStoreIndex([TextNode(text="The answer is 42.")], embed_model=MockEmbedding(embed_dim=4))
    engine = index.as_query_engine(llm=saying(reader, "It says 42."))
    tool = QueryEngineTool.from_defaults(engine, name="manual", description="Looks a question up.")
    call = '<tool_call>\n{"name": "manual", "arguments": {"input": "why"}}\n</tool_call>'
    assert saying(reader, call).predict_and_call([tool], QUESTION).response == "It says 42."


def test_calls_and_results_of_earlier_turns_reach_the_template() -> None:
    fake = FakeReader()
    call = ToolCallBlock(tool_call_id="id1", tool_name="add", tool_kwargs={"a": 1})
    old = {"tool_calls": [{"id": "id2", "function": {"name": "today", "arguments": "{}"}}]}
    ReaderLLM(reader=fake).chat(
        [
            *USER,
            ChatMessage(role="assistant", blocks=[call]),
            ChatMessage(role="tool", content="3", additional_kwargs={"tool_call_id": "id1"}),
            ChatMessage(role="assistant", content="", additional_kwargs=old),
            ChatMessage(role="tool", content="Monday", additional_kwargs={"tool_call_id": "id2"}),
        ]
    )
    _, first, result, second, other = fake.asked.prompt
    assert first["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert result == {"role": "tool", "content": "3", "tool_call_id": "id1", "name": "add"}
    assert second["tool_calls"][0]["function"] == {"name": "today", "arguments": "{}"}
    assert other["name"] == "today"
    assert json.dumps(fake.asked.prompt)


def test_tools_for_a_model_without_a_format_are_refused_and_it_stays_usable(
    tiny_model: Path, tmp_path: Path
) -> None:
    plain = Reader.load(tiny_model, dtype="float32", device="cpu", cache_dir=tmp_path)
    llm = ReaderLLM(reader=plain, max_tokens=3)
    with pytest.raises(PromptError, match="tool_format"):
        llm.chat_with_tools(TOOLS, QUESTION)
    assert llm.chat(USER).raw["usage"]["completion_tokens"] > 0
    named = ReaderLLM(reader=plain, max_tokens=60, tool_format="hermes")
    response = named.chat_with_tools(TOOLS[1:], QUESTION, tool_required=True)
    assert calls_of(named, response) == [("today", {})]


@pytest.mark.parametrize(
    ("options", "named"), [({"tools": [{"name": "a b"}]}, "a b"), ({"tools": [], "tool_choice": "no"}, "no")]
)
def test_tools_that_cannot_be_meant_are_refused(reader: Reader, options: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        ReaderLLM(reader=reader).chat(USER, **options)


def test_a_completion_takes_no_tools(reader: Reader) -> None:
    with pytest.raises(SettingsError, match="unknown option tools"):
        ReaderLLM(reader=reader).complete("Why?", tools=TOOLS)
