"""What a bench compares: READER and its peers, each a system that serves one request after another and may learn from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from reader_rag.bench.engine_replay import Drafts, feed
from reader_rag.bench.recording import Recording, Tokens
from reader_rag.bench.rules.installed import InstalledSuffixTrees
from reader_rag.bench.rules.occurrences import Occurrences
from reader_rag.bench.rules.recency import LatestCandidates, LatestFollowers, TrigramSearch
from reader_rag.bench.rules.rule import NoDrafts, Rule, RuleDrafter
from reader_rag.bench.rules.suffixes import Datastore, PromptLookup, SuffixCopy, SuffixTrees
from reader_rag.draft import ChunkPool, NgramTable, Source, make_drafter
from reader_rag.memory import ScopeMemory
from reader_rag.prompt import control_ids
from reader_rag.settings import SOURCES

if TYPE_CHECKING:
    from reader_rag.reader import Reader

READER = "reader"
PEERS = (
    "plain",
    "prompt_lookup",
    "sam",
    "suffix_decoding",
    "rest",
    "token_recycling",
    "sam_token_recycling",
    "cacheback",
    "aded",
)
INSTALLED = "arctic_inference"
SWITCH = 4
"""Matched tokens from which SAM-Decoding copies rather than asks Token Recycling: the best of 2 to 6 on our recordings."""


class System(Protocol):
    """Serves requests one at a time; what it keeps between them is its own."""

    def open(self, prompt: Tokens, chunks: Sequence[Tokens] = ()) -> Drafts:
        """The drafter of a new request."""

    def close(self, prompt: Tokens, output: Tokens) -> None:
        """The request is over."""


class RuleSystem:
    """A peer: its rule, and what the rule keeps."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def open(self, prompt: Tokens, chunks: Sequence[Tokens] = ()) -> Drafts:
        return RuleDrafter(self._rule)

    def close(self, prompt: Tokens, output: Tokens) -> None:
        self._rule.end()


class ReaderSystem:
    """READER's own drafter over one scope's memory, as a Reader would build it."""

    def __init__(
        self,
        sources: Sequence[str | Source] = SOURCES,
        *,
        forbidden: frozenset[int] = frozenset(),
        vocabulary: int = 1 << 31,
        ngrams: NgramTable | None = None,
        answers: Iterable[Tokens] = (),
    ) -> None:
        """`ngrams` and `answers` are what the scope knows already."""
        self._sources, self._forbidden, self._vocabulary = tuple(sources), forbidden, vocabulary
        self.memory = ScopeMemory(ChunkPool(), NgramTable() if ngrams is None else ngrams)
        self._answers: list[Tokens] = []
        self._lent = False  # whether a copy reads the same pool of answers
        for answer in answers:
            self._learn_answer(answer)

    @classmethod
    def like(cls, reader: Reader) -> ReaderSystem:
        """The drafter that a Reader builds, with a memory of its own."""
        from reader_rag.engine import vocabulary_of  # torch, which a replay does without

        return cls(
            reader.drafting.sources,
            forbidden=control_ids(reader.tokenizer),
            vocabulary=vocabulary_of(reader.model),
        )

    def open(self, prompt: Tokens, chunks: Sequence[Tokens] = ()) -> Drafts:
        return make_drafter(
            [s if isinstance(s, str) else s.name for s in self._sources],
            chunk_tokens=chunks,
            pool=self.memory.pool,
            ngrams=self.memory.ngrams,
            answers=self.memory.answers,
            extra_sources=[s for s in self._sources if not isinstance(s, str)],
            forbidden=self._forbidden,
            vocabulary=self._vocabulary,
        )

    def close(self, prompt: Tokens, output: Tokens) -> None:
        self._learn_answer(output)

    def _learn_answer(self, answer: Tokens) -> None:
        if self._lent:  # indexing all answers takes long: only who learns one more does it
            self._lent = False
            self.memory.answers = ChunkPool()
            for known in self._answers:
                self.memory.learn_answer(known)
        self._answers.append(answer)
        self.memory.learn_answer(answer)

    def copy(self) -> ReaderSystem:
        """A system that knows the same; what either learns from now on, the other does not."""
        twin = ReaderSystem(
            self._sources,
            forbidden=self._forbidden,
            vocabulary=self._vocabulary,
            ngrams=self.memory.ngrams.copy(),
        )
        twin.memory.answers, twin._answers = self.memory.answers, self._answers.copy()
        self._lent = twin._lent = True
        return twin


def learn(system: System, recordings: Sequence[Recording]) -> None:
    """Lets a system see whole requests; what it then knows is what serving them would have taught it."""
    for recording in recordings:
        feed(recording, system.open(recording.prompt, recording.chunks))
        system.close(recording.prompt, recording.output)


def peer_makers(width: int, documents: Sequence[Tokens]) -> dict[str, Callable[[], System]]:
    """How to make each peer afresh. `documents` are REST's datastore; `width` is W, the tokens of a pass.

    Where arctic-inference is installed, its own suffix trees come last, as a cross-check of our rule.
    """
    datastore = Occurrences(documents)  # it never learns, so that all REST systems share it
    rules: dict[str, Callable[[], Rule]] = {
        "plain": NoDrafts,
        "prompt_lookup": lambda: PromptLookup(width - 1),
        "sam": SuffixCopy,
        "suffix_decoding": SuffixTrees,
        "rest": lambda: Datastore(datastore),
        "token_recycling": LatestCandidates,
        "sam_token_recycling": lambda: SuffixCopy(
            "sam_token_recycling", fallback=LatestCandidates(), threshold=SWITCH
        ),
        "cacheback": LatestFollowers,
        "aded": TrigramSearch,
    }

    def maker(make: Callable[[], Rule]) -> Callable[[], System]:
        return lambda: RuleSystem(make())

    makers = {name: maker(rules[name]) for name in PEERS}
    if find_spec(INSTALLED):
        makers[InstalledSuffixTrees.name] = maker(InstalledSuffixTrees)
    return makers
