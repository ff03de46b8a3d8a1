"""Weights of experts by what each of them said of tokens that the model then chose (Hedge with the logarithmic loss)."""

from collections.abc import Sequence
from math import log


class Hedge:
    """A mixture of N predictors: P(x) = sum_i w_i p_i(x), w_i in proportion to prior_i times all its likelihoods so far.

    With `forgetting` 0 the mixture's total loss, -sum log P, exceeds that of the best predictor i in hindsight by at
    most log(1 / prior_i): log N for equal priors, whatever the tokens. A small `forgetting` gives that share of the
    weight back to the prior at each step, so that a predictor that was wrong long ago can return (fixed share, Herbster
    and Warmuth 1998); each of T steps then costs at most log(1 / (1 - forgetting)) more. Every predictor is scored at
    every step, whether or not its tokens were drafted (full information, as in Not-a-Bandit, 2510.20064).
    """

    __slots__ = ("_forgetting", "_prior", "loss", "weights")

    def __init__(self, prior: Sequence[float], forgetting: float = 0.0) -> None:
        if not prior or min(prior) <= 0.0:
            raise ValueError(f"prior is {list(prior)}: give every expert a weight above 0")
        total = sum(prior)
        self._prior = tuple(weight / total for weight in prior)
        self._forgetting = forgetting
        self.weights = list(self._prior)
        self.loss = 0.0  # nats, over all steps

    def update(self, likelihoods: Sequence[float]) -> float:
        """Takes each expert's probability (above 0) of the token that came; returns the mixture's."""
        joint = [weight * prob for weight, prob in zip(self.weights, likelihoods, strict=True)]
        total = sum(joint)
        self.loss -= log(total)
        keep, give = (1.0 - self._forgetting) / total, self._forgetting
        self.weights = [part * keep + give * prior for part, prior in zip(joint, self._prior, strict=True)]
        return total
