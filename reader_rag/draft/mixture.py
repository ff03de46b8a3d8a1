"""One calibrated distribution from the evidence of all sources."""

from collections.abc import Sequence
from typing import Any

from reader_rag.draft.source import Evidence, Row, Source

CHILDREN = 16  # next tokens considered after one node
PRIOR = 12.0  # sightings that the given trust is worth against what this request shows
LEAST_WEIGHT = 0.003  # evidence that weighs less cannot bring a token into the draft
CERTAIN = 0.98  # no token is taken to be likelier
UNFORESEEN = 1e-3  # likelihood of a token that no evidence names


# (weight, trust, source, evidence); weight = trust * what more trusted evidence left over
Claim = tuple[float, float, int, Evidence]


class Node:
    """One tail: the sources' states for it, and once it was predicted from, their evidence."""

    __slots__ = ("claims", "states")

    def __init__(self, states: list[Any]) -> None:
        self.states = states
        self.claims: list[Claim] | None = None


class Mixture:
    """P(x) = sum of weight_i p_i(x) over all evidence, the most trusted first, each claiming from what is left.

    Trusts are the sources' own, corrected by what the verified tokens of this request say about each source and level
    (Beta counts of the responsibility that each had for the token, as in deleted interpolation). Every verified position
    scores every source, also those whose tokens were not drafted (full information, as in Not-a-Bandit).
    """

    def __init__(
        self, sources: Sequence[Source], forbidden: frozenset[int] = frozenset(), vocabulary: int = 1 << 31
    ) -> None:
        self.sources = tuple(sources)
        self._forbidden, self._vocabulary = forbidden, vocabulary
        # (source, level) -> (claims upheld, claims)
        self._learned: dict[tuple[int, int], tuple[float, float]] = {}

    def root(self) -> Node:
        return Node([source.root() for source in self.sources])

    def advance(self, node: Node, token: int) -> Node:
        states = zip(self.sources, node.states, strict=True)
        return Node([source.advance(state, token) for source, state in states])

    def predict(self, node: Node, floor: float = 0.0) -> list[tuple[int, float]]:
        """The next tokens of a probability above `floor`, the likeliest first; probabilities sum to at most 1."""
        if floor >= CERTAIN:
            return []
        mixed: dict[int, float] = {}
        get = mixed.get
        rows: dict[Row, float] = {}  # several sources may know the same row: it is spread out once
        for weight, _, _, (_, _, hard, soft) in self._claims(node):
            if weight < LEAST_WEIGHT:
                continue
            for token, share in hard.items():
                mixed[token] = get(token, 0.0) + weight * share
            for share, row in soft:
                rows[row] = rows.get(row, 0.0) + weight * share
        for row, weight in rows.items():
            if weight < LEAST_WEIGHT:
                continue
            for token, prob in row.items():
                mixed[token] = get(token, 0.0) + weight * prob
        for token in self._forbidden.intersection(mixed):
            del mixed[token]
        vocabulary = self._vocabulary
        best = [(-prob, token) for token, prob in mixed.items() if prob > floor and 0 <= token < vocabulary]
        best.sort()
        return [(token, -negative) for negative, token in best[:CHILDREN]]

    def _claims(self, node: Node) -> list[Claim]:
        """All sources' evidence for what follows, the most trusted first; asked for once per node."""
        if node.claims is not None:
            return node.claims
        found: list[tuple[float, int, Evidence]] = []  # (trust, source, evidence)
        learned = self._learned
        for number, (source, state) in enumerate(zip(self.sources, node.states, strict=True)):
            for evidence in source.predict(state):
                trust = evidence.trust
                counts = learned.get((number, evidence.level))
                if counts is not None:
                    upheld, claims = counts
                    trust = (PRIOR * trust + upheld) / (PRIOR + claims)
                found.append((trust, number, evidence))
        found.sort(key=_by_trust)
        node.claims = weighed = []
        left = 1.0
        for trust, number, evidence in found:
            weighed.append((left * trust, trust, number, evidence))
            left *= 1.0 - trust
        return weighed

    def origin(self, node: Node, token: int) -> int:
        """The source that contributed most to `token` after `node`."""
        shares = [0.0] * len(self.sources)
        left = 1.0
        for weight, _, number, evidence in self._claims(node):
            shares[number] += weight * evidence.likelihood(token)
            left -= weight
            if shares[number] > left:  # what is left cannot outweigh it
                return number
        return shares.index(max(shares))

    def learn(self, node: Node, token: int) -> None:
        """Scores all evidence after `node` by the token that the model chose there."""
        claims_made = self._claims(node)
        responsible: list[float] = []
        likelihood = UNFORESEEN
        for _, trust, _, evidence in reversed(claims_made):
            own = trust * evidence.likelihood(token)
            likelihood = own + (1.0 - trust) * likelihood
            responsible.append(own / likelihood)
        reached = 1.0  # probability that no more trusted evidence was responsible
        for _, _, number, evidence in claims_made:
            share = responsible.pop()
            key = number, evidence.level
            upheld, claims = self._learned.get(key, (0.0, 0.0))
            self._learned[key] = upheld + reached * share, claims + reached
            reached *= 1.0 - share


def _by_trust(found: tuple[float, int, Evidence]) -> float:
    return -found[0]
