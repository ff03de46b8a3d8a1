"""Where a stretch of tokens stands in a set of documents, and the tree of what follows it there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from reader_rag.bench.rules.rule import Proposal

EDGE = -1
"""Stands between documents: no match and no continuation crosses it."""


class Occurrences:
    """Documents in one array, with the places of every token and every pair of tokens in ascending order."""

    def __init__(self, documents: Iterable[Sequence[int]] = ()) -> None:
        self.tokens: list[int] = []
        self._singles: dict[int, list[int]] = {}
        self._pairs: dict[tuple[int, int], list[int]] = {}
        for document in documents:
            self.separate()
            self.extend(document)

    def extend(self, tokens: Iterable[int]) -> None:
        """Goes on with the current document."""
        before = self.tokens[-1] if self.tokens else EDGE
        for token in tokens:
            place = len(self.tokens)
            self._singles.setdefault(token, []).append(place)
            if before != EDGE:
                self._pairs.setdefault((before, token), []).append(place)
            self.tokens.append(token)
            before = token

    def separate(self) -> None:
        """Begins another document."""
        if self.tokens and self.tokens[-1] != EDGE:
            self.tokens.append(EDGE)

    def matches(self, tail: Sequence[int], longest: int, shortest: int = 1) -> list[tuple[int, list[int]]]:
        """(length, places where the last `length` tokens of `tail` end), the longest length first.

        Lengths whose places are those of a longer match are left out, and so is the end of the array: nothing follows it.
        """
        known, end = self.tokens, len(self.tokens) - 1
        found: list[tuple[int, list[int]]] = []
        if not tail or longest < 1:
            return found
        places = self._singles.get(tail[-1], [])
        length = 1
        while True:
            open_places = places[:-1] if places and places[-1] == end else places
            if not open_places:
                break
            if found and len(found[-1][1]) == len(open_places):
                found.pop()
            found.append((length, open_places))
            if length == min(longest, len(tail)):
                break
            if length == 1:
                places = self._pairs.get((tail[-2], tail[-1]), [])
            else:
                wanted = tail[-1 - length]
                places = [p for p in places if p >= length and known[p - length] == wanted]
            length += 1
        return [match for match in reversed(found) if match[0] >= shortest]


def counted_tree(
    occurrences: Occurrences, places: Sequence[int], limit: int, *, depth: int, least_share: float = 0.0
) -> tuple[Proposal, float]:
    """The `limit` most frequent nodes of the tree that follows `places`, and the sum of their path probabilities.

    A node's probability is how many of `places` go on with its path: C(path) / C(match). `depth` bounds the path, and
    conditionals under `least_share` are left out. Equal counts: shallower first, then the later place.
    """
    known, end = occurrences.tokens, len(occurrences.tokens)
    proposal = Proposal(limit)
    score = 0.0
    frontier: list[tuple[int, int, int, int, int, list[int]]] = []

    def expand(parent: int, level: int, ends: Sequence[int]) -> None:
        groups: dict[int, list[int]] = {}
        for place in ends:
            if place + 1 < end and known[place + 1] != EDGE:
                groups.setdefault(known[place + 1], []).append(place + 1)
        for token, after in groups.items():
            if len(after) >= least_share * len(ends):
                heappush(frontier, (-len(after), level, -after[-1], token, parent, after))

    expand(-1, 1, places)
    while frontier and not proposal.full:
        count, level, _, token, parent, after = heappop(frontier)
        node = proposal.add(parent, token)
        assert node is not None
        score -= count / len(places)
        if level < depth:
            expand(node, level + 1, after)
    return proposal, score
