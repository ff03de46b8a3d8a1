"""Constraints at work: which tokens may come next after an answer so far.

Everything is a function of the answer's tokens alone. A walk goes forward along its own path and back to the last committed
token; the matcher follows it, by rolling back to where two paths part and reading on from there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from reader_rag.errors import ReaderError, SettingsError
from reader_rag.structured.constraint import Constraint, llguidance

__all__ = ["Grammars", "Matching"]

COMPILED = 32
"""Compiled constraints that a model keeps; the oldest go first."""


class Grammars:
    """Compiles constraints for one model's tokenizer, each once.

    `vocabulary` is the length of a row of logits, `eos` the tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, eos: frozenset[int]) -> None:
        self._tokenizer, self._vocabulary, self._eos = tokenizer, vocabulary, sorted(eos)
        self._lock = threading.Lock()
        self._reading: Any = None
        self._compiled: dict[str, Any] = {}

    def rules(self, *given: Constraint | None) -> Matching | None:
        """The matching of the one constraint that is not None."""
        constraints = [constraint for constraint in given if constraint is not None]
        if len(constraints) > 1:
            raise SettingsError(
                "an answer cannot both follow a constraint and call tools; ask for them one after the other"
            )
        return self.match(constraints[0]) if constraints else None

    def match(self, constraint: Constraint) -> Matching:
        """A fresh matching of the constraint, for one request. Raises SettingsError where this model cannot have it."""
        with self._lock:
            matcher = self._compiled.pop(constraint.grammar, None) or self._compile(constraint)
            self._compiled[constraint.grammar] = matcher
            while len(self._compiled) > COMPILED:
                del self._compiled[next(iter(self._compiled))]
            return Matching(matcher.deep_copy(), self._vocabulary)

    def _compile(self, constraint: Constraint) -> Any:
        if self._reading is None:
            self._reading = self._read_tokenizer()
        matcher = llguidance().LLMatcher(self._reading, constraint.grammar, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().strip().splitlines()[0]
            raise SettingsError(f"this {constraint.kind.replace('_', ' ')} cannot be compiled: {reason}")
        return matcher

    def _read_tokenizer(self) -> Any:
        """The vocabulary as bytes, about a second per hundred thousand tokens."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or not self._eos:
            lack = "token that ends an answer" if backend is not None else "fast tokenizer (tokenizer.json)"
            raise SettingsError(f"constraints and tools need a model with a {lack}; this one has none")
        plain = type(backend).from_str(backend.to_str())  # a copy: the caller's keeps its settings
        plain.no_padding()
        plain.no_truncation()
        return llguidance().LLTokenizer(plain.to_str(), n_vocab=self._vocabulary, eos_token=self._eos)


class Matching:
    """One request's place in its grammar. Not for two threads at once."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._read: list[int] = []  # the answer's tokens that the matcher has consumed
        self._forced: tuple[list[int], list[int]] | None = None  # (answer, what it forces)

    def forced(self, answer: Sequence[int]) -> list[int]:
        """The tokens that must follow, in the tokenizer's own cut; empty where there is a choice or `answer` breaks the rules."""
        answer = list(answer)
        if self._forced is None or self._forced[0] != answer:
            tokens = self._matcher.compute_ff_tokens() if self._go(answer) else []
            self._forced = answer, list(tokens)
        return self._forced[1]

    def restrict(self, scores: torch.Tensor, answer: Sequence[int], *, greedy: bool) -> torch.Tensor:
        """Scores [V] with -inf for every token that may not come after `answer`.

        For a greedy choice the mask, which walks the whole vocabulary, is left out where the best token may come anyway.
        """
        if forced := self.forced(answer):
            only = torch.full_like(scores, -torch.inf)
            only[forced[0]] = scores[forced[0]]
            return only
        if not self._go(list(answer)):
            raise ReaderError("an answer left its grammar; this is a fault of reader_rag, please report it")
        if greedy and self._matcher.validate_tokens([int(scores.argmax())]) == 1:
            return scores
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=self._vocabulary).astype(bool)
        mask = torch.from_numpy(allowed).to(scores.device)
        return scores.masked_fill(~mask[: scores.shape[0]], -torch.inf)

    def _go(self, answer: list[int]) -> bool:
        """Moves the matcher to `answer`; False, at the last place that is allowed, when the grammar does not admit it."""
        read = self._read
        if answer[: len(read)] != read:
            shared = next((i for i, (a, b) in enumerate(zip(answer, read, strict=False)) if a != b), None)
            shared = min(len(answer), len(read)) if shared is None else shared
            self._matcher.rollback(len(read) - shared)
            del read[shared:]
        more = answer[len(read) :]
        if more:
            read += more[: self._matcher.try_consume_tokens(more)]
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip().splitlines()[0]
            raise ReaderError(f"the constraint is too complex to follow: {reason}; simplify it")
        return len(read) == len(answer)
