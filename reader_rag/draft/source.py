"""What a source of drafts must be able to do: the seam along which new sources are added."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Array = Sequence[int] | NDArray[np.integer[Any]]
"""Token ids, however they come."""


Row = dict[int, float]
"""The model's own prediction at one position: its likeliest next tokens and their probabilities.

Rows are never changed, and told apart by identity: several sources remember the same position. A plain dict of numbers, because
the garbage collector leaves it alone; a scope holds hundreds of thousands.
"""


class Evidence(NamedTuple):
    """What a source expects next, and how far it is to be believed.

    The distribution is hard + sum of share * row over soft; it sums to at most 1.
    """

    trust: float  # share of what more trusted evidence left over that this one claims
    level: int  # match length or n-gram order: reliability is learned per source and level
    hard: dict[int, float]  # tokens that followed, and their shares
    soft: list[tuple[float, Row]]  # what the model expected, and the shares of these rows

    def likelihood(self, token: int) -> float:
        """The probability of one token."""
        prob = self.hard.get(token, 0.0)
        for share, row in self.soft:
            prob += share * row.get(token, 0.0)
        return prob


class Source(Protocol):
    """Answers one question: given this tail of tokens, what is likely next?

    A state stands for one tail: that of the committed sequence (`root`), or of a node in the draft (`advance`).
    States are never changed once returned.
    """

    name: str

    def observe(self, tokens: Sequence[int], rows: Sequence[Row | None], prompt: bool) -> None:
        """Takes newly committed tokens; rows[j] is the prediction that tokens[j] was chosen from, where known."""

    def observe_branch(self, context: Sequence[int], row: Row) -> None:
        """Takes the model's prediction after the committed sequence and `context`, which was not committed."""

    def root(self) -> Any:
        """The state after everything committed."""

    def advance(self, state: Any, token: int) -> Any:
        """The state after one more token."""

    def predict(self, state: Any) -> list[Evidence]:
        """The evidence for what follows, the most trusted first; empty where the source knows nothing."""


@runtime_checkable
class BranchSource(Protocol):
    """A source that takes all branches of a pass at once; others are told of them one by one."""

    def observe_branches(self, contexts: Sequence[Sequence[int]], rows: Sequence[Row]) -> None:
        """`observe_branch` for contexts[j] and rows[j], in turn."""


@runtime_checkable
class SharedSource(Protocol):
    """What several requests share and each needs a source of its own from."""

    name: str

    def for_request(self) -> Source:
        """A source that serves one request."""
