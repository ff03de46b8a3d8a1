"""The Drafter as the reader sees it: limits, pending, forbidden tokens, determinism, and that evidence helps."""

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from reader_rag.draft import ChunkPool, Corpus, Draft, Drafter, NgramTable, make_drafter
from reader_rag.draft.mixture import Mixture
from reader_rag.draft.source import Evidence, Row

ALL = ("context", "chunks", "ngrams", "answers", "corpus")
LARGE = 151_935


class Oracle:
    """Names one token with a given trust, whatever the tail."""

    def __init__(self, name: str, token: int, trust: float) -> None:
        self.name = name
        self.evidence = Evidence(trust, 1, {token: 1.0}, [])

    def observe(self, tokens: Sequence[int], rows: Sequence[Row | None], prompt: bool) -> None:
        pass

    def observe_branch(self, context: Sequence[int], row: Row) -> None:
        pass

    def root(self) -> None:
        return None

    def advance(self, state: Any, token: int) -> None:
        return None

    def predict(self, state: Any) -> list[Evidence]:
        return [self.evidence]


def random_run(seed: int, names: Sequence[str] = ALL, forbidden: frozenset[int] = frozenset()) -> list[Draft]:
    """Drafts of a made-up request over 12 tokens, half of whose drafts come true; checks every draft's limits."""
    rng = random.Random(seed)
    chunks = [[rng.randrange(12) for _ in range(60)] for _ in range(3)]
    answers = ChunkPool()
    answers.add("earlier", [chunks[0][::-1]])
    drafter = make_drafter(
        names,
        chunk_tokens=chunks,
        ngrams=NgramTable(),
        answers=answers,
        corpus=Corpus.build(chunks),
        forbidden=forbidden,
    )
    prompt = [token for chunk in chunks for token in chunk]
    drafter.observe_prompt(prompt, *evidence(rng, len(prompt)))
    drafts = []
    for _ in range(30):
        limit = rng.randrange(18)
        chain_limit = rng.randrange(18)
        pending = [rng.randrange(12) for _ in range(rng.randrange(4))]
        draft = drafter.draft(pending, limit, chain_limit)
        check(draft, drafter, pending, limit, chain_limit)
        drafts.append(draft)
        taken = [*draft.tokens[: rng.randrange(draft.chain + 1)], rng.randrange(12)]
        ids, probs = evidence(rng, len(taken))
        drafter.observe(taken, ids.tolist(), probs.tolist())
        drafter.observe_branch([1, 2], [3, 4], [0.5, 0.25])
    assert drafter.dropped() == {}
    return drafts


