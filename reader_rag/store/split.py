"""Text to pieces: Markdown sections, paragraphs and sentences packed up to a size.

Every piece is an exact substring of the text, so that an answer's span can be traced to its file.
Sizes and offsets are characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from reader_rag.errors import SettingsError

MAX_CHARS = 800

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))??(?:[ \t]+#+)?[ \t]*\r?\n?\Z")
_UNDERLINE = re.compile(r" {0,3}(={3,}|-{3,})[ \t]*\r?\n?\Z")
_FENCE = re.compile(r"[ \t]*(`{3,}(?=[^`]*\Z)|~{3,})")
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]»]*(?=\s)|[。！？]+[」』”’）]*")
_WORD = re.compile(r"\S+")

Range = tuple[int, int]  # [start, end) in the text


@dataclass(frozen=True, slots=True)
class Piece:
    """`text` stands at `start` of the whole; `title` is its heading path ("Guide > Install"), or empty."""

    start: int
    text: str
    title: str


@dataclass(frozen=True, slots=True)
class _Line:
    start: int
    text: str  # with its newline
    fenced: bool  # belongs to a Markdown code fence, the fence's own lines included

    @property
    def blank(self) -> bool:
        return not self.text.strip()


def split_text(
    text: str, *, max_chars: int = MAX_CHARS, overlap: int = 0, markdown: bool = False
) -> list[tuple[int, str]]:
    """Split `text` into (start, piece) with `text[start:start + len(piece)] == piece`.

    No piece is longer than `max_chars`, none is blank, and together they hold every character but white
    space. With `overlap`, a piece begins with up to that many characters of the one before, at a paragraph or
    sentence boundary. Raises SettingsError for max_chars < 1 or an overlap outside [0, max_chars).
    """
    return [(piece.start, piece.text) for piece in split_titled(text, max_chars, overlap, markdown)]


def split_titled(
    text: str, max_chars: int = MAX_CHARS, overlap: int = 0, markdown: bool = False
) -> list[Piece]:
    """As `split_text`, with each piece's heading path."""
    if max_chars < 1:
        raise SettingsError(
            f"max_chars is {max_chars}, but a piece needs at least one character: pass 1 or more"
        )
    if not 0 <= overlap < max_chars:
        raise SettingsError(f"overlap is {overlap}: pass 0 or more, and less than max_chars ({max_chars})")
    pieces = []
    for title, lines in _sections(_lines(text, markdown)) if markdown else [("", _lines(text, markdown))]:
        atoms = [atom for block in _blocks(lines) for atom in _atoms(text, block, max_chars)]
        pieces += [Piece(start, text[start:end], title) for start, end in _pack(atoms, max_chars, overlap)]
    return pieces


def _lines(text: str, markdown: bool) -> list[_Line]:
    lines = []
    fence = ""  # the marker that opened the code block we are in
    for match in _LINE.finditer(text):
        line = match.group()
        mark = _FENCE.match(line) if markdown else None
        fenced = bool(fence) or mark is not None
        if fence:
            bare = line.strip()
            if len(bare) >= len(fence) and bare == fence[0] * len(bare):
                fence = ""
        elif mark:
            fence = mark.group(1)
        lines.append(_Line(match.start(), line, fenced))
    return lines


def _sections(lines: list[_Line]) -> Iterator[tuple[str, list[_Line]]]:
    """Cut at headings. A heading without text of its own stays with the section below it."""
    path: list[tuple[int, str]] = []  # (level, heading), outermost first
    section: list[_Line] = []
    has_body = False
    position = _front_matter(lines)
    section, has_body = lines[:position], position > 0
    while position < len(lines):
        heading = _heading(lines, position)
        if heading is None:
            section.append(lines[position])
            has_body = has_body or not lines[position].blank
            position += 1
            continue
        level, name, height = heading
        if has_body:
            yield _title(path), section
            section, has_body = [], False
        path = [*(entry for entry in path if entry[0] < level), (level, name)]
        section += lines[position : position + height]
        position += height
    if section:
        yield _title(path), section


