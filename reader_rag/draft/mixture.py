"""One calibrated distribution from the evidence of all sources."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from reader_rag.draft.hedge import Hedge
from reader_rag.draft.priors import Counts, Priors, shipped
from reader_rag.draft.source import Evidence, Row, Source

CHILDREN = 16  # next tokens considered after one node
PRIOR = 12.0  # sightings that a source's own trust is worth where the fitted table has no entry
LEAST_WEIGHT = 0.01  # evidence that weighs less cannot bring a token into the draft
LEAST_OF_FLOOR = 0.3  # nor can evidence that weighs less than this share of the probability asked for
CERTAIN = 0.8  # a node is not asked for what would have to be likelier than this
UNFORESEEN = 1e-3  # likelihood of a token that no evidence names
UNION = 0.95  # prior weight of the union of all sources; the sources alone share the rest
FORGETTING = 0.02  # share of the weights that returns to the prior at each token

Claim = tuple[float, float, int, Evidence]  # (weight, trust, source, evidence)


class Node:
    """One tail: its last token after another node's; the sources' states and evidence, as far as they were asked for."""

    __slots__ = ("claims", "parent", "states", "token", "whole")

    def __init__(self, parent: "Node | None", token: int, states: list[Any]) -> None:
        self.parent, self.token = parent, token
        self.states = states
        self.claims: list[Claim] | None = None
        self.whole = False  # whether every source was asked


class Mixture:
    """P(x) = sum of weight_i p_i(x) over all evidence.

    The union of all sources orders evidence by trust, and each piece claims its trust's share of what more trusted ones
    left over. Trusts are Beta means: the fitted table's counts plus what the verified tokens of this request say about
    each source and level (the responsibility that each had for the token, as in deleted interpolation). Above it, Hedge
    mixes the union with each source alone, so that no source on its own would have served this request much better.
    Every verified position scores every source, also those whose tokens were not drafted.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        forbidden: frozenset[int] = frozenset(),
        vocabulary: int = 1 << 31,
        priors: Priors | None = None,
    ) -> None:
        self.sources = tuple(sources)
        self._forbidden, self._vocabulary = forbidden, vocabulary
        fitted: Mapping[tuple[str, int], Counts] = (shipped() if priors is None else priors).counts
        self._fitted = [
            {level: counts for (name, level), counts in fitted.items() if name == source.name}
            for source in self.sources
        ]
        # source -> level -> (claims upheld, claims) in this request
        self.learned: list[dict[int, tuple[float, float]]] = [{} for _ in self.sources]
        alone = len(self.sources)
        self.hedge = Hedge([UNION, *([(1.0 - UNION) / alone] * alone)] if alone > 1 else [1.0], FORGETTING)
        # What each source said in the states of this draft: equal contexts met again share one lookup (GSD, 2407.16207).
        self._said: list[dict[Any, list[Evidence]]] = [{} for _ in self.sources]
        # source -> level -> trust, where the fitted table has an entry
        self._trusts = [{level: a / (a + b) for level, (a, b) in fitted.items()} for fitted in self._fitted]
        self._unknown: list[Any] = [_UNKNOWN] * len(self.sources)
        # What a draft calls a hundred times, bound once.
        self._advances = [source.advance for source in self.sources]
        self._asked = [
            (number, source.predict, said, trusts, learned)
            for number, (source, said, trusts, learned) in enumerate(
                zip(self.sources, self._said, self._trusts, self.learned, strict=True)
            )
        ]

    def root(self) -> Node:
        """The node of the committed sequence. What was said before it grew is forgotten."""
        for said in self._said:
            said.clear()
        return Node(None, -1, [source.root() for source in self.sources])

    def advance(self, node: Node, token: int) -> Node:
        return Node(node, token, self._unknown[:])

    def state(self, node: Node, number: int) -> Any:
        """A source's state. Worked out when first asked for: of most nodes only the most trusted sources are asked."""
        path = []
        while (state := node.states[number]) is _UNKNOWN and node.parent is not None:
            path.append(node)
            node = node.parent
        advance = self._advances[number]
        for node in reversed(path):
            node.states[number] = state = advance(state, node.token)
        return state

    def predict(self, node: Node, floor: float = 0.0) -> list[tuple[int, float]]:
        """The next tokens of a probability above `floor`, the likeliest first; probabilities sum to at most 1."""
        if floor >= CERTAIN:
            return []
        least = max(LEAST_WEIGHT, LEAST_OF_FLOOR * floor)
        mixed: dict[int, float] = {}
        get = mixed.get
        # Several sources may know the same row: it is spread out once.
        parts: dict[int, float] = {}
        rows: dict[int, Row] = {}
        for weight, _, _, (_, _, hard, soft) in self._claims(node, floor):
            if weight < least:
                continue
            for token, share in hard.items():
                mixed[token] = get(token, 0.0) + weight * share
            for share, row in soft:
                name = id(row)
                rows[name] = row
                parts[name] = parts.get(name, 0.0) + weight * share
        for name, weight in parts.items():
            if weight >= least:
                for token, prob in rows[name].items():
                    mixed[token] = get(token, 0.0) + weight * prob
        forbidden, vocabulary = self._forbidden, self._vocabulary
        best = [
            (-prob, token)
            for token, prob in mixed.items()
            if prob > floor and 0 <= token < vocabulary and token not in forbidden
        ]
        best.sort()
        return [(token, -negative) for negative, token in best[:CHILDREN]]

    def _claims(self, node: Node, floor: float) -> list[Claim]:
        """The sources' evidence for what follows, the most trusted first; asked for once per node.

        Sources are not asked once those before them have left over less than `floor`: nothing they say could matter.
        """
        if node.claims is not None and (node.whole or floor > 0.0):
            return node.claims
        rest = 1.0
        node.whole = True
        found: list[tuple[float, int, Evidence]] = []  # (trust, source, evidence)
        states = node.states
        for number, predict, said, trusts, learned in self._asked:
            if rest < floor:
                node.whole = False
                break
            state = states[number]
            if state is _UNKNOWN:
                state = self.state(node, number)
            try:
                evidence = said.get(state)
            except TypeError:  # a state that cannot be hashed is asked about each time
                evidence = predict(state)
            else:
                if evidence is None:
                    said[state] = evidence = predict(state)
            for piece in evidence:
                trust = trusts.get(piece[1])
                if trust is None:
                    upheld, claims = learned.get(piece[1], _NOTHING)
                    trust = (PRIOR * piece[0] + upheld) / (PRIOR + claims)
                found.append((trust, number, piece))
                rest *= 1.0 - trust
        found.sort(key=_BY_TRUST, reverse=True)
        weights = self.hedge.weights
        left = weights[0]
        node.claims = weighed = []
        if len(weights) == 1:
            for trust, number, piece in found:
                weight = left * trust
                left -= weight
                weighed.append((weight, trust, number, piece))
            return weighed
        alone = weights[1:]  # what each source's own more trusted evidence left over of its weight
        for trust, number, piece in found:
            weight = left * trust
            left -= weight
            own = alone[number] * trust
            alone[number] -= own
            weighed.append((weight + own, trust, number, piece))
        return weighed

    def origin(self, node: Node, token: int) -> int:
        """The source that contributed most to `token` after `node`."""
        shares = [0.0] * len(self.sources)
        left, total = 1.0, 0.0
        for weight, _, number, (_, _, hard, soft) in node.claims or self._claims(node, 0.0):
            prob = hard.get(token, 0.0)
            for share, row in soft:
                if token in row:
                    prob += share * row[token]
            left -= weight
            if prob > 0.0:
                prob *= weight
                total += prob
                shares[number] = prob = shares[number] + prob
                if prob > total - prob + left:  # all the others, and all that is left, cannot outweigh it
                    return number
        return shares.index(max(shares))

    def learn(self, node: Node, token: int) -> None:
        """Scores all evidence after `node` by the token that the model chose there."""
        claims_made = self._claims(node, 0.0)
        responsible: list[float] = []
        likelihood = UNFORESEEN
        alone = [UNFORESEEN] * len(self.sources)
        for _, trust, number, (_, _, hard, soft) in reversed(claims_made):
            prob = hard.get(token, 0.0)
            for part, row in soft:
                if token in row:
                    prob += part * row[token]
            own = trust * prob
            rest = 1.0 - trust
            likelihood = own + rest * likelihood
            alone[number] = own + rest * alone[number]
            responsible.append(own / likelihood)
        reached = 1.0  # probability that no more trusted evidence was responsible
        for _, _, number, evidence in claims_made:
            share = responsible.pop()
            level = evidence.level
            learned = self.learned[number]
            upheld, claims = learned.get(level, _NOTHING)
            learned[level] = upheld, claims = upheld + reached * share, claims + reached
            counts = self._fitted[number].get(level)
            if counts is not None:
                a, b = counts
                self._trusts[number][level] = (a + upheld) / (a + b + claims)
            reached *= 1.0 - share
        if len(alone) > 1:
            self.hedge.update([likelihood, *alone])


_NOTHING = (0.0, 0.0)
_UNKNOWN: Any = object()
_BY_TRUST = itemgetter(0)
