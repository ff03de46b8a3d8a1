"""A LlamaIndex LLM over a `Reader`: eight public methods, each a view of one private stream."""

import asyncio
import dataclasses
import threading
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    TextBlock,
    ThinkingBlock,
)
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM, default_completion_to_prompt

from llama_index.llms.reader_rag.handoff import closes_source, each, each_off_loop, last, last_off_loop
from llama_index.llms.reader_rag.nodes import chunks_from
from reader_rag import Chunk, Drafting, Sampling
from reader_rag.errors import PromptError, SettingsError

if TYPE_CHECKING:
    from reader_rag import Answer, Reader

SAMPLING_OPTIONS = tuple(field.name for field in dataclasses.fields(Sampling))
LOADING_OPTIONS = ("dtype", "device", "width", "cache_dir", "local_files_only", "model_kwargs", "progress")
WAITING_CHUNKS = 256  # kept until the model is loaded; more than a few questions retrieve

ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}

DEFAULTS = Sampling()


class ReaderLLM(LLM):
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
    answer stand verbatim in which chunk.

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

    _engine: "_Engine" = PrivateAttr()

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
            raise SettingsError(f"unknown option {', '.join(unknown)}: ReaderLLM knows {', '.join(known)}")
        if isinstance(options.get("stop"), str):
            options["stop"] = (options["stop"],)
        name = str(model) if isinstance(model, str | Path) else getattr(model, "name_or_path", None)
        options["model"] = name if reader is None else reader.name
        super().__init__(**options)
        self._sampling({})  # a value out of range is told now, not at the first question

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
        self._engine = _Engine(model, loading, reader)

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
            is_function_calling_model=False,
            model_name=reader.name,
        )

    def to_payload(self) -> dict[str, Any]:
        """What observers are told. Never loads the model: callbacks ask on the event loop."""
        payload = {
            "class_name": self.class_name(),
            "model": self.model or "default",
            **{name: getattr(self, name) for name in SAMPLING_OPTIONS if name != "processors"},
        }
        return payload | self.metadata.model_dump() if self._engine.loaded else payload

    def offer(self, chunks: Sequence[Chunk], scope: str | None = None) -> None:
        """Put chunks into the scope's pool, by default this model's; they wait for a model not loaded yet."""
        self._engine.offer(chunks, scope or self.scope)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return _completion(last(self._answer_text(prompt, formatted, kwargs)))

    @closes_source
    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        return each(self._answer_text(prompt, formatted, kwargs), _completion_part)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return _completion(await last_off_loop(partial(self._answer_text, prompt, formatted, kwargs)))

    @closes_source
    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        parts = await asyncio.to_thread(self._answer_text, prompt, formatted, kwargs)
        return each_off_loop(parts, _completion_part)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return _chat(last(self._answer_messages(messages, kwargs)))

    @closes_source
    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return each(self._answer_messages(messages, kwargs), _chat_part)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return _chat(await last_off_loop(partial(self._answer_messages, messages, kwargs)))

    @closes_source
    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        parts = await asyncio.to_thread(self._answer_messages, messages, kwargs)
        return each_off_loop(parts, _chat_part)

    def _answer_text(
        self, prompt: str, formatted: bool, options: Mapping[str, Any]
    ) -> "Generator[_Part, None, None]":
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
        return self._parts(_as_dicts(self._extend_messages([message])), False, options)

    def _answer_messages(
        self, messages: Sequence[ChatMessage], options: Mapping[str, Any]
    ) -> "Generator[_Part, None, None]":
        _refuse_unknown(options, (*SAMPLING_OPTIONS, "documents"))
        if not messages:
            raise PromptError("there is no message to answer: pass at least one ChatMessage")
        documents = [m.additional_kwargs["documents"] for m in messages if "documents" in m.additional_kwargs]
        # LLM.predict has put the system prompt in front already.
        if not any(ROLES[message.role] == "system" for message in messages):
            messages = self._extend_messages(list(messages))
        dicts = _as_dicts(messages)
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
        prompt: str | list[dict[str, str]],
        raw: bool,
        options: Mapping[str, Any],
        documents: Sequence[object] = (),
    ) -> "Generator[_Part, None, None]":
        """The one stream behind all eight methods; a faulty request raises here, before it starts."""
        sampling = self._sampling(options)
        chunks = [chunk for one in (*documents, options.get("documents")) for chunk in chunks_from(one)]
        steps = self.reader.stream(
            prompt, sampling=sampling, chunks=chunks, drafting=self.drafting, scope=self.scope, raw=raw
        )
        return _accumulate(steps, self.reader.name)

    def _sampling(self, options: Mapping[str, Any]) -> Sampling:
        """This model's sampling with the call's own options; None means not given."""
        values = {name: getattr(self, name) for name in SAMPLING_OPTIONS}
        values |= {name: options[name] for name in SAMPLING_OPTIONS if options.get(name) is not None}
        return Sampling(**values)


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """The text so far, what is new in it, and at the end, and only there, the facts about the answer."""

    text: str
    delta: str
    raw: dict[str, Any] | None


