"""Writes docs/api/*.md, one page per public module, from the docstrings; `make docs` runs it before the site is built."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("api")
MODULES = (
    "reader_rag",
    "reader_rag.store",
    "reader_rag.structured",
    "reader_rag.citations",
    "reader_rag.draft.speculator",
    "reader_rag.verify.stochastic",
    "reader_rag.errors",
    "langchain_reader_rag",
    "llama_index.llms.reader_rag",
)
OURS = ("reader_rag", "langchain_reader_rag", "llama_index.llms.reader_rag")

LINE = 100

_COMMA = re.compile(r", (?=\*{0,2}\w+(?::|=|,|$)|\*,|/,)")  # between parameters, not inside an annotation
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$")
_ENTRY = re.compile(r"^ *(\w[\w., ]*?)(?:: | {2,})(\S.*)$|^(\w+) (\S.*)$")


@dataclass(frozen=True, slots=True)
class Page:
    """The API page of a module."""

    module: str

    @property
    def file(self) -> Path:
        return FOLDER / f"{self.module}.md"

    def text(self) -> str:
        module = import_module(self.module)
        parts = [f"# {self.module}", markdown(inspect.getdoc(module) or "")]
        for name in public_names(module):
            parts += entry(name, getattr(module, name), depth=2)
        return "\n\n".join(part for part in parts if part) + "\n"


def public_names(module: Any) -> list[str]:
    """`__all__`, or what the module itself defines and does not begin with an underscore."""
    own = [
        name
        for name, thing in vars(module).items()
        if not name.startswith("_") and getattr(thing, "__module__", "") == module.__name__
    ]
    return sorted(getattr(module, "__all__", own))


def entry(name: str, thing: Any, depth: int) -> Iterator[str]:
    """Heading, signature and docstring of a class or function, then the same of a class's own members."""
    yield f"{'#' * depth} {name}"
    if not (callable(thing) or isinstance(thing, property)):
        yield f"```python\n{name} = {thing!r}\n```"
        return
    yield signature(name, thing)
    yield markdown(inspect.getdoc(thing) or "")
    if not inspect.isclass(thing):
        return
    yield fields(thing)
    for member, value in members(thing):
        yield from entry(f"{name}.{member}", value, depth + 1)


class Plain(str):
    """An annotation that a signature shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def plain(annotation: Any) -> Any:
    """The annotation as it is read: names without their modules."""
    if annotation is inspect.Signature.empty or annotation is None:
        return annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return Plain(re.sub(r"(?:[A-Za-z_]\w*\.)+(?=\w)", "", text).replace("'", "").replace('"', ""))


def signature(name: str, thing: Any) -> str:
    if isinstance(thing, property) or (inspect.isclass(thing) and issubclass(thing, Exception)):
        return ""
    try:
        # A pydantic class's own signature lists all fields of all bases; `fields` tells ours.
        given = inspect.signature(thing.__init__ if hasattr(thing, "model_fields") else thing)
    except (TypeError, ValueError):
        return ""
    parameters = [
        p.replace(annotation=plain(p.annotation)) for p in given.parameters.values() if p.name != "self"
    ]
    given = given.replace(parameters=parameters, return_annotation=plain(given.return_annotation))
    text = re.sub(r"<object object at 0x[0-9a-f]+>|<factory>", "...", f"{name}{given}")
    if len(text) > LINE:
        inside, _, result = text[len(name) + 1 :].rpartition(")")
        text = f"{name}(\n    {_COMMA.sub(f',{chr(10)}    ', inside)},\n){result}"
    return f"```python\n{text}\n```"


def fields(kind: type) -> str:
    """The fields that a pydantic class of ours adds, as a table."""
    declared: dict[str, Any] = getattr(kind, "model_fields", {})
    ours = {
        name
        for base in kind.__mro__
        if base.__module__.startswith(OURS)
        for name in vars(base).get("__annotations__", {})
    }
    rows = [
        f"| `{name}` | `{field.get_default(call_default_factory=False)!r}` | {field.description or ''} |"
        for name, field in declared.items()
        if name in ours
    ]
    return "\n".join(["| Option | Default | Meaning |", "|---|---|---|", *rows]) if rows else ""


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that our own code defines and documents, in the order of the source."""
    seen: set[str] = set()
    for base in kind.__mro__:
        if not base.__module__.startswith(OURS):
            continue
        for name, value in vars(base).items():
            method = isinstance(value, property | classmethod | staticmethod) or inspect.isfunction(value)
            if name.startswith(("_", "model_")) or name in seen or not method or not value.__doc__:
                continue
            seen.add(name)
            yield name, value if isinstance(value, property) else getattr(kind, name)


def markdown(docstring: str) -> str:
    """A docstring as Markdown: sections and aligned entries become lists, doctests become code."""
    blocks = re.split(r"\n\s*\n", docstring)
    return "\n\n".join(block for block in map(_block, blocks) if block.strip())


def _block(block: str) -> str:
    lines = block.split("\n")
    if lines[0].startswith(">>>"):
        shown = [re.sub(r"\s*# doctest:.*", "", line) for line in lines]
        return "\n".join(["```pycon", *shown, "```"])
    section = _SECTION.match(lines[0])
    if section:
        return f"**{section[1]}**\n\n" + "\n".join(_entries(lines[1:]))
    return "\n".join(_entries(lines)) if _aligned(lines) else block


def _aligned(lines: list[str]) -> bool:
    """Whether the lines are a table of names and, in a second column, meanings."""
    first = re.match(r"\w+ {2,}", lines[0])
    if first is None or len(lines) < 2:
        return False
    column = re.compile(rf"(?=\w+ +\S).{{{first.end() - 1}}} \S")
    return all(re.match(r"\w+ {2,}\S| {2,}\S", line) or column.match(line) for line in lines)


def _entries(lines: list[str]) -> Iterator[str]:
    """`- name: meaning` of every entry, its further lines joined."""
    depth = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    entry = ""
    for line in lines:
        match = None if line[depth : depth + 1].isspace() else _ENTRY.match(line)
        if match is None:
            entry += f" {line.strip()}"
            continue
        if entry:
            yield f"- {entry.strip()}"
        entry = f"`{match[1] or match[3]}`: {match[2] or match[4]}"
    if entry:
        yield f"- {entry.strip()}"


def write() -> list[Path]:
    """Writes every page anew; pages of modules that are gone are removed."""
    FOLDER.mkdir(exist_ok=True)
    pages = [Page(module) for module in MODULES]
    for file in set(FOLDER.glob("*.md")) - {page.file for page in pages}:
        file.unlink()
    for page in pages:
        page.file.write_text(page.text(), encoding="utf-8")
    return [page.file for page in pages]


if __name__ == "__main__":
    for file in write():
        print(file)
