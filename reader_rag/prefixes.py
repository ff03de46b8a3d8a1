"""KV of finished requests, found again by the longest common prefix: a conversation's next turn prefills only what is new.

Prefill chunks are canonical (fixed shape, aligned position, keys by position), so KV taken over from another request is bit for
bit what a fresh prefill would write. That of decoding passes is not, so an answer's tokens are prefilled again as part of the next
prompt. Each scope has its own: how fast a prompt is read would tell whose prompts were read before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reader_rag.request import PromptEvidence
from reader_rag.verify.arena import Arena

KEPT_FROM = 128
"""Tokens from which a prompt is kept (or a chunk, where that is less): a shorter one is soon read again."""


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """An arena whose first len(tokens) slots hold the KV of `tokens`, and what the model expected there."""

    scope: str
    tokens: NDArray[np.int64]
    arena: Arena
    evidence: PromptEvidence


class PrefixCache:
    """At most `limit` bytes of KV, the least recently used out first. Used by one thread at a time."""

    def __init__(self, limit: int, chunk: int) -> None:
        self.limit, self._chunk = limit, chunk
        self._kept: list[Kept] = []  # least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    def bytes(self) -> int:
        """Bytes of all kept KV."""
        return sum(kept.arena.bytes() for kept in self._kept)

    def put(self, scope: str, tokens: Sequence[int], arena: Arena, evidence: PromptEvidence) -> list[Arena]:
        """Keeps the KV of prefilled `tokens`; returns the arenas that had to leave, for reuse as empty ones."""
        if len(tokens) < min(KEPT_FROM, self._chunk) or arena.bytes() > self.limit:
            return [arena]
        array = np.array(tokens)
        left = [
            kept
            for kept in self._kept
            if kept.scope == scope and _common(kept.tokens, array) == len(kept.tokens)
        ]
        self._kept = [kept for kept in self._kept if kept not in left]
        self._kept.append(Kept(scope, array, arena, evidence))
        while self.bytes() > self.limit:
            left.append(self._kept.pop(0))
        return [kept.arena for kept in left]

    def take(
        self, scope: str, tokens: Sequence[int], *, wants_evidence: bool
    ) -> tuple[Arena, int, PromptEvidence] | None:
        """An arena with the KV of the first n of `tokens`, that n, and the evidence of these; None where nothing fits.

        n is a multiple of the prefill chunk, or all of `tokens` where the same were kept: a shorter last chunk has a shape
        of its own. The kept arena itself is handed over when most of it serves; otherwise its head is copied and it stays for others.
        """
        array = np.array(tokens)
        best, reach = None, 0
        for kept in self._kept:
            if kept.scope != scope:
                continue
            common = _common(kept.tokens, array)
            same = common == len(array) == len(kept.tokens)
            usable = common if same else common // self._chunk * self._chunk
            if usable > reach and (len(kept.evidence) >= usable or not wants_evidence):
                best, reach = kept, usable
        if best is None:
            return None
        self._kept.remove(best)
        evidence = best.evidence.head(reach)
        if 2 * reach >= len(best.tokens):
            return best.arena, reach, evidence
        self._kept.append(best)
        return best.arena.copy(reach, reach), reach, evidence

    def clear(self) -> list[Arena]:
        """Forgets everything; returns the arenas."""
        kept, self._kept = self._kept, []
        return [entry.arena for entry in kept]


def _common(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Length of the common prefix."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length