class _Engine:
    """The Reader behind a ReaderLLM: loaded at first use, shared by copies, left behind by pickling."""

    def __init__(self, model: Any, loading: dict[str, Any], reader: "Reader | None" = None) -> None:
        self._model = model
        self._loading = loading
        self._reader = reader
        self._waiting: deque[tuple[Chunk, str]] = deque(maxlen=WAITING_CHUNKS)
        self._lock = threading.Lock()

    @property
    def loaded(self) -> bool:
        return self._reader is not None

    def load(self) -> "Reader":
        if self._reader is not None and not self._waiting:
            return self._reader
        with self._lock:
            if self._reader is None:
                from reader_rag.reader import Reader  # torch: not before a model is wanted

                self._reader = Reader.shared(self._model, **self._loading)
            while self._waiting:
                chunk, scope = self._waiting.popleft()
                self._reader.offer([chunk], scope=scope)
            return self._reader

    def offer(self, chunks: Sequence[Chunk], scope: str) -> None:
        if self._reader is None:
            self._waiting.extend((chunk, scope) for chunk in chunks)
        else:
            self._reader.offer(chunks, scope=scope)

    def __deepcopy__(self, memo: object) -> "_Engine":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # An unpickled LLM starts from its fields (BaseComponent.__setstate__): this is never read again.
        return (_Engine, (None, {}))


def _accumulate(steps: Any, model: str) -> Generator[_Part, None, None]:
    text = ""
    try:
        for step in steps:
            text += step.text
            raw = _raw(step.answer, model) if step.answer is not None else None
            if step.text or raw is not None:
                yield _Part(text, step.text, raw)
    finally:
        steps.close()


def _raw(answer: "Answer", model: str) -> dict[str, Any]:
    """Plain numbers and strings: TokenCountingHandler reads "usage", observers may serialise all of it."""
    tokens = len(answer.tokens)
    return {
        "model": model,
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": answer.prompt_tokens + tokens,
        },
        "finish_reason": answer.finish_reason,
        "reader": {**answer.stats.to_dict(), "spans": [span.to_dict() for span in answer.spans]},
    }


def _usage(part: _Part) -> dict[str, int]:
    return dict(part.raw["usage"]) if part.raw is not None else {}


def _completion(part: _Part) -> CompletionResponse:
    return CompletionResponse(text=part.text, raw=part.raw, additional_kwargs=_usage(part))


def _completion_part(part: _Part) -> CompletionResponse:
    return CompletionResponse(text=part.text, delta=part.delta, raw=part.raw, additional_kwargs=_usage(part))


def _chat(part: _Part) -> ChatResponse:
    message = ChatMessage(role=MessageRole.ASSISTANT, content=part.text)
    return ChatResponse(message=message, raw=part.raw, additional_kwargs=_usage(part))


def _chat_part(part: _Part) -> ChatResponse:
    message = ChatMessage(role=MessageRole.ASSISTANT, content=part.text)
    return ChatResponse(message=message, delta=part.delta, raw=part.raw, additional_kwargs=_usage(part))


def _as_dicts(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    for message in messages:
        for block in message.blocks:
            if not isinstance(block, TextBlock | ThinkingBlock | CachePoint):
                raise PromptError(
                    f"a message holds a {type(block).__name__}, the model reads text: send text blocks only"
                )
    return [{"role": ROLES[message.role], "content": message.content or ""} for message in messages]


def _refuse_unknown(options: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := sorted(set(options) - set(known)):
        raise SettingsError(f"unknown option {', '.join(unknown)}: a call takes {', '.join(sorted(known))}")
