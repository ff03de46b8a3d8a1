"""A rule proposes a tree; `RuleDrafter` gives it the interface that the engine and the replay ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from reader_rag.draft import Draft
from reader_rag.draft.tree import main_chain_first

ROOT = -1

Best = Sequence[int]
"""The model's likeliest next tokens at one position, the likeliest first; empty where they are not known."""


class Proposal:
    """A tree in the making: nodes in the order in which the rule prefers them, no token twice under one parent."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._nodes: dict[tuple[int, int], int] = {}

    @property
    def full(self) -> bool:
        return len(self.tokens) >= self.limit

    def add(self, parent: int, token: int) -> int | None:
        """The node of `token` under `parent`, made if there is room; None if there is not."""
        node = self._nodes.get((parent, token))
        if node is None and not self.full:
            node = self._nodes[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
        return node

    def add_path(self, parent: int, tokens: Sequence[int]) -> int | None:
        """The node at the end of a path under `parent`; None if it had to be cut."""
        node: int | None = parent
        for token in tokens:
            if node is None:
                return None
            node = self.add(node, token)
        return node


class Rule(Protocol):
    """One system with all that it keeps. One request at a time: `begin`, observations and proposals, `end`."""

    name: str

    def begin(self) -> None:
        """A new request: what belongs to the last one alone is forgotten."""

    def end(self) -> None:
        """The request is over: what is kept for later ones is taken in."""

    def observe(self, tokens: Sequence[int], best: Sequence[Best], prompt: bool) -> None:
        """Takes committed tokens; best[j] is what the model expected where tokens[j] stands."""

    def observe_branch(self, context: Sequence[int], best: Best) -> None:
        """Takes what the model expected after a drafted path that was not committed."""

    def propose(self, pending: Sequence[int], limit: int) -> Proposal:
        """What may follow the committed tokens and `pending`: at most `limit` nodes."""


class RuleDrafter:
    """One request of a rule, with the methods of `reader_rag.draft.Drafter`."""

    def __init__(self, rule: Rule) -> None:
        self.source_names: tuple[str, ...] = (rule.name,)
        self._rule = rule
        rule.begin()

    def observe_prompt(
        self,
        tokens: Sequence[int],
        top_ids: NDArray[np.integer[Any]] | None,
        top_probs: NDArray[np.floating[Any]] | None,
    ) -> None:
        best: list[Best] = [()] * len(tokens)
        if top_ids is not None:
            known = top_ids[: len(tokens) - 1].tolist()
            best[1 : len(known) + 1] = known  # row i was computed at token i and expects token i + 1
        self._rule.observe(tokens, best, True)

    def observe(self, tokens: Sequence[int], top_ids: list[list[int]], top_probs: list[list[float]]) -> None:
        self._rule.observe(tokens, top_ids, False)

    def observe_branch(self, context: Sequence[int], top_ids: list[int], top_probs: list[float]) -> None:
        self._rule.observe_branch(context, top_ids)

    def observe_branches(
        self,
        contexts: Sequence[Sequence[int]],
        top_ids: Sequence[Sequence[int]],
        top_probs: Sequence[Sequence[float]],
    ) -> None:
        for context, ids in zip(contexts, top_ids, strict=True):
            self._rule.observe_branch(context, ids)

    def draft(self, pending: Sequence[int], limit: int, chain_limit: int) -> Draft:
        """`pending`, and what the rule proposes after it, laid out as the engine wants it: the preferred path first."""
        pending = pending[: max(limit, 0)]
        proposal = self._rule.propose(pending, max(limit - len(pending), 0))
        shift = len(pending)
        tokens = [*pending, *proposal.tokens]
        # A parent of ROOT becomes the last pending token, or ROOT where nothing is pending.
        parents = [*range(-1, shift - 1), *(parent + shift for parent in proposal.parents)]
        return lay_out(tokens, parents, chain_limit)

    def dropped(self) -> dict[str, str]:
        return {}


class NoDrafts:
    """Plain decoding."""

    name = "plain"

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def observe(self, tokens: Sequence[int], best: Sequence[Best], prompt: bool) -> None: ...

    def observe_branch(self, context: Sequence[int], best: Best) -> None: ...

    def propose(self, pending: Sequence[int], limit: int) -> Proposal:
        return Proposal(0)


def lay_out(tokens: Sequence[int], parents: Sequence[int], chain_limit: int) -> Draft:
    """A Draft whose main chain is the path of first children; the other nodes keep their order behind it."""
    order, placed, chain = main_chain_first(parents, chain_limit)
    return Draft(
        tokens=[tokens[node] for node in order],
        parents=placed,
        probs=[1.0] * len(order),  # rules rank, they do not estimate
        origins=[0] * len(order),
        chain=chain,
    )
