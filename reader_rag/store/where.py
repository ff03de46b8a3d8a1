"""Conditions on metadata: the comparisons that both frameworks' filters are made of."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from reader_rag.errors import SettingsError

Condition = Callable[[Any], bool]
"""Takes what the metadata holds under a key, None if nothing."""

_ORDER = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_LISTS = ("in", "nin", "any", "all")
_TEXTS = ("text_match", "text_match_insensitive")
OPERATORS = ("==", "!=", *_ORDER, *_LISTS, *_TEXTS, "contains", "is_empty")


def condition(name: str, wanted: Any) -> Condition:
    """The condition `found <name> wanted`; a value of another kind than it asks for does not meet it.

    Raises SettingsError if there is no such operator, or it cannot be asked with `wanted`.
    """
    if name not in OPERATORS:
        raise SettingsError(f"there is no filter operator {name!r}; there are: {', '.join(OPERATORS)}")
    if name in _LISTS and not isinstance(wanted, list | tuple | set | frozenset):
        raise SettingsError(f"the filter operator {name!r} takes a list of values, not {wanted!r}")
    if name in _TEXTS and not isinstance(wanted, str):
        raise SettingsError(f"the filter operator {name!r} takes a text, not {wanted!r}")
    if name in _ORDER:
        return lambda found: _ordered(_ORDER[name], found, wanted)
    conditions: dict[str, Condition] = {
        "==": lambda found: bool(found == wanted),
        "!=": lambda found: bool(found != wanted),
        "in": lambda found: _is_one_of(found, wanted),
        "nin": lambda found: not _is_one_of(found, wanted),
        "any": lambda found: isinstance(found, list) and any(value in found for value in wanted),
        "all": lambda found: isinstance(found, list) and all(value in found for value in wanted),
        "contains": lambda found: _contains(found, wanted),
        "text_match": lambda found: isinstance(found, str) and wanted in found,
        "text_match_insensitive": lambda found: (
            isinstance(found, str) and wanted.casefold() in found.casefold()
        ),
        "is_empty": lambda found: found is None or found == "" or found == [],
    }
    return conditions[name]


def _is_one_of(found: Any, wanted: Any) -> bool:
    return any(bool(found == value) for value in wanted)


def _contains(found: Any, wanted: Any) -> bool:
    if isinstance(found, str):
        return isinstance(wanted, str) and wanted in found
    return isinstance(found, list) and wanted in found


def _ordered(compare: Callable[[Any, Any], Any], found: Any, wanted: Any) -> bool:
    try:
        return found is not None and bool(compare(found, wanted))
    except TypeError:  # a text and a number have no order
        return False
