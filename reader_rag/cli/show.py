"""What a person sees: streamed text with copied spans, and tables."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from reader_rag.spans import find_spans

if TYPE_CHECKING:
    from reader_rag.spans import Span
    from reader_rag.store.chunk import Chunk

MIN_SPAN = 32
_LAST_WORD = re.compile(r"\w+\Z")
_COLOURS = (36, 33, 35, 32, 34, 31)  # by chunk number: cyan, yellow, magenta, green, blue, red


def wants_colour(out: TextIO) -> bool:
    """Whether to write ANSI colours: on a terminal, unless NO_COLOR is set; always with FORCE_COLOR."""
    if os.environ.get("FORCE_COLOR"):
        return True
    return out.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def bold(text: str, out: TextIO) -> str:
    """`text` in bold where colours are shown."""
    return f"\x1b[1m{text}\x1b[0m" if wants_colour(out) else text


def dim(text: str, out: TextIO) -> str:
    """`text` dimmed where colours are shown."""
    return f"\x1b[2m{text}\x1b[0m" if wants_colour(out) else text


class Highlighter:
    """Writes a growing text once; what stands verbatim in a chunk is coloured (or in «») and numbered by chunk.

    Characters that may be the beginning of a span, fewer than 32, are held back until they are or are not.
    A span that later turns out to begin earlier keeps the mark it got: `Answer.spans` is the exact account.
    """

    def __init__(self, chunks: Sequence[Chunk], out: TextIO) -> None:
        self.coloured = wants_colour(out)
        self.marked: set[int] = set()
        """Numbers of the chunks that were marked so far, from 1."""
        self._chunks = list(chunks)
        self._number = {chunk.id: number for number, chunk in reversed([*enumerate(self._chunks, 1)])}
        self._out = out
        self._text = ""
        self._shown = 0
        self._open: int | None = None  # the number of the chunk whose span is being written

    def push(self, delta: str) -> None:
        """Take more text and write what is settled."""
        if delta:
            self._text += delta
            self._write(final=False)

    def finish(self) -> None:
        """Write the rest and close an open span."""
        self._write(final=True)
        self._close()
        self._out.flush()

    def _write(self, final: bool) -> None:
        # A word that may go on could still take a span's last word back, so it waits.
        settled = self._text if final else _LAST_WORD.sub("", self._text)
        spans = find_spans(settled, self._chunks, min_chars=MIN_SPAN)
        ready = len(settled) if final else len(settled) - self._may_begin_span(settled)
        ready = max([ready, *(span.end for span in spans)])
        for span in spans:
            if span.end <= self._shown:
                continue
            self._plain(span.start)
            self._marked(span)
            if span.end < len(settled.rstrip()):
                self._close()
        self._plain(ready)
        self._out.flush()

    def _may_begin_span(self, text: str) -> int:
        """Length of the longest end of `text`, shorter than a span, that stands in a chunk."""
        for length in range(min(MIN_SPAN - 1, len(text)), 0, -1):
            if any(text[-length:] in chunk.text for chunk in self._chunks):
                return length
        return 0

    def _plain(self, end: int) -> None:
        if end > self._shown:
            self._close()
            self._out.write(self._text[self._shown : end])
            self._shown = end

    def _marked(self, span: Span) -> None:
        number = self._number[span.chunk_id]
        if self._open is not None and self._open != number:
            self._close()
        piece = self._text[self._shown : span.end]
        if self.coloured:
            colour = _COLOURS[(number - 1) % len(_COLOURS)]
            self._out.write(f"\x1b[{colour}m{piece}\x1b[0m")
        else:
            self._out.write(piece if self._open is not None else f"«{piece}")
        self._open = number
        self.marked.add(number)
        self._shown = span.end

    def _close(self) -> None:
        if self._open is not None:
            mark = f"[{self._open}]"
            self._out.write(f"\x1b[1m{mark}\x1b[0m" if self.coloured else f"»{mark}")
            self._open = None


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Rows as aligned columns: the first column to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(indent + "   ".join(cells).rstrip())
    return "\n".join(lines)
