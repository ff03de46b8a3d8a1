"""Splitting: exact substrings of bounded size, cut where a reader would cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reader_rag.errors import SettingsError
from reader_rag.store.split import split_text, split_titled

GUIDE = """\
A line before any heading.

# Guide

## Install

Run the command. It takes a minute.

```bash
# not a heading

pip install reader-rag
```

## Use

Use it well.

# Appendix ##

Closing words.
"""

fragments = st.sampled_from(
    [
        "# A\n",
        "## B\n",
        "Title\n=====\n",
        "```\n",
        "~~~\n",
        "\n",
        "\r\n",
        "word ",
        "Eine Aussage. ",
        "日本語。",
        "    code\n",
    ]
)
documents = st.lists(fragments | st.text(max_size=20), max_size=40).map("".join)


@settings(max_examples=300, deadline=None)
@given(documents, st.integers(1, 60), st.booleans(), st.data())
def test_pieces_are_exact_substrings_that_cover_the_text(
    text: str, max_chars: int, markdown: bool, data: st.DataObject
) -> None:
    overlap = data.draw(st.integers(0, max_chars - 1))
    pieces = split_text(text, max_chars=max_chars, overlap=overlap, markdown=markdown)
    covered: set[int] = set()
    for start, piece in pieces:
        assert text[start : start + len(piece)] == piece
        assert piece.strip()
        assert len(piece) <= max_chars
        covered.update(range(start, start + len(piece)))
    assert {i for i, char in enumerate(text) if not char.isspace()} <= covered
    starts = [start for start, _ in pieces]
    assert starts == sorted(set(starts))
    if overlap == 0:
        assert sum(len(piece) for _, piece in pieces) == len(covered)


def test_paragraphs_are_packed_and_not_cut_when_they_fit() -> None:
    paragraphs = [f"Paragraph {i}. " + "x" * 80 for i in range(10)]
    pieces = split_text("\n\n".join(paragraphs), max_chars=300)
    assert [piece.count("Paragraph") for _, piece in pieces] == [3, 3, 3, 1]
    assert all(part in paragraphs for _, piece in pieces for part in piece.split("\n\n"))


def test_a_long_paragraph_is_cut_after_sentences() -> None:
    text = " ".join(f"Sentence number {i} says something." for i in range(20))
    pieces = [piece for _, piece in split_text(text, max_chars=100)]
    assert len(pieces) > 5
    assert all(piece.startswith("Sentence number") and piece.endswith("something.") for piece in pieces)


def test_text_without_spaces_is_cut_after_its_full_stops() -> None:
    pieces = [piece for _, piece in split_text("これは文です。" * 30, max_chars=50)]
    assert all(piece.endswith("。") and len(piece) == 49 for piece in pieces[:-1])


def test_overlap_repeats_the_last_sentence() -> None:
    text = " ".join(f"Sentence {i} is here." for i in range(20))
    pieces = [piece for _, piece in split_text(text, max_chars=100, overlap=30)]
    for before, after in pairwise(pieces):
        assert before.endswith(after[: after.index(".") + 1])


def test_markdown_is_split_at_headings_with_their_path_as_title() -> None:
    pieces = split_titled(GUIDE, markdown=True)
    assert [piece.title for piece in pieces] == ["", "Guide > Install", "Guide > Use", "Appendix"]
    assert pieces[1].text.startswith(
        "# Guide\n\n## Install"
    )  # a heading without text stays with what follows
    assert "# not a heading" in pieces[1].text


def test_underlined_headings_count_and_front_matter_does_not() -> None:
    text = "---\ntitle: x\n---\nIntro.\n\nFirst\n=====\n\nOne.\n\nSecond\n------\n\nTwo.\n"
    assert [piece.title for piece in split_titled(text, markdown=True)] == ["", "First", "First > Second"]


@pytest.mark.parametrize("fence", ["```", "~~~~"])
def test_a_code_fence_that_fits_is_never_broken(fence: str) -> None:
    code = f"{fence}python\n" + "print('line')\n\n" * 10 + fence
    text = ("Some prose before the code. " * 6 + "\n\n" + code + "\n\n") * 5
    pieces = [piece for _, piece in split_text(text, max_chars=250, markdown=True)]
    assert sum(code in piece for piece in pieces) == 5
    assert all(piece.count(fence) % 2 == 0 for piece in pieces)


def test_a_code_fence_too_large_is_broken_between_lines() -> None:
    lines = [f"    value_{i} = compute(value_{i - 1}). Done" for i in range(50)]
    pieces = [
        piece for _, piece in split_text("```\n" + "\n".join(lines) + "\n```", max_chars=200, markdown=True)
    ]
    assert [line for piece in pieces for line in piece.splitlines()] == ["```", *lines, "```"]


@pytest.mark.parametrize(("max_chars", "overlap"), [(0, 0), (10, 10), (10, -1)])
def test_impossible_sizes_are_refused(max_chars: int, overlap: int) -> None:
    with pytest.raises(SettingsError, match="pass"):
        split_text("text", max_chars=max_chars, overlap=overlap)
