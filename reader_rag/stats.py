"""What happened in a request: counts, seconds, sources."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from reader_rag.spans import Span


@dataclass(slots=True)
class Stats:
    """Counts and seconds of one request.

    tokens per pass is emitted tokens over decoding passes (plain decoding is 1.00; papers also call it mean acceptance length).
    `verify_s` is the model's share of decoding, `draft_s` that of drafting and learning; `other_s` is the rest of our own work
    (the walk, detokenising). `ttft_s` runs from the call to the first token. `mode` is "exact" or "plain"; `reason` says why not exact.
    `dropped_sources` names sources that raised, with what they raised.
    """

    prompt_tokens: int = 0
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

    def count(self, ledger: dict[str, int], source: str, tokens: int = 1) -> None:
        """Adds to `drafted_by_source` or `accepted_by_source`."""
        ledger[source] = ledger.get(source, 0) + tokens

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for response metadata and JSON; seconds rounded to microseconds."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values.update(
            tokens_per_pass=self.tokens_per_pass, decode_s=self.decode_s, tokens_per_s=self.tokens_per_s
        )
        return {name: round(v, 6) if isinstance(v, float) else v for name, v in values.items()}


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer: its text, its tokens (an end-of-sequence token included), and what happened.

    `finish_reason` is "stop" (an end-of-sequence token or a stop string) or "length" (max_tokens or the context limit).
    `spans` are the stretches of `text` that stand verbatim in one of the request's chunks.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    stats: Stats
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What one pass brought: new tokens and the text that is safe to show. The last step alone has the answer."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    answer: Answer | None = None
