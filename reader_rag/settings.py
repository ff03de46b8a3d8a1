"""Sampling and Drafting: everything a request can be told, checked when it is said."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from reader_rag.errors import SettingsError
from reader_rag.structured.constraint import Constraint

__all__ = ["DRAFT_RULES", "SOURCES", "Drafting", "Sampling"]

SOURCES = ("context", "chunks", "ngrams", "answers", "corpus")
"""The names that `Drafting.sources` may hold, and holds by default."""
DRAFT_RULES = ("specinfer", "k_seq")
"""What `Sampling.draft_rule` may be."""

MIB = 1 << 20
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
INTEGERS = ("max_tokens", "top_k", "no_repeat_ngram_size")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen and where the answer ends. Raises SettingsError for a value that cannot be meant.

    temperature          0 is greedy (the default); above it, a draw. top_k 0, top_p 1 and min_p 0 are off
    repetition_penalty   of every token of prompt and answer, 1 is off; presence_penalty and frequency_penalty look
                         at the answer's tokens only (once per distinct token, per occurrence), 0 is off
    no_repeat_ngram_size no n-gram of this size twice in prompt and answer, 0 is off
    logit_bias           token id -> what is added to its logit
    stop                 texts before which the answer is cut
    seed                 same seed, same text; None draws one per request
    processors           transformers LogitsProcessors, called as p(input_ids [1, n], scores [1, V]) in this order
                         after the penalties. They must depend on their arguments alone: a walk asks along its own path
    constraint           a language that the answer must be a text of, see reader_rag.structured.Constraint
    logprobs             keep the log-probability of every token of the answer, and this many of the likeliest tokens at its
                         place (0 to 20); of the model's own distribution, before temperature, penalties and constraint
    draft_rule           "specinfer" or "k_seq": a speculator's drafts are sampled, and accepted by chance under this rule. The
                         text has the same distribution as without, but is another sample. None keeps the seeded draws
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    processors: tuple[Callable[..., Any], ...] = ()
    constraint: Constraint | None = None
    logprobs: int | None = None
    draft_rule: str | None = None

    def __post_init__(self) -> None:
        for name in NUMBERS:
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        for name in INTEGERS:
            object.__setattr__(self, name, _integer(name, getattr(self, name)))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        object.__setattr__(self, "stop", _texts("stop", self.stop))
        object.__setattr__(self, "processors", _callables(self.processors))
        for name in ("seed", "logprobs"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _integer(name, getattr(self, name)))
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "ask for at least 1 token")
        _require(
            self.temperature >= 0, "temperature", self.temperature, "use 0 for greedy or a number above 0"
        )
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "use a number above 0 and at most 1 (1 is off)")
        _require(0 <= self.min_p < 1, "min_p", self.min_p, "use a number from 0 (off) to below 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "use 0 (off) or a number of tokens to keep")
        _require(
            self.repetition_penalty > 0,
            "repetition_penalty",
            self.repetition_penalty,
            "use 1 (off) or above 0",
        )
        _require(
            self.no_repeat_ngram_size >= 0,
            "no_repeat_ngram_size",
            self.no_repeat_ngram_size,
            "use 0 (off) or a length",
        )
        if self.seed is not None:
            _require(
                0 <= self.seed < 1 << 64, "seed", self.seed, "use an integer from 0 to 2**64 - 1, or None"
            )
        given = self.constraint
        mend = "use reader_rag.structured.Constraint, as in Constraint.json_schema(schema)"
        _require(given is None or isinstance(given, Constraint), "constraint", given, mend)
        count = self.logprobs
        _require(count is None or 0 <= count <= 20, "logprobs", count, "use a number from 0 to 20, or None")
        rule = self.draft_rule
        mend = f"choose from {', '.join(DRAFT_RULES)}, or None"
        _require(rule is None or rule in DRAFT_RULES, "draft_rule", rule, mend)
        mend = "greedy answers draw nothing: set a temperature above 0, or leave draft_rule out"
        _require(rule is None or self.temperature > 0, "draft_rule", rule, mend)


@dataclass(frozen=True, slots=True)
class Drafting:
    """Where drafts come from. It changes the speed of an answer, never a token of it.

    sources     any of "context" (this request), "chunks" (retrieved text), "ngrams" (statistics of the model's own
                earlier requests), "answers" (earlier answers) and "corpus" (a whole store, where one is given), or
                objects with the methods of reader_rag.draft.Source, such as a speculator; () is plain decoding
    pool_bytes  cap of a scope's recent chunks; ngram_bytes: of its statistics; answer_bytes: of its answers; the
                least recently used go first
    persist     whether the statistics outlive the process, in the user's cache folder
    prompt_evidence  whether the model's expectations at the prompt's own positions are kept too: better drafts for a
                slower first token (the output matrix over the prompt); None is what pays on this machine, measured at load
    """

    sources: tuple[Any, ...] = SOURCES
    pool_bytes: int = 64 * MIB
    ngram_bytes: int = 64 * MIB
    answer_bytes: int = 32 * MIB
    persist: bool = True
    prompt_evidence: bool | None = None

    def __post_init__(self) -> None:
        given = (self.sources,) if isinstance(self.sources, str) else self.sources
        if not isinstance(given, tuple | list):
            raise SettingsError(f"sources is {given!r}; use a list of source names")
        sources = tuple(given)
        unknown = [s for s in sources if s not in SOURCES and not _is_source(s)]
        if unknown:
            raise SettingsError(
                f"sources has {unknown[0]!r}; choose from {', '.join(SOURCES)}, or () for no drafts"
                + ("; a speculator is an object of reader_rag.draft.speculator" * ("speculator" in unknown))
            )
        object.__setattr__(self, "sources", tuple(dict.fromkeys(sources)))
        for name in ("pool_bytes", "ngram_bytes", "answer_bytes"):
            size = _integer(name, getattr(self, name))
            _require(size >= 0, name, size, "use a number of bytes, 0 or above")
            object.__setattr__(self, name, size)
        _require(isinstance(self.persist, bool), "persist", self.persist, "use True or False")
        known = self.prompt_evidence
        _require(
            known is None or isinstance(known, bool), "prompt_evidence", known, "use True, False or None"
        )


def _is_source(given: Any) -> bool:
    return hasattr(given, "name") and (hasattr(given, "predict") or hasattr(given, "for_request"))


def _require(holds: bool, name: str, value: object, mend: str) -> None:
    if not holds:
        raise SettingsError(f"{name} is {value!r}; {mend}")


def _number(name: str, value: Any) -> float:
    """A finite float; a bool or a text is a slip, not a number."""
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    _require(math.isfinite(number), name, value, "use a finite number")
    return number


def _integer(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise SettingsError(f"{name} is {value!r}; use an integer") from None


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """None, one text, or several, as a tuple of non-empty texts."""
    texts = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(texts, tuple | list) or not all(isinstance(text, str) for text in texts):
        raise SettingsError(f"{name} is {value!r}; use a text or a list of texts")
    _require(all(texts), name, value, "drop the empty text from it")
    return tuple(texts)


def _bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise SettingsError(f"logit_bias is {value!r}; use a dict of token id to number")
    bias = {}
    for token, number in value.items():
        token = _integer("a key of logit_bias", token)
        _require(token >= 0, "a key of logit_bias", token, "use a token id, 0 or above")
        banned = isinstance(number, float) and number == -math.inf
        bias[token] = number if banned else _number(f"logit_bias[{token}]", number)
    return bias or None


def _callables(value: Any) -> tuple[Callable[..., Any], ...]:
    processors = (value,) if callable(value) and not isinstance(value, list | tuple) else value
    if not isinstance(processors, tuple | list) or not all(callable(p) for p in processors):
        raise SettingsError(f"processors is {value!r}; use a list of transformers LogitsProcessors")
    return tuple(processors)
