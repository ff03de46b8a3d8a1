"""The documentation: links lead somewhere, snippets compile, and no public name or option is missing."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import reader_rag
from reader_rag.settings import SOURCES, Drafting, Sampling

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
OURS = ("reader_rag", "langchain_reader_rag", "llama_index.llms.reader_rag")

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def snippets(text: str) -> list[str]:
    return [dedent(code) for language, code in _FENCE.findall(text) if language == "python"]


def parsed(code: str) -> ast.Module:
    tree = compile(code, "snippet", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(tree, ast.Module)
    return tree


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_relative_links_lead_to_files(file: Path) -> None:
    text = _FENCE.sub("", file.read_text(encoding="utf-8"))
    targets = [link for link in _LINK.findall(text) if not re.match(r"[a-z]+:|#", link)]
    missing = [link for link in targets if not (file.parent / link.partition("#")[0]).exists()]
    assert not missing


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_anchors_name_a_heading(file: Path) -> None:
    text = _FENCE.sub("", file.read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        target, _, anchor = link.partition("#")
        if anchor and not re.match(r"[a-z]+:", link):
            assert anchor in headings((file.parent / target) if target else file), link


def headings(file: Path) -> set[str]:
    """The anchors of a Markdown file, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.+)$", _FENCE.sub("", file.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_python_snippets_compile_and_import_what_there_is(file: Path) -> None:
    for code in snippets(file.read_text(encoding="utf-8")):
        for node in ast.walk(parsed(code)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(OURS):
                if node.module.startswith("langchain"):
                    pytest.importorskip("langchain_core")
                if node.module.startswith("llama_index"):
                    pytest.importorskip("llama_index.core")
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


def test_every_public_name_is_documented() -> None:
    text = "\n".join(file.read_text(encoding="utf-8") for file in DOCS.glob("*.md"))
    assert not [name for name in reader_rag.__all__ if not re.search(rf"\b{name}\b", text)]


def test_every_option_of_the_core_is_documented() -> None:
    names = [field.name for kind in (Sampling, Drafting) for field in fields(kind)]
    assert not missing_from(page("python.md"), names)
    assert not missing_from(page("how-it-works.md"), SOURCES)


def test_every_option_of_the_langchain_faces_is_documented() -> None:
    pytest.importorskip("langchain_core")
    from langchain_reader_rag import ChatReader, ReaderLLM, ReaderRetriever
    from langchain_reader_rag.face import ReaderFace

    for kind in (ReaderFace, ChatReader, ReaderLLM, ReaderRetriever):
        assert not missing_from(page("langchain.md"), own_options(kind))


def test_every_option_of_the_llama_index_faces_is_documented() -> None:
    pytest.importorskip("llama_index.core")
    from llama_index.llms.reader_rag import ReaderLLM

    names = [*own_options(ReaderLLM), "reader", "tokenizer", "store", "k", "draft_k", "documents"]
    assert not missing_from(page("llama-index.md"), names)


def own_options(kind: Any) -> list[str]:
    """The fields that a pydantic class declares itself."""
    return [name for name in kind.__annotations__ if name in kind.model_fields]


def missing_from(text: str, names: Iterable[str]) -> list[str]:
    """The names that do not stand in `text` in back quotes, alone or at the start of an expression."""
    return [name for name in names if not re.search(rf"`{name}\b", text)]
