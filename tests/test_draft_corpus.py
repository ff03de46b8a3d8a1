"""The corpus source: its suffix array against brute force, and no match across documents."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reader_rag.draft import Corpus, make_drafter
from reader_rag.draft.corpus import LONGEST, SHORTEST, CorpusSource
from reader_rag.draft.source import Evidence

DOCUMENTS = st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=6)
LARGE = 151_935


def occurrences(documents: list[list[int]], pattern: list[int]) -> list[tuple[int, int]]:
    """(document, position) of every place where the pattern stands, by looking everywhere."""
    return [
        (number, start)
        for number, document in enumerate(documents)
        for start in range(len(document) - len(pattern) + 1)
        if document[start : start + len(pattern)] == pattern
    ]


def expected(documents: list[list[int]], tail: list[int]) -> tuple[int, dict[int, float]]:
    """The longest match of the tail's end, at most LONGEST, and the shares of what follows it."""
    for length in range(min(LONGEST, len(tail)), SHORTEST - 1, -1):
        places = occurrences(documents, tail[-length:])
        if places:
            after = [
                documents[n][start + length] for n, start in places if start + length < len(documents[n])
            ]
            return length, {token: after.count(token) / len(after) for token in set(after)}
    return 0, {}


def said(source: CorpusSource) -> Evidence | None:
    found = source.predict(source.root())
    return found[0] if found else None


@given(DOCUMENTS, st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_every_occurrence_is_found(documents: list[list[int]], pattern: list[int]) -> None:
    corpus = Corpus.build(documents)
    low, high = corpus.find(pattern)
    starts, at = [], 0
    for document in documents:
        starts.append(at)
        at += len(document) + 1
    found = sorted(corpus.suffixes[low:high].tolist())
    assert found == [starts[number] + position for number, position in occurrences(documents, pattern)]


@given(DOCUMENTS, st.lists(st.integers(0, 3), max_size=50), st.booleans())
def test_the_longest_match_is_continued_by_its_counts(
    documents: list[list[int]], tail: list[int], at_once: bool
) -> None:
    source = CorpusSource(Corpus.build(documents))
    for part in [tail] if at_once else [[token] for token in tail]:
        source.observe(part, [None] * len(part), True)
    length, shares = expected(documents, tail)
    evidence = said(source)
    if not shares:
        assert evidence is None
    else:
        assert evidence is not None
        assert evidence.level == length
        assert evidence.hard == pytest.approx(shares)


def test_a_long_match_goes_on_and_is_found_again_when_it_breaks() -> None:
    document = list(range(100, 160))
    source = CorpusSource(Corpus.build([document, [120, 121, 7]]))
    state = source.root()
    for token in document[:50]:
        state = source.advance(state, token)
    assert source.predict(state)[0].hard == {150: 1.0}
    state = source.advance(source.advance(state, 120), 121)
    assert source.predict(state)[0].hard == {122: 0.5, 7: 0.5}


def test_no_match_and_no_draft_crosses_two_documents() -> None:
    drafter = make_drafter(["corpus"], corpus=Corpus.build([[1, 2, 3], [4, 5, 6]]))
    drafter.observe_prompt([2, 3], None, None)
    assert drafter.draft([], 5, 5).tokens == []
    drafter.observe([3, 4], [[3], [4]], [[0.9], [0.9]])
    assert drafter.draft([], 5, 5).tokens == []
    drafter.observe([4, 5], [[4], [5]], [[0.9], [0.9]])
    assert drafter.draft([], 5, 5).tokens == [6]


def test_ids_beyond_sixteen_bits_keep_their_identity() -> None:
    drafter = make_drafter(["corpus"], corpus=Corpus.build([[LARGE, 1, LARGE, 2]]))
    drafter.observe_prompt([LARGE & 0xFFFF, 1], None, None)
    assert drafter.draft([], 3, 3).tokens == []
    drafter.observe([LARGE, 1], [[1], [1]], [[0.5], [0.5]])
    draft = drafter.draft([], 1, 1)
    assert draft.tokens == [LARGE]
    assert drafter.origin(draft, 0) == (0, None, 2)


def test_mapped_from_files_it_says_the_same(tmp_path: Path) -> None:
    built = Corpus.build([np.arange(50), np.arange(20, 90)])
    built.save(tmp_path / "corpus")
    mapped = Corpus.open(tmp_path / "corpus")
    assert isinstance(mapped.tokens, np.memmap)
    assert mapped.find([30, 31]) == built.find([30, 31])
    assert len(mapped) == len(built) == 122
    assert mapped.nbytes == built.nbytes == 122 * 8


def test_an_empty_corpus_says_nothing() -> None:
    drafter = make_drafter(["corpus"])
    drafter.observe_prompt([1, 2, 3], None, None)
    assert drafter.draft([], 3, 3).tokens == []
    assert drafter.dropped() == {}


def test_what_cannot_be_a_corpus_is_an_error() -> None:
    with pytest.raises(ValueError, match="document 1 has token -5"):
        Corpus.build([[1], [2, -5]])
    with pytest.raises(ValueError, match=r"3 tokens with 2 suffixes.*build it again"):
        Corpus(np.zeros(3, np.int32), np.zeros(2, np.int32))
