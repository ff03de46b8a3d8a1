"""Chunks: copied from verbatim, one at a time, within the pool's bytes and its scope."""

import math
import random
import threading
import tracemalloc

import numpy as np
import pytest

from reader_rag.draft.chunks import ChunkSource
from reader_rag.draft.drafter import make_drafter
from reader_rag.draft.pool import END, ChunkPool

LARGE = 151_935


def drafted(
    chunks: list[list[int]], tail: list[int], pool: ChunkPool | None = None, limit: int = 10
) -> list[int]:
    drafter = make_drafter(["chunks"], chunk_tokens=chunks, pool=pool)
    drafter.observe_prompt(tail, None, None)
    draft = drafter.draft([], limit, limit)
    assert drafter.dropped() == {}
    return draft.tokens[: draft.chain]


def test_a_tail_of_two_tokens_is_continued() -> None:
    chunk = [10, 11, 12, LARGE, 14]
    assert drafted([chunk], [99, 10, 11]) == [12, LARGE, 14]
    assert drafted([chunk], [99, 11]) == [], "one token is no evidence"


def test_numpy_arrays_are_taken_as_they_are() -> None:
    drafter = make_drafter(["chunks"], chunk_tokens=[np.array([1, 2, LARGE, 4], np.int32)])
    drafter.observe_prompt([1, 2], None, None)
    draft = drafter.draft([], 4, 4)
    assert draft.tokens == [LARGE, 4]
    assert all(type(token) is int for token in draft.tokens)


def test_no_draft_runs_from_one_chunk_into_the_next() -> None:
    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    assert drafted([first, second], [2, 3]) == [4]
    assert drafted([first, second], [3, 4]) == []
    pool = ChunkPool()
    pool.add("a", [first])
    pool.add("b", [second])
    assert drafted([], [2, 3], pool) == [4]
    assert drafted([], [3, 4], pool) == []


def test_no_match_spans_two_chunks() -> None:
    assert drafted([[1, 2, 3], [4, 5, 6]], [3, 4]) == []


def test_the_longest_match_decides() -> None:
    assert drafted([[1, 2, 3, 40], [9, 2, 3, 50]], [9, 2, 3])[0] == 50


def test_the_requests_own_chunks_come_before_the_pool() -> None:
    pool = ChunkPool()
    pool.add("a", [[1, 2, 30]])
    assert drafted([[1, 2, 40]], [1, 2], pool)[0] == 40


def test_a_pool_is_read_by_its_own_scope_only() -> None:
    mine, theirs = ChunkPool(), ChunkPool()
    theirs.add("secret", [[1, 2, 3]])
    assert drafted([], [1, 2], mine) == []
    assert drafted([], [1, 2], theirs) == [3]


def test_equal_sequences_are_stored_once() -> None:
    pool = ChunkPool()
    pool.add("a", [[1, 2, 3, 4], [1, 2, 3, 4]])
    once = pool.nbytes
    pool.add("b", [[1, 2, 3, 4]])
    assert pool.nbytes == once
    assert len(pool.index.find(1, 2)) == 1
    pool._drop("a")
    assert pool.nbytes == once
    assert drafted([], [1, 2], pool) == [3, 4]
    pool._drop("b")
    assert (pool.nbytes, pool.index._places, pool.index.sequences) == (0, {}, {})


def test_the_least_recently_used_chunk_goes_first() -> None:
    chunk = [[number, number + 1, number + 2] * 20 for number in range(0, 100, 10)]
    pool = ChunkPool()
    pool.add("0", [chunk[0]])
    pool.limit = pool.nbytes * 3
    pool.add("1", [chunk[1]])
    pool.add("2", [chunk[2]])
    pool.add("0", [chunk[0]])
    pool.add("3", [chunk[3]])
    assert [name for name in "0123" if name in pool] == ["0", "2", "3"]
    assert drafted([], chunk[1][:2], pool) == []


def test_the_same_id_with_other_tokens_replaces_the_chunk() -> None:
    pool = ChunkPool()
    pool.add("a", [[1, 2, 3]])
    pool.add("a", [[1, 2, 4]])
    assert drafted([], [1, 2], pool) == [4]
    assert len(pool) == 1


def test_a_chunk_larger_than_the_pool_is_not_kept() -> None:
    pool = ChunkPool(1000)
    pool.add("a", [list(range(1000))])
    assert (len(pool), pool.nbytes) == (0, 0)


def test_a_chunk_that_leaves_the_pool_in_mid_request_falls_silent() -> None:
    pool = ChunkPool()
    pool.add("a", [[1, 2, 3, 4]])
    source = ChunkSource([], pool)
    source.observe([1, 2], [None, None], False)
    state = source.root()
    assert source.predict(state)
    pool._drop("a")
    assert source.predict(source.advance(state, 3)) == [], "at the next token: a state says what it has read"
    source.observe([3], [None], False)
    assert source.predict(source.root()) == []


def test_memory_stays_under_the_cap() -> None:
    rng = random.Random(0)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    pool = ChunkPool(2_000_000)
    for number in range(100):
        pool.add(str(number), [[rng.randrange(50_000) for _ in range(200)]])
        assert pool.nbytes <= pool.limit
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert pool.limit / 3 <= used <= pool.limit
    assert len(pool) > 20


def test_threads_may_add_while_others_draft() -> None:
    pool = ChunkPool(500_000)
    failures: list[Exception] = []

    def add(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for number in range(100):
                pool.add(f"{seed}-{number}", [[rng.randrange(20) for _ in range(100)]])
        except Exception as error:
            failures.append(error)

    def read(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(300):
                drafted([], [rng.randrange(20), rng.randrange(20)], pool)
        except Exception as error:
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=(seed,)) for seed, work in enumerate([add, add, read, read])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("arrays", [[], [[]], [[1]], [[1, 2]]])
def test_chunks_too_short_to_draft_from_are_no_trouble(arrays: list[list[int]]) -> None:
    pool = ChunkPool()
    pool.add("a", arrays)
    assert len(pool) == 0
    assert drafted(arrays, [1, 2], pool) == []


@pytest.mark.parametrize("seed", range(5))
def test_states_that_carry_the_tokens_say_what_places_looked_up_say(seed: int) -> None:
    rng = random.Random(seed)
    pool = ChunkPool()
    for number in range(6):
        pool.add(str(number), [[rng.randrange(4) for _ in range(12)]])
    source = ChunkSource([[rng.randrange(4) for _ in range(20)]], pool)
    state = source.root()
    for _ in range(60):
        state = source.advance(state, rng.randrange(4))
        shares: dict[int, float] = {}
        longest = max((min(length, 8) for matches in state[1] for length, _, _ in matches), default=0)
        for index, matches, own in zip(source._indexes, state[1], (2.0, 1.0), strict=True):
            for length, places, tokens in matches:
                for place, token in zip(places, tokens, strict=True):
                    number, position = index.split(place)
                    assert index.sequences[number][position] == token != END
                    weight = own * math.exp(-0.9 * (longest - min(length, 8)))
                    shares[token] = shares.get(token, 0.0) + weight
        said = source.predict(state)
        assert [one.level for one in said] == ([longest] if longest else [])
        for one in said:
            total = sum(shares.values())
            assert one.hard == pytest.approx({token: share / total for token, share in shares.items()})
