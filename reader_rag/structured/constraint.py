"""What the text of an answer must look like, as data: checked when it is said, compiled when a Reader meets it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from reader_rag.errors import MissingExtraError, SettingsError

__all__ = ["Constraint", "closed_schema", "json_schema_of", "llguidance"]

WRITING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is written: on one line, as `json.dumps` does. Free white space is where small models loop."""
COMPOSED = ("allOf", "if", "patternProperties", "unevaluatedProperties", "dependentSchemas")
"""Keywords by which several schemas describe one object: closing one of them would contradict the others."""

LITERAL, NAMED = ("enum", "const", "default", "examples"), ("properties", "$defs", "definitions")
"""Keywords that hold values, and keywords that hold schemas by name."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A language that the answer must be a text of. Make one with a classmethod; each raises SettingsError for what cannot be meant.

    kind     "json_schema", "regex", "choice" or "grammar"
    source   the schema, pattern, options or grammar, as text
    grammar  the same for llguidance
    """

    kind: str
    source: str
    grammar: str = field(repr=False)

    @classmethod
    def json_schema(cls, schema: Any) -> Constraint:
        """JSON after a JSON schema, a pydantic model, a TypedDict or a dataclass.

        The text is written on one line with the properties in the schema's order. An object that lists its properties and says
        nothing about others has no others, as in OpenAI's strict mode.
        """
        plain = json_schema_of(schema)
        text = json.dumps(closed_schema(plain), ensure_ascii=False)
        return cls._checked("json_schema", json.dumps(plain, ensure_ascii=False), f"start: %json {text}\n")

    @classmethod
    def json(cls) -> Constraint:
        """Any JSON object: what others call JSON mode."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """A text that the whole pattern matches (Rust's regex syntax: no lookaround, no back-references)."""
        if not isinstance(pattern, str) or not pattern:
            raise SettingsError(f"regex is {pattern!r}; use a pattern")
        return cls._checked("regex", pattern, _matcher_class().grammar_from_regex(pattern))

    @classmethod
    def choice(cls, options: Iterable[str]) -> Constraint:
        """One of these texts."""
        texts = [options] if isinstance(options, str) else list(options)
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise SettingsError(f"choice is {texts!r}; use a list of non-empty texts")
        texts = list(dict.fromkeys(texts))
        quoted = [json.dumps(text, ensure_ascii=False) for text in texts]
        source = json.dumps(texts, ensure_ascii=False)
        return cls._checked("choice", source, f"start: {' | '.join(quoted)}\n")

    @classmethod
    def lark(cls, grammar: str) -> Constraint:
        """A context-free grammar in llguidance's variant of Lark."""
        if not isinstance(grammar, str) or not grammar.strip():
            raise SettingsError(f"grammar is {grammar!r}; use a grammar in Lark's syntax")
        return cls._checked("grammar", grammar, grammar)

    @classmethod
    def _checked(cls, kind: str, source: str, text: str) -> Constraint:
        matcher = _matcher_class()
        if kind != "regex":
            text = matcher.grammar_from_lark(text)
        failed, messages = matcher.validate_grammar_with_warnings(text)
        if failed:
            raise SettingsError(
                f"this {kind.replace('_', ' ')} cannot be compiled: {_first_line(messages[0])}; "
                "simplify it, or take out what llguidance does not support"
            )
        return cls(kind, source, str(text))


def json_schema_of(schema: Any) -> dict[str, Any]:
    """The JSON schema of a mapping, of its text, of a pydantic model (1 or 2), or of a type that pydantic understands."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise SettingsError(f"the schema is not JSON: {error}") from None
    if isinstance(schema, Mapping):
        try:
            plain: dict[str, Any] = json.loads(json.dumps(dict(schema)))
        except (TypeError, ValueError) as error:
            raise SettingsError(
                f"the schema is not JSON: {error}; use plain dicts, lists and texts"
            ) from None
        return plain
    for name in ("model_json_schema", "schema"):
        write: Callable[[], Any] | None = getattr(schema, name, None)
        if isinstance(schema, type) and callable(write):
            return dict(write())
    if isinstance(schema, type):
        try:
            from pydantic import TypeAdapter

            return dict(TypeAdapter(schema).json_schema())
        except Exception as error:  # without pydantic, or a type that it cannot describe
            raise SettingsError(f"{schema.__name__} has no JSON schema: {_first_line(error)}") from error
    raise SettingsError(
        f"the schema is a {type(schema).__name__}; use a JSON schema, a pydantic model or a TypedDict"
    )


def closed_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema as the grammar takes it: objects closed where that is safe, JSON on one line."""
    closed = dict(schema) if _mentions(schema, COMPOSED) else _closed(dict(schema))
    return {**closed, "x-guidance": WRITING}


def _closed(schema: Any) -> Any:
    """The schema with objects that admit only the properties they list."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: value if key in LITERAL else _closed(value) for key, value in schema.items()}
    for key in NAMED:  # a property may itself be called "properties"
        if isinstance(schema.get(key), dict):
            closed[key] = {name: _closed(value) for name, value in schema[key].items()}
    kind = schema.get("type", "object")
    if "properties" in closed and "$ref" not in schema and (kind == "object" or "object" in kind):
        closed.setdefault("additionalProperties", False)
    return closed


def _mentions(schema: Any, keywords: tuple[str, ...]) -> bool:
    if isinstance(schema, dict):
        return any(key in keywords or _mentions(value, keywords) for key, value in schema.items())
    return isinstance(schema, list) and any(_mentions(item, keywords) for item in schema)


def _first_line(error: object) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _matcher_class() -> Any:
    return llguidance().LLMatcher


def llguidance() -> Any:
    """The grammar library, which comes with an extra."""
    try:
        import llguidance as library
    except ImportError as error:
        raise MissingExtraError(
            'constraints and tools need llguidance: pip install "reader-rag[structured]"'
        ) from error
    return library
