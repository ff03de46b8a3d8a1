"""Token sequences of chunks, indexed for suffix matches; `ChunkPool` keeps those that a scope used last."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from threading import Lock
from typing import Any

import numpy as np

from reader_rag.draft.source import Array

Sequences = tuple[tuple[int, ...], ...]

END = -1  # stands behind the last token of every sequence; no token is negative, so nothing follows it
PLACES = 16  # latest places kept per pair of tokens
POSITION_BITS = 32
POSITION = (1 << POSITION_BITS) - 1

# What CPython takes, rounded up: a test compares the sum with tracemalloc.
_SEQUENCE_BYTES = 600
_TOKEN_BYTES = 340


class ChunkIndex:
    """What follows every pair of neighbouring tokens, sequence by sequence; equal sequences are stored once.

    A place is one integer, number of the sequence << POSITION_BITS | position, so it cannot point across two chunks.
    Sequences come with END behind them.
    Everything found is an immutable tuple that is replaced, never changed: reading needs no lock.
    """

    def __init__(self) -> None:
        self.sequences: dict[int, tuple[int, ...]] = {}
        self.nbytes = 0
        # sequence -> (its number, how many chunks hold it)
        self._numbers: dict[tuple[int, ...], tuple[int, int]] = {}
        self._places: dict[tuple[int, int], tuple[int, ...]] = {}
        self._next = 0

    def add(self, tokens: tuple[int, ...]) -> None:
        number, holders = self._numbers.get(tokens, (self._next, 0))
        self._numbers[tokens] = number, holders + 1
        if holders:
            return
        self._next += 1
        self.sequences[number] = tokens
        self.nbytes += _bytes_of(tokens)
        places = self._places
        first = number << POSITION_BITS
        for position in range(2, len(tokens) - 1):
            pair = tokens[position - 2], tokens[position - 1]
            places[pair] = (first + position, *places.get(pair, ())[: PLACES - 1])

    def discard(self, tokens: tuple[int, ...]) -> None:
        number, holders = self._numbers[tokens]
        if holders > 1:
            self._numbers[tokens] = number, holders - 1
            return
        del self._numbers[tokens], self.sequences[number]
        self.nbytes -= _bytes_of(tokens)
        for pair in set(pairwise(tokens)):
            places = self._places.get(pair, ())
            kept = tuple(place for place in places if place >> POSITION_BITS != number)
            if kept:
                self._places[pair] = kept
            else:
                self._places.pop(pair, None)

    def find(self, before: int, token: int) -> tuple[int, ...]:
        """The places of what follows `token` after `before`, the latest first."""
        return self._places.get((before, token), ())

    def after(self, places: Iterable[int]) -> list[int]:
        """The token at each place; END behind the end of its chunk, or when the chunk has gone."""
        sequences = self.sequences
        try:
            return [sequences[place >> POSITION_BITS][place & POSITION] for place in places]
        except KeyError:  # a chunk has gone
            return [sequences.get(place >> POSITION_BITS, _GONE)[place & POSITION] for place in places]

    @staticmethod
    def split(place: int) -> tuple[int, int]:
        """A place as (number of the sequence, position)."""
        return place >> POSITION_BITS, place & POSITION


class ChunkPool:
    """The chunks that a scope used last, at most `limit` bytes of them, the least recently used out first.

    One pool per scope: nobody may draft from another scope's tokens, because acceptance timing would reveal them.
    Safe to use from several threads.
    """

    def __init__(self, limit: int = 64 << 20) -> None:
        self.limit = limit
        self.index = ChunkIndex()
        self._chunks: OrderedDict[str, Sequences] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, chunk_id: str) -> bool:
        return chunk_id in self._chunks

    @property
    def nbytes(self) -> int:
        """Estimated memory of all chunks with their index."""
        return self.index.nbytes

    def add(self, chunk_id: str, arrays: Iterable[Array]) -> None:
        """Puts a chunk, in one or several tokenizations, in front; the same id again replaces it.

        A chunk that is larger than the whole pool is not kept.
        """
        sequences = as_sequences(arrays)
        with self._lock:
            if self._chunks.get(chunk_id) == sequences:
                self._chunks.move_to_end(chunk_id)
                return
            if chunk_id in self._chunks:
                self._drop(chunk_id)
            if not sequences or sum(map(_bytes_of, sequences)) > self.limit:
                return
            self._chunks[chunk_id] = sequences
            for tokens in sequences:
                self.index.add(tokens)
            while self.index.nbytes > self.limit:
                self._drop(next(iter(self._chunks)))

    def _drop(self, chunk_id: str) -> None:
        for tokens in self._chunks.pop(chunk_id):
            self.index.discard(tokens)


class _Gone(tuple[int, ...]):
    """A sequence without tokens."""

    __slots__ = ()

    def __getitem__(self, position: Any) -> Any:
        return END


_GONE = _Gone()


def as_sequences(arrays: Iterable[Array]) -> Sequences:
    """The distinct token sequences that are long enough to draft from (a pair, and what follows it), END behind each."""
    distinct: dict[tuple[int, ...], None] = {}
    for array in arrays:
        tokens = tuple(array.tolist()) if isinstance(array, np.ndarray) else tuple(map(int, array))
        if len(tokens) > 2:
            distinct[(*tokens, END)] = None
    return tuple(distinct)


def _bytes_of(tokens: Sequence[int]) -> int:
    return _SEQUENCE_BYTES + _TOKEN_BYTES * len(tokens)
