"""Rules for candidates that a draft model *sampled*: some are accepted by chance, and the token has the target's distribution.

target and draft are the probabilities [V] that the two models draw the next token from, after temperature, penalties and all
else. A rule may be any that gives the target's law when the candidates are drawn as it wants them; this one file has the two
that are known for several candidates per place (docs/decisions/0009-stochastic-drafts.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Probs = NDArray[np.float64]

HALVINGS = 30
"""Steps of k_seq's bisection. A coarser factor would accept less often; the token's law does not depend on them."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a rule does with candidates, tried in turn.

    chances   of each candidate to be accepted, given that those before it were refused
    residual  [V], what the token is drawn from when all were refused
    """

    chances: tuple[float, ...]
    residual: Probs


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule, and whether its candidates are drawn with replacement."""

    trial: Callable[[Probs, Probs, Sequence[int]], Trial]
    with_replacement: bool


def specinfer(target: Probs, draft: Probs, candidates: Sequence[int]) -> Trial:
    """Each candidate against what is left of the target (SpecInfer, arXiv 2305.09781, algorithm 2).

    x is accepted with min(1, p(x) / q(x)); when it is refused, p becomes norm(max(p - q, 0)). Candidates are distinct, drawn from
    `draft` without replacement, so q becomes norm(q without x) as well (as in arXiv 2402.14160): a token that was refused would be
    refused again.
    """
    chances = []
    for token in candidates:
        chances.append(min(1.0, float(target[token] / draft[token])))
        target = _normed(np.maximum(target - draft, 0.0), target)
        draft = _without(draft, token)
    return Trial(tuple(chances), target)


def k_seq(target: Probs, draft: Probs, candidates: Sequence[int]) -> Trial:
    """All k candidates by one test (SpecTr's K-SEQ, arXiv 2310.15141, algorithm 2). They are drawn independently from `draft`.

    x is accepted with min(1, p(x) / (rho q(x))). With b = sum of min(q, p / rho), one candidate is accepted with probability b and
    any of k with a = 1 - (1 - b)^k; the residual is p - min(q, p / rho) a / b, which is nowhere negative as long as a <= rho b.
    The least such rho, in [1, k], accepts most.
    """
    rho, accepted = _least_factor(target, draft, len(candidates))
    overlap = np.minimum(draft, target / rho)
    beta = float(overlap.sum())
    if not beta > 0.0:  # nothing that the draft model may draw can be the target's
        return Trial((0.0,) * len(candidates), target)
    chances = tuple(min(1.0, float(target[x] / (rho * draft[x]))) for x in candidates)
    return Trial(chances, _normed(np.maximum(target - overlap * (accepted / beta), 0.0), target))


RULES: Mapping[str, Rule] = {
    "specinfer": Rule(specinfer, with_replacement=False),
    "k_seq": Rule(k_seq, with_replacement=True),
}
"""By the names that `Sampling.draft_rule` takes."""


def decide(trial: Trial, candidates: Sequence[int], uniforms: Sequence[float]) -> tuple[int, int | None]:
    """The token, and which candidate it was (None: drawn from the residual). uniforms: one per candidate, then the residual's."""
    for number, (token, chance) in enumerate(zip(candidates, trial.chances, strict=True)):
        if uniforms[number] < chance:
            return token, number
    return draw(trial.residual, uniforms[len(candidates)]), None


def draw_candidates(draft: Probs, uniforms: Sequence[float], *, with_replacement: bool) -> tuple[int, ...]:
    """One token of `draft` per uniform number. Without replacement there are fewer where fewer tokens are possible."""
    drawn: list[int] = []
    for u in uniforms:
        if not draft.any():
            break
        drawn.append(draw(draft, u))
        if not with_replacement:
            draft = _without(draft, drawn[-1])
    return tuple(drawn)


def draw(probs: Probs, u: float) -> int:
    """The first token whose cumulative probability exceeds u in [0, 1); never one of probability 0. `probs` need not sum to 1."""
    cumulative = probs.cumsum()
    total = float(cumulative[-1])
    token = int(np.searchsorted(cumulative, u * total, side="right"))
    if token == len(cumulative):  # u * total was rounded up to total: the last token that is possible
        token = int(np.searchsorted(cumulative, total, side="left"))
    return token


def _least_factor(target: Probs, draft: Probs, count: int) -> tuple[float, float]:
    """The least rho in [1, count] with 1 - (1 - b(rho))^count <= rho b(rho), and that left side."""
    # Only tokens with 1 < p / q < count change sides between q and p / rho; the others are summed once.
    above, below = target >= count * draft, target <= draft
    fixed, scaled = float(draft[above].sum()), float(target[below & ~above].sum())
    between = ~(above | below)
    p, q = target[between], draft[between]

    def accepted(rho: float) -> tuple[float, float]:
        beta = min(1.0, fixed + scaled / rho + float(np.minimum(q, p / rho).sum()))
        return 1.0 - (1.0 - beta) ** count, rho * beta

    low, high = 1.0, float(count)
    if count == 1 or accepted(low)[0] <= accepted(low)[1]:
        return low, accepted(low)[0]
    for _ in range(HALVINGS):  # `high` always satisfies the condition, whatever rounding does to the rest
        middle = (low + high) / 2.0
        any_of, limit = accepted(middle)
        low, high = (low, middle) if any_of <= limit else (middle, high)
    return high, accepted(high)[0]


def _without(probs: Probs, token: int) -> Probs:
    """`probs` given that it is not `token`; all zero if nothing else is possible."""
    rest = probs.copy()
    rest[token] = 0.0
    return _normed(rest, rest)


def _normed(weights: Probs, otherwise: Probs) -> Probs:
    total: Any = weights.sum()
    return weights / total if total > 0.0 else otherwise
