"""The mixture: Hedge's bound, the fitted table, and that sources are asked once per context."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reader_rag.draft import Drafter, make_drafter
from reader_rag.draft.context import HARD_ONLY, ContextSource
from reader_rag.draft.hedge import Hedge
from reader_rag.draft.mixture import Mixture
from reader_rag.draft.priors import FORMAT, Priors, shipped
from reader_rag.draft.source import Evidence, Row

PROBABILITY = st.floats(1e-6, 1.0)
NO_PRIORS = Priors({})


class Says:
    """A source that names one token with a given trust and counts how often it is asked."""

    def __init__(self, name: str, token: int, trust: float, level: int = 1) -> None:
        self.name = name
        self.asked: list[Any] = []
        self._evidence = Evidence(trust, level, {token: 1.0}, [])

    def observe(self, tokens: Sequence[int], rows: Sequence[Row | None], prompt: bool) -> None:
        pass

    def observe_branch(self, context: Sequence[int], row: Row) -> None:
        pass

    def root(self) -> Any:
        return 0

    def advance(self, state: Any, token: int) -> Any:
        return token

    def predict(self, state: Any) -> list[Evidence]:
        self.asked.append(state)
        return [self._evidence]


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.tuples(
            st.lists(st.floats(0.01, 1.0), min_size=n, max_size=n),
            st.lists(st.lists(PROBABILITY, min_size=n, max_size=n), max_size=60),
        )
    )
)
def test_hedge_loses_at_most_the_log_of_its_prior_against_any_expert(
    game: tuple[list[float], list[list[float]]],
) -> None:
    prior, rounds = game
    hedge = Hedge(prior)
    losses = [0.0] * len(prior)
    for likelihoods in rounds:
        mixed = sum(w * p for w, p in zip(hedge.weights, likelihoods, strict=True))
        assert hedge.update(likelihoods) == pytest.approx(mixed)
        losses = [loss - math.log(p) for loss, p in zip(losses, likelihoods, strict=True)]
        assert sum(hedge.weights) == pytest.approx(1.0)
    for weight, loss in zip(prior, losses, strict=True):
        assert hedge.loss <= loss + math.log(sum(prior) / weight) + 1e-6


@given(st.lists(st.lists(PROBABILITY, min_size=4, max_size=4), max_size=60))
def test_equal_priors_lose_at_most_log_n(rounds: list[list[float]]) -> None:
    hedge = Hedge([1.0] * 4)
    for likelihoods in rounds:
        hedge.update(likelihoods)
    best = min((-sum(math.log(r[i]) for r in rounds) for i in range(4)), default=0.0)
    assert hedge.loss <= best + math.log(4) + 1e-6


def test_with_forgetting_an_expert_that_was_wrong_comes_back() -> None:
    kept, forgetting = Hedge([0.5, 0.5]), Hedge([0.5, 0.5], forgetting=0.02)
    for hedge in (kept, forgetting):
        for likelihoods in [[0.9, 0.001]] * 50 + [[0.001, 0.9]] * 5:
            hedge.update(likelihoods)
    assert kept.weights[1] < 0.01
    assert forgetting.weights[1] > 0.9


def test_every_verified_position_scores_every_source() -> None:
    mixture = Mixture([Says("a", 1, 0.9), Says("b", 2, 0.1)], priors=NO_PRIORS)
    before = list(mixture.hedge.weights)
    assert mixture.predict(mixture.root())[0][0] == 1
    for _ in range(3):
        mixture.learn(mixture.root(), 2)
    assert mixture.hedge.weights[2] > before[2]
    assert mixture.hedge.weights[1] < before[1]
    assert [set(levels) for levels in mixture.learned] == [{1}, {1}]


def test_one_source_alone_needs_no_weights() -> None:
    mixture = Mixture([Says("a", 1, 0.5)], priors=NO_PRIORS)
    mixture.learn(mixture.root(), 1)
    assert mixture.hedge.weights == [1.0]
    assert mixture.predict(mixture.root())[0][1] > 0.5


def test_the_fitted_table_decides_how_far_a_source_is_believed() -> None:
    def prob(priors: Priors) -> float:
        mixture = Mixture([Says("a", 1, 0.5)], priors=priors)
        return mixture.predict(mixture.root())[0][1]

    assert prob(Priors({("a", 1): (9.0, 1.0)})) == pytest.approx(0.9)
    assert prob(Priors({("a", 2): (9.0, 1.0), ("b", 1): (9.0, 1.0)})) == pytest.approx(0.5)


def test_a_weak_prior_gives_way_sooner() -> None:
    def learned(a: float, b: float) -> float:
        mixture = Mixture([Says("a", 1, 0.5)], priors=Priors({("a", 1): (a, b)}))
        for _ in range(5):
            mixture.learn(mixture.root(), 2)
        return mixture.predict(mixture.root())[0][1]

    assert learned(3.0, 1.0) < learned(75.0, 25.0)


def test_equal_contexts_share_one_lookup_within_a_draft() -> None:
    source = Says("a", 7, 0.9)
    drafter = Drafter([source], priors=NO_PRIORS)
    drafter.observe_prompt([1], None, None)
    assert drafter.draft([], 12, 12).tokens == [7] * 12
    assert source.asked == [0, 7], "eleven nodes hold the same token, and the state says no more than that"
    drafter.observe([7], [[7]], [[0.9]])
    source.asked.clear()
    drafter.draft([], 12, 12)
    assert source.asked == [0, 7], "a new draft asks anew: the source has learned meanwhile"


def test_the_context_source_tells_contexts_apart_by_their_matches_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    predict = ContextSource.predict

    def counted(self: ContextSource, state: Any) -> list[Evidence]:
        asked.append(state)
        return predict(self, state)

    monkeypatch.setattr(ContextSource, "predict", counted)
    drafter = make_drafter(["context"])
    drafter.observe_prompt([1, 2, 1, 3, 1, 4, 1, 2, 1, 3, 1], None, None)
    drafter.draft([], 30, 30)
    assert len(asked) == len(set(asked)), "no state is asked about twice"
    assert len(asked) < 30


def test_the_table_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    table = Priors({("ngrams", 10): (1.5, 2.25), ("context", 1): (3.0, 4.0)}, "the command")
    table.save(tmp_path / "p.json")
    assert Priors.load(tmp_path / "p.json") == table
    assert (tmp_path / "p.json").read_text().count("\n") > 8, "one level a line"


def test_the_shipped_table_says_which_command_made_it() -> None:
    assert shipped().made_by.startswith("reader-rag bench fit ")
    assert {"context", "ngrams"} <= {name for name, _ in shipped().counts}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (json.dumps({"format": FORMAT + 1, "reliability": {}}), rf"format {FORMAT + 1}.*reads {FORMAT}"),
        (json.dumps({"reliability": {}}), "no fitted table"),
        (json.dumps([1]), "no fitted table"),
        ("{", "no fitted table"),
        (json.dumps({"format": FORMAT, "reliability": {"context": {"1": [1.0]}}}), "damaged"),
        (json.dumps({"format": FORMAT, "reliability": {"context": {"1": [-1.0, 2.0]}}}), "damaged"),
        (json.dumps({"format": FORMAT, "reliability": {"context": {"x": [1.0, 2.0]}}}), "damaged"),
        (json.dumps({"format": FORMAT}), "damaged"),
    ],
)
def test_another_version_or_a_damaged_table_is_an_error_with_the_mend(
    tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=says) as caught:
        Priors.load(path)
    assert str(path) in str(caught.value)
    assert "bench fit" in str(caught.value)


def test_a_source_is_not_asked_where_the_others_leave_too_little_but_scored_all_the_same() -> None:
    sure, late = Says("sure", 1, 0.95), Says("late", 2, 0.9)
    mixture = Mixture([sure, late], priors=NO_PRIORS)
    node = mixture.root()
    assert [token for token, _ in mixture.predict(node, floor=0.5)] == [1]
    assert late.asked == []
    mixture.learn(node, 2)
    assert late.asked == [0]
    assert mixture.learned[1][1][1] > 0.0
    assert {token for token, _ in mixture.predict(mixture.root(), floor=0.0)} == {1, 2}


def test_an_origin_is_the_larger_share_even_where_the_smaller_one_could_no_longer_be_outweighed() -> None:
    half, whole = Says("half", 1, 0.6), Says("whole", 1, 0.58)
    half._evidence = Evidence(0.6, 1, {1: 0.6, 2: 0.4}, [])
    mixture = Mixture([half, whole], priors=NO_PRIORS)
    node = mixture.root()
    shares = [0.0, 0.0]
    for weight, _, number, evidence in mixture._claims(node, 0.0):
        shares[number] += weight * evidence.likelihood(1)
    assert shares[0] > shares[1]
    assert mixture.origin(node, 1) == 0


def test_only_sources_that_are_asked_follow_a_draft() -> None:
    sure, late = Says("sure", 1, 0.95), Says("late", 2, 0.9)
    mixture = Mixture([sure, late], priors=NO_PRIORS)
    node = mixture.advance(mixture.advance(mixture.root(), 3), 4)
    mixture.predict(node, floor=0.5)
    assert sure.asked == [4]
    assert mixture.state(node, 1) == 4, "and the others catch up when they are"


@pytest.mark.parametrize(
    ("copied", "level"), [(3, 3), (8, 8), (11, 8), (12, 9), (20, 10), (30, 11), (60, 12)]
)
def test_long_copies_are_told_apart_by_their_length(copied: int, level: int) -> None:
    source = ContextSource()
    text = list(range(100, 170))
    source.observe(text, [None] * len(text), True)
    source.observe(text[:copied], [None] * copied, False)
    (evidence,) = (one for one in source.predict(source.root()) if one.level != 0)
    assert evidence.level == HARD_ONLY + level
    assert evidence.hard == {text[copied]: 1.0}
