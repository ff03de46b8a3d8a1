"""Rules that keep the latest or the commonest followers of a short context: Token Recycling, Cacheback, trigram search."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from reader_rag.bench.rules.rule import ROOT, Best, Proposal

RANKS = (0.40, 0.15, 0.08, 0.06, 0.04, 0.03, 0.03, 0.02)
"""How often the model's choice is the k-th of the latest candidates: what the static tree is built from."""


class LatestCandidates:
    """Token Recycling (2408.08696): after every token the model's latest best eight next tokens; a static tree over their ranks.

    The tree's nodes are the rank paths with the largest product of rank frequencies, cut to the width; where a token has no
    candidates yet its share goes to the next best path.
    """

    name = "token_recycling"

    def __init__(self, *, ranks: Sequence[float] = RANKS, depth: int = 6) -> None:
        self._ranks, self._depth = tuple(ranks), depth
        self._candidates: dict[int, Best] = {}
        self.begin()

    def begin(self) -> None:
        self._last = ROOT

    def end(self) -> None: ...

    def observe(self, tokens: Sequence[int], best: Sequence[Best], prompt: bool) -> None:
        for token, candidates in zip(tokens, best, strict=True):
            if candidates and self._last != ROOT:
                self._candidates[self._last] = candidates
            self._last = token

    def observe_branch(self, context: Sequence[int], best: Best) -> None:
        if best:
            self._candidates[context[-1]] = best

    def propose(self, pending: Sequence[int], limit: int) -> Proposal:
        proposal = Proposal(limit)
        frontier: list[tuple[float, int, int, int, int]] = []
        serial = 0

        def expand(parent: int, token: int, depth: int, path: float) -> None:
            nonlocal serial
            for rank, candidate in zip(self._ranks, self._candidates.get(token, ()), strict=False):
                serial += 1
                heappush(frontier, (-path * rank, serial, parent, candidate, depth))

        expand(ROOT, pending[-1] if pending else self._last, 1, 1.0)
        while frontier and not proposal.full:
            negative, _, parent, token, depth = heappop(frontier)
            node = proposal.add(parent, token)
            if node is not None and depth < self._depth:
                expand(node, token, depth + 1, -negative)
        return proposal


class LatestFollowers:
    """Cacheback (2511.21699): least-recently-used tables, leader n-gram to follower n-grams, asked again and again for a tree."""

    name = "cacheback"

    def __init__(
        self, *, leader: int = 1, follower: int = 3, followers: int = 4, leaders: int = 1 << 20
    ) -> None:
        self._leader, self._follower = leader, follower
        self._followers, self._leaders = followers, leaders
        # leader -> its followers; the one used last stands last in both
        self._table: OrderedDict[tuple[int, ...], OrderedDict[tuple[int, ...], None]] = OrderedDict()
        self.begin()

    def begin(self) -> None:
        self._window: list[int] = []

    def end(self) -> None: ...

    def observe(self, tokens: Sequence[int], best: Sequence[Best], prompt: bool) -> None:
        span = self._leader + self._follower
        for token in tokens:
            self._window = [*self._window[1 - span :], token]
            if len(self._window) == span:
                self._learn(tuple(self._window[: self._leader]), tuple(self._window[self._leader :]))

    def _learn(self, leader: tuple[int, ...], follower: tuple[int, ...]) -> None:
        known = self._table.setdefault(leader, OrderedDict())
        known[follower] = None
        known.move_to_end(follower)
        if len(known) > self._followers:
            known.popitem(last=False)
        self._table.move_to_end(leader)
        if len(self._table) > self._leaders:
            self._table.popitem(last=False)

    def observe_branch(self, context: Sequence[int], best: Best) -> None: ...

    def propose(self, pending: Sequence[int], limit: int) -> Proposal:
        proposal = Proposal(limit)
        queue: list[tuple[int, tuple[int, ...]]] = [(ROOT, tuple([*self._window, *pending][-self._leader :]))]
        for above, leader in queue:  # the queue grows while it is walked: level by level
            for follower in reversed(self._table.get(leader, ())):
                end = proposal.add_path(above, follower)
                if end is not None:
                    queue.append((end, (*leader, *follower)[-self._leader :]))
            if proposal.full:
                break
        return proposal


