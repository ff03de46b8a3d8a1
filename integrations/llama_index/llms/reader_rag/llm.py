"""A LlamaIndex LLM over a `Reader`: eight public methods, each a view of one private stream."""

import asyncio
import dataclasses
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import default_completion_to_prompt

from llama_index.llms.reader_rag import responses
from llama_index.llms.reader_rag.engine import Engine
from llama_index.llms.reader_rag.handoff import closes_source, each, each_off_loop, last, last_off_loop
from llama_index.llms.reader_rag.messages import ROLES, as_dicts
from llama_index.llms.reader_rag.nodes import chunks_from
from llama_index.llms.reader_rag.structured import ConstrainedLLM
from reader_rag import Chunk, Drafting, Sampling
from reader_rag.errors import PromptError, SettingsError
from reader_rag.options import hint
from reader_rag.structured import Constraint, plan_tools

if TYPE_CHECKING:
    from reader_rag import Reader

SAMPLING_OPTIONS = tuple(field.name for field in dataclasses.fields(Sampling))
LOADING_OPTIONS = (
    "dtype",
    "device",
    "width",
    "rows",
    "exact",
    "prefix_bytes",
    "graphs",
    "cache_dir",
    "local_files_only",
    "model_kwargs",
    "progress",
)
TOOL_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls")
UNTOLD = ("processors", "constraint")  # not plain values, so not for observers

DEFAULTS = Sampling()


