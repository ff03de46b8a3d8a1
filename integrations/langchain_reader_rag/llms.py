"""The text model."""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun, Callbacks
from langchain_core.language_models import BaseLLM, LanguageModelInput
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list

from langchain_reader_rag.asking import (
    Request,
    answers,
    answers_of,
    response_metadata,
    scoped,
    steps,
    usage,
    with_scope,
)
from langchain_reader_rag.errors import langchain_errors
from langchain_reader_rag.face import PER_REQUEST, SAMPLING, ReaderFace
from langchain_reader_rag.handoff import driven
from reader_rag import Answer, Step
from reader_rag.options import refuse_unknown

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

    invoke = scoped(BaseLLM.invoke)
    ainvoke = scoped(BaseLLM.ainvoke)
    stream = scoped(BaseLLM.stream)
    astream = scoped(BaseLLM.astream)

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """The answers' texts, in the order of the inputs; the prompts share passes."""
        texts: dict[int, str] = {}
        for rows, some, options in self._batches(inputs, config, kwargs):
            made = BaseLLM.batch(self, *some, return_exceptions=return_exceptions, **options)
            texts.update(zip(rows, made, strict=True))
        return [texts[row] for row in range(len(inputs))]

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """`batch`; the event loop stays free."""
        texts: dict[int, str] = {}
        for rows, some, options in self._batches(inputs, config, kwargs):
            made = await BaseLLM.abatch(self, *some, return_exceptions=return_exceptions, **options)
            texts.update(zip(rows, made, strict=True))
        return [texts[row] for row in range(len(inputs))]

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
        """`generate`; the event loop stays free."""
        face, rest = self._with_text_options(kwargs)
        return await BaseLLM.agenerate(face, prompts, stop=stop, callbacks=callbacks, **rest)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        requests = self._requests(prompts, stop, kwargs)
        return self._result(answers(steps(requests, timeout=self.timeout, streamed=False)), requests)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        requests = self._requests(prompts, stop, kwargs)
        return self._result(await answers_of(steps(requests, timeout=self.timeout, streamed=False)), requests)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        requests = self._requests([prompt], stop, kwargs)
        for step in steps(requests, timeout=self.timeout, streamed=True):
            for chunk in self._chunks(step, requests[0]):
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
        requests = self._requests([prompt], stop, kwargs)
        async with driven(steps(requests, timeout=self.timeout, streamed=True)) as found:
            async for step in found:
                for chunk in self._chunks(step, requests[0]):
                    if run_manager is not None and chunk.text:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    def _requests(self, prompts: list[str], stop: list[str] | None, options: dict[str, Any]) -> list[Request]:
        with langchain_errors():
            refuse_unknown(options, [*TEXT_OPTIONS, *PER_REQUEST, "model"], "a call of ReaderLLM")
            raw = options.get("raw", self.raw)
            return [self._request(prompt, stop, options, raw=raw) for prompt in prompts]

    def _with_text_options(self, options: dict[str, Any]) -> tuple["ReaderLLM", dict[str, Any]]:
        """This face with the call's model and sampling options as its own, and the options that remain."""
        own = {name: value for name, value in options.items() if name in TEXT_OPTIONS}
        face = self._of_model(options.get("model"))
        if own:
            with langchain_errors():
                self._sampling(own)
            face = face.model_copy(update=own)
            face.__dict__.pop("_serialized", None)
        return face, {n: value for n, value in options.items() if n not in own and n != "model"}

    def _batches(
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None,
        options: dict[str, Any],
    ) -> Iterator[tuple[list[int], tuple[Any, list[RunnableConfig]], dict[str, Any]]]:
        """The rows of a batch by scope, mostly one: a `_generate` serves prompts of one scope only."""
        configs = get_config_list(config, len(inputs))
        each = [with_scope(config, options) for config in configs]
        for scope in dict.fromkeys(some.get("scope") for some in each):
            rows = [row for row, some in enumerate(each) if some.get("scope") == scope]
            yield rows, ([inputs[row] for row in rows], [configs[row] for row in rows]), each[rows[0]]

    def _chunks(self, step: Step, request: Request) -> Iterator[GenerationChunk]:
        """The text of a step, if it has any; after the last step the one chunk with usage and metadata."""
        if step.text:
            yield GenerationChunk(text=step.text)
        if step.answer is not None:
            yield GenerationChunk(text="", generation_info=_info(step.answer, request))

    def _result(self, found: Sequence[Answer], requests: Sequence[Request]) -> LLMResult:
        counts = [_token_usage(answer) for answer in found]
        total = {name: sum(count[name] for count in counts) for name in counts[0]} if counts else {}
        made = [
            [Generation(text=answer.text, generation_info=_info(answer, request))]
            for answer, request in zip(found, requests, strict=True)
        ]
        name = requests[0].load().name if requests else self._model_name()
        return LLMResult(generations=made, llm_output={"token_usage": total, "model_name": name})


def _info(answer: Answer, request: Request) -> dict[str, Any]:
    return {**response_metadata(answer, request.load()), "token_usage": _token_usage(answer)}


def _token_usage(answer: Answer) -> dict[str, int]:
    counts = usage(answer)
    return {
        "prompt_tokens": counts["input_tokens"],
        "completion_tokens": counts["output_tokens"],
        "total_tokens": counts["total_tokens"],
    }
