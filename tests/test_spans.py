from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reader_rag.errors import SettingsError
from reader_rag.spans import Span, find_spans
from reader_rag.store.chunk import Chunk

LOOP = "The loop's else clause runs when no break occurs."


def found(text: str, *chunks: str, min_chars: int = 32) -> list[str]:
    return [
        text[s.start : s.end]
        for s in find_spans(text, [Chunk(str(i), c) for i, c in enumerate(chunks)], min_chars)
    ]


def test_a_copied_sentence_is_found_where_it_stands() -> None:
    text = f"As the manual says: {LOOP} Good."
    [span] = find_spans(text, [Chunk("a", "Nothing here."), Chunk("b", f"Note. {LOOP}\nNext.")])
    assert span == Span(20, 20 + len(LOOP), "b", 6, 6 + len(LOOP))
    assert span.to_dict() == {
        "start": 20,
        "end": 69,
        "chunk_id": "b",
        "chunk_start": 6,
        "chunk_end": 55,
    }


def test_a_span_ends_at_a_words_edge_in_both_texts() -> None:
    assert found("a great art of war book", "the smart art of warfare", min_chars=4) == ["art of"]
    assert found("counterexample", "example", min_chars=4) == []
    assert found("example", "counterexample", min_chars=4) == []


def test_white_space_is_not_normalised_and_never_ends_a_span() -> None:
    assert found("one two three", "one  two three", min_chars=7) == ["two three"]
    assert found("one two ", "one two ", min_chars=3) == ["one two"]


def test_the_longest_match_is_taken_and_the_first_chunk_wins_ties() -> None:
    spans = find_spans(
        "alpha beta gamma delta", [Chunk("short", "alpha beta"), Chunk("long", "alpha beta gamma")], 5
    )
    assert [(s.chunk_id, s.start, s.end) for s in spans] == [("long", 0, 16)]
    spans = find_spans("alpha beta", [Chunk("1", "x alpha beta"), Chunk("2", "alpha beta")], 5)
    assert [(s.chunk_id, s.chunk_start) for s in spans] == [("1", 2)]


def test_matches_shorter_than_the_minimum_are_no_spans() -> None:
    assert found("x " + "a" * 31 + " y", "z " + "a" * 31 + " w") == []
    assert found("x " + "a" * 32 + " y", "z " + "a" * 32 + " w") == ["a" * 32]


def test_scripts_without_spaces_and_marks() -> None:
    assert found(
        "答えは東京は日本の首都ですと書いてある。", "日本について。東京は日本の首都です。", min_chars=8
    ) == ["東京は日本の首都です"]
    assert found("x cafe\u0301 noir", "y cafe noir", min_chars=3) == ["noir"]
    family = "👩\u200d👩\u200d👧"
    assert found(f"see {family} now", "see 👩 now", min_chars=3) == ["see", "now"]


def test_empty_inputs_have_no_spans_and_a_bad_minimum_is_refused() -> None:
    assert find_spans("", [Chunk("a", "text")]) == ()
    assert find_spans("text", []) == ()
    assert find_spans("text", [Chunk("a", "")]) == ()
    with pytest.raises(SettingsError, match="min_chars"):
        find_spans("text", [], min_chars=0)


WORDS = st.lists(
    st.sampled_from(["ab", "a", "b", "ba", " ", "  ", "\n", ".", "é", "日", "本"]), max_size=40
).map("".join)


@given(WORDS, st.lists(WORDS, max_size=4), st.integers(1, 6))
def test_every_span_is_verbatim_ordered_and_long_enough(text: str, chunks: list[str], min_chars: int) -> None:
    by_id = {str(i): c for i, c in enumerate(chunks)}
    end = 0
    for span in find_spans(text, [Chunk(i, c) for i, c in by_id.items()], min_chars):
        assert text[span.start : span.end] == by_id[span.chunk_id][span.chunk_start : span.chunk_end]
        assert span.start >= end
        assert span.end - span.start >= min_chars
        assert text[span.start : span.end].strip() == text[span.start : span.end]
        end = span.end


@given(
    st.lists(st.sampled_from(["red", "green", "blue"]), min_size=1, max_size=12),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_a_text_inside_a_chunk_is_one_span(words: list[str], before: int, after: int) -> None:
    text = " ".join(words)
    [span] = find_spans(text, [Chunk("a", "x " * before + text + " y" * after)], min_chars=2)
    assert (span.start, span.end) == (0, len(text))


def test_a_long_answer_against_twenty_chunks_takes_milliseconds() -> None:
    rng = random.Random(0)
    vocabulary = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(300)]
    chunks = [Chunk(str(i), " ".join(rng.choices(vocabulary, k=260))[:1500]) for i in range(20)]
    text = " ".join(c.text[100:220] for c in chunks)[:1000]
    seconds = []
    for _ in range(5):
        began = time.process_time()
        assert len(find_spans(text, chunks)) >= 7
        seconds.append(time.process_time() - began)
    assert min(seconds) < 0.05  # under 10 ms on a quiet machine