def _front_matter(lines: list[_Line]) -> int:
    """The number of lines of a YAML block at the very top, whose last `---` is no underline of a heading."""
    if lines and lines[0].text.strip() == "---":
        for position, line in enumerate(lines[1:], 2):
            if line.text.strip() == "---":
                return position
    return 0


def _heading(lines: list[_Line], position: int) -> tuple[int, str, int] | None:
    """Level, name and height in lines of the heading that starts here, if one does."""
    line = lines[position]
    if line.fenced or line.blank:
        return None
    marked = _HEADING.match(line.text)
    if marked:
        return len(marked.group(1)), (marked.group(2) or "").strip(), 1
    starts_block = position == 0 or lines[position - 1].blank
    if (
        starts_block
        and position + 1 < len(lines)
        and not line.text.startswith(("    ", "\t", "-", "*", ">", "|"))
    ):
        underline = _UNDERLINE.match(lines[position + 1].text)
        if underline and not lines[position + 1].fenced:
            return (1 if underline.group(1)[0] == "=" else 2), line.text.strip(), 2
    return None


def _title(path: list[tuple[int, str]]) -> str:
    return " > ".join(name for _, name in path if name)


def _blocks(lines: list[_Line]) -> Iterator[tuple[int, int, bool]]:
    """Paragraphs and code fences as (start, end, fenced), without surrounding blank lines."""
    block: list[_Line] = []

    def closed() -> Iterator[tuple[int, int, bool]]:
        if block:
            yield block[0].start, block[-1].start + len(block[-1].text.rstrip()), block[0].fenced
            block.clear()

    for line in lines:
        if (block and line.fenced != block[0].fenced) or (line.blank and not line.fenced):
            yield from closed()
        if not line.blank or (line.fenced and block):
            block.append(line)
    # A fence left open may end in blank lines.
    while block and block[-1].blank:
        block.pop()
    yield from closed()


def _atoms(text: str, block: tuple[int, int, bool], max_chars: int) -> list[Range]:
    """The block whole if it fits, else its sentences (not of a code fence), lines, words, at last cuts."""
    start, end, fenced = block
    finer: list[Callable[[str, int, int], list[Range]]] = [_split_lines, _split_words]
    atoms = [(start, end)]
    for split in finer if fenced else [_split_sentences, *finer]:
        atoms = [
            part
            for first, last in atoms
            for part in ([(first, last)] if last - first <= max_chars else split(text, first, last))
        ]
    return [
        (cut, min(cut + max_chars, last)) for first, last in atoms for cut in range(first, last, max_chars)
    ]


def _split_sentences(text: str, start: int, end: int) -> list[Range]:
    ends = [match.end() for match in _SENTENCE_END.finditer(text, start, end)]
    return _trimmed(text, [start, *ends, end])


def _split_lines(text: str, start: int, end: int) -> list[Range]:
    ends = [match.end() for match in _LINE.finditer(text, start, end)]
    return [
        (first, first + len(text[first:last].rstrip()))  # a line keeps its indentation
        for first, last in zip([start, *ends], ends, strict=False)
        if text[first:last].strip()
    ]


def _split_words(text: str, start: int, end: int) -> list[Range]:
    return [match.span() for match in _WORD.finditer(text, start, end)]


def _trimmed(text: str, edges: list[int]) -> list[Range]:
    """The stretches between edges, without the white space around them."""
    ranges = []
    for first, last in pairwise(edges):
        body = text[first:last].strip()
        if body:
            offset = first + text[first:last].index(body[0])
            ranges.append((offset, offset + len(body)))
    return ranges


def _pack(atoms: list[Range], max_chars: int, overlap: int) -> Iterator[Range]:
    """Join neighbours while the whole stays within max_chars; step back over up to `overlap` characters."""
    first = 0
    for last in range(1, len(atoms) + 1):
        if last < len(atoms) and atoms[last][1] - atoms[first][0] <= max_chars:
            continue
        yield atoms[first][0], atoms[last - 1][1]
        if last == len(atoms):
            return
        end, following = atoms[last - 1][1], atoms[last][1]
        # The next piece takes up atoms[last], so it may only begin where that still fits.
        first = next(
            (
                i
                for i in range(first + 1, last)
                if end - atoms[i][0] <= overlap and following - atoms[i][0] <= max_chars
            ),
            last,
        )
