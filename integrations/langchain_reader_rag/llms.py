"""The text model."""

# ruff: noqa: A002 - `input` is the parameter's name in every Runnable of LangChain

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun, Callbacks
from langchain_core.language_models import BaseLLM, LanguageModelInput
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list

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
from reader_rag import Answer, Step

TEXT_OPTIONS = (*SAMPLING, "raw")


class ReaderLLM(ReaderFace, BaseLLM):
    """A local model, from text to text, that drafts its answers from the retrieved documents.

    The prompt goes through the model's chat template as one message of the user; `raw=True` sends it as
    it is. Messages given to a text model are first written out by LangChain ("Human: ..."): for
    conversations take `ChatReader`. Documents reach the drafter as part of the prompt, as `documents=` of
    the call, from a `ReaderRetriever`, or by `watch`. They change how fast an answer comes, never what it
    says.

    Every generation has in `generation_info` `model_name`, `finish_reason`, `token_usage` and `reader`:
    passes, tokens per pass, what was drafted and accepted from where, and the spans copied from documents.

        llm = ReaderLLM(model="Qwen/Qwen2.5-7B-Instruct", max_tokens=200)
        for text in llm.stream("What is a context manager?"):
            print(text, end="")
    """

    raw: bool = False
    """Send the prompt as it is, without the chat template."""

    @property
    def _llm_type(self) -> str:
        return "reader-llm"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**super()._identifying_params, "raw": self.raw}

    def invoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> str:
        """The answer's text."""
        return BaseLLM.invoke(self, input, config, stop=stop, **self._with_scope(config, kwargs))

    async def ainvoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> str:
        """The answer's text; the event loop stays free."""
        return await BaseLLM.ainvoke(self, input, config, stop=stop, **self._with_scope(config, kwargs))

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[str]:
        """The answer as it is made, in pieces that add up to the text of `invoke`."""
        return BaseLLM.stream(self, input, config, stop=stop, **self._with_scope(config, kwargs))

    def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[str]:
        """The answer as it is made; the event loop stays free, and closing the stream stops the work."""
        return BaseLLM.astream(self, input, config, stop=stop, **self._with_scope(config, kwargs))

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """The answers' texts, in the order of the inputs."""
        answers: dict[int, str] = {}
        for rows, configs, options in self._batches(inputs, config, kwargs):
            some = [inputs[row] for row in rows]
            texts = BaseLLM.batch(self, some, configs, return_exceptions=return_exceptions, **options)
            answers.update(zip(rows, texts, strict=True))
        return [answers[row] for row in range(len(inputs))]

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """The answers' texts, in the order of the inputs; the event loop stays free."""
        answers: dict[int, str] = {}
        for rows, configs, options in self._batches(inputs, config, kwargs):
            some = [inputs[row] for row in rows]
            texts = await BaseLLM.abatch(self, some, configs, return_exceptions=return_exceptions, **options)
            answers.update(zip(rows, texts, strict=True))
        return [answers[row] for row in range(len(inputs))]

    def generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] = None,
        **kwargs: Any,
    ) -> LLMResult:
        """As of `BaseLLM`, whose cache key leaves out the options of the call: here they are part of it."""
        face, rest = self._with_text_options(kwargs)
        return BaseLLM.generate(face, prompts, stop=stop, callbacks=callbacks, **rest)

    async def agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] = None,
        **kwargs: Any,
    ) -> LLMResult:
        """As of `BaseLLM`, whose cache key leaves out the options of the call: here they are part of it."""
        face, rest = self._with_text_options(kwargs)
        return await BaseLLM.agenerate(face, prompts, stop=stop, callbacks=callbacks, **rest)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        requests = [self._text_request(prompt, stop, kwargs) for prompt in prompts]
        lasts = []
        for request in requests:
            *_, last = self._steps(request)
            lasts.append(last)
        return self._result(lasts)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        requests = [self._text_request(prompt, stop, kwargs) for prompt in prompts]
        lasts = []
        for request in requests:
            async with aclosing(drive(self._steps(request))) as steps:
                async for step in steps:
                    last = step
            lasts.append(last)
        return self._result(lasts)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        for step in self._steps(self._text_request(prompt, stop, kwargs)):
            for chunk in self._chunks(step):
                if run_manager is not None and chunk.text:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        async with aclosing(drive(self._steps(self._text_request(prompt, stop, kwargs)))) as steps:
            async for step in steps:
                for chunk in self._chunks(step):
                    if run_manager is not None and chunk.text:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    def _text_request(self, prompt: str, stop: list[str] | None, options: dict[str, Any]) -> Request:
        refuse_unknown(options, [*TEXT_OPTIONS, *PER_REQUEST], "a call of ReaderLLM")
        return self._request(prompt, stop, options, raw=options.get("raw", self.raw))

    def _with_text_options(self, options: dict[str, Any]) -> tuple["ReaderLLM", dict[str, Any]]:
        """This model with the call's sampling options as its own, and the options that remain."""
        own = {name: value for name, value in options.items() if name in TEXT_OPTIONS}
        if not own:
            return self, options
        self._sampling(own)
        face = self.model_copy(update=own)
        face.__dict__.pop("_serialized", None)
        return face, {name: value for name, value in options.items() if name not in own}

    def _batches(
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None,
        options: dict[str, Any],
    ) -> Iterator[tuple[list[int], list[RunnableConfig], dict[str, Any]]]:
        """The rows of a batch by scope, mostly one: a `_generate` serves prompts of one scope only."""
        configs = get_config_list(config, len(inputs))
        scoped = [self._with_scope(each, options) for each in configs]
        for scope in dict.fromkeys(each.get("scope") for each in scoped):
            rows = [row for row, each in enumerate(scoped) if each.get("scope") == scope]
            yield rows, [configs[row] for row in rows], scoped[rows[0]]

    def _chunks(self, step: Step) -> Iterator[GenerationChunk]:
        """The text of a step, if it has any; after the last step the one chunk with usage and metadata."""
        if step.text:
            yield GenerationChunk(text=step.text)
        if step.answer is not None:
            yield GenerationChunk(text="", generation_info=self._info(step.answer))

    def _result(self, lasts: Sequence[Step]) -> LLMResult:
        answers = [step.answer for step in lasts if step.answer is not None]
        assert len(answers) == len(lasts), "a Reader's last step carries the answer"
        counts = [_token_usage(answer) for answer in answers]
        total = {name: sum(count[name] for count in counts) for name in counts[0]} if counts else {}
        return LLMResult(
            generations=[[Generation(text=a.text, generation_info=self._info(a))] for a in answers],
            llm_output={"token_usage": total, "model_name": self.load().name},
        )

    def _info(self, answer: Answer) -> dict[str, Any]:
        return {**response_metadata(answer, self.load().name), "token_usage": _token_usage(answer)}


def _token_usage(answer: Answer) -> dict[str, int]:
    counts = usage(answer)
    return {
        "prompt_tokens": counts["input_tokens"],
        "completion_tokens": counts["output_tokens"],
        "total_tokens": counts["total_tokens"],
    }
