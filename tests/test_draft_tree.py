"""The tree: the best nodes, laid out with the main chain in front, never more than asked for."""

import random
from itertools import product

import pytest

from reader_rag.draft.tree import Tree, grow

Path = tuple[int, ...]
Table = dict[Path, list[tuple[int, float]]]


def random_table(rng: random.Random, depth: int) -> Table:
    """Next-token probabilities for every path over three tokens up to `depth`; distinct, so the optimum is too."""
    table: Table = {}
    for length in range(depth + 1):
        for path in product(range(3), repeat=length):
            shares = [rng.random() for _ in range(3)]
            scale = rng.uniform(0.3, 1.0) / sum(shares)
            table[path] = sorted(((t, s * scale) for t, s in enumerate(shares)), key=lambda pair: -pair[1])
    return table


def tree_of(table: Table, limit: int, chain_limit: int = 99, pending: Path = ()) -> Tree[Path]:
    return grow((), lambda p, _: table.get(p, []), lambda p, token: (*p, token), limit, chain_limit, pending)


def best_sum(table: Table, limit: int) -> float:
    """The largest sum of path probabilities over all trees of at most `limit` nodes, by trying them all."""

    def best_by_size(path: Path) -> list[float]:
        """[n] = the best sum of n nodes below `path`, each relative to it."""
        sums = [0.0] * (limit + 1)
        for token, prob in table.get(path, []):
            if len(path) >= limit:
                break
            below = best_by_size((*path, token))
            with_child = [0.0] + [prob * (1.0 + below[n]) for n in range(limit)]
            sums = [max(sums[n - k] + with_child[k] for k in range(n + 1)) for n in range(limit + 1)]
        return sums

    return best_by_size(())[limit]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_no_tree_of_the_same_size_expects_more_accepted_tokens(seed: int, limit: int) -> None:
    table = random_table(random.Random(seed), depth=5)
    tree = tree_of(table, limit)
    assert len(tree.tokens) == limit
    assert sum(tree.probs) == pytest.approx(best_sum(table, limit))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("chain_limit", [0, 1, 3, 99])
def test_layout_is_chain_first_and_parents_before_children(seed: int, chain_limit: int) -> None:
    table = random_table(random.Random(seed), depth=6)
    tree = tree_of(table, 12, chain_limit)
    assert tree.chain <= chain_limit
    assert tree.parents[: tree.chain] == list(range(-1, tree.chain - 1))
    assert all(parent < node for node, parent in enumerate(tree.parents))
    assert len(set(zip(tree.parents, tree.tokens, strict=True))) == 12
    paths: list[Path] = []
    for token, parent, prob, state in zip(tree.tokens, tree.parents, tree.probs, tree.states, strict=True):
        path = (*(paths[parent] if parent >= 0 else ()), token)
        paths.append(path)
        assert state == path
        expected = 1.0
        for depth in range(len(path)):
            expected *= dict(table[path[:depth]])[path[depth]]
        assert prob == pytest.approx(expected)
    here: Path = ()
    for token in tree.tokens[: tree.chain]:
        assert token == table[here][0][0], "the main chain takes the likeliest token everywhere"
        here = (*here, token)


def test_a_cut_chain_goes_on_as_a_side_branch() -> None:
    table: Table = {(0,) * depth: [(0, 0.9)] for depth in range(9)}
    tree = tree_of(table, 5, chain_limit=2)
    assert tree.chain == 2
    assert tree.parents == [-1, 0, 1, 2, 3]


def test_pending_leads_the_chain() -> None:
    table: Table = {(): [(1, 0.9)], (7, 8): [(2, 0.5), (3, 0.4)], (7, 8, 2): [(4, 0.1)]}
    tree = tree_of(table, 5, pending=(7, 8))
    assert tree.tokens == [7, 8, 2, 4, 3]
    assert tree.parents == [-1, 0, 1, 2, 1]
    assert tree.probs == pytest.approx([1.0, 1.0, 0.5, 0.05, 0.4])
    assert tree.chain == 4


@pytest.mark.parametrize(("limit", "expected"), [(0, []), (1, [7]), (2, [7, 8])])
def test_pending_is_cut_at_the_limit(limit: int, expected: list[int]) -> None:
    assert tree_of({(7, 8): [(2, 0.5)]}, limit, pending=(7, 8)).tokens == expected


def test_nothing_known_gives_an_empty_tree() -> None:
    tree = tree_of({}, 5)
    assert (tree.tokens, tree.parents, tree.chain) == ([], [], 0)


@pytest.mark.parametrize("seed", range(10))
def test_what_is_left_out_as_too_unlikely_is_exactly_that(seed: int) -> None:
    table = random_table(random.Random(seed), depth=4)
    whole = tree_of(table, 30)
    least = sorted(whole.probs)[10]
    cut = grow(
        (), lambda p, _: table.get(p, []), lambda p, token: (*p, token), limit=30, chain_limit=99, least=least
    )
    assert sorted(cut.probs) == [prob for prob in sorted(whole.probs) if prob > least]


def test_a_child_is_found_by_its_parent_and_token() -> None:
    tree: Tree[None] = Tree([5, 6, 5, 6], [-1, 0, 0, -1], [0.5] * 4, [None] * 4, 2)
    found = {(node, token): tree.child(node, token) for node in (-1, 0, 1) for token in (5, 6)}
    assert found == {(-1, 5): 0, (-1, 6): 3, (0, 5): 2, (0, 6): 1, (1, 5): -1, (1, 6): -1}
