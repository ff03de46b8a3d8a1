"""Tools: what a caller offers, what the model may call, and how a call is written and read.

A tool is an OpenAI function dict. How a model calls it is its template's own affair: a `ToolFormat` knows the writing, gives the
grammar of a call (so that a call is always complete, names a tool that there is, and has arguments after its schema), and reads it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reader_rag.errors import SettingsError
from reader_rag.structured.constraint import Constraint, closed_schema, llguidance
from reader_rag.structured.formats import FORMATS, ToolFormat, tool_format

__all__ = ["ToolCall", "ToolUse", "checked_tools", "plan_tools"]

CHOICES = ("auto", "required", "none")
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Names are pasted into templates and grammars, so no other text is let through."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The model asks for a tool to be run. `id` is made here, nine letters and digits: the strictest templates want that."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Everything that one request's tools come to.

    tools       as the template gets them; empty when the choice is "none"
    format      how calls are written, None where no tools are offered
    constraint  the grammar of an answer that may, or must, call them
    """

    tools: tuple[dict[str, Any], ...]
    format: ToolFormat | None
    constraint: Constraint | None


NO_TOOLS = ToolUse((), None, None)


def plan_tools(
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]],
    *,
    choice: Any = "auto",
    parallel: bool | None = None,
    format: str | None = None,  # noqa: A002
) -> ToolUse:
    """Checks the tools of a request and compiles what the answer may be.

    choice    "auto", "required" (or "any", True), "none", or one tool: its name or OpenAI's {"type": "function", ...}
    parallel  whether one answer may hold several calls; None: where the model is free ("auto"), not where it is forced
    format    the name of a ToolFormat, for templates that know no tools; None asks the template
    Raises PromptError for a model without a format, SettingsError for everything else.
    """
    offered = checked_tools(tools)
    if format is not None and format not in FORMATS:
        raise SettingsError(f"tool_format is {format!r}; choose from {', '.join(FORMATS)}")
    wanted = _choice(choice, [tool["function"]["name"] for tool in offered])
    if not offered or wanted == "none":
        return ToolUse((), FORMATS[format] if format else None, None)
    writing = tool_format(tokenizer, format)
    forced = [tool for tool in offered if wanted in ("auto", "required", tool["function"]["name"])]
    grammar = writing.grammar(
        [(tool["function"]["name"], closed_schema(tool["function"]["parameters"])) for tool in forced],
        must=wanted != "auto",
        many=wanted == "auto" if parallel is None else bool(parallel),
        token=lambda text: _added_token(tokenizer, text),
    )
    llguidance()
    return ToolUse(tuple(offered), writing, Constraint.lark(grammar))


def checked_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools as {"type": "function", "function": {"name", "description", "parameters"}}; the bare function is fine, too."""
    if isinstance(tools, Mapping | str) or not isinstance(tools, Sequence):
        raise SettingsError(f"tools is a {type(tools).__name__}; use a list of OpenAI function dicts")
    checked: dict[str, dict[str, Any]] = {}
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise SettingsError(f"a tool is a {type(tool).__name__}; use an OpenAI function dict")
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise SettingsError(
                f"a tool has the name {name!r}; use up to 64 letters, digits, '_', '-' and '.'"
            )
        if name in checked:
            raise SettingsError(f"two tools have the name {name!r}; rename one")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
            raise SettingsError(
                f"the parameters of tool {name!r} are not the JSON schema of an object; "
                'give {"type": "object", "properties": {...}}'
            )
        description = str(function.get("description") or "")
        plain = {"name": name, "description": description, "parameters": dict(parameters)}
        checked[name] = {"type": "function", "function": plain}
    return list(checked.values())


def _choice(choice: Any, names: Sequence[str]) -> str:
    """ "auto", "required", "none", or the name of a tool."""
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        choice = function.get("name") if isinstance(function, Mapping) else None
    if choice is None or choice is False:
        choice = "auto"
    if choice is True or choice == "any":
        choice = "required"
    if choice in names or choice in CHOICES:
        if choice in ("auto", "none") or names:
            return str(choice)
        raise SettingsError(f"tool_choice is {choice!r} and there are no tools; pass tools=[...]")
    known = ", ".join([*CHOICES, *names])
    raise SettingsError(f"tool_choice is {choice!r}; choose from {known}")


def made_calls(found: Sequence[tuple[str, dict[str, Any]]]) -> tuple[ToolCall, ...]:
    """Calls with fresh ids: the same call made twice is two calls."""
    return tuple(ToolCall(secrets.token_hex(5)[:9], name, arguments) for name, arguments in found)


def arguments_of(call: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call in a message, OpenAI's nesting or none, JSON text or a dict."""
    function = call.get("function", call)
    given = function.get("arguments", function.get("args", {}))
    try:
        arguments = json.loads(given) if isinstance(given, str) else dict(given or {})
    except (TypeError, ValueError):
        arguments = None
    name = function.get("name")
    if not isinstance(arguments, dict) or not isinstance(name, str):
        raise SettingsError(f"a message calls {name!r} with {given!r}; arguments are a JSON object")
    return name, arguments


def _added_token(tokenizer: Any, text: str) -> int | None:
    """The id of a text that the vocabulary holds as one added token."""
    return next(
        (int(i) for i, token in tokenizer.added_tokens_decoder.items() if token.content == text), None
    )
