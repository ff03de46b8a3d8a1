"""The chat model."""

# ruff: noqa: A002 - `input` is the parameter's name in every Runnable of LangChain

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig

from langchain_reader_rag.face import (
    PER_REQUEST,
    SAMPLING,
    ReaderFace,
    Request,
    refuse_unknown,
    response_metadata,
    usage,
)
from langchain_reader_rag.handoff import drive
from langchain_reader_rag.messages import message_chunks, reader_messages
from reader_rag import Answer, Step
from reader_rag.errors import SettingsError


class ChatReader(ReaderFace, BaseChatModel):
    """A local chat model that drafts its answers from the retrieved documents.

    Documents reach the drafter as part of the prompt, with a message (`ToolMessage.artifact`,
    `additional_kwargs["documents"]`), as `documents=` of the call, from a `ReaderRetriever`, or by `watch`.
    They change how fast an answer comes, never what it says.

    Every answer has `usage_metadata` and, in `response_metadata`, `model_name`, `finish_reason` and `reader`:
    passes, tokens per pass, what was drafted and accepted from where, and the spans copied from documents.

        chat = ChatReader(model="Qwen/Qwen2.5-7B-Instruct", temperature=0)
        chat.invoke("What is a context manager?").content
    """

    streaming: bool = False
    """True streams inside `invoke` as well, for callbacks that wait for tokens."""

    @property
    def _llm_type(self) -> str:
        return "reader-chat"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_model_type"] = "chat"
        return params

    def _resolve_model_profile(self) -> ModelProfile | None:
        profile = ModelProfile(
            text_inputs=True, text_outputs=True, tool_calling=False, structured_output=False
        )
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

    def invoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """The answer as one message."""
        return BaseChatModel.invoke(self, input, config, stop=stop, **self._with_scope(config, kwargs))

    async def ainvoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """The answer as one message; the event loop stays free."""
        return await BaseChatModel.ainvoke(self, input, config, stop=stop, **self._with_scope(config, kwargs))

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """The answer as it is made, in pieces that add up to the message of `invoke`."""
        return BaseChatModel.stream(self, input, config, stop=stop, **self._with_scope(config, kwargs))

    def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """The answer as it is made; the event loop stays free, and closing the stream stops the work."""
        return BaseChatModel.astream(self, input, config, stop=stop, **self._with_scope(config, kwargs))

    def stream_events(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Any:
        """As of `BaseChatModel`."""
        return BaseChatModel.stream_events(self, input, config, **self._with_scope(config, kwargs))

    def astream_events(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Any:
        """As of `BaseChatModel`."""
        return BaseChatModel.astream_events(self, input, config, **self._with_scope(config, kwargs))

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the whole prompt that these messages become, template included."""
        if tools:
            raise SettingsError("ChatReader sends no tools to the model: count the messages without them")
        return len(self.load().encode_prompt(reader_messages(messages)))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        *_, last = self._steps(self._chat_request(messages, stop, kwargs))
        return self._result(last)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        async with aclosing(drive(self._steps(self._chat_request(messages, stop, kwargs)))) as steps:
            async for step in steps:
                last = step
        return self._result(last)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        for step in self._steps(self._chat_request(messages, stop, kwargs)):
            for chunk in self._chunks(step):
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
        async with aclosing(drive(self._steps(self._chat_request(messages, stop, kwargs)))) as steps:
            async for step in steps:
                for chunk in self._chunks(step):
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(str(chunk.text), chunk=chunk)
                    yield chunk

    def _chat_request(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, options: dict[str, Any]
    ) -> Request:
        refuse_unknown(options, [*SAMPLING, *PER_REQUEST, "stream"], "a call of ChatReader")
        return self._request(reader_messages(messages), stop, options, chunks=message_chunks(messages))

    def _chunks(self, step: Step) -> Iterator[ChatGenerationChunk]:
        """The text of a step, if it has any; after the last step the one chunk with usage and metadata."""
        if step.text:
            yield ChatGenerationChunk(message=AIMessageChunk(content=step.text))
        if step.answer is not None:
            message = AIMessageChunk(
                content="",
                usage_metadata=usage(step.answer),
                response_metadata=self._metadata(step.answer),
                chunk_position="last",
            )
            reason = {"finish_reason": step.answer.finish_reason}
            yield ChatGenerationChunk(message=message, generation_info=reason)

    def _result(self, last: Step) -> ChatResult:
        answer = last.answer
        assert answer is not None, "a Reader's last step carries the answer"
        message = AIMessage(
            content=answer.text, usage_metadata=usage(answer), response_metadata=self._metadata(answer)
        )
        generation = ChatGeneration(message=message, generation_info={"finish_reason": answer.finish_reason})
        return ChatResult(generations=[generation], llm_output={"model_name": self.load().name})

    def _metadata(self, answer: Answer) -> dict[str, Any]:
        return response_metadata(answer, self.load().name)
