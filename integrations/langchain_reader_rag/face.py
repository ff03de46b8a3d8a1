"""What the two models have in common: options, the lazily loaded Reader, and the one path to its steps."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

from langchain_core.language_models import BaseLanguageModel, LangSmithParams
from pydantic import ConfigDict, Field, PrivateAttr, model_validator

import reader_rag
from langchain_reader_rag.asking import Request, configured_scope
from langchain_reader_rag.messages import chunks_of
from reader_rag import Chunk, Drafting, Sampling, __version__
from reader_rag.errors import SettingsError
from reader_rag.options import refuse_unknown

SAMPLING = tuple(field.name for field in fields(Sampling))
LOADING = (
    "tokenizer",
    "dtype",
    "device",
    "width",
    "rows",
    "exact",
    "context",
    "prefix_bytes",
    "graphs",
    "cache_dir",
    "local_files_only",
    "model_kwargs",
)
PER_REQUEST = ("documents", "drafting", "scope")
"""Options of a call that never change its text, and so stand outside every cache key."""
WAITING = 64
"""Offers kept until the model is loaded; the oldest go first."""


class ReaderFace(BaseLanguageModel[Any]):
    """Options of `ReaderLLM` and `ChatReader`.

    Give a `model` (hub id, folder, .gguf file, or a live transformers model with its `tokenizer`; None is
    the demo model), which is loaded at the first use and shared by all faces of the process, or a live
    `reader`.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    model: Any = Field(default=None, exclude=True, repr=False)
    reader: Any = Field(default=None, exclude=True, repr=False)
    """A live Reader, or another face to share its Reader."""
    tokenizer: Any = Field(default=None, exclude=True, repr=False)
    dtype: Any = "auto"
    device: Any = "auto"
    width: int | None = None
    """Tokens per pass; None measures which is fastest."""
    rows: int | None = None
    """Requests per pass; None measures."""
    exact: bool = True
    """False is throughput mode: faster, and in bfloat16 another rounding may choose another token."""
    prefix_bytes: int | None = None
    """Cap of the KV kept for prompts that begin like earlier ones; None is the Reader's own."""
    graphs: bool = True
    """False runs the passes of a CUDA device without CUDA graphs."""
    context: int | None = None
    """Context length in tokens; None is the model's own."""
    cache_dir: str | Path | None = None
    local_files_only: bool = False
    model_kwargs: dict[str, Any] | None = Field(default=None, repr=False)
    """Passed to transformers' `from_pretrained` as they are."""
    progress: bool = False
    """Show a progress bar while the model loads."""

    temperature: float = 0.0
    """0 takes the most probable token."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: list[str] | str | None = None
    """Strings that end the answer and are not part of it. `stop` of a call replaces them."""
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: dict[int, float] | None = None
    processors: Sequence[Any] = Field(default=(), exclude=True, repr=False)
    """transformers' LogitsProcessors, applied in order."""
    constraint: Any = Field(default=None, repr=False)
    """A `reader_rag.structured.Constraint` that every answer follows."""
    logprobs: bool | int | None = None
    """True puts the tokens' log-probabilities into the metadata; a number adds so many of the likeliest at each place."""
    draft_rule: str | None = None
    """How drafts that a speculator sampled are accepted, as of `Sampling`; None keeps the seeded draws."""

    drafting: Drafting | None = None
    """Where drafts come from; `Drafting(sources=())` turns them off. Never changes a text."""
    scope: str = "default"
    """Who shares what is drafted from; `config={"configurable": {"reader_scope": ...}}` comes first."""
    timeout: float | None = None
    """Seconds for one request, after which it stops with TimeoutError; None is no limit."""
    max_retries: int | None = None
    """Accepted because LangChain's models share it; a local model has nothing to retry."""

    _live: Any = PrivateAttr(default=None)
    _waiting: deque[tuple[list[Chunk], str]] = PrivateAttr(default_factory=lambda: deque(maxlen=WAITING))

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_options(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            refuse_unknown(values, cls.model_fields, f"{cls.__name__}()")
        return values

    @model_validator(mode="after")
    def _check_reader_options(self) -> Self:
        self._sampling({})
        if self.drafting is not None and not isinstance(self.drafting, Drafting):
            raise SettingsError("drafting must be a Drafting, as in Drafting(sources=())")
        if self.timeout is not None and self.timeout <= 0:
            raise SettingsError(f"timeout is {self.timeout}: give seconds above 0, or None for no limit")
        if self.reader is None:
            return self
        if not isinstance(self.reader, ReaderFace) and not hasattr(self.reader, "stream"):
            raise SettingsError("reader must be a live Reader: give a name or a path as model= instead")
        if extra := ["model"] * (self.model is not None) + list(self._loading()):
            raise SettingsError(f"a live reader has its {' and '.join(extra)} already: leave that out")
        return self

    @model_validator(mode="after")
    def _set_reader_rag_version(self) -> Self:
        self._add_version("reader-rag", __version__)
        return self

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A face with options of its own over the same model: what is alive in memory is shared, never copied."""
        alive = (self.model, self.tokenizer, self.reader, self._live, self.processors, self.constraint)
        return super().__deepcopy__({**(memo or {}), **{id(one): one for one in alive}})

    def __getstate__(self) -> dict[Any, Any]:
        """What pickle writes: the options, never the model, which the other process loads by its name."""
        by_name = all(one is None or isinstance(one, str | Path) for one in (self.model, self.tokenizer))
        if not by_name or not (self.reader is None or isinstance(self.reader, ReaderFace)):
            raise TypeError(
                f"{type(self).__name__} was given a live model, which cannot be pickled: give model= as a hub id or a "
                "path, and the other process loads it"
            )
        state = super().__getstate__()
        private = {**(state["__pydantic_private__"] or {}), "_live": None}
        return {**state, "__pydantic_private__": private}

    def load(self) -> "reader_rag.Reader":
        """The live Reader behind this face; the first call loads it."""
        if self._live is None:
            if isinstance(self.reader, ReaderFace):
                self._live = self.reader.load()
            elif self.reader is not None:
                self._live = self.reader
            else:
                progress = {"progress": True} if self.progress else {}
                self._live = reader_rag.Reader.shared(self.model, **self._loading(), **progress)
        while self._waiting:
            chunks, scope = self._waiting.popleft()
            self._live.offer(chunks, scope=scope)
        return self._live  # type: ignore[no-any-return]

    def offer(self, chunks: Iterable[Any], scope: str | None = None) -> None:
        """Put chunks, Documents or strings where the scope's next requests may draft from them.

        Loads nothing: before the first request they are kept until the model is there.
        """
        found = chunks_of(chunks)
        if not found:
            return
        self._waiting.append((found, scope or self.scope))
        if self._is_live():
            self.load()

    def _is_live(self) -> bool:
        if isinstance(self.reader, ReaderFace):
            return self.reader._is_live()
        return self._live is not None or self.reader is not None

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of `text` by the model's own tokenizer, without special tokens."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return list(self.load().encode(text))

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What the text depends on, and nothing else: cached answers are looked up by it."""
        values = self._model_params()
        sampling = {name: getattr(self, name) for name in SAMPLING if name not in ("stop", "processors")}
        values.update(sampling, stop=list(stop_strings(self.stop)))
        if self.processors:
            values["processors"] = [repr(processor) for processor in self.processors]
        return values

    def _model_params(self) -> dict[str, Any]:
        if isinstance(self.reader, ReaderFace):
            return self.reader._model_params()
        if self.reader is not None:
            shaping = ("dtype", "device", "width", "rows", "mode")
            loading = {name: getattr(self.reader, name, None) for name in shaping}
        else:
            loading = {
                n: value
                for n, value in self._loading().items()
                if n not in ("cache_dir", "prefix_bytes", "graphs")
            }
        return {"model": self._model_name(), **{name: str(value) for name, value in loading.items()}}

    def _model_name(self) -> str:
        """The model's name without loading it; live objects are told apart by identity."""
        if isinstance(self.reader, ReaderFace):
            return self.reader._model_name()
        if self.reader is not None:
            return str(self.reader.name)
        if self.model is None or isinstance(self.model, str | Path):
            return str(self.model or "default")
        return f"{getattr(self.model, 'name_or_path', '')}@{id(self.model):x}"

    def _loading(self) -> dict[str, Any]:
        """The loading options that differ from their defaults: equal ones must share one Reader."""
        known = type(self).model_fields
        return {n: getattr(self, n) for n in LOADING if getattr(self, n) != known[n].default}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = LangSmithParams(
            ls_provider="reader_rag",
            ls_model_name=str(kwargs.get("model") or self._model_name()),
            ls_model_type="llm",
            ls_temperature=kwargs.get("temperature", self.temperature),
            ls_max_tokens=kwargs.get("max_tokens", self.max_tokens),
        )
        if strings := stop_strings(self.stop if stop is None else stop):
            params["ls_stop"] = list(strings)
        return params

    def _sampling(self, options: Mapping[str, Any]) -> Sampling:
        values = {name: options.get(name, getattr(self, name)) for name in SAMPLING}
        values["stop"] = stop_strings(values["stop"])
        values["processors"] = tuple(values["processors"])
        if isinstance(values["logprobs"], bool):
            values["logprobs"] = 0 if values["logprobs"] else None
        return Sampling(**values)

    def _request(
        self,
        prompt: str | list[dict[str, Any]],
        stop: Sequence[str] | str | None,
        options: Mapping[str, Any],
        *,
        chunks: Sequence[Chunk] = (),
        raw: bool = False,
        tools: Mapping[str, Any] | None = None,
    ) -> Request:
        """A call with its options checked; reads the config's scope, so it runs before the first yield."""
        face = self._of_model(options.get("model"))
        documents = options.get("documents")
        if options.get("scope") == "":
            raise SettingsError("scope is empty: name it, or leave it out for the face's own")
        drafting = options.get("drafting", self.drafting)
        if drafting is not None and not isinstance(drafting, Drafting):
            raise SettingsError("drafting must be a Drafting, as in Drafting(sources=())")
        return Request(
            load=face.load,
            prompt=prompt,
            sampling=self._sampling(options if stop is None else {**options, "stop": stop}),
            chunks=[*chunks, *chunks_of(() if documents is None else documents)],
            drafting=drafting,
            scope=options.get("scope") or configured_scope(None) or self.scope,
            raw=raw,
            tools=tools or {},
        )

    def _of_model(self, model: Any) -> Self:
        """This face, or its like for the model that a call names."""
        if model is None or model == self._model_name():
            return self
        face = self.model_copy(update={"model": model, "tokenizer": None, "reader": None})
        face._live, face._waiting = None, deque(maxlen=WAITING)
        face.__dict__.pop("_serialized", None)
        return face


def stop_strings(stop: Sequence[str] | str | None) -> tuple[str, ...]:
    """Stop strings as a tuple; a single string is one of them."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)
