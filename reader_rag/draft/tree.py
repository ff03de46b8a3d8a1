"""Grows the draft tree: best-first by path probability, laid out as one main chain with side branches behind it."""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

State = TypeVar("State")


class Origin(NamedTuple):
    """Where a drafted token was copied from."""

    source: int  # index into Drafter.source_names
    sequence: int | None = (
        None  # number of the chunk or answer in its source's index; None: the source is one text
    )
    offset: int | None = None  # position there; None: not copied, or the source cannot tell


@dataclass(frozen=True, slots=True)
class Draft:
    """The proposed tree of n nodes; a parent's index is always smaller than its child's.

    Nodes 0..chain-1 are the main chain in order, the side branches follow.
    """

    tokens: list[int]
    parents: list[int]  # -1: child of the root, which is the last committed token
    probs: list[float]  # probability that the whole path down to the node is accepted
    origins: list[int]  # index into Drafter.source_names
    chain: int  # nodes in the main chain


@dataclass(frozen=True, slots=True)
class Tree(Generic[State]):
    """A Draft in the making: the same nodes, and the state that predicts what follows each of them."""

    tokens: list[int]
    parents: list[int]
    probs: list[float]
    states: list[State]
    chain: int

    def child(self, node: int, token: int) -> int:
        """The node that goes on with `token` after `node`; -1 where there is none."""
        for child, parent in enumerate(self.parents):
            if parent == node and self.tokens[child] == token:
                return child
        return -1


def grow(
    root: State,
    predict: Callable[[State, float], Sequence[tuple[int, float]]],
    advance: Callable[[State, int], State],
    limit: int,
    chain_limit: int,
    pending: Sequence[int] = (),
    least: float = 0.0,
) -> Tree[State]:
    """Returns the `limit` nodes (or fewer) with the largest path probabilities.

    `predict(state, floor)` gives (token, probability) pairs, the likeliest first, and may leave out those whose
    probability is not above `floor`; `advance(state, token)` gives the child's state.
    Path probabilities never grow along a path, so taking the best node on the frontier again and again maximises
    the expected number of accepted tokens over all trees of `limit` nodes.

    Nodes of a path probability up to `least` are left out: a caller that knows what a full tree will end at saves the work
    of weighing them.

    Every node is worth its path probability, in the main chain or beside it: what a side branch finds is emitted one
    pass later, as `pending`, but is not lost. `pending` has been seen by the model already: it leads with
    probability 1, and nothing branches off before its end.
    """
    tokens = list(pending[: max(limit, 0)])
    parents = list(range(-1, len(tokens) - 1))
    probs = [1.0] * len(tokens)
    states: list[State] = []
    parent, state, prob = len(tokens) - 1, root, 1.0
    for token in tokens:
        state = advance(state, token)
        states.append(state)

    # The best `missing` nodes that could come next, the best one last: (path probability, -serial, token, parent, state)
    frontier: list[tuple[float, int, int, int, State]] = []
    serial = 0
    missing = limit - len(tokens)
    while missing > 0:
        floor = frontier[0][0] if len(frontier) >= missing else least
        for token, conditional in predict(state, floor / prob):
            path = prob * conditional
            if path <= floor:
                break
            serial -= 1
            insort(frontier, (path, serial, token, parent, state))
            if len(frontier) > missing:
                del frontier[0]
                floor = frontier[0][0]
        if not frontier:
            break
        prob, _, token, above, state = frontier.pop()
        state = advance(state, token)
        parent = len(tokens)
        tokens.append(token)
        parents.append(above)
        probs.append(prob)
        states.append(state)
        missing -= 1
    return _lay_out(tokens, parents, probs, states, chain_limit)


def main_chain_first(parents: Sequence[int], chain_limit: int) -> tuple[list[int], list[int], int]:
    """The layout of a draft: (nodes in their new order, their parents in it, nodes in the main chain).

    The main chain is the path of first children; the other nodes keep their order behind it.
    """
    chain: list[int] = []
    tip = -1
    for node, parent in enumerate(parents):
        if len(chain) >= chain_limit:
            break
        if parent == tip:
            chain.append(node)
            tip = node
    members = set(chain)
    order = chain + [node for node in range(len(parents)) if node not in members]
    place = {node: slot for slot, node in enumerate(order)} | {-1: -1}
    return order, [place[parents[node]] for node in order], len(chain)


def _lay_out(
    tokens: list[int], parents: list[int], probs: list[float], states: list[State], chain_limit: int
) -> Tree[State]:
    """Moves the main chain to the front. Nodes come in the order of growth, so a first child is the likeliest."""
    order, placed, chain = main_chain_first(parents, chain_limit)
    return Tree(
        tokens=[tokens[node] for node in order],
        parents=placed,
        probs=[probs[node] for node in order],
        states=[states[node] for node in order],
        chain=chain,
    )
