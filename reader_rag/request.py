"""One running request: its tokens so far and everything that watches them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from reader_rag.draft import Drafter
from reader_rag.draws import Draws
from reader_rag.stats import Stats, Step
from reader_rag.store.chunk import Chunk
from reader_rag.stream import TextStream
from reader_rag.verify.sampling import Sampler


@dataclass(slots=True)
class PromptEvidence:
    """What the model expected at the prompt's positions: row i belongs to token i, most probable tokens first."""

    ids: list[list[int]] = field(default_factory=list)
    probs: list[list[float]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def head(self, length: int) -> PromptEvidence:
        """The first `length` rows, as new lists."""
        return PromptEvidence(self.ids[:length], self.probs[:length])


@dataclass(slots=True, eq=False)
class Request:
    """State of one answer in the making.

    tokens           prompt and answer; the last one is the root of the next pass
    budget           tokens that the answer may have: max_tokens, or what the context leaves; 0 only reads the prompt
    chunks           what spans are looked for in: the request's own chunks, then the scope's recent ones
    wants_evidence   whether the model's predictions at the prompt's positions are kept for drafting
    in_full          whether the whole answer is awaited, so that it may run ahead of its consumer
    arena, known     its KV, while it runs, and how many tokens of it the prefill has filled
    draws            what it drafts by chance, if it has a `Sampling.draft_rule`
    pending          what a side branch of the last pass found: it leads the next draft
    shown            the text deltas so far
    steps, failure   what the consumer has not taken yet; an exception comes after the steps before it
    """

    tokens: list[int]
    prompt_tokens: int
    budget: int
    sampler: Sampler
    drafter: Drafter
    text: TextStream
    stats: Stats
    chunks: tuple[Chunk, ...]
    started: float
    wants_evidence: bool
    draws: Draws | None = None
    in_full: bool = False
    arena: Any = None
    known: int = 0
    evidence: PromptEvidence = field(default_factory=PromptEvidence)
    is_read: bool = False
    pending: tuple[int, ...] = ()
    shown: list[str] = field(default_factory=list)
    steps: deque[Step] = field(default_factory=deque)
    failure: BaseException | None = None
    is_done: bool = False
    cancelled: bool = False

    @property
    def last(self) -> int:
        """Position of the last prompt token: the prefill stops before it, the first pass starts from it."""
        return self.prompt_tokens - 1
