"""Answers with their spans as footnotes and marks: what is shown is what was said, and nothing of it is markup."""

from __future__ import annotations

import doctest
import re
from dataclasses import dataclass
from html import unescape
from types import SimpleNamespace
from typing import Any

import pytest
from bs4 import BeautifulSoup
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from reader_rag import Chunk, Span, citations, find_spans
from reader_rag.citations import to_html, to_markdown
from reader_rag.errors import SettingsError

LOOP = "the else clause of a loop runs when no break occurs"
TRY = "the finally clause runs whatever happens in the try block"
CHUNKS = [
    Chunk("c1", f"Note: {LOOP}. {'More. ' * 30}", {"title": "Loops"}),
    Chunk("c2", f"{'Before. ' * 30}So {TRY}!", {"source": "docs/try.md"}),
]
ANSWER = f"It says that {LOOP}, and {TRY}. Again, {LOOP}!"

_COMMONMARK = MarkdownIt("commonmark", {"html": True})
_TABLES = MarkdownIt("gfm-like", {"linkify": False})


def cited(text: str, chunks: list[Chunk], render: Any, min_chars: int = 3) -> str:
    return str(render(text, find_spans(text, chunks, min_chars), chunks))


def test_each_chunk_has_one_number_and_one_footnote() -> None:
    text = to_markdown(ANSWER, find_spans(ANSWER, CHUNKS), CHUNKS)
    body, first, second = text.split("\n\n")
    assert body == f"It says that {LOOP}[^1], and {TRY}[^2]. Again, {LOOP}[^1]\\!"
    assert first.startswith(f"[^1]: Loops: Note: “{LOOP}”. More. More.")
    assert first.endswith(" …")
    assert second.startswith("[^2]: docs/try.md: … ")
    assert second.endswith(f"So “{TRY}”\\!")


def test_html_marks_what_was_copied_and_leads_to_its_source() -> None:
    page = BeautifulSoup(to_html(ANSWER, find_spans(ANSWER, CHUNKS), CHUNKS), "html.parser")
    answer, sources = page.find("p"), page.find("ol")
    assert [mark.text for mark in answer.find_all("mark")] == [LOOP, TRY, LOOP]
    links = [link["href"] for link in answer.find_all("a")]
    assert [page.find(id=link[1:]).text.split(":")[0] for link in links] == ["Loops", "docs/try.md", "Loops"]
    assert [mark.text for mark in sources.find_all("mark")] == [LOOP, TRY]
    for number in answer.find_all("sup"):
        number.extract()
    assert answer.text == ANSWER


def test_the_dicts_of_a_response_and_what_frameworks_retrieve_will_do() -> None:
    @dataclass
    class Document:
        id: str | None
        page_content: str
        metadata: dict[str, Any]

    expected = to_markdown(ANSWER, find_spans(ANSWER, CHUNKS), CHUNKS)
    spans = [span.to_dict() for span in find_spans(ANSWER, CHUNKS)]
    documents = [Document(chunk.id, chunk.text, dict(chunk.metadata)) for chunk in CHUNKS]
    nodes = [SimpleNamespace(node_id=c.id, text=c.text, metadata=c.metadata) for c in CHUNKS]
    scored = [SimpleNamespace(node=node, score=1.0) for node in nodes]
    for chunks in (documents, nodes, scored):
        assert to_markdown(ANSWER, spans, chunks) == expected
    assert to_markdown(ANSWER, reversed(spans), CHUNKS) == expected


def test_the_title_may_be_any_metadata_and_an_unknown_chunk_is_cited_by_its_id() -> None:
    spans = find_spans(ANSWER, CHUNKS)
    assert "[^1]: c1: Note" in to_markdown(ANSWER, spans, CHUNKS, title="page")
    assert "[^2]: docs/try.md: " in to_markdown(ANSWER, spans, CHUNKS, title="source")
    assert to_markdown(ANSWER, spans, CHUNKS[:1]).endswith("\n\n[^2]: chunk c2")
    assert "<li" in to_html(ANSWER, spans, [])


def test_an_answer_that_copies_nothing_has_no_sources() -> None:
    assert to_markdown("Plain text.", [], CHUNKS) == "Plain text."
    assert to_html("Plain & simple.", [], CHUNKS) == '<p style="white-space:pre-wrap">Plain &amp; simple.</p>'
    assert to_markdown("", [], []) == ""


