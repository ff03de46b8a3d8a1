"""The chat model."""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolMessage
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable

from langchain_reader_rag.asking import (
    Request,
    answers,
    answers_of,
    response_metadata,
    scoped,
    steps,
    usage,
)
from langchain_reader_rag.errors import langchain_errors
from langchain_reader_rag.face import PER_REQUEST, SAMPLING, ReaderFace
from langchain_reader_rag.handoff import driven
from langchain_reader_rag.messages import message_chunks, reader_messages
from langchain_reader_rag.structured import Method, openai_tools, response_constraint, structured
from reader_rag import Answer, Step
from reader_rag.errors import SettingsError
from reader_rag.options import refuse_unknown
from reader_rag.structured import template_has_tools

TOOLS = ("tools", "tool_choice", "tool_format", "parallel_tool_calls")


class ChatReader(ReaderFace, BaseChatModel):
    """A local chat model that drafts its answers from the retrieved documents.

    Documents reach the drafter as part of the prompt, with a message (`ToolMessage.artifact`,
    `additional_kwargs["documents"]`), as `documents=` of the call, from a `ReaderRetriever`, or by `watch`.
    They change how fast an answer comes, never what it says.

    Every answer has `usage_metadata` and, in `response_metadata`, `model_name`, `finish_reason` and `reader`:
    passes, tokens per pass, what was drafted and accepted from where, and the spans copied from documents.

        chat = ChatReader(model="Qwen/Qwen2.5-7B-Instruct", temperature=0)
        chat.invoke("What is a context manager?").content
        chat.with_structured_output(Person).invoke("Ada Lovelace was born in 1815.")
        chat.bind_tools([get_weather]).invoke("How warm is it in Oslo?").tool_calls
    """

    streaming: bool = False
    """True streams inside `invoke` as well, for callbacks that wait for tokens."""
    tool_choice: Any = "auto"
    """What bound tools are for, unless `bind_tools` says otherwise: "auto", "any", "none", a tool's name, or "first": a tool must be
    called before the model answers freely, which it may once a tool's result is the last message. Small models need that."""
    tool_format: str | None = None
    """How the model writes calls; None asks its chat template. "hermes" serves models whose template knows no tools."""

    @property
    def _llm_type(self) -> str:
        return "reader-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        own = {"tool_choice": self.tool_choice, "tool_format": self.tool_format}
        return {**super()._identifying_params, **own}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_model_type"] = "chat"
        return params

    def _resolve_model_profile(self) -> ModelProfile | None:
        profile = ModelProfile(text_inputs=True, text_outputs=True, structured_output=True)
        if self.tool_format is not None or not self._is_live():
            profile["tool_calling"] = True
        else:
            profile["tool_calling"] = template_has_tools(getattr(self.load(), "tokenizer", None))
        length = getattr(self.reader, "context_length", None)
        if isinstance(length, int):
            profile["max_input_tokens"] = length
        return profile

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        lasting = {name: value for name, value in kwargs.items() if name not in PER_REQUEST}
        return super()._get_llm_string(stop=stop, **lasting)

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        traced = {name: value for name, value in kwargs.items() if name != "documents"}
        return super()._get_invocation_params(stop=stop, **traced)

    # The config's scope becomes an option of the call; all else is BaseChatModel's.
    invoke = scoped(BaseChatModel.invoke)
    ainvoke = scoped(BaseChatModel.ainvoke)
    stream = scoped(BaseChatModel.stream)
    astream = scoped(BaseChatModel.astream)
    stream_events = scoped(BaseChatModel.stream_events)
    astream_events = scoped(BaseChatModel.astream_events)

    def bind_tools(
        self,
        tools: Sequence[Any],
        *,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools: functions, BaseTools, pydantic models, TypedDicts or OpenAI dicts.

        tool_choice is "auto", "any" (or "required", True), "none", a tool's name, or "first" (see the field); None takes the field's.
        A call always names a tool that there is and has arguments after its schema, so `strict` makes no difference.
        """
        options: dict[str, Any] = {"tools": openai_tools(tools, strict), **kwargs}
        if tool_choice is not None:
            options["tool_choice"] = tool_choice
        if parallel_tool_calls is not None:
            options["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(**options)

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        include_raw: bool = False,
        method: Method = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """The model with answers of a schema: a pydantic model, a TypedDict, a JSON schema or an OpenAI function.

        method "json_schema" lets the model write nothing but JSON of the schema; "function_calling" makes it call a tool of that
        schema, which also describes the schema to the model; "json_mode" is "json_schema", and without a schema any JSON object.
        An answer that max_tokens cut off raises OutputParserException (with `include_raw` it is the `parsing_error`).
        """
        return structured(self.bind, self.bind_tools, schema, method, include_raw, kwargs)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the whole prompt that these messages become, template and tools included."""
        given: dict[str, Any] = {"tool_format": self.tool_format} if self.tool_format else {}
        if tools:
            given["tools"] = openai_tools(tools)
        return len(self.load().encode_prompt(reader_messages(messages), **given))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        request = self._asked(messages, stop, kwargs)
        return self._result(answers(steps([request], timeout=self.timeout, streamed=False)), request)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        request = self._asked(messages, stop, kwargs)
        found = await answers_of(steps([request], timeout=self.timeout, streamed=False))
        return self._result(found, request)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        request = self._asked(messages, stop, kwargs)
        for step in steps([request], timeout=self.timeout, streamed=True):
            for chunk in self._chunks(step, request):
                if run_manager is not None:
                    run_manager.on_llm_new_token(str(chunk.text), chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        request = self._asked(messages, stop, kwargs)
        async with driven(steps([request], timeout=self.timeout, streamed=True)) as found:
            async for step in found:
                for chunk in self._chunks(step, request):
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(str(chunk.text), chunk=chunk)
                    yield chunk

    def _asked(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, options: dict[str, Any]
    ) -> Request:
        known = [*SAMPLING, *PER_REQUEST, *TOOLS, "model", "response_format", "stream"]
        with langchain_errors():
            refuse_unknown(options, known, "a call of ChatReader")
            if options.get("response_format") is not None:
                if options.get("constraint") is not None:
                    raise SettingsError("give a constraint or a response_format, not both")
                options = {**options, "constraint": response_constraint(options["response_format"])}
            return self._request(
                reader_messages(messages),
                stop,
                options,
                chunks=message_chunks(messages),
                tools=self._tools(messages, options),
            )

    def _tools(self, messages: Sequence[BaseMessage], options: dict[str, Any]) -> dict[str, Any]:
        """The options of `Reader.stream` about tools; those that say nothing are left out."""
        given: dict[str, Any] = {}
        choice = options.get("tool_choice")
        if options.get("tools"):
            choice = self.tool_choice if choice is None else choice
            if choice == "first":
                choice = "auto" if isinstance(messages[-1], ToolMessage) else "required"
            given = {"tools": options["tools"], "tool_choice": choice}
            given["parallel_tool_calls"] = options.get("parallel_tool_calls")
        elif choice not in (None, "auto", "none"):
            raise SettingsError(f"tool_choice is {choice!r} and there are no tools: bind some")
        if format_ := options.get("tool_format", self.tool_format):
            given["tool_format"] = format_
        return given

    def _chunks(self, step: Step, request: Request) -> Iterator[ChatGenerationChunk]:
        """The text of a step, if it has any; after the last step the calls and the one chunk with usage and metadata."""
        if step.text:
            yield ChatGenerationChunk(message=AIMessageChunk(content=step.text))
        answer = step.answer
        if answer is None:
            return
        pieces = [
            tool_call_chunk(
                name=call.name, args=json.dumps(call.arguments, ensure_ascii=False), id=call.id, index=i
            )
            for i, call in enumerate(answer.tool_calls)
        ]
        message = AIMessageChunk(
            content="",
            tool_call_chunks=pieces,
            usage_metadata=usage(answer),
            response_metadata=response_metadata(answer, request.load()),
            chunk_position="last",
        )
        message.invalid_tool_calls = _broken(answer)
        reason = {"finish_reason": answer.finish_reason}
        yield ChatGenerationChunk(message=message, generation_info=reason)

    def _result(self, found: Sequence[Answer], request: Request) -> ChatResult:
        (answer,) = found
        message = AIMessage(
            content=answer.text,
            tool_calls=[tool_call(name=c.name, args=c.arguments, id=c.id) for c in answer.tool_calls],
            invalid_tool_calls=_broken(answer),
            usage_metadata=usage(answer),
            response_metadata=response_metadata(answer, request.load()),
        )
        generation = ChatGeneration(message=message, generation_info={"finish_reason": answer.finish_reason})
        return ChatResult(generations=[generation], llm_output={"model_name": request.load().name})


def _broken(answer: Answer) -> list[Any]:
    error = "max_tokens cut it off" if answer.finish_reason == "length" else "it is not JSON of a call"
    return [invalid_tool_call(args=text, error=error) for text in answer.broken_calls]
