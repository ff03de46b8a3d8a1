"""What happened in a request: counts, seconds, sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from reader_rag.spans import Span
from reader_rag.structured.tools import ToolCall


@dataclass(slots=True)
class Stats:
    """Counts and seconds of one request.

    tokens per pass is emitted tokens over decoding passes (plain decoding is 1.00; papers also call it mean acceptance length).
    `verify_s` is the model's share of decoding, `draft_s` that of drafting and learning; `other_s` is the rest of our own work
    (the walk, detokenising). A pass over several requests counts in full for each of them. `ttft_s` runs from the call to the first
    token. `reused_tokens` of the prompt needed no prefill: an earlier request had left their KV. `mode` is "exact", "throughput" or
    "plain"; `reason` says why not exact.
    `dropped_sources` names sources that raised, with what they raised.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    dropped_sources: dict[str, str] = field(default_factory=dict)
    prefill_s: float = 0.0
    verify_s: float = 0.0
    draft_s: float = 0.0
    other_s: float = 0.0
    ttft_s: float = 0.0
    mode: str = "exact"
    reason: str | None = None
    width: int = 1
    rows: int = 1
    scope: str = "default"
    seed: int | None = None

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens over decoding passes."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def decode_s(self) -> float:
        """Seconds of decoding: everything after the prefill."""
        return self.verify_s + self.draft_s + self.other_s

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens over decoding seconds."""
        return self.tokens / self.decode_s if self.decode_s else 0.0

    def count_draft(self, sources: Sequence[str], accepted: Sequence[int]) -> None:
        """Adds a draft: the source of every node, and which nodes were accepted."""
        self.drafted += len(sources)
        self.accepted += len(accepted)
        for source in sources:
            self.drafted_by_source[source] = self.drafted_by_source.get(source, 0) + 1
        for node in accepted:
            source = sources[node]
            self.accepted_by_source[source] = self.accepted_by_source.get(source, 0) + 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for response metadata and JSON; seconds rounded to microseconds."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values.update(
            tokens_per_pass=self.tokens_per_pass, decode_s=self.decode_s, tokens_per_s=self.tokens_per_s
        )
        return {name: round(v, 6) if isinstance(v, float) else v for name, v in values.items()}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of an answer, its log-probability by the model, and the likeliest (token, log-probability) at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer: its text, its tokens (an end-of-sequence token included), and what happened.

    `finish_reason` is "stop" (an end-of-sequence token or a stop string) or "length" (max_tokens or the context limit).
    `spans` are the stretches of `text` that stand verbatim in one of the request's chunks. `tool_calls` are not part of `text`;
    `broken_calls` are those that could not be read, mostly because max_tokens cut them off. `logprobs`, when asked for, has one
    entry per token.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    stats: Stats
    spans: tuple[Span, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    broken_calls: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What one pass brought: new tokens and the text that is safe to show. The last step alone has the answer."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    answer: Answer | None = None