class _Place:
    """A node of the search tree: visits N, sum of rewards, prior P, and the probability of its path."""

    __slots__ = ("children", "context", "path", "prior", "reward", "token", "visits")

    def __init__(self, token: int, context: tuple[int, int], prior: float, path: float) -> None:
        self.token, self.context, self.prior, self.path = token, context, prior, path
        self.visits, self.reward = 0, 0.0
        self.children: list[_Place] | None = None


class TrigramSearch:
    """ADED (2407.12021): P(c given a, b) from a corpus, updated while decoding; a search by PUCT chooses what to draft.

    `searches` walks go down by Q + c P sqrt(N of the parent) / (1 + N), each adding one place; a path is worth its
    probability. The draft is the most visited places. An unseen pair is answered by its last token alone.
    """

    name = "aded"

    def __init__(self, *, searches: int = 150, exploration: float = 2.0, breadth: int = 8) -> None:
        self._searches, self._exploration, self._breadth = searches, exploration, breadth
        self._after: dict[tuple[int, int], dict[int, int]] = {}
        self.begin()

    def begin(self) -> None:
        self._pair = (ROOT, ROOT)

    def end(self) -> None: ...

    def observe(self, tokens: Sequence[int], best: Sequence[Best], prompt: bool) -> None:
        for token in tokens:
            before, last = self._pair
            if last != ROOT:
                for context in ((before, last), (ROOT, last)):
                    counts = self._after.setdefault(context, {})
                    counts[token] = counts.pop(token, 0) + 1  # of equals, the latest stands last
            self._pair = last, token

    def observe_branch(self, context: Sequence[int], best: Best) -> None: ...

    def propose(self, pending: Sequence[int], limit: int) -> Proposal:
        context = self._pair
        for token in pending:
            context = context[1], token
        root = _Place(ROOT, context, 1.0, 1.0)
        for _ in range(self._searches if limit else 0):
            self._search(root)
        return _most_visited(root, limit)

    def _search(self, root: _Place) -> None:
        walked = [root]
        while (place := walked[-1]).visits and self._children(place):
            spread = self._exploration * float(place.visits) ** 0.5
            walked.append(max(place.children or (), key=_worth(spread)))
        for place in walked:
            place.visits += 1
            place.reward += walked[-1].path

    def _children(self, place: _Place) -> list[_Place]:
        if place.children is None:
            counts = self._after.get(place.context) or self._after.get((ROOT, place.context[1]), {})
            total = sum(counts.values())
            latest_first = list(counts.items())[::-1]
            likeliest = sorted(latest_first, key=lambda item: -item[1])[: self._breadth]
            place.children = [
                _Place(token, (place.context[1], token), count / total, place.path * count / total)
                for token, count in likeliest
            ]
        return place.children


def _worth(spread: float) -> Callable[[_Place], float]:
    def puct(place: _Place) -> float:
        mean = place.reward / place.visits if place.visits else 0.0
        return mean + spread * place.prior / (1 + place.visits)

    return puct


def _most_visited(root: _Place, limit: int) -> Proposal:
    proposal = Proposal(limit)
    frontier: list[tuple[int, float, int, int, _Place]] = []
    serial = 0

    def expand(node: int, place: _Place) -> None:
        nonlocal serial
        for child in place.children or ():
            if child.visits:
                serial += 1
                heappush(frontier, (-child.visits, -child.path, serial, node, child))

    expand(ROOT, root)
    while frontier and not proposal.full:
        *_, parent, place = heappop(frontier)
        node = proposal.add(parent, place.token)
        if node is not None:
            expand(node, place)
    return proposal
