"""Reader: a model, what it remembers, and the requests that run on it (the loop itself is in loop.py)."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from reader_rag.cache import user_cache_dir
from reader_rag.draft import Drafter, make_drafter
from reader_rag.draft.corpus import Corpus
from reader_rag.draws import plan_draws
from reader_rag.engine import build_engine, vocabulary_of
from reader_rag.errors import ContextError, PromptError, ReaderError, SettingsError
from reader_rag.load import Loaded, context_length, eos_ids, load_model
from reader_rag.loop import Loop
from reader_rag.memory import Memory
from reader_rag.options import check_request, count_prompts
from reader_rag.prefixes import PrefixCache
from reader_rag.prompt import chunk_encodings, control_ids, encode_prompt, encode_text
from reader_rag.request import Request
from reader_rag.settings import Drafting, Sampling
from reader_rag.stats import Answer, Stats, Step
from reader_rag.store.chunk import Chunk, as_chunks
from reader_rag.structured.calls import text_stream
from reader_rag.structured.matching import Grammars
from reader_rag.structured.source import GrammarSource
from reader_rag.structured.tools import plan_tools
from reader_rag.ticket import Ticket, option_of, results
from reader_rag.verify.sampling import Sampler

PREFIX_BYTES = 512 << 20
"""KV of finished requests that is kept for prompts which begin the same way."""
ENCODED_CHUNKS = 4096
LESSON = Drafting(sources=("ngrams",), prompt_evidence=True)
"""`learn` reads a text for what the model expects in it."""

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]


class Reader:
    """A local model that answers with lookups verified in fixed-shape passes: same text, fewer passes.

    Make one with `Reader.load` (or `Reader.shared`, one per process and model). `generate` returns an Answer, `stream` yields Steps.
    Threads may share a Reader: their requests share passes. The text is a pure function of model, dtype, device, width (and rows),
    prompt, sampling and seed; drafts, sources and neighbours cannot change it (docs/losslessness.md).

    >>> reader = Reader.load("Qwen/Qwen2.5-7B-Instruct")                             # doctest: +SKIP
    >>> reader.generate("What does `else` after a `for` loop do?", chunks=hits).text  # doctest: +SKIP
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        width: int | None = None,
        rows: int | None = None,
        exact: bool = True,
        context: int | None = None,
        drafting: Drafting | None = None,
        prefix_bytes: int = PREFIX_BYTES,
        cache_dir: str | Path | None = None,
        graphs: bool = True,
    ) -> None:
        _in_range("width", width, 256, "a row of a pass takes 1 to 256 tokens")
        _in_range("rows", rows, 256, "a pass serves 1 to 256 requests")
        if prefix_bytes < 0:
            raise SettingsError(
                f"prefix_bytes is {prefix_bytes}; give a number of bytes, or 0 to keep nothing"
            )
        folder = user_cache_dir(cache_dir)
        engine = build_engine(loaded, width=width, rows=rows, exact=exact, cache_dir=folder, graphs=graphs)
        self.model, self.tokenizer, self.name = loaded.model, loaded.tokenizer, loaded.name
        self.dtype, self.device = loaded.dtype, loaded.device
        self.drafting = drafting or Drafting()
        self.mode, self.mode_reason = engine.mode, engine.reason
        self.kernels, self.pass_seconds = engine.kernels, engine.pass_seconds
        self.prompt_evidence = engine.prompt_evidence
        self.context_length = context_length(loaded.model.config, context)
        self.graphs, self.graphs_reason = engine.unrecorded is None, engine.unrecorded
        self._forward = engine.forward
        self._eos = eos_ids(loaded.model, loaded.tokenizer)
        self._control = control_ids(loaded.tokenizer)
        self._vocabulary = vocabulary_of(loaded.model)
        self._grammars = Grammars(loaded.tokenizer, self._vocabulary, self._eos)
        self._memory = Memory(engine.fingerprint, folder, self.drafting)
        self._encodings = lru_cache(ENCODED_CHUNKS)(lambda text: chunk_encodings(self.tokenizer, text))
        self._loop = Loop(
            engine.forward,
            eos=self._eos,
            prefixes=PrefixCache(prefix_bytes, engine.forward.chunk),
            seconds=engine.seconds_of if self.mode == "throughput" else None,
            ended=self._remember,
        )

    @classmethod
    def load(
        cls,
        model: Any = None,
        tokenizer: Any = None,
        *,
        dtype: Any = "auto",
        device: Any = "auto",
        width: int | None = None,
        rows: int | None = None,
        exact: bool = True,
        context: int | None = None,
        drafting: Drafting | None = None,
        prefix_bytes: int = PREFIX_BYTES,
        cache_dir: str | Path | None = None,
        graphs: bool = True,
        local_files_only: bool = False,
        model_kwargs: dict[str, Any] | None = None,
        progress: bool = False,
    ) -> Reader:
        """Loads a model: None (the demo model), a hub id, a folder, a .gguf file, or a live model with its tokenizer.

        dtype "auto" is the fastest that the device computes natively. A pass serves `rows` requests with `width` tokens each; both
        are measured when None. `exact=False` is throughput mode: passes take only the tokens that pay, and in bfloat16
        another rounding may then choose another token. `context` lowers the model's own limit; `prefix_bytes` caps the KV kept
        for prompts that begin like earlier ones. `graphs=False` runs the decoding passes of a CUDA device without CUDA graphs.
        Raises LoadError or MissingExtraError with the mend.
        """
        loaded = load_model(
            model,
            tokenizer,
            dtype=dtype,
            device=device,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            model_kwargs=model_kwargs,
            progress=progress,
        )
        return cls(
            loaded,
            width=width,
            rows=rows,
            exact=exact,
            context=context,
            drafting=drafting,
            prefix_bytes=prefix_bytes,
            cache_dir=cache_dir,
            graphs=graphs,
        )

    @classmethod
    def shared(cls, model: Any = None, tokenizer: Any = None, **options: Any) -> Reader:
        """`Reader.load`, once per process for the same arguments: every later call returns the same live Reader."""
        quiet = {k: v for k, v in options.items() if k != "progress" and v is not None}
        quiet["cache_dir"] = str(user_cache_dir(quiet.get("cache_dir")))
        key = (_identity(model), _identity(tokenizer), *sorted((k, repr(v)) for k, v in quiet.items()))
        with _SHARED_LOCK:
            if key not in _SHARED:
                _SHARED[key] = cls.load(model, tokenizer, **options)
            return _SHARED[key]

    @property
    def width(self) -> int:
        """W: tokens of one request in a decoding pass."""
        return self._forward.width

    @property
    def rows(self) -> int:
        """R: requests that a decoding pass serves."""
        return self._forward.rows

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer brings a chat template, so that prompts become messages."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def eos(self) -> frozenset[int]:
        """Token ids that end an answer."""
        return self._eos

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text: no special token is added, none is read out of the text."""
        return encode_text(self.tokenizer, text)

    def count_tokens(self, text: str) -> int:
        """How many tokens `text` has for this model."""
        return len(self.encode(text))

    def encode_prompt(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_format: str | None = None,
    ) -> list[int]:
        """The token ids that `generate` would start from."""
        use = plan_tools(self.tokenizer, tools, format=tool_format)
        return encode_prompt(self.tokenizer, prompt, raw=raw, tools=use.tools, tool_format=use.format)

    def offer(self, chunks: Sequence[Chunk | str], scope: str = "default") -> None:
        """Puts retrieved chunks, the best first, into the scope's pool, from which its later requests draft.

        The pool is capped in bytes; the oldest offer leaves first, and the worst of one offer before its best.
        """
        taken = as_chunks(chunks)
        self._memory.of(scope).offer(taken, self._encodings)

    def index(self, chunks: Iterable[Chunk | str], scope: str = "default") -> int:
        """Makes chunks, usually all of a store, the scope's corpus, from which its later requests draft. Returns its tokens.

        A corpus replaces the one before. Sorting takes about a second per million tokens; it stays in memory, 8 bytes a token.
        """
        corpus = Corpus.build(self.encode(chunk.text) for chunk in as_chunks(list(chunks)))
        self._memory.of(scope).corpus = corpus
        return len(corpus)

    def generate(self, prompt: Prompt, **options: Any) -> Answer:
        """Answers `prompt`; takes the options of `stream`."""
        return self.submit(prompt, **options).result()

    def generate_batch(
        self, prompts: Sequence[Prompt], *, return_exceptions: bool = False, **options: Any
    ) -> list[Answer | Exception]:
        """Answers several prompts in shared passes, in order; each text is the one that `generate` gives.

        Takes the options of `stream`; `sampling` and `chunks` may also be lists with one entry per prompt. All prompts are checked
        before anything runs. With `return_exceptions` a failed request leaves its exception in its place; otherwise the first
        failure is raised when all others are done.
        """
        count = count_prompts(prompts)
        each = [
            {name: option_of(name, value, i, count) for name, value in options.items()} for i in range(count)
        ]
        tickets: list[Ticket | Exception] = []
        for prompt, chosen in zip(prompts, each, strict=True):
            try:
                tickets.append(self.submit(prompt, **chosen))
            except ReaderError as error:
                if not return_exceptions:
                    raise  # tickets that go out of sight are cancelled
                tickets.append(error)
        return results(tickets, return_exceptions=return_exceptions)

    def submit(self, prompt: Prompt, **options: Any) -> Ticket:
        """Queues a request; it runs while anyone waits for this Reader. Takes the options of `stream`; raises as it does."""
        request = self._open(prompt, **options)
        request.in_full = True
        return Ticket(self._loop, request)

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Step]:
        """Yields a Step per pass (and an empty one per prefill chunk); the last one carries the Answer.

        Closing the generator ends the work within one pass.

        prompt: text (one user message, unless `raw` or the model has no chat template), messages, or token ids.
        sampling: a Sampling; None is greedy, at most 256 tokens.
        chunks: what was retrieved for this request. They serve drafting and spans; they never enter the prompt.
        drafting: `Drafting(sources=())` is plain decoding. scope: who shares learned statistics, chunks and read prompts.
        tools, tool_choice, tool_format, parallel_tool_calls: see reader_rag.structured.
        drafter: an object with the methods of reader_rag.draft.Drafter that drafts instead of the sources of `drafting`.
        Raises PromptError or SettingsError at once, before anything runs.
        """
        return self._run(self._open(prompt, **options))

    def learn(self, text: str | Sequence[int], *, scope: str = "default") -> int:
        """Reads text (or token ids) with the model, so that later drafts of the scope know what it expects there.

        Costs a prefill and writes no token. Returns the number of tokens read.
        """
        tokens = self.encode(text) if isinstance(text, str) else list(text)
        for start in range(0, len(tokens), self.context_length - 1):
            part = tokens[start : start + self.context_length - 1]
            if len(part) > 1:
                request = self._open(part, drafting=LESSON, scope=scope)
                request.budget = 0
                for _ in self._run(request):
                    pass
        return len(tokens)

    def forget(self) -> None:
        """Drops what was learned, offered and read in this process, in every scope; files in the cache folder stay."""
        self._memory.forget()
        self._loop.clear()

    def save(self) -> None:
        """Writes the learned statistics of every scope to the cache folder (this also happens at exit)."""
        self._memory.save()

    def close(self) -> None:
        """Saves, and frees KV memory. The Reader may be used again."""
        self.save()
        self._loop.clear()

    # One request, stage by stage.

    def _open(
        self,
        prompt: Prompt,
        *,
        sampling: Sampling | None = None,
        chunks: Sequence[Chunk | str] = (),
        drafting: Drafting | None = None,
        drafter: Drafter | None = None,
        scope: str = "default",
        raw: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: Any = "auto",
        tool_format: str | None = None,
        parallel_tool_calls: bool | None = None,
        **unknown: Any,
    ) -> Request:
        started = time.perf_counter()
        sampling = Sampling() if sampling is None else sampling
        drafting = self.drafting if drafting is None else drafting
        check_request(unknown, sampling=sampling, drafting=drafting, scope=scope)
        use = plan_tools(
            self.tokenizer, tools, choice=tool_choice, parallel=parallel_tool_calls, format=tool_format
        )
        rules = self._grammars.rules(sampling.constraint, use.constraint)
        tokens = encode_prompt(self.tokenizer, prompt, raw=raw, tools=use.tools, tool_format=use.format)
        room = self.context_length - len(tokens)
        if not tokens:
            raise PromptError("the prompt has no tokens; pass a question")
        if room < 1:
            raise ContextError(
                f"the prompt has {len(tokens)} tokens and {self.name} takes {self.context_length}; "
                "retrieve fewer or shorter chunks, or shorten the conversation"
            )
        given, memory = as_chunks(chunks), self._memory.of(scope)
        sources = () if self.mode == "plain" else drafting.sources
        if rules is not None and sources:
            sources = (GrammarSource(rules), *sources)
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(32)
        sampler = Sampler(sampling, seed, self._eos, prompt_tokens=len(tokens), rules=rules)
        sources, draws = plan_draws(sources, sampler, self.mode, self._vocabulary, drafter)
        drafter = drafter or make_drafter(
            [s if isinstance(s, str) else s.name for s in sources],
            chunk_tokens=[ids for chunk in given for ids in self._encodings(chunk.text)],
            pool=memory.pool,
            ngrams=memory.ngrams,
            answers=memory.answers,
            corpus=memory.corpus,
            extra_sources=[s for s in sources if not isinstance(s, str)],
            forbidden=self._control,
            vocabulary=self._vocabulary,
        )
        wanted = drafting.prompt_evidence
        stats = Stats(
            prompt_tokens=len(tokens),
            mode=self.mode,
            reason=self.mode_reason,
            width=self.width,
            rows=self.rows,
            scope=scope,
            seed=seed if sampling.temperature > 0 else None,
        )
        return Request(
            tokens=tokens,
            prompt_tokens=len(tokens),
            budget=min(sampling.max_tokens, room),
            sampler=sampler,
            drafter=drafter,
            draws=draws,
            text=text_stream(self.tokenizer, sampling.stop, self._control, use),
            stats=stats,
            chunks=(*given, *memory.recent(exclude={chunk.id for chunk in given})),
            started=started,
            wants_evidence=bool(sources) and (self.prompt_evidence if wanted is None else wanted),
        )

    def _remember(self, request: Request) -> None:
        if "answers" in request.drafter.source_names:
            self._memory.of(request.stats.scope).learn_answer(request.tokens[request.prompt_tokens :])

    def _run(self, request: Request) -> Iterator[Step]:
        self._loop.submit(request)
        try:
            finished = False
            while not finished:
                step = self._loop.take(request)
                finished = step.finish_reason is not None
                yield step
        finally:
            self._loop.cancel(request)


_SHARED: dict[tuple[Any, ...], Reader] = {}
_SHARED_LOCK = threading.Lock()


def _in_range(name: str, value: int | None, most: int, meaning: str) -> None:
    if value is not None and not 1 <= value <= most:
        raise SettingsError(f"{name} is {value}; {meaning}, or None to let the Reader measure")


def _identity(thing: Any) -> Any:
    return str(thing) if thing is None or isinstance(thing, str | Path) else id(thing)