def evidence(rng: random.Random, count: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array([rng.sample(range(12), 8) for _ in range(count)], np.int32)
    probs = np.array(
        [sorted((rng.random() / 8 for _ in range(8)), reverse=True) for _ in range(count)], np.float32
    )
    return ids, probs


def check(draft: Draft, drafter: Drafter, pending: list[int], limit: int, chain_limit: int) -> None:
    count = len(draft.tokens)
    assert count == len(draft.parents) == len(draft.probs) == len(draft.origins) <= limit
    assert draft.chain <= min(count, chain_limit)
    assert draft.parents[: draft.chain] == list(range(-1, draft.chain - 1))
    assert all(-1 <= parent < node for node, parent in enumerate(draft.parents))
    assert len(set(zip(draft.parents, draft.tokens, strict=True))) == count, "no token twice under one parent"
    assert all(0 <= origin < len(drafter.source_names) for origin in draft.origins)
    assert all(0.0 < prob <= 1.0 for prob in draft.probs)
    known = min(len(pending), limit, chain_limit)
    assert draft.tokens[:known] == pending[:known]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("names", [ALL, *((name,) for name in ALL)])
def test_limits_and_pending_are_honoured(seed: int, names: Sequence[str]) -> None:
    assert any(draft.tokens for draft in random_run(seed, names))


def test_forbidden_tokens_are_never_drafted() -> None:
    forbidden = frozenset({3, 7})
    drafter = make_drafter(ALL, chunk_tokens=[[1, 2, 3, 4]], forbidden=forbidden)
    drafter.observe_prompt([1, 2, 3, 4, 1, 2], np.array([[2], [3], [4], [1], [2]]), np.full((5, 1), 0.9))
    assert not forbidden.intersection(drafter.draft([], 15, 15).tokens)
    for seed in range(5):
        free = random_run(seed)
        assert any(forbidden.intersection(draft.tokens) for draft in free)
    drafter = make_drafter(ALL, chunk_tokens=[list(range(12)) * 4], forbidden=forbidden)
    drafter.observe_prompt(list(range(12)) * 3, *evidence(random.Random(0), 36))
    for token in range(12):
        assert not forbidden.intersection(drafter.draft([], 15, 15).tokens)
        drafter.observe([token], [[3, 7]], [[0.5, 0.4]])


def test_the_same_input_gives_the_same_drafts() -> None:
    assert random_run(1) == random_run(1)


def test_hash_order_does_not_matter() -> None:
    code = "from tests.test_draft_drafter import random_run; print(random_run(2))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(outputs) == 1


def test_context_copies_what_followed_before() -> None:
    drafter = make_drafter(["context"])
    drafter.observe_prompt([1, 2, 3, LARGE, 5, 6, 1, 2], None, None)
    draft = drafter.draft([], 4, 4)
    assert draft.tokens[: draft.chain] == [3, LARGE, 5, 6]


def test_soft_evidence_brings_in_tokens_that_never_stood_anywhere() -> None:
    drafter = make_drafter(["context"])
    ids = np.array([[2, LARGE], [9, LARGE], [1, 8]], np.int32)
    drafter.observe_prompt([1, 2, 3, 1, 2], ids, np.array([[0.9, 0.05], [0.3, 0.7], [0.9, 0.05]], np.float32))
    draft = drafter.draft([], 5, 5)
    assert draft.tokens[0] == LARGE
    assert {3, 9} <= set(draft.tokens)


def test_prompt_rows_may_be_missing_or_few() -> None:
    for rows in (0, 1, 4, 5):
        drafter = make_drafter(["context", "ngrams"])
        drafter.observe_prompt([1, 2, 3, 1, 2], np.full((rows, 2), [6, 7]), np.full((rows, 2), [0.5, 0.4]))
        assert 3 in drafter.draft([], 8, 8).tokens
        assert drafter.dropped() == {}


def test_tables_learned_in_one_request_speed_up_the_next() -> None:
    table = NgramTable()
    first = make_drafter(["ngrams"], ngrams=table)
    first.observe_prompt([1], None, None)
    assert first.draft([], 5, 5).tokens == []
    first.observe([2, 3, 4], [[2, 9], [3, 9], [4, 9]], [[0.9, 0.1]] * 3)
    second = make_drafter(["ngrams"], ngrams=table)
    second.observe_prompt([1], None, None)
    assert second.draft([], 5, 5).tokens[:3] == [2, 3, 4]


def test_interleaved_requests_keep_their_own_context() -> None:
    table = NgramTable()
    one, two = (make_drafter(["context", "ngrams"], ngrams=table) for _ in range(2))
    one.observe_prompt([1, 2, 3, 1, 2], None, None)
    two.observe_prompt([1, 2, 4, 1, 2], None, None)
    assert one.draft([], 1, 1).tokens == [3]
    assert two.draft([], 1, 1).tokens == [4]
    one.observe([3], [[3]], [[0.9]])
    two.observe([4], [[4]], [[0.9]])
    one.observe([1, 2], [[1], [2]], [[0.9], [0.9]])
    two.observe([1, 2], [[1], [2]], [[0.9], [0.9]])
    assert one.draft([], 1, 1).tokens == [3]
    assert two.draft([], 1, 1).tokens == [4]


def test_origins_name_the_source_that_knew() -> None:
    table = NgramTable()
    table.add([[7]], [Row({8: 0.9})])
    drafter = make_drafter(ALL, chunk_tokens=[[1, 2, 3]], ngrams=table)
    drafter.observe_prompt([1, 2], None, None)
    assert drafter.source_names[drafter.draft([], 1, 1).origins[0]] == "chunks"
    drafter.observe([7], [[7]], [[0.9]])
    assert drafter.source_names[drafter.draft([], 1, 1).origins[0]] == "ngrams"
    drafter.observe([1, 2], [[1], [2]], [[0.9]] * 2)
    drafter.observe([5, 1, 2], [[5], [1], [2]], [[0.9]] * 3)
    assert drafter.source_names[drafter.draft([], 1, 1).origins[0]] == "context"


def test_no_sources_is_plain_decoding() -> None:
    drafter = make_drafter(())
    drafter.observe_prompt([1, 2, 1], None, None)
    assert drafter.draft([], 15, 15) == Draft([], [], [], [], 0)
    drafter.observe([2], [[2]], [[0.9]])
    drafter.observe_branch([2], [1], [0.5])


def test_an_unknown_source_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'web'.*context, chunks, ngrams, .*oracle"):
        make_drafter(["web"], extra_sources=[Oracle("oracle", 1, 0.5)])


def test_an_extra_source_is_drafted_from() -> None:
    drafter = make_drafter(["context", "oracle"], extra_sources=[Oracle("oracle", 5, 0.9)])
    drafter.observe_prompt([1, 2], None, None)
    assert drafter.draft([], 3, 3).tokens == [5, 5, 5]


def test_the_mixture_comes_to_trust_the_source_that_is_right() -> None:
    mixture = Mixture([Oracle("wrong", 1, 0.8), Oracle("right", 2, 0.2)])
    assert mixture.predict(mixture.root())[0][0] == 1
    for _ in range(30):
        mixture.learn(mixture.root(), 2)
    token, prob = mixture.predict(mixture.root())[0]
    assert token == 2
    assert prob > 0.6
    assert mixture.origin(mixture.root(), 2) == 1


def test_probabilities_sum_to_at_most_one() -> None:
    mixture = Mixture([Oracle("a", 1, 0.9), Oracle("b", 2, 0.9), Oracle("c", 1, 0.5)])
    assert sum(prob for _, prob in mixture.predict(mixture.root())) <= 1.0


def test_branches_told_at_once_teach_what_they_teach_one_by_one() -> None:
    at_once, one_by_one = NgramTable(), NgramTable()
    contexts, ids = [[3], [3, 4], [5, 6, 7], []], [[4, 5], [6, 7], [8, 9], [2, 3]]
    probs = [[0.5, 0.25], [0.75, 0.01], [0.5, 0.5], [0.9, 0.05]]
    drafter = make_drafter(["context", "ngrams"], ngrams=at_once)
    drafter.observe_prompt([1, 2], None, None)
    drafter.observe_branches(contexts, ids, probs)
    drafter = make_drafter(["context", "ngrams"], ngrams=one_by_one)
    drafter.observe_prompt([1, 2], None, None)
    for context, top_ids, top_probs in zip(contexts, ids, probs, strict=True):
        drafter.observe_branch(context, top_ids, top_probs)
    assert at_once.tables == one_by_one.tables
    assert (len(at_once), at_once.nbytes) == (len(one_by_one), one_by_one.nbytes)
    assert len(at_once) == 8


def test_a_source_that_takes_branches_one_by_one_is_told_of_each() -> None:
    class Listener(Oracle):
        def __init__(self) -> None:
            super().__init__("listener", 1, 0.5)
            self.heard: list[tuple[list[int], Row]] = []

        def observe_branch(self, context: Sequence[int], row: Row) -> None:
            self.heard.append((list(context), row))

    listener = Listener()
    drafter = make_drafter(["listener"], extra_sources=[listener])
    drafter.observe_branches([[1], [1, 2]], [[3], [4]], [[0.9], [0.8]])
    assert listener.heard == [([1], {3: 0.9}), ([1, 2], {4: 0.8})]
