"""An answer with its spans as citations: Markdown with footnotes, or HTML with marks.

Chunks come from outside and may hold anything, and an answer repeats them: both texts are shown as they stand,
never as markup.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from reader_rag.errors import SettingsError
from reader_rag.spans import Span

__all__ = ["to_html", "to_markdown"]

_AROUND = 60  # characters of the chunk shown on either side of what was copied
_TITLES = ("title", "source", "file_name", "file_path", "url")  # metadata that says where a chunk is from


@dataclass(frozen=True, slots=True)
class _Source:
    """A cited chunk: its footnote's number, its name, and its text around the first span that was copied from it."""

    number: int
    title: str
    before: str
    copied: str
    after: str


def to_markdown(
    text: str, spans: Iterable[Span | Mapping[str, Any]], chunks: Iterable[Any], title: str | None = None
) -> str:
    r"""The answer with a footnote for every chunk that it copies from, for renderers that know footnotes.

    `spans` are `answer.spans`, or the dicts of a response's metadata. `chunks` are Chunks, LangChain Documents or
    LlamaIndex nodes; a span of a chunk that is not among them is cited by its id. `title` names the metadata that
    a footnote begins with; by default a title, source, file name or URL, else the id.

    >>> from reader_rag import Chunk, find_spans
    >>> chunk = Chunk("c1", "Note: the else clause of a loop runs when no break occurs.", {"title": "Loops"})
    >>> answer = "It says that the else clause of a loop runs when no break occurs"
    >>> print(to_markdown(answer, find_spans(answer, [chunk]), [chunk]))
    It says that the else clause of a loop runs when no break occurs[^1]
    <BLANKLINE>
    [^1]: Loops: Note: “the else clause of a loop runs when no break occurs”.

    Raises SettingsError if a span does not fit the text and its chunk.
    """
    pieces, sources = _cited(text, spans, chunks, title)
    body = "".join(_markdown(piece) + (f"[^{source.number}]" if source else "") for piece, source in pieces)
    return "\n\n".join([body, *(_footnote(source) for source in sources)]) if sources else body


def to_html(
    text: str, spans: Iterable[Span | Mapping[str, Any]], chunks: Iterable[Any], title: str | None = None
) -> str:
    """The answer as HTML: what was copied is marked and numbered, the numbers lead to the sources below.

    The arguments are those of `to_markdown`. The HTML is a fragment that loads nothing and runs nothing; several
    fragments may stand on one page.

    Raises SettingsError if a span does not fit the text and its chunk.
    """
    pieces, sources = _cited(text, spans, chunks, title)
    anchor = f"reader-{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:8]}"
    body = "".join(
        f'<mark>{escape(piece)}</mark><sup><a href="#{anchor}-{source.number}">{source.number}</a></sup>'
        if source
        else escape(piece)
        for piece, source in pieces
    )
    listed = "".join(
        f'<li id="{anchor}-{source.number}">{escape(source.title)}'
        + (
            f": {escape(source.before)}<mark>{escape(source.copied)}</mark>{escape(source.after)}"
            if source.copied
            else ""
        )
        + "</li>"
        for source in sources
    )
    return f'<p style="white-space:pre-wrap">{body}</p>' + (f"<ol>{listed}</ol>" if sources else "")


def _cited(
    text: str, spans: Iterable[Span | Mapping[str, Any]], chunks: Iterable[Any], title: str | None
) -> tuple[list[tuple[str, _Source | None]], list[_Source]]:
    """The text in pieces, each with what it was copied from or None; and the sources in order of their numbers."""
    known = {name: (content, metadata) for name, content, metadata in map(_read, chunks)}
    sources: dict[str, _Source] = {}
    pieces: list[tuple[str, _Source | None]] = []
    end = 0
    for span in sorted(map(_span, spans), key=lambda span: span.start):
        content, metadata = known.get(span.chunk_id, (None, {}))
        copied = text[span.start : span.end]
        fits = content is None or copied == content[span.chunk_start : span.chunk_end]
        if not (end <= span.start < span.end <= len(text)) or not fits:
            raise SettingsError(
                f"the span {span.start}:{span.end} of chunk {span.chunk_id!r} does not fit: pass the whole answer "
                "with its own spans, and the chunks as they were retrieved"
            )
        if span.chunk_id not in sources:
            name = _title(span.chunk_id, metadata, title)
            around = ("", "", "") if content is None else _around(content, span)
            sources[span.chunk_id] = _Source(len(sources) + 1, name, *around)
        pieces += [(text[end : span.start], None), (copied, sources[span.chunk_id])]
        end = span.end
    pieces.append((text[end:], None))
    return [piece for piece in pieces if piece[0]], list(sources.values())