@pytest.mark.parametrize(
    "spans",
    [
        [Span(0, 5, "c1", 0, 5)],
        [Span(9, 60, "c1", 6, 57), Span(20, 60, "c1", 17, 57)],
        [Span(0, 10_000, "nobody", 0, 10_000)],
        [Span(3, 3, "c1", 3, 3)],
        [{"start": 0}],
    ],
)
@pytest.mark.parametrize("render", [to_markdown, to_html])
def test_spans_that_do_not_fit_are_refused(render: Any, spans: Any) -> None:
    with pytest.raises(SettingsError, match="span"):
        render(ANSWER, spans, CHUNKS)


def test_what_has_no_id_cannot_be_cited() -> None:
    with pytest.raises(SettingsError, match="a str cannot be cited"):
        to_html(ANSWER, [], ["a text"])


EVIL = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "![x](http://evil.example/track.png)",
    "[click](javascript:alert(1))",
    "[^1]: http://evil.example/x.png",
    "</p></li></ol><iframe src='//evil'>",
    "# Heading\n\n- list\n1. one\n> quote\n    code\n---\n===",
    "`code` *em* __strong__ ~~gone~~ | a | b |\n|---|---|\n| c | d |",
    "rows\n\n| a | b |\n|---|---|\n| c | d |\n\nend",
    '" onmouseover="alert(1)',
    "&lt;b&gt; &amp; &#60;",
    "http://evil.example www.evil.example a@evil.example",
    "<!-- comment --> <?php ?> <![CDATA[ x ]]>",
    "line one\\\nline two  \n\nparagraph\r\nend",
)


@pytest.mark.parametrize("evil", EVIL)
def test_nothing_in_a_chunk_becomes_markup(evil: str) -> None:
    text = f"He wrote {evil} there ({evil}): {evil}"
    # The chunk's name and title are as foreign as its text.
    chunks = [Chunk(evil, f"{evil} there, and {evil}", {"title": evil}), Chunk("x", evil, {"source": [evil]})]
    assert find_spans(text, chunks, 3)
    check(text, chunks)


MARKUP = st.lists(
    st.sampled_from(
        [*"<>&\"'`*_[](){}#+-.!|~$@:=\\/^1 \n\t\r", "a", "b", "é", "日", "www.", "://", "[^1]", "&lt;"]
    ),
    max_size=30,
).map("".join)


@example("www..<", ["..<"])
@example("http://x", ["//x"])
@given(MARKUP, st.lists(MARKUP, max_size=3))
def test_any_text_is_shown_as_it_is(text: str, chunks: list[str]) -> None:
    check(text, [Chunk(f"c{i}", chunk, {"title": chunk}) for i, chunk in enumerate(chunks)])


def check(text: str, chunks: list[Chunk]) -> None:
    """Both renderings show exactly the text, and hold no element but their own."""
    html = cited(text, chunks, to_html)
    page = BeautifulSoup(html, "html.parser")
    assert {tag.name for tag in page.find_all()} <= {"p", "mark", "sup", "a", "ol", "li"}
    assert all(link["href"].startswith("#reader-") for link in page.find_all("a"))
    answer = html.removeprefix('<p style="white-space:pre-wrap">').partition("</p>")[0]
    assert unescape(re.sub(r"<sup>.*?</sup>|</?mark>", "", answer)) == text

    source = cited(text, chunks, to_markdown)
    for parser in (_COMMONMARK, _TABLES):
        rendered = BeautifulSoup(parser.render(source), "html.parser")
        assert {tag.name for tag in rendered.find_all()} <= {"p", "br"}, source
    assert "://" not in source  # GitHub makes links of bare addresses
    assert not re.search(r"www\.\S", source)
    body = re.split(r"\n\n(?=\[\^1\]: )", source)[0] if "[^1]: " in source else source
    words = BeautifulSoup(_COMMONMARK.render(body), "html.parser").text
    assert squeezed(re.sub(r"\[\^\d+\]", "", words)) == squeezed(re.sub(r"\[\^\d+\]", "", text))


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("\xa0", " ")).strip()


def test_two_answers_on_one_page_have_links_of_their_own() -> None:
    other = ANSWER + " And that is all."
    pages = [to_html(text, find_spans(text, CHUNKS), CHUNKS) for text in (ANSWER, other)]
    names = [set(re.findall(r'id="([^"]+)"', page)) for page in pages]
    assert len(names[0]) == len(names[1]) == 2
    assert not names[0] & names[1]


def test_the_docstring_is_right() -> None:
    assert doctest.testmod(citations).attempted > 0
    assert doctest.testmod(citations).failed == 0
