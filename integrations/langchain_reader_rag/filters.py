"""LangChain's filters, dicts or functions, as what a Store asks of each chunk."""

from collections.abc import Callable, Mapping
from typing import Any

from langchain_core.documents import Document

from reader_rag.errors import SettingsError
from reader_rag.store import Chunk
from reader_rag.store.where import condition

Filter = Mapping[str, Any] | Callable[[Document], bool]

_OPERATORS = {
    "$eq": "==",
    "$ne": "!=",
    "$neq": "!=",
    "$gt": ">",
    "$gte": ">=",
    "$lt": "<",
    "$lte": "<=",
    "$in": "in",
    "$nin": "nin",
    "$contains": "contains",
}


def where_of(given: Filter | None) -> Callable[[Chunk], bool] | None:
    """What `filter=` asks of a chunk; None if it asks nothing.

    A function gets the Document. A dict names what the metadata must hold: a value, a list of allowed
    values, or operators, as in {"year": {"$gte": 2020}, "$or": [{"kind": "a"}, {"kind": "b"}]}.
    Raises SettingsError for anything else.
    """
    if given is None:
        return None
    if isinstance(given, Mapping):
        holds = _all_of(given)
        return lambda chunk: holds(chunk.metadata)
    if callable(given):
        return lambda chunk: bool(given(document_of(chunk)))
    raise SettingsError(f"filter must be a dict or a function of a Document, not {type(given).__name__}")


def document_of(chunk: Chunk) -> Document:
    """The chunk as a Document with the same id, text and metadata."""
    return Document(id=chunk.id, page_content=chunk.text, metadata=dict(chunk.metadata))


def _all_of(given: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], bool]:
    rules = [_rule(key, wanted) for key, wanted in given.items()]
    return lambda metadata: all(rule(metadata) for rule in rules)


def _rule(key: str, wanted: Any) -> Callable[[Mapping[str, Any]], bool]:
    if key in ("$and", "$or"):
        if not isinstance(wanted, list | tuple) or not all(isinstance(part, Mapping) for part in wanted):
            raise SettingsError(f"{key} in a filter takes a list of filters, not {wanted!r}")
        parts = [_all_of(part) for part in wanted]
        joined = all if key == "$and" else any
        return lambda metadata: joined(part(metadata) for part in parts)
    if key == "$not":
        if not isinstance(wanted, Mapping):
            raise SettingsError(f"$not in a filter takes a filter, not {wanted!r}")
        part = _all_of(wanted)
        return lambda metadata: not part(metadata)
    if key.startswith("$"):
        raise SettingsError(f"a filter has no {key!r}; beside metadata keys it takes $and, $or, $not")
    if isinstance(wanted, Mapping):
        conditions = [condition(_operator(name), value) for name, value in wanted.items()]
    elif isinstance(wanted, list | tuple | set):
        conditions = [condition("in", wanted)]
    else:
        conditions = [condition("==", wanted)]
    return lambda metadata: all(holds(metadata.get(key)) for holds in conditions)


def _operator(name: str) -> str:
    if name not in _OPERATORS:
        raise SettingsError(f"a filter has no operator {name!r}; it has: {', '.join(_OPERATORS)}")
    return _OPERATORS[name]
