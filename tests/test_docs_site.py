"""The documentation as a site: API pages from the docstrings, and a build without a single warning."""

from __future__ import annotations

import shutil
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FRAMEWORKS = {"langchain_reader_rag": "langchain_core", "llama_index.llms.reader_rag": "llama_index.core"}


@pytest.fixture(scope="module")
def write_api() -> ModuleType:
    sys.path.insert(0, str(DOCS))
    try:
        return import_module("write_api")
    finally:
        sys.path.remove(str(DOCS))


@pytest.fixture(scope="module")
def pages(write_api: ModuleType) -> dict[str, str]:
    for framework in FRAMEWORKS.values():
        pytest.importorskip(framework)
    return {module: write_api.Page(module).text() for module in write_api.MODULES}


def test_every_public_name_has_its_entry(pages: dict[str, str]) -> None:
    for module, text in pages.items():
        for name in getattr(import_module(module), "__all__", ()):
            assert f"\n## {name}\n" in text, f"{module}.{name}"


def test_options_of_the_faces_stand_in_a_table_with_their_defaults(pages: dict[str, str]) -> None:
    for module in FRAMEWORKS:
        assert "| `max_tokens` | `256` |" in pages[module]
        assert "`callback_manager`" not in pages[module]  # the framework's own


def test_a_docstring_becomes_markdown(write_api: ModuleType) -> None:
    docstring = (
        "One sentence.\n\n"
        "first   what it is,\n        told on\nsecond_name  another\n\n"
        "Args:\n    k: how many.\n    name: with\n        two lines.\n\n"
        ">>> 1 + 1  # doctest: +SKIP\n2"
    )
    assert write_api.markdown(docstring) == (
        "One sentence.\n\n"
        "- `first`: what it is, told on\n- `second_name`: another\n\n"
        "**Args**\n\n- `k`: how many.\n- `name`: with two lines.\n\n"
        "```pycon\n>>> 1 + 1\n2\n```"
    )


def test_signatures_read_as_they_are_called(write_api: ModuleType) -> None:
    def ask(self: object, text: str, *, k: int = 4, names: dict[str, list[int]] | None = None) -> str:
        return text

    assert write_api.signature("ask", ask) == (
        "```python\nask(text: str, *, k: int = 4, names: dict[str, list[int]] | None = None) -> str\n```"
    )


@pytest.mark.filterwarnings("ignore:.*MystReferenceResolver.app")
def test_the_site_is_built_without_a_warning(pages: dict[str, str], tmp_path: Path) -> None:
    application = pytest.importorskip("sphinx.cmd.build")
    # Links lead from docs/ to files beside it, so the copy gets the same neighbours.
    source = shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    for neighbour in ("examples", "tests", "reader_rag", "integrations", "README.md", "CONTRIBUTING.md"):
        (tmp_path / neighbour).symlink_to(ROOT / neighbour)
    (source / "api").mkdir(exist_ok=True)
    for module, text in pages.items():
        (source / "api" / f"{module}.md").write_text(text, encoding="utf-8")
    site = tmp_path / "site"
    failed = application.build_main(["--fail-on-warning", "--keep-going", "--quiet", str(source), str(site)])
    assert not failed
    assert "Reader.stream" in (site / "api" / "reader_rag.html").read_text(encoding="utf-8")
    assert (site / "index.html").exists()
