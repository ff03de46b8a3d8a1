"""One running request: its tokens so far and everything that watches them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from reader_rag.draft import Drafter
from reader_rag.stats import Stats
from reader_rag.store.chunk import Chunk
from reader_rag.stream import TextStream
from reader_rag.verify.sampling import Sampler


@dataclass(slots=True)
class Request:
    """State of one answer in the making.

    tokens           prompt and answer; the last one is the root of the next pass
    budget           tokens that the answer may have: max_tokens, or what the context leaves
    chunks           what spans are looked for in: the request's own chunks, then the scope's recent ones
    prompt_evidence  whether the model's predictions at the prompt's positions are kept for drafting
    arena            its KV, while it runs
    pending          what a side branch of the last pass found: it leads the next draft
    shown            the text deltas so far
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
    prompt_evidence: bool
    arena: Any = None
    pending: tuple[int, ...] = ()
    shown: list[str] = field(default_factory=list)
