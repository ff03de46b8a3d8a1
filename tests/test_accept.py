"""The walk against a slow reading of its definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reader_rag.verify.accept import ROOT, walk

END = 9


def never(token: int) -> bool:
    return False


def test_an_empty_draft_is_an_ordinary_step():
    verdict = walk([], [], 0, lambda node, path: 5, never)
    assert verdict.tokens == (5,)
    assert (verdict.accepted, verdict.pending, verdict.branch) == (0, (), ROOT)


def test_a_confirmed_chain_is_emitted_with_the_token_after_it():
    wanted = [3, 4, 5, 6]
    verdict = walk([3, 4, 5], [-1, 0, 1], 3, lambda node, path: wanted[node + 1], never)
    assert verdict.tokens == (3, 4, 5, 6)
    assert verdict.accepted == 3


def test_a_side_branch_is_never_emitted_but_becomes_pending():
    # root -> 3 -> 4 is the chain; root -> 7 -> 8 is a side branch that the target takes.
    tokens, parents = [3, 4, 7, 8], [-1, 0, -1, 2]
    says = {ROOT: 7, 2: 8, 3: 1}
    verdict = walk(tokens, parents, 2, lambda node, path: says[node], never)
    assert verdict.tokens == (7,)
    assert verdict.accepted == 0
    assert verdict.pending == (8, 1)
    assert verdict.branch == 2


def test_nothing_follows_an_end_token():
    verdict = walk(
        [3, END, 5], [-1, 0, 1], 3, lambda node, path: [3, END, 5, 6][node + 1], lambda t: t == END
    )
    assert verdict.tokens == (3, END)
    assert verdict.pending == ()


@st.composite
def drafts(draw):
    """A draft in the layout that the drafter promises: chain first, parents before children."""
    chain = draw(st.integers(0, 5))
    side = draw(st.integers(0, 6))
    parents = list(range(-1, chain - 1))
    for node in range(chain, chain + side):
        parents.append(draw(st.integers(-1, node - 1)))
    tokens = [draw(st.integers(0, 3)) for _ in parents]
    return tokens, parents, chain


@given(drafts(), st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_emitted_tokens_equal_plain_decoding_for_any_draft(draft, script):
    """The target says script[depth] wherever the path agrees with the script, so plain decoding is the script itself."""
    tokens, parents, chain = draft
    depth = [0] * len(tokens)
    for node, parent in enumerate(parents):
        depth[node] = 1 if parent == ROOT else depth[parent] + 1

    def choose(node, path):
        assert len(path) == (0 if node == ROOT else depth[node])
        return script[len(path)]

    verdict = walk(tokens, parents, chain, choose, never)
    assert list(verdict.tokens) == script[: len(verdict.tokens)]
    agreed = 0
    while agreed < chain and tokens[agreed] == script[agreed]:
        agreed += 1
    assert verdict.accepted == agreed
    assert len(verdict.tokens) == agreed + 1
    together = [*verdict.tokens, *verdict.pending]
    assert together == script[: len(together)]
