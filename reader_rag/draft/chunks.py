"""The `chunks` source: the request's own chunks, then the scope's recent ones; hard evidence, chunk by chunk."""

from collections.abc import Iterable, Sequence
from math import exp

from reader_rag.draft.pool import END, ChunkIndex, ChunkPool, as_sequences
from reader_rag.draft.source import Array, Evidence, Row

LONGEST = 8  # longer matches count as this long
MATCHES = 16  # matches that are followed in each index: the longest-lived, then the latest
STEP = 0.9  # a match one token longer weighs exp(STEP) times as much
OWN = 2.0  # a match in the request's own chunks weighs this many times one in the pool
TRUST = (0.0, 0.0, 0.20, 0.30, 0.40, 0.50, 0.60, 0.65, 0.70)  # by length; behind `context` where both match

_SHARE = tuple(exp(-STEP * shorter) for shorter in range(LONGEST + 1))

_COUNTED = 15  # lengths that a state tells apart
Match = tuple[int, tuple[int, ...], tuple[int, ...]]
"""(length, places of what followed, the tokens there)."""
Matches = tuple[Match, ...]
"""In one ChunkIndex, the longest first."""
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
            moved.append(_moved(index, old, fresh, token) if old or fresh else ())
        return token, tuple(moved)

    def predict(self, state: State) -> list[Evidence]:
        lengths = [matches[0][0] for matches in state[1] if matches]
        if not lengths:
            return []
        longest = min(max(lengths), LONGEST)
        own = OWN if len(self._indexes) > 1 else 1.0
        shares: dict[int, float] = {}
        get = shares.get
        total = 0.0
        for matches in state[1]:
            for length, _, tokens in matches:
                weight = own * _SHARE[longest - length if length < LONGEST else 0]
                total += weight * len(tokens)
                for token in tokens:
                    shares[token] = get(token, 0.0) + weight
            own = 1.0
        hard = {token: share / total for token, share in shares.items()}
        return [Evidence(TRUST[longest], longest, hard, [])]

    def locate(self, state: State, token: int) -> tuple[int, int] | None:
        """(number of the sequence in its index, position) from which `token` is copied: the longest match's."""
        best: tuple[int, int] | None = None
        longest = 0
        for index, matches in zip(self._indexes, state[1], strict=True):
            for length, places, tokens in matches:
                if length > longest and token in tokens:
                    longest, best = length, index.split(places[tokens.index(token)])
        return best


def _moved(index: ChunkIndex, old: Matches, fresh: tuple[int, ...], token: int) -> Matches:
    """The matches that `token` continues, and those that begin with it, up to MATCHES."""
    moved = []
    taken: list[int] = []
    for length, places, tokens in old:
        if token in tokens:
            kept = [place + 1 for place, copied in zip(places, tokens, strict=True) if copied == token]
            taken += kept
            if match := _match(index, length + 1 if length < _COUNTED else length, kept):
                moved.append(match)
    if taken:
        fresh = tuple([place for place in fresh if place not in taken][: max(MATCHES - len(taken), 0)])
    if fresh and (match := _match(index, 2, fresh)):
        moved.append(match)
    return tuple(moved)


def _match(index: ChunkIndex, length: int, places: Sequence[int]) -> Match | None:
    """The match without the places at which its chunk ends; None where none is left."""
    tokens = index.after(places)
    if END in tokens:
        places = [place for place, token in zip(places, tokens, strict=True) if token != END]
        tokens = [token for token in tokens if token != END]
    return (length, tuple(places), tuple(tokens)) if tokens else None
