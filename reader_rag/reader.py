"""Reader: the loop that drafts, verifies, commits and streams, and the model it runs on."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from reader_rag.cache import user_cache_dir
from reader_rag.draft import Draft, make_drafter
from reader_rag.engine import build_engine, vocabulary_of
from reader_rag.errors import PromptError, SettingsError
from reader_rag.load import Loaded, context_length, eos_ids, load_model
from reader_rag.memory import Memory
from reader_rag.prompt import chunk_encodings, control_ids, encode_prompt, encode_text
from reader_rag.request import Request
from reader_rag.settings import Drafting, Sampling
from reader_rag.spans import find_spans
from reader_rag.stats import Answer, Stats, Step
from reader_rag.store.chunk import Chunk, as_chunks
from reader_rag.stream import TextStream
from reader_rag.verify.accept import ROOT, walk
from reader_rag.verify.sampling import Sampler, top_evidence

EVIDENCE = 8
"""Top tokens kept of every computed position: the model's soft evidence."""
ENCODED_CHUNKS = 4096

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]


class Reader:
    """A local model that answers with lookups verified in fixed-shape passes: same text, fewer passes.

    Make one with `Reader.load` (or `Reader.shared`, one per process and model). `generate` returns an Answer, `stream` yields Steps.
    Threads may share a Reader: passes take turns, streams interleave. The text is a pure function of model, dtype, device, width,
    prompt, sampling and seed; drafts, sources and neighbours cannot change it (docs/losslessness.md).

    >>> reader = Reader.load("Qwen/Qwen2.5-7B-Instruct")                             # doctest: +SKIP
    >>> reader.generate("What does `else` after a `for` loop do?", chunks=hits).text  # doctest: +SKIP
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        width: int | None = None,
        context: int | None = None,
        drafting: Drafting | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        if width is not None and not 1 <= width <= 256:
            raise SettingsError(
                f"width is {width}; a pass takes 1 to 256 tokens, or None to let the Reader measure"
            )
        folder = user_cache_dir(cache_dir)
        engine = build_engine(loaded, width=width, cache_dir=folder)
        self.model, self.tokenizer, self.name = loaded.model, loaded.tokenizer, loaded.name
        self.dtype, self.device = loaded.dtype, loaded.device
        self.drafting = drafting or Drafting()
        self.mode = "plain" if engine.reason else "exact"
        self.mode_reason = engine.reason
        self.kernels, self.pass_seconds = engine.kernels, engine.pass_seconds
        self.context_length = context_length(loaded.model.config, context)
        self._forward = engine.forward
        self._eos = eos_ids(loaded.model, loaded.tokenizer)
        self._control = control_ids(loaded.tokenizer)
        self._vocabulary = vocabulary_of(loaded.model)
        self._memory = Memory(engine.fingerprint, folder, self.drafting)
        self._encodings = lru_cache(ENCODED_CHUNKS)(lambda text: chunk_encodings(self.tokenizer, text))
        self._lock = threading.Lock()
        self._arenas: list[Any] = []

    @classmethod
    def load(
        cls,
        model: Any = None,
        tokenizer: Any = None,
        *,
        dtype: Any = "auto",
        device: Any = "auto",
        width: int | None = None,
        context: int | None = None,
        drafting: Drafting | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        model_kwargs: dict[str, Any] | None = None,
        progress: bool = False,
    ) -> Reader:
        """Loads a model: None (the demo model), a hub id, a folder, a .gguf file, or a live model with its tokenizer.

        dtype "auto" is the fastest that the device computes natively; `width` is the tokens of a pass, measured when None;
        `context` lowers the model's own limit. Raises LoadError or MissingExtraError with the mend.
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
        return cls(loaded, width=width, context=context, drafting=drafting, cache_dir=cache_dir)

    @classmethod
    def shared(cls, model: Any = None, tokenizer: Any = None, **options: Any) -> Reader:
        """`Reader.load`, once per process for the same arguments: every later call returns the same live Reader."""
        quiet = {k: v for k, v in options.items() if k != "progress" and v is not None}
        key = (_identity(model), _identity(tokenizer), *sorted((k, repr(v)) for k, v in quiet.items()))
        with _SHARED_LOCK:
            if key not in _SHARED:
                _SHARED[key] = cls.load(model, tokenizer, **options)
            return _SHARED[key]

    @property
    def width(self) -> int:
        """W: tokens of a decoding pass."""
        return self._forward.width

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

    def encode_prompt(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """The token ids that `generate` would start from."""
        return encode_prompt(self.tokenizer, prompt, raw=raw)

    def offer(self, chunks: Sequence[Chunk | str], scope: str = "default") -> None:
        """Puts retrieved chunks, the best first, into the scope's pool, from which its later requests draft.

        The pool is capped in bytes; the oldest offer leaves first, and the worst of one offer before its best.
        """
        taken = as_chunks(chunks)
        self._memory.of(scope).offer(taken, self._encodings)

    def generate(self, prompt: Prompt, **options: Any) -> Answer:
        """Answers `prompt`; takes the options of `stream`."""
        answer = None
        for step in self.stream(prompt, **options):
            answer = step.answer
        assert answer is not None
        return answer

    def stream(
        self,
        prompt: Prompt,
        *,
        sampling: Sampling | None = None,
        chunks: Sequence[Chunk | str] = (),
        drafting: Drafting | None = None,
        scope: str = "default",
        raw: bool = False,
    ) -> Iterator[Step]:
        """Yields a Step per pass (and an empty one per prefill chunk); the last one carries the Answer.

        Closing the generator ends the work within one pass.

        prompt: text (one user message, unless `raw` or the model has no chat template), messages, or token ids.
        chunks: what was retrieved for this request. They serve drafting and spans; they never enter the prompt.
        drafting: `Drafting(sources=())` is plain decoding. scope: who shares learned statistics and chunks.
        Raises PromptError or SettingsError at once, before anything runs.
        """
        return self._run(
            self._open(prompt, sampling or Sampling(), chunks, drafting or self.drafting, scope, raw)
        )

    def forget(self) -> None:
        """Drops what was learned and offered in this process, in every scope; files in the cache folder stay."""
        self._memory.forget()

    def save(self) -> None:
        """Writes the learned statistics of every scope to the cache folder (this also happens at exit)."""
        self._memory.save()

    def close(self) -> None:
        """Saves, and frees KV memory. The Reader may be used again."""
        self.save()
        with self._lock:
            self._arenas.clear()

    # One request, stage by stage.

    def _open(
        self,
        prompt: Prompt,
        sampling: Sampling,
        chunks: Sequence[Chunk | str],
        drafting: Drafting,
        scope: str,
        raw: bool,
    ) -> Request:
        started = time.perf_counter()
        tokens = encode_prompt(self.tokenizer, prompt, raw=raw)
        room = self.context_length - len(tokens)
        if not tokens:
            raise PromptError("the prompt has no tokens; pass a question")
        if room < 1:
            raise PromptError(
                f"the prompt has {len(tokens)} tokens and {self.name} takes {self.context_length}; "
                "retrieve fewer or shorter chunks, or shorten the conversation"
            )
        given, memory = as_chunks(chunks), self._memory.of(scope)
        sources = drafting.sources if self.mode == "exact" else ()
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(32)
        drafter = make_drafter(
            [s if isinstance(s, str) else s.name for s in sources],
            chunk_tokens=[ids for chunk in given for ids in self._encodings(chunk.text)],
            pool=memory.pool,
            ngrams=memory.ngrams,
            extra_sources=[s for s in sources if not isinstance(s, str)],
            forbidden=self._control,
            vocabulary=self._vocabulary,
        )
        stats = Stats(
            prompt_tokens=len(tokens),
            mode=self.mode,
            reason=self.mode_reason,
            width=self.width,
            scope=scope,
            seed=seed if sampling.temperature > 0 else None,
        )
        return Request(
            tokens=tokens,
            prompt_tokens=len(tokens),
            budget=min(sampling.max_tokens, room),
            sampler=Sampler(sampling, seed, self._eos, prompt_tokens=len(tokens)),
            drafter=drafter,
            text=TextStream(self.tokenizer, sampling.stop, self._control),
            stats=stats,
            chunks=(*given, *memory.recent(exclude={chunk.id for chunk in given})),
            started=started,
            prompt_evidence=drafting.prompt_evidence and bool(sources),
        )

    def _run(self, request: Request) -> Iterator[Step]:
        with self._lock:
            request.arena = self._arenas.pop() if self._arenas else self._forward.new_arena()
        try:
            # 1. Prefill all but the last prompt token, chunk by chunk; the last one is the root of the first pass.
            known = request.prompt_tokens - 1
            evidence: tuple[list[list[int]], list[list[float]]] = ([], [])
            for start in range(0, known, self._forward.chunk):
                with self._lock:
                    self._prefill(request, start, min(start + self._forward.chunk, known), evidence)
                yield Step((), "")  # a place to stop at: a long prompt takes seconds
            self._read_prompt(request, evidence)
            finish = None
            while finish is None:
                with self._lock:
                    step = self._pass(request)
                finish = step.finish_reason
                yield step
        finally:
            with self._lock:
                self._arenas.append(request.arena)

    def _prefill(
        self, request: Request, start: int, stop: int, evidence: tuple[list[list[int]], list[list[float]]]
    ) -> None:
        began = time.perf_counter()
        logits = self._forward.prefill(
            request.arena, request.tokens[start:stop], start, want_logits=request.prompt_evidence
        )
        if logits is not None:
            _, ids, probs = top_evidence(logits, EVIDENCE)
            evidence[0].extend(ids)
            evidence[1].extend(probs)
        request.stats.prefill_s += time.perf_counter() - began

    def _read_prompt(self, request: Request, evidence: tuple[list[list[int]], list[list[float]]]) -> None:
        began = time.perf_counter()
        ids, probs = (np.array(rows) if rows else None for rows in evidence)
        request.drafter.observe_prompt(request.tokens, ids, probs)
        request.stats.draft_s += time.perf_counter() - began

    def _pass(self, request: Request) -> Step:
        """Draft, verify, commit, stream: one forward pass of the model."""
        stats, tokens = request.stats, request.tokens
        left = request.budget - stats.tokens
        position = len(tokens) - 1

        # 2. Draft: a tree of likely continuations of at most width - 1 nodes.
        t0 = time.perf_counter()
        limit = min(self.width - 1, left - 1)
        chain_limit = min(limit, self._forward.chain_limit(position))
        draft = request.drafter.draft(request.pending[:chain_limit], limit, chain_limit)

        # 3. Verify: one pass over [last token, draft, padding], then walk the tree with the target's own choices.
        t1 = time.perf_counter()
        logits = self._forward.decode(request.arena, position, [tokens[-1], *draft.tokens], draft.parents)
        best, top_ids, top_probs = top_evidence(logits, EVIDENCE)
        t2 = time.perf_counter()
        sampler = request.sampler

        def choose(node: int, path: Sequence[int]) -> int:
            if sampler.is_greedy_plain:
                return best[node + 1]
            return sampler.choose(logits[node + 1], [*tokens, *path], len(tokens) + len(path))

        verdict = walk(draft.tokens, draft.parents, draft.chain, choose, self._eos.__contains__)

        # 4. Commit what counts: nothing after a stop string or an end-of-sequence token goes on from here.
        delta = request.text.push(verdict.tokens)
        taken = verdict.tokens[: delta.kept_tokens]
        tokens.extend(taken)
        stats.passes += 1
        stats.tokens += len(taken)
        accepted = min(verdict.accepted, len(taken))
        self._count(request, draft, accepted)
        ended = delta.stopped or taken[-1] in self._eos
        finish = "stop" if ended else "length" if stats.tokens >= request.budget else None
        t3 = time.perf_counter()

        # 5. Learn: what the model said at every position it computed is evidence for what comes later.
        if finish is None:
            request.pending = verdict.pending
        self._learn(request, draft, taken, top_ids, top_probs)
        t4 = time.perf_counter()
        if stats.passes == 1:
            stats.ttft_s = t4 - request.started
        stats.draft_s += (t1 - t0) + (t4 - t3)
        stats.verify_s += t2 - t1
        stats.other_s += t3 - t2
        return self._step(request, taken, delta.text, finish)

    def _count(self, request: Request, draft: Draft, accepted: int) -> None:
        stats, names = request.stats, request.drafter.source_names
        stats.drafted += len(draft.tokens)
        stats.accepted += accepted
        for node, origin in enumerate(draft.origins):
            stats.count(stats.drafted_by_source, names[origin])
            if node < accepted:
                stats.count(stats.accepted_by_source, names[origin])

    def _learn(
        self,
        request: Request,
        draft: Draft,
        taken: Sequence[int],
        top_ids: list[list[int]],
        top_probs: list[list[float]],
    ) -> None:
        count = len(taken)
        paths: list[list[int]] = []
        for node, parent in enumerate(draft.parents):
            paths.append([*(paths[parent] if parent != ROOT else ()), draft.tokens[node]])
            if node >= draft.chain or node >= count - 1:
                request.drafter.observe_branch(paths[node], top_ids[node + 1], top_probs[node + 1])
        request.drafter.observe(taken, top_ids[:count], top_probs[:count])

    def _step(self, request: Request, taken: tuple[int, ...], text: str, finish: str | None) -> Step:
        if finish is None:
            request.shown.append(text)
            return Step(taken, text)
        text += request.text.finish()
        request.shown.append(text)
        whole = "".join(request.shown)
        request.stats.dropped_sources = request.drafter.dropped()
        request.stats.drafted_by_source = dict(sorted(request.stats.drafted_by_source.items()))
        answer = Answer(
            text=whole,
            tokens=tuple(request.tokens[request.prompt_tokens :]),
            finish_reason=finish,
            prompt_tokens=request.prompt_tokens,
            stats=request.stats,
            spans=find_spans(whole, request.chunks),
        )
        return Step(taken, text, finish, answer)


_SHARED: dict[tuple[Any, ...], Reader] = {}
_SHARED_LOCK = threading.Lock()


def _identity(thing: Any) -> Any:
    return str(thing) if thing is None or isinstance(thing, str | Path) else id(thing)
