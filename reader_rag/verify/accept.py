"""The walk: which drafted tokens the target model confirms (docs/losslessness.md, rules 3 and 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

ROOT = -1


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one pass.

    tokens   the target's own tokens in order: the confirmed path, then the token after it (never empty)
    nodes    the drafted nodes of the confirmed path: tokens[i] was drafted as nodes[i]
    pending  the target's guess of what follows, read off a side branch that `tokens` ran into; not confirmed, hence not
             emitted: it begins the next pass's main chain
    branch   the drafted side node that `tokens` ended in, or ROOT
    """

    tokens: tuple[int, ...]
    nodes: tuple[int, ...]
    pending: tuple[int, ...] = ()
    branch: int = ROOT

    @property
    def accepted(self) -> int:
        """How many of `tokens` had been drafted."""
        return len(self.nodes)


Choose = Callable[[int, Sequence[int]], int]


def walk(
    tokens: Sequence[int],
    parents: Sequence[int],
    chain: int,
    choose: Choose,
    ends: Callable[[int], bool],
) -> Verdict:
    """Walks a draft with the target's own choices.

    `tokens`, `parents`: the draft, nodes [0, chain) being the main chain. `choose(node, path)` is the target's token after
    `path`, computed from the logits of `node` (ROOT is the last committed token). `ends(token)` is true for an end-of-sequence token,
    after which nothing counts. Only main-chain logits decide emitted tokens; side branches merely guess `pending`.
    """
    path: list[int] = []
    node = ROOT
    while True:
        path.append(choose(node, path))
        if ends(path[-1]):
            return Verdict(tuple(path), tuple(range(len(path) - 1)))
        if node + 1 < chain and tokens[node + 1] == path[-1]:
            node += 1
            continue
        break
    confirmed = len(path)
    branch = side = _child(tokens, parents, chain, node, path[-1])
    while side != ROOT:
        path.append(choose(side, path))
        if ends(path[-1]):
            break
        side = _child(tokens, parents, chain, side, path[-1])
    return Verdict(tuple(path[:confirmed]), tuple(range(confirmed - 1)), tuple(path[confirmed:]), branch)


def walk_any(
    tokens: Sequence[int], parents: Sequence[int], choose: Choose, ends: Callable[[int], bool]
) -> Verdict:
    """`walk` of throughput mode: the logits of every node decide, so any path of the tree may be confirmed."""
    path: list[int] = []
    nodes: list[int] = []
    node = ROOT
    while True:
        path.append(choose(node, path))
        if ends(path[-1]):
            break
        node = _child(tokens, parents, 0, node, path[-1])
        if node == ROOT:
            break
        nodes.append(node)
    return Verdict(tuple(path), tuple(nodes))


def _child(tokens: Sequence[int], parents: Sequence[int], first: int, parent: int, token: int) -> int:
    """The node from `first` on under `parent` that holds `token`, or ROOT when there is none."""
    for node in range(first, len(tokens)):
        if parents[node] == parent and tokens[node] == token:
            return node
    return ROOT
