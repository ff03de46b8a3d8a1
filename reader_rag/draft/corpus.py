"""The `corpus` source: every document of a store through a suffix array, in memory or mapped from files."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reader_rag.draft.source import Array, Evidence, Row

LONGEST, SHORTEST = 16, 2  # tokens of a match
SORTED_BY = 32  # tokens that the order of suffixes depends on, a power of two above LONGEST
FIRST = 4096  # tokens whose suffixes are remembered
SAMPLED = 64  # continuations that are counted, evenly spread over the matches
TRUST = (0.0, 0.0, 0.10, 0.20, 0.30, 0.40, 0.50, 0.55, 0.60, 0.65, 0.65, 0.70, 0.70, 0.70, 0.75, 0.75, 0.75)
SEPARATOR = -1  # stands after every document; no token is negative, so no match crosses it
NOWHERE = -2  # stands in no document

TOKENS, SUFFIXES = "tokens.npy", "suffixes.npy"


class Corpus:
    """Documents as one int32 array, each followed by SEPARATOR, and the order of its suffixes (REST, 2311.08252).

    Never changed once built: any number of requests may read it at the same time.
    """

    def __init__(self, tokens: NDArray[np.int32], suffixes: NDArray[np.integer[Any]]) -> None:
        if tokens.shape != suffixes.shape:
            raise ValueError(
                f"{len(tokens)} tokens with {len(suffixes)} suffixes: the corpus is damaged, build it again"
            )
        self.tokens, self.suffixes = tokens, suffixes
        # Single numbers are read in half the time through these.
        self._token_at, self._suffix_at = tokens.data, suffixes.data
        self._first: dict[
            int, tuple[int, int]
        ] = {}  # where suffixes begin that begin with a token, once looked up

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays; memory only as far as they are not mapped from files."""
        return int(self.tokens.nbytes + self.suffixes.nbytes)

    @classmethod
    def build(cls, documents: Iterable[Array]) -> "Corpus":
        """Sorts all suffixes of the documents by their first SORTED_BY tokens (prefix doubling)."""
        parts: list[NDArray[np.int32]] = []
        separator = np.array([SEPARATOR], np.int32)
        for document in documents:
            tokens = np.asarray(document, np.int32).reshape(-1)
            if len(tokens) and tokens.min() < 0:
                raise ValueError(
                    f"document {len(parts) // 2} has token {tokens.min()}: token ids are 0 or more"
                )
            parts += [tokens, separator]
        text = np.concatenate(parts) if parts else np.empty(0, np.int32)
        return cls(text, _sorted_suffixes(text))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes both arrays as .npy files, which `open` can map."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in ((TOKENS, self.tokens), (SUFFIXES, self.suffixes)):
            fresh = folder / f"{name}.{os.getpid()}.tmp"
            with fresh.open("wb") as file:
                np.save(file, array, allow_pickle=False)
            os.replace(fresh, folder / name)

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> "Corpus":
        """Maps what `save` wrote: pages are read when they are first needed."""
        arrays = [
            np.load(Path(folder) / name, mmap_mode="r", allow_pickle=False) for name in (TOKENS, SUFFIXES)
        ]
        return cls(*arrays)

    def narrow(self, low: int, high: int, depth: int, token: int) -> tuple[int, int]:
        """Of the suffixes [low, high), which share their first `depth` tokens, those that go on with `token`."""
        low = self._bound(low, high, depth, token)
        return low, self._bound(low, high, depth, token + 1)

    def _bound(self, low: int, high: int, depth: int, token: int) -> int:
        """The first of the suffixes [low, high) whose token at `depth` is not below `token`."""
        tokens, suffixes, size = self._token_at, self._suffix_at, len(self.tokens)
        while low < high:
            middle = (low + high) // 2
            place = suffixes[middle] + depth
            if place < size and tokens[place] >= token:
                high = middle
            else:
                low = middle + 1
        return low

    def find(self, pattern: Sequence[int]) -> tuple[int, int]:
        """The suffixes that begin with `pattern`."""
        if not pattern:
            return 0, len(self.tokens)
        first = self._first.get(pattern[0])
        if first is None:
            if len(self._first) >= FIRST:
                self._first.clear()
            self._first[pattern[0]] = first = self.narrow(0, len(self.tokens), 0, pattern[0])
        low, high = first
        for depth in range(1, len(pattern)):
            if low == high:
                break
            low, high = self.narrow(low, high, depth, pattern[depth])
        return low, high

    def after(self, low: int, high: int, length: int) -> list[int]:
        """The tokens `length` behind the beginnings of the suffixes [low, high): of all, or of SAMPLED evenly spread ones."""
        tokens = self._token_at
        step = max(1, -(-(high - low) // SAMPLED))
        return [tokens[place + length] for place in self._suffix_at[low:high:step]]

    def place(self, number: int) -> int:
        """Where the suffix with this number in their order begins."""
        place: int = self._suffix_at[number]
        return place

    def text(self, place: int, length: int) -> tuple[int, ...]:
        """`length` tokens from `place`."""
        return tuple(self._token_at[place : place + length])


def _sorted_suffixes(text: NDArray[np.int32]) -> NDArray[np.integer[Any]]:
    size = len(text)
    kind = np.int32 if size < 1 << 31 else np.int64
    if not size:
        return np.empty(0, kind)
    rank = np.unique(text, return_inverse=True)[1].astype(np.int64) + 1  # 0: beyond the end
    order = np.argsort(rank, kind="stable")
    depth = 1
    while depth < SORTED_BY:
        after = np.zeros(size, np.int64)
        after[:-depth] = rank[depth:] if depth < size else 0
        both = rank * (size + 1) + after
        order = np.argsort(both, kind="stable")
        ordered = both[order]
        rank[order] = np.concatenate(([1], 1 + np.cumsum(ordered[1:] != ordered[:-1])))
        depth *= 2
    return order.astype(kind)


State = tuple[int, int, int, int]
"""The last token; length of the longest match of the tail's end; and its suffixes [low, high)."""


class CorpusSource:
    """Continues the longest match, 16 tokens down to 2, by the counts of what followed."""

    name = "corpus"

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._size = len(corpus)
        self._state: State = (NOWHERE, 0, 0, 0)

    def observe(self, tokens: Sequence[int], rows: Sequence[Row | None], prompt: bool) -> None:
        # A match of the last LONGEST tokens tells all that predict() can tell apart.
        for token in tokens[-LONGEST:] if prompt else tokens:
            self._state = self.advance(self._state, token)

    def observe_branch(self, context: Sequence[int], row: Row) -> None:
        """A corpus is hard evidence."""

    def root(self) -> State:
        return self._state

    def advance(self, state: State, token: int) -> State:
        last, length, low, high = state
        if not self._size:
            return state
        if SHORTEST <= length < SORTED_BY - 1:
            further = self._corpus.narrow(low, high, length, token)
            if further[0] < further[1]:
                return token, length + 1, *further
        if length < SHORTEST:
            tail: tuple[int, ...] = (last, token)
        else:  # the end of what matched so far can be read off the corpus
            place = self._corpus.place(low)
            tail = (*self._corpus.text(place + max(0, length - LONGEST + 1), min(length, LONGEST - 1)), token)
        # No match can be longer than the last one with this token.
        return token, *self._longest(tail, max(length, SHORTEST))

    def _longest(self, tail: tuple[int, ...], at_most: int) -> tuple[int, int, int]:
        """The longest end of `tail` that stands in the corpus; halving works, since ends of a match match too."""
        best = (0, 0, 0)
        short, long = SHORTEST, min(at_most, len(tail))  # the tail has LONGEST tokens at most
        while short <= long:
            length = (short + long + 1) // 2 if best[0] else SHORTEST
            low, high = self._corpus.find(tail[-length:])
            if low < high:
                best = (length, low, high)
                short = length + 1
            else:
                long = length - 1
        return best

    def predict(self, state: State) -> list[Evidence]:
        _, length, low, high = state
        if length < SHORTEST:
            return []
        counts: dict[int, int] = {}
        for token in self._corpus.after(low, high, length):
            if token != SEPARATOR:
                counts[token] = counts.get(token, 0) + 1
        if not counts:
            return []
        total = sum(counts.values())
        level = min(length, LONGEST)
        return [Evidence(TRUST[level], level, {token: count / total for token, count in counts.items()}, [])]

    def locate(self, state: State, token: int) -> tuple[None, int] | None:
        """The position in the corpus from which `token` is copied."""
        _, length, low, high = state
        if length >= SHORTEST:
            low, high = self._corpus.narrow(low, high, length, token)
            if low < high:
                return None, self._corpus.place(low) + length
        return None
