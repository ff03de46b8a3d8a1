"""The `chunks` source: the request's own chunks, then the scope's recent ones; hard evidence, chunk by chunk."""

from collections.abc import Iterable, Sequence
from math import exp

from reader_rag.draft.pool import ChunkIndex, ChunkPool, as_sequences
from reader_rag.draft.source import Array, Evidence, Row

LONGEST = 8  # longer matches count as this long
MATCHES = 16  # matches that are followed in each index: the longest-lived, then the latest
STEP = 0.9  # a match one token longer weighs exp(STEP) times as much
OWN = 2.0  # a match in the request's own chunks weighs this many times one in the pool
TRUST = (0.0, 0.0, 0.20, 0.30, 0.40, 0.50, 0.60, 0.65, 0.70)  # by length; behind `context` where both match

_SHARE = tuple(exp(-STEP * shorter) for shorter in range(LONGEST + 1))

_COUNTED = 15  # lengths that a state tells apart
Matches = tuple[tuple[int, tuple[int, ...]], ...]
"""In one ChunkIndex, the longest matches first: (length, places of what followed)."""
State = tuple[int, tuple[Matches, ...]]
"""The last token, and the matches in each index."""


class ChunkSource:
    """Continues the chunks that a tail of at least two tokens stands in; never from one chunk into another."""

    name = "chunks"

    def __init__(self, arrays: Iterable[Array], pool: ChunkPool | None = None) -> None:
        own = ChunkIndex()
        for tokens in as_sequences(arrays):
            own.add(tokens)
        self._indexes = (*((own,) if own.sequences else ()), *(() if pool is None else (pool.index,)))
        self._state: State = (-1, tuple(() for _ in self._indexes))

    def observe(self, tokens: Sequence[int], rows: Sequence[Row | None], prompt: bool) -> None:
        # A prompt's matches matter by its end alone: LONGEST tokens before it tell all that predict() can tell apart.
        for token in tokens[-LONGEST - 1 :] if prompt else tokens:
            self._state = self.advance(self._state, token)

    def observe_branch(self, context: Sequence[int], row: Row) -> None:
        """Chunks are hard evidence."""

    def root(self) -> State:
        return self._state

    def advance(self, state: State, token: int) -> State:
        before, tracked = state
        moved: list[Matches] = []
        for index, old in zip(self._indexes, tracked, strict=True):
            fresh = index.find(before, token)
            moved.append(_moved(index, old, fresh, token) if old else ((2, fresh),) if fresh else ())
        return token, tuple(moved)

    def predict(self, state: State) -> list[Evidence]:
        if not any(state[1]):
            return []
        found: list[tuple[int, int, float]] = []  # (next token, match length, weight)
        weight = OWN if len(self._indexes) > 1 else 1.0
        longest = 0
        for index, matches in zip(self._indexes, state[1], strict=True):
            for length, places in matches:
                if length > LONGEST:
                    length = LONGEST
                for place in places:
                    token = index.token(place)
                    if token is not None:
                        found.append((token, length, weight))
                        if length > longest:
                            longest = length
            weight = 1.0
        if not found:
            return []
        shares: dict[int, float] = {}
        total = 0.0
        for token, length, weight in found:
            weight *= _SHARE[longest - length]
            total += weight
            shares[token] = shares.get(token, 0.0) + weight
        hard = {token: share / total for token, share in shares.items()}
        return [Evidence(TRUST[longest], longest, hard, [])]

    def locate(self, state: State, token: int) -> tuple[int, int] | None:
        """(number of the sequence in its index, position) from which `token` is copied: the longest match's."""
        best: tuple[int, int] | None = None
        longest = 0
        for index, matches in zip(self._indexes, state[1], strict=True):
            for length, places in matches:
                if length > longest:
                    copied = next((place for place in places if index.token(place) == token), None)
                    if copied is not None:
                        longest, best = length, index.split(copied)
        return best


def _moved(index: ChunkIndex, old: Matches, fresh: tuple[int, ...], token: int) -> Matches:
    """The matches that `token` continues, and those that begin with it, up to MATCHES."""
    moved: list[tuple[int, tuple[int, ...]]] = []
    taken: list[int] = []
    for length, places in old:
        kept = [place + 1 for place in places if index.token(place) == token]
        if kept:
            moved.append((length + 1 if length < _COUNTED else length, tuple(kept)))
            taken += kept
    if taken:
        fresh = tuple([place for place in fresh if place not in taken][: max(MATCHES - len(taken), 0)])
    if fresh:
        moved.append((2, fresh))
    return tuple(moved)
