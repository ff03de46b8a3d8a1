"""Spans: the stretches of an answer that stand verbatim in a chunk."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from reader_rag.errors import SettingsError

__all__ = ["Span", "find_spans"]

# Where a span may begin: the first letter of a word, a sign, or any character of a script written without spaces.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_START = re.compile(rf"(?<!\w)\w|[^\w\s]|[{_UNSPACED}]")
_UNSPACED_CHARACTER = re.compile(f"[{_UNSPACED}]")
_ZERO_WIDTH_JOINER = "\u200d"


class _HasText(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Span:
    """answer.text[start:end] == chunk.text[chunk_start:chunk_end], in characters, for the chunk with this id."""

    start: int
    end: int
    chunk_id: str
    chunk_start: int
    chunk_end: int

    def to_dict(self) -> dict[str, int | str]:
        """Plain values, for response metadata and JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def find_spans(text: str, chunks: Sequence[_HasText], min_chars: int = 32) -> tuple[Span, ...]:
    """The longest verbatim matches of at least `min_chars` characters, left to right, none overlapping.

    A span begins and ends at a word's edge in both texts. White space counts as it is. Of equally long matches the first
    chunk's, and in it the first, is taken.

    >>> from reader_rag import Chunk
    >>> text = "As the manual says, the loop's else clause runs when no break occurs."
    >>> [span] = find_spans(text, [Chunk("manual", "Remember: the loop's else clause runs when no break occurs!")])
    >>> text[span.start : span.end]
    "the loop's else clause runs when no break occurs"
    """
    if min_chars < 1:
        raise SettingsError(f"min_chars is {min_chars}; use 1 or more")
    everything = "\n".join(chunk.text for chunk in chunks)
    begins = list(accumulate((len(chunk.text) + 1 for chunk in chunks), initial=0))
    spans: list[Span] = []
    free = 0
    for match in _START.finditer(text, 0, max(0, len(text) - min_chars + 1)):
        start = match.start()
        if start < free or not _is_edge(text, start):
            continue
        best: Span | None = None
        for place in _places(everything, text[start : start + min_chars]):
            number = bisect_right(begins, place) - 1
            chunk, at = chunks[number], place - begins[number]
            if at + min_chars > len(chunk.text) or not _is_edge(chunk.text, at):
                continue
            end = _last_edge(text, start, chunk.text, at)
            if end - start >= min_chars and (best is None or end > best.end):
                best = Span(start, end, chunk.id, at, at + end - start)
        if best is not None:
            spans.append(best)
            free = best.end
    return tuple(spans)


def _places(text: str, part: str) -> Iterator[int]:
    """Every offset at which `part` stands in `text`."""
    at = text.find(part)
    while at >= 0:
        yield at
        at = text.find(part, at + 1)


def _last_edge(text: str, start: int, other: str, at: int) -> int:
    """End, in `text`, of the longest common stretch from text[start] and other[at] that ends at an edge of both."""
    length = _common(text, start, other, at)
    while length and (
        text[start + length - 1].isspace()
        or not _is_edge(text, start + length)
        or not _is_edge(other, at + length)
    ):
        length -= 1
    return start + length


def _common(text: str, start: int, other: str, at: int) -> int:
    """Length of the common prefix of text[start:] and other[at:]: slices are compared, of doubling, then halving size."""
    length, step, growing = 0, 64, True
    longest = min(len(text) - start, len(other) - at)
    while step:
        size = min(step, longest - length)
        if text[start + length : start + length + size] == other[at + length : at + length + size]:
            length += size
            growing = growing and size == step
        else:
            growing = False
        step = step * 2 if growing else step // 2
    return length


def _is_edge(text: str, i: int) -> bool:
    """Whether no word, and no character with its marks, goes on from text[i - 1] to text[i]."""
    if i <= 0 or i >= len(text):
        return True
    before, after = text[i - 1], text[i]
    if after == _ZERO_WIDTH_JOINER or before == _ZERO_WIDTH_JOINER or unicodedata.category(after)[0] == "M":
        return False
    if _UNSPACED_CHARACTER.match(before) or _UNSPACED_CHARACTER.match(after):
        return True
    return not (_in_word(before) and _in_word(after))


def _in_word(character: str) -> bool:
    return character.isalnum() or character == "_" or unicodedata.category(character)[0] == "M"