class ReaderLLM(ConstrainedLLM):
    """A local model that drafts its answers from retrieved chunks; drafts change its speed, not its text.

        llm = ReaderLLM("Qwen/Qwen2.5-7B-Instruct", max_tokens=256)
        Settings.llm = llm
        Settings.tokenizer = llm.reader.encode      # so that LlamaIndex counts this model's tokens

    Give `model` (hub id, folder, .gguf file, a loaded model with its `tokenizer`, or nothing for the default
    model) and options, or `reader`, a live `Reader`. The model is loaded once per process, at first use;
    `llm.reader` loads it at a moment of your choice, such as the start of a server.

    Every method takes, per call, the options of `Sampling` (stop, max_tokens, temperature, top_p, top_k,
    min_p, seed, ...) and `documents`: nodes or texts to draft from, which never enter the prompt. `raw` of a
    response is a dict with "usage", "finish_reason" and "reader": what drafting did, and which spans of the
    answer stand verbatim in which chunk. Chats also take `tools`, `tool_choice` and `parallel_tool_calls`, where the
    model's template writes calls of tools, or `tool_format` names how (see `reader_rag.structured`); the calls are
    blocks of the message.

    A plain prompt enters the chat template as one user message, unless `raw=True` or `formatted=True`, or a
    `completion_to_prompt` of your own formats it. `chat` uses the template, unless you gave a
    `messages_to_prompt`. `system_prompt` leads both, where the messages bring no system message themselves.
    Only in a text that is formatted in one of these ways do control strings such as `<|im_end|>` act as control
    tokens; everywhere else they are plain text.

    Raises:
        SettingsError: an unknown option, a value out of range, or `reader` together with options of loading.
    """

    model_config = ConfigDict(protected_namespaces=("pydantic_model_",))

    model: str | None = Field(default=None, frozen=True, description="Hub id, folder or .gguf file.")
    dtype: Any = Field(default="auto", frozen=True, description="Torch dtype or its name.")
    device: Any = Field(default="auto", frozen=True, description="Torch device or its name.")
    width: int | None = Field(default=None, frozen=True, description="Tokens per pass; chosen if None.")
    rows: int | None = Field(default=None, frozen=True, description="Requests per pass; chosen if None.")
    exact: bool = Field(default=True, frozen=True, description="False: throughput mode.")
    prefix_bytes: int | None = Field(default=None, frozen=True, description="KV kept for later turns.")
    graphs: bool = Field(default=True, frozen=True, description="False: no CUDA graphs on a CUDA device.")
    context_window: int | None = Field(default=None, frozen=True, description="Prompt and answer, in tokens.")
    cache_dir: str | Path | None = Field(default=None, frozen=True, description="For converted weights.")
    local_files_only: bool = Field(default=False, frozen=True, description="Never ask the hub.")
    model_kwargs: dict[str, Any] | None = Field(
        default=None, frozen=True, repr=False, description="Passed on to from_pretrained."
    )
    progress: bool = Field(default=False, frozen=True, description="Show progress bars while loading.")

    drafting: Drafting | None = Field(default=None, description="What to draft from, if not as the reader.")
    scope: str = Field(default="default", description="Who may share sources.")
    raw: bool = Field(default=False, description="Keep plain prompts out of the chat template.")

    tool_format: str | None = Field(default=None, description="How tools are called, if not as the template.")

    max_tokens: int = Field(default=DEFAULTS.max_tokens, description="Longest answer, in tokens.")
    temperature: float = Field(default=DEFAULTS.temperature, description="0 is greedy.")
    top_k: int = Field(default=DEFAULTS.top_k, description="Draw among the k likeliest tokens; 0: all.")
    top_p: float = Field(default=DEFAULTS.top_p, description="Draw among the likeliest tokens of this mass.")
    min_p: float = Field(default=DEFAULTS.min_p, description="Drop tokens below this share of the likeliest.")
    repetition_penalty: float = Field(default=DEFAULTS.repetition_penalty)
    presence_penalty: float = Field(default=DEFAULTS.presence_penalty)
    frequency_penalty: float = Field(default=DEFAULTS.frequency_penalty)
    no_repeat_ngram_size: int = Field(default=DEFAULTS.no_repeat_ngram_size)
    logit_bias: dict[int, float] | None = Field(default=None)
    stop: tuple[str, ...] = Field(default=(), description="Texts that end the answer and are left out of it.")
    seed: int | None = Field(default=None, description="The same draws again, with or without drafts.")
    processors: tuple[Any, ...] = Field(
        default=(), exclude=True, repr=False, description="Transformers logits processors."
    )
    constraint: Constraint | None = Field(default=None, description="A language that answers are texts of.")
    logprobs: int | None = Field(default=None, description="Log-probabilities of this many tokens a place.")
    draft_rule: str | None = Field(
        default=None, description="How a speculator's sampled drafts are accepted."
    )

    _engine: Engine = PrivateAttr()

    def __init__(
        self,
        model: Any = None,
        *,
        reader: "Reader | None" = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        fields = type(self).model_fields
        if unknown := sorted(set(options) - set(fields)):
            known = ["model", "reader", "tokenizer", *sorted(set(fields) - {"model"})]
            raise SettingsError(
                f"unknown option {unknown[0]}{hint(unknown[0], known)}: ReaderLLM knows {', '.join(known)}"
            )
        if isinstance(options.get("stop"), str):
            options["stop"] = (options["stop"],)
        name = str(model) if isinstance(model, str | Path) else getattr(model, "name_or_path", None)
        options["model"] = name if reader is None else reader.name
        super().__init__(**options)
        self._sampling({})  # a value out of range is told now, not at the first question
        plan_tools(None, (), format=self.tool_format)

        loading = {
            option: value
            for option in LOADING_OPTIONS
            if (value := getattr(self, option)) != fields[option].default
        }
        if tokenizer is not None:
            loading["tokenizer"] = tokenizer
        if reader is not None and (model is not None or loading):
            given = ", ".join([*(["model"] if model is not None else []), *loading])
            raise SettingsError(f"{given} given beside reader=, which is loaded already: pass to Reader.load")
        if reader is None and self.context_window is not None:
            loading["context"] = self.context_window
        self._engine = Engine(model, loading, reader)

    @classmethod
    def class_name(cls) -> str:
        return "ReaderLLM"

    @property
    def reader(self) -> "Reader":
        """The engine; loaded by this call if it was not."""
        return self._engine.load()

    @property
    def metadata(self) -> LLMMetadata:
        reader = self.reader
        return LLMMetadata(
            context_window=min(reader.context_length, self.context_window or reader.context_length),
            num_output=self.max_tokens,
            is_chat_model=reader.has_chat_template,
            is_function_calling_model=self._engine.calls_tools(self.tool_format),
            model_name=reader.name,
        )

    def to_payload(self) -> dict[str, Any]:
        """What observers are told. Never loads the model: callbacks ask on the event loop."""
        payload = {
            "class_name": self.class_name(),
            "model": self.model or "default",
            **{name: getattr(self, name) for name in SAMPLING_OPTIONS if name not in UNTOLD},
        }
        return payload | self.metadata.model_dump() if self._engine.loaded else payload

    def offer(self, chunks: Sequence[Chunk], scope: str | None = None) -> None:
        """Put chunks into the scope's pool, by default this model's; they wait for a model not loaded yet."""
        self._engine.offer(chunks, self.scope if scope is None else scope)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return responses.completion(last(self._answer_text(prompt, formatted, kwargs)))

    @closes_source
    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        return each(self._answer_text(prompt, formatted, kwargs), responses.completion_part)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return responses.completion(
            await last_off_loop(partial(self._answer_text, prompt, formatted, kwargs))
        )

    @closes_source
    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        parts = await asyncio.to_thread(self._answer_text, prompt, formatted, kwargs)
        return each_off_loop(parts, responses.completion_part)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return responses.chat(last(self._answer_messages(messages, kwargs)))

    @closes_source
    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return each(self._answer_messages(messages, kwargs), responses.chat_part)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return responses.chat(await last_off_loop(partial(self._answer_messages, messages, kwargs)))

    @closes_source
    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        parts = await asyncio.to_thread(self._answer_messages, messages, kwargs)
        return each_off_loop(parts, responses.chat_part)

    def _answer_text(
        self, prompt: str, formatted: bool, options: Mapping[str, Any]
    ) -> "Generator[responses.Part, None, None]":
        _refuse_unknown(options, (*SAMPLING_OPTIONS, "documents", "raw"))
        raw = self.raw if options.get("raw") is None else options["raw"]
        to_prompt = self.completion_to_prompt or default_completion_to_prompt
        own_format = to_prompt is not default_completion_to_prompt or self.query_wrapper_prompt is not None
        template = self.reader.has_chat_template
        if raw or formatted:
            # LLM.predict calls every prompt for a model without template formatted, documents and all.
            return self._parts(prompt, raw or own_format or template, options)
        if own_format or not template:
            return self._parts(self._extend_prompt(to_prompt(prompt)), own_format, options)
        message = ChatMessage(content=prompt, role=MessageRole.USER)
        return self._parts(as_dicts(self._extend_messages([message])), False, options)

    def _answer_messages(
        self, messages: Sequence[ChatMessage], options: Mapping[str, Any]
    ) -> "Generator[responses.Part, None, None]":
        _refuse_unknown(options, (*SAMPLING_OPTIONS, *TOOL_OPTIONS, "documents"))
        if not messages:
            raise PromptError("there is no message to answer: pass at least one ChatMessage")
        documents = [m.additional_kwargs["documents"] for m in messages if "documents" in m.additional_kwargs]
        # LLM.predict has put the system prompt in front already.
        if not any(ROLES[message.role] == "system" for message in messages):
            messages = self._extend_messages(list(messages))
        dicts = as_dicts(messages)
        to_prompt = self.messages_to_prompt or generic_messages_to_prompt
        if to_prompt is not generic_messages_to_prompt:
            return self._parts(to_prompt(messages), True, options, documents)
        if not self.reader.has_chat_template:
            # The generic function prints additional_kwargs, documents and all: it gets bare messages.
            bare = [ChatMessage(role=message.role, blocks=message.blocks) for message in messages]
            return self._parts(to_prompt(bare), False, options, documents)
        return self._parts(dicts, False, options, documents)

    def _parts(
        self,
        prompt: str | list[dict[str, Any]],
        raw: bool,
        options: Mapping[str, Any],
        documents: Sequence[object] = (),
    ) -> "Generator[responses.Part, None, None]":
        """The one stream behind all eight methods; a faulty request raises here, before it starts."""
        sampling = self._sampling(options)
        chunks = [chunk for one in (*documents, options.get("documents")) for chunk in chunks_from(one)]
        tools = {name: options[name] for name in TOOL_OPTIONS if options.get(name) is not None}
        if tools or self.tool_format is not None:  # the format also writes the calls of earlier turns
            tools["tool_format"] = self.tool_format
        reader = self.reader
        steps = reader.stream(
            prompt,
            sampling=sampling,
            chunks=chunks,
            drafting=self.drafting,
            scope=self.scope,
            raw=raw,
            **tools,
        )
        return responses.accumulate(steps, reader.name, lambda token: reader.tokenizer.decode([token]))

    def _sampling(self, options: Mapping[str, Any]) -> Sampling:
        """This model's sampling with the call's own options; None means not given."""
        values = {name: getattr(self, name) for name in SAMPLING_OPTIONS}
        values |= {name: options[name] for name in SAMPLING_OPTIONS if options.get(name) is not None}
        return Sampling(**values)


def _refuse_unknown(options: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := sorted(set(options) - set(known)):
        raise SettingsError(
            f"unknown option {unknown[0]}{hint(unknown[0], known)}: a call takes {', '.join(sorted(known))}"
        )
