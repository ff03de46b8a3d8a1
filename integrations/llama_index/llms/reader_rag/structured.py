"""Structured prediction and function calling over `chat`, for an LLM whose chat takes a constraint and tools."""

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ToolCallBlock
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.events.llm import (
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.program.utils import create_flexible_model
from llama_index.core.prompts import PromptTemplate
from llama_index.core.types import PydanticProgramMode

from reader_rag.errors import PromptError, SettingsError
from reader_rag.structured import Constraint

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool

Options = dict[str, Any]

dispatcher = get_dispatcher(__name__)


class ConstrainedLLM(FunctionCallingLLM):
    """An LLM that fills in pydantic classes by a grammar, and calls tools in its template's own format.

    `as_structured_llm` and the four methods of structured prediction constrain the answer to the JSON schema of the
    class, so it cannot fail to parse; the schema does not enter the prompt. With a `pydantic_program_mode` of your own
    LlamaIndex's programs are used instead.
    """

    @dispatcher.span
    def structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: Options | None = None,
        **prompt_args: Any,
    ) -> BaseModel:
        """The prompt's answer as an instance of `output_cls`."""
        if self.pydantic_program_mode is not PydanticProgramMode.DEFAULT:
            return super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        _started(output_cls, prompt, prompt_args)
        options = _constrained(output_cls, llm_kwargs)
        response = self.chat(prompt.format_messages(llm=self, **prompt_args), **options)
        return _ended(_read(output_cls, response))

    @dispatcher.span
    async def astructured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: Options | None = None,
        **prompt_args: Any,
    ) -> BaseModel:
        """`structured_predict`, off the event loop."""
        if self.pydantic_program_mode is not PydanticProgramMode.DEFAULT:
            return await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        _started(output_cls, prompt, prompt_args)
        options = _constrained(output_cls, llm_kwargs)
        response = await self.achat(prompt.format_messages(llm=self, **prompt_args), **options)
        return _ended(_read(output_cls, response))

    # LlamaIndex's own streaming methods call these two, and fire the events.

    def _structured_stream_call(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: Options | None = None,
        **prompt_args: Any,
    ) -> Generator[BaseModel, None, None]:
        if self.pydantic_program_mode is not PydanticProgramMode.DEFAULT:
            yield from super()._structured_stream_call(output_cls, prompt, llm_kwargs, **prompt_args)
            return
        options, growing = _constrained(output_cls, llm_kwargs), _Growing(output_cls)
        response = None
        for response in self.stream_chat(prompt.format_messages(llm=self, **prompt_args), **options):
            yield from growing.feed(response)
        yield _read(output_cls, response)

    async def _structured_astream_call(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: Options | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[BaseModel, None]:
        if self.pydantic_program_mode is not PydanticProgramMode.DEFAULT:
            program: AsyncGenerator[BaseModel, None] = await super()._structured_astream_call(
                output_cls, prompt, llm_kwargs, **prompt_args
            )
            return program
        options = _constrained(output_cls, llm_kwargs)
        responses = await self.astream_chat(prompt.format_messages(llm=self, **prompt_args), **options)

        async def objects() -> AsyncGenerator[BaseModel, None]:
            growing, response = _Growing(output_cls), None
            async for response in responses:
                for partial in growing.feed(response):
                    yield partial
            yield _read(output_cls, response)

        return objects()

    def _prepare_chat_with_tools(
        self,
        tools: Sequence["BaseTool | Mapping[str, Any]"],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> Options:
        """The arguments of `chat` under which the model may call these tools."""
        messages = list(chat_history or [])
        if user_msg is not None:
            message = user_msg if isinstance(user_msg, ChatMessage) else ChatMessage(content=user_msg)
            messages.append(message)
        offered = [
            tool if isinstance(tool, Mapping) else tool.metadata.to_openai_tool(skip_length_check=True)
            for tool in tools
        ]
        asked = {
            "messages": messages,
            "tools": offered,
            "tool_choice": "required" if tool_required else "auto",
            "parallel_tool_calls": allow_parallel_tool_calls,
        }
        return asked | {name: value for name, value in kwargs.items() if value is not None}

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls in a response.

        Raises:
            ValueError: there is none, and `error_on_no_tool_call` is set.
        """
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not calls and error_on_no_tool_call:
            raise ValueError(
                "the model answered without calling a tool; pass tool_required=True to force a call"
            )
        return [
            ToolSelection(
                tool_id=call.tool_call_id or "", tool_name=call.tool_name, tool_kwargs=call.tool_kwargs
            )
            for call in calls
        ]


class _Growing:
    """The objects that a growing JSON text shows, each once."""

    def __init__(self, output_cls: type[BaseModel]) -> None:
        self._flexible = create_flexible_model(output_cls)
        self._shown: Any = None

    def feed(self, response: ChatResponse) -> Generator[BaseModel, None, None]:
        from pydantic_core import from_json

        try:
            values = from_json(response.message.content or "", allow_partial="trailing-strings")
        except ValueError:  # not even the beginning of an object
            return
        if isinstance(values, dict) and values and values != self._shown:
            self._shown = values
            yield self._flexible.model_validate(values)


def _constrained(output_cls: type[BaseModel], llm_kwargs: Options | None) -> Options:
    options = dict(llm_kwargs or {})
    if options.get("constraint") is not None:
        raise SettingsError("constraint= cannot be given here: the class to fill in is the constraint")
    return options | {"constraint": Constraint.json_schema(output_cls)}


def _read(output_cls: type[BaseModel], response: ChatResponse | None) -> BaseModel:
    if response is None or response.raw is None:
        raise PromptError("the stream ended before the answer did: nothing to read")
    if response.raw["finish_reason"] == "length":
        tokens = response.raw["usage"]["completion_tokens"]
        raise SettingsError(
            f"the {output_cls.__name__} was cut off after {tokens} tokens: raise max_tokens, "
            "or bound the schema (maxLength, maxItems)"
        )
    return output_cls.model_validate_json(response.message.content or "")


def _started(output_cls: type[BaseModel], prompt: PromptTemplate, prompt_args: Options) -> None:
    event = LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args)
    dispatcher.event(event)


def _ended(output: BaseModel) -> BaseModel:
    dispatcher.event(LLMStructuredPredictEndEvent(output=output))
    return output
