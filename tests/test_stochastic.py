"""Sampled drafts: whatever is drawn and accepted, the text has the target's distribution. Enumerated, then drawn."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reader_rag.verify.accept import walk_any
from reader_rag.verify.sampling import uniform
from reader_rag.verify.stochastic import RULES, Trial, decide, draw, draw_candidates, k_seq, specinfer

Path_ = tuple[int, ...]


@st.composite
def laws(draw: Any, size: int = 4) -> np.ndarray:
    """Probabilities of `size` tokens, some of them 0."""
    weights = draw(st.lists(st.sampled_from([0, 0, 1, 2, 3, 7, 40]), min_size=size, max_size=size))
    weights = weights if any(weights) else [1] * size
    return np.array(weights, dtype=float) / sum(weights)


def outcomes(law: np.ndarray, count: int, with_replacement: bool) -> dict[Path_, float]:
    """Every sequence of candidates that can be drawn, and its probability."""
    found = {(): 1.0}
    for _ in range(count):
        longer: dict[Path_, float] = {}
        for drawn, prob in found.items():
            rest = law.copy()
            if not with_replacement:
                rest[list(drawn)] = 0.0
            if not rest.any():
                return found  # every token is a candidate
            for token in np.flatnonzero(rest):
                longer[(*drawn, int(token))] = prob * float(rest[token] / rest.sum())
        found = longer
    return found


def law_of(trial: Trial, candidates: Sequence[int]) -> np.ndarray:
    """The law of the token, over all uniform numbers that the tests and the residual may meet."""
    law, left = np.zeros(len(trial.residual)), 1.0
    for token, chance in zip(candidates, trial.chances, strict=True):
        law[token] += left * chance
        left *= 1.0 - chance
    return law + left * trial.residual / trial.residual.sum()


# One place: exact enumeration of every draw


@pytest.mark.parametrize("name", sorted(RULES))
@given(target=laws(), draft=laws(), count=st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_over_all_draws_the_token_has_exactly_the_targets_law(
    name: str, target: np.ndarray, draft: np.ndarray, count: int
) -> None:
    rule = RULES[name]
    total = np.zeros(4)
    for candidates, prob in outcomes(draft, count, rule.with_replacement).items():
        total += prob * law_of(rule.trial(target, draft, candidates), candidates)
    assert np.abs(total - target).sum() / 2 < 1e-12


@pytest.mark.parametrize("name", sorted(RULES))
def test_more_candidates_are_accepted_more_often(name: str) -> None:
    target, draft = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.1, 0.2, 0.3, 0.4])
    rates = [acceptance(name, target, draft, count) for count in (1, 2, 3, 4)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(np.minimum(target, draft).sum()), "one candidate: speculative sampling"
    assert rates[2] > rates[0] + 0.15
    if name == "specinfer":
        assert rates[3] == pytest.approx(1.0), "all tokens are candidates: nothing is left over"


@pytest.mark.parametrize("name", sorted(RULES))
def test_drafts_of_the_target_itself_are_always_accepted(name: str) -> None:
    target = np.array([0.5, 0.3, 0.15, 0.05])
    assert acceptance(name, target, target, 1) == pytest.approx(1.0)


def acceptance(name: str, target: np.ndarray, draft: np.ndarray, count: int) -> float:
    rate = 0.0
    for candidates, prob in outcomes(draft, count, RULES[name].with_replacement).items():
        refused = np.prod([1.0 - chance for chance in RULES[name].trial(target, draft, candidates).chances])
        rate += prob * (1.0 - float(refused))
    return rate


def test_k_seqs_factor_is_the_least_that_leaves_a_residual() -> None:
    """rho solves 1 - (1 - b)^k = rho b: one such pair by hand, b = (1 + rho) / (2 rho) here."""
    target, draft = np.array([1.0, 0.0]), np.array([0.5, 0.5])
    assert k_seq(target, draft, [0, 0]).chances == (1.0, 1.0), "p / q = 2 = k: rho q never exceeds p"
    target = np.array([0.75, 0.25])
    chance = k_seq(target, draft, [1, 1]).chances[0]
    rho = 0.5 / chance
    beta = min(0.5, 0.75 / rho) + min(0.5, 0.25 / rho)
    assert 1.0 < rho < 2.0
    assert 1.0 - (1.0 - beta) ** 2 == pytest.approx(rho * beta, abs=1e-7)


def test_a_draft_that_knows_nothing_of_the_target_leaves_it_as_it_is() -> None:
    target, draft = np.array([0.6, 0.4, 0.0, 0.0]), np.array([0.0, 0.0, 0.5, 0.5])
    for rule, candidates in ((specinfer, [2, 3]), (k_seq, [2, 2])):
        trial = rule(target, draft, candidates)
        assert trial.chances == (0.0, 0.0)
        assert trial.residual.tolist() == target.tolist()


# The draws themselves


def test_a_draw_hits_each_token_on_its_share_of_the_numbers() -> None:
    probs = np.array([0.0, 0.25, 0.0, 0.75, 0.0])
    assert [draw(probs, u) for u in (0.0, 0.2499, 0.25, 0.9999999999999999)] == [1, 1, 3, 3]
    assert draw(probs * 0.1, 1.0 - 2**-53) == 3, "sums that are not 1, and the largest number there is"


@pytest.mark.parametrize("with_replacement", [True, False])
def test_candidates_follow_the_law_that_the_enumeration_takes(with_replacement: bool) -> None:
    law, draws = np.array([0.5, 0.3, 0.2, 0.0]), 6000
    seen = Counter(
        draw_candidates(law, [uniform(3, n, lane) for lane in (1, 2)], with_replacement=with_replacement)
        for n in range(draws)
    )
    wanted = outcomes(law, 2, with_replacement)
    assert set(seen) == set(wanted)
    assert distance(seen, wanted) < 0.02
    assert len(draw_candidates(law, [0.1] * 4, with_replacement=False)) == 3, "no token twice"


def test_lanes_are_independent_of_each_other() -> None:
    lanes = np.array([[uniform(5, n, lane) for n in range(2000)] for lane in (0, 1, 2, 65)])
    assert np.abs(np.corrcoef(lanes) - np.eye(4)).max() < 0.07
    assert lanes[0].tolist() == [uniform(5, n) for n in range(2000)]


def distance(seen: Counter[Any], law: dict[Any, float]) -> float:
    """Total variation between what was seen and a law."""
    total = sum(seen.values())
    return sum(abs(seen[key] / total - law.get(key, 0.0)) for key in {*seen, *law}) / 2


# A whole block: a sampled tree of two levels and a retrieved branch, walked as throughput mode walks it


def block_law(name: str, branches: int) -> tuple[dict[Path_, float], dict[Path_, float]]:
    """(law of the first three tokens by drafts, law without), over every draw of every level, by enumeration."""
    rng = np.random.default_rng(4)
    target = {
        path: rng.dirichlet([0.7] * 3) for n in range(3) for path in itertools.product(range(3), repeat=n)
    }
    model = {
        path: rng.dirichlet([0.7] * 3) for n in range(2) for path in itertools.product(range(3), repeat=n)
    }
    plain = {
        (a, b, c): target[()][a] * target[a,][b] * target[a, b][c]
        for a, b, c in itertools.product(range(3), repeat=3)
    }
    law: dict[Path_, float] = dict.fromkeys(plain, 0.0)
    rule = RULES[name]

    def choices(path: Path_) -> list[tuple[Path_, float, np.ndarray]]:
        """All that may be drawn after a path: candidates, their probability, and the law of the choice among them."""
        return [
            (drawn, prob, law_of(rule.trial(target[path], model[path], drawn), drawn))
            for drawn, prob in outcomes(model[path], branches, rule.with_replacement).items()
        ]

    below = {token: choices((token,)) for token in range(3)}
    for first, prob, law_first in choices(()):
        for second, conditional, law_second in below[first[0]]:
            laws_after = {(): law_first, (first[0],): law_second}
            paths = {(x,) for x in first} | {(first[0], x) for x in second} | {(2,), (2, 1)}  # retrieved: 2 1
            for block, chance in walked(laws_after, paths, target).items():
                for tail, rest in continued(block, target).items():
                    law[tail] += prob * conditional * chance * rest
    return law, plain


class Try:
    """One walk along `script`: the probability of its tokens so far, and the law of the choice that comes after them."""

    def __init__(self, script: Path_, law_after: Any) -> None:
        self.script, self._law_after = script, law_after
        self.prob = 1.0
        self.left_open: np.ndarray | None = None

    def choose(self, node: int, path: Sequence[int]) -> int:
        law = self._law_after(node, tuple(path))
        if len(path) == len(self.script):
            self.left_open = law
            return ENDS
        self.prob *= float(law[self.script[len(path)]])
        return self.script[len(path)]


ENDS = 99


def walked(laws_after: dict[Path_, Any], paths: set[Path_], target: Any) -> dict[Path_, float]:
    """Every block that one tree may give, as `walk_any` walks it with each choice tried in turn, and its probability.

    laws_after: the law of the choice after each path where something was drawn; elsewhere it is the target's.
    """
    nodes = sorted(paths, key=lambda path: (len(path), path))
    parents = [nodes.index(path[:-1]) if len(path) > 1 else -1 for path in nodes]

    def law_after(node: int, path: Path_) -> np.ndarray:
        assert path == (nodes[node] if node >= 0 else ())
        return laws_after[path] if path in laws_after else target[path]

    found: dict[Path_, float] = {}
    waiting: list[Path_] = [()]
    while waiting:
        one = Try(waiting.pop(), law_after)
        verdict = walk_any([path[-1] for path in nodes], parents, one.choose, lambda token: token == ENDS)
        if one.left_open is not None:
            waiting += [(*one.script, int(token)) for token in np.flatnonzero(one.left_open)]
        else:
            assert verdict.tokens == one.script
            found[one.script] = one.prob
    return found


def continued(block: Path_, target: Any) -> dict[Path_, float]:
    """The block and plain decoding after it, up to three tokens."""
    if len(block) == 3:
        return {block: 1.0}
    return {
        path: float(target[block][token]) * prob
        for token in range(3)
        for path, prob in continued((*block, token), target).items()
    }


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize("branches", [1, 2, 3])
def test_a_walked_block_has_exactly_the_targets_law(name: str, branches: int) -> None:
    law, plain = block_law(name, branches)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert sum(abs(law[path] - plain[path]) for path in plain) / 2 < 1e-12


def test_decisions_follow_the_trial() -> None:
    """Over a fine grid of uniform numbers, the shares of the tokens are the trial's law."""
    trial, candidates = Trial((0.3, 0.6), np.array([0.5, 0.0, 0.5])), [1, 2]
    grid = (np.arange(20) + 0.5) / 20
    counts = Counter(decide(trial, candidates, numbers)[0] for numbers in itertools.product(grid, grid, grid))
    shares = np.array([counts[token] for token in range(3)]) / 20**3
    assert shares == pytest.approx(law_of(trial, candidates))
    assert decide(trial, candidates, [0.3, 0.59, 0.0]) == (2, 1)
    assert decide(trial, candidates, [0.3, 0.6, 0.9]) == (2, None)