def _span(span: Span | Mapping[str, Any]) -> Span:
    try:
        return span if isinstance(span, Span) else Span(**span)
    except TypeError as error:
        raise SettingsError(f"{span!r} is no span: pass answer.spans, or the dicts of a response") from error


def _read(chunk: Any) -> tuple[str, str, Mapping[str, Any]]:
    """Id, text and metadata of a Chunk, a Document, a node or a scored node."""
    chunk = getattr(chunk, "node", chunk)
    name = getattr(chunk, "node_id", None) or getattr(chunk, "id", None)
    content = getattr(chunk, "page_content", None) or getattr(chunk, "text", None)
    if not isinstance(name, str) or not isinstance(content, str):
        raise SettingsError(
            f"a {type(chunk).__name__} cannot be cited: pass Chunks, Documents with an id, or nodes"
        )
    return name, content, getattr(chunk, "metadata", None) or {}


def _title(name: str, metadata: Mapping[str, Any], wanted: str | None) -> str:
    for key in (wanted,) if wanted else _TITLES:
        if metadata.get(key):
            return " ".join(str(metadata[key]).split())
    return name


def _around(content: str, span: Span) -> tuple[str, str, str]:
    """The chunk before, in and after the span, on one line."""
    start, end = max(0, span.chunk_start - _AROUND), min(len(content), span.chunk_end + _AROUND)
    before, after = content[start : span.chunk_start], content[span.chunk_end : end]
    return (
        _one_line(("… " if start else "") + before.lstrip()),
        _one_line(content[span.chunk_start : span.chunk_end]),
        _one_line(after.rstrip() + (" …" if end < len(content) else "")),
    )


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def _footnote(source: _Source) -> str:
    if not source.copied:
        return f"[^{source.number}]: chunk {_markdown(source.title)}"
    excerpt = "".join([_markdown(source.before), "“", _markdown(source.copied), "”", _markdown(source.after)])
    return f"[^{source.number}]: {_markdown(source.title)}: {excerpt}"


# Markup is taken away by backslashes where every dialect knows them, by character references where not.
_MARKUP = re.compile(r"[\\`*_{}\[\]!<>&|~$@\"]|(?<=www)\.|:(?=//)", re.IGNORECASE)
# At the start of a line headings, lists and definitions; at that of a piece what would go on an address.
_AT_START = re.compile(r"^(?:[#+=:'/(-]|\.(?=\S)|\d+(?=[.)]))", re.MULTILINE)
_INDENT = re.compile(r"^[ \t]+", re.MULTILINE)  # would make a block of code
_BACKSLASHED = frozenset("\\`*_{}[]!#+-.()")


def _markdown(text: str) -> str:
    """The text as Markdown that shows these characters and lines, also right behind a footnote's mark."""
    text = re.sub(r"\r\n?", "\n", text)
    text = _MARKUP.sub(lambda found: _literal(found.group()), text)
    text = _AT_START.sub(lambda found: _literal(found.group()), text)
    text = _INDENT.sub(lambda found: "&nbsp;" * len(found.group().expandtabs(4)), text)
    return re.sub(r"[ \t]*\n", "  \n", text)


def _literal(markup: str) -> str:
    if markup.isdigit():  # "1." begins a list, "&#49;." does not
        return f"&#{ord(markup[0])};{markup[1:]}"
    return f"\\{markup}" if markup in _BACKSLASHED else f"&#{ord(markup)};"
