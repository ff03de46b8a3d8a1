"""How models write the calls of tools: one class per family, each with its grammar and its reader."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from reader_rag.errors import PromptError

__all__ = ["FORMATS", "Found", "ToolFormat", "template_has_tools", "tool_format"]

Token = Callable[[str], int | None]
"""The id of a text that is one added token of the vocabulary."""
Found = tuple[str, list[tuple[str, dict[str, Any]]], list[str]]
"""Text outside of calls; calls as (name, arguments); calls that could not be read."""


class ToolFormat(Protocol):
    """One way of writing calls.

    marker  what begins a call
    leads   whether a call can only stand at the very start of an answer
    """

    name: str
    marker: str
    leads: bool

    def grammar(self, tools: Sequence[tuple[str, Any]], *, must: bool, many: bool, token: Token) -> str:
        """Lark for an answer that may call (`must`: that is nothing but calls) these (name, parameters), `many` times or once."""

    def read(self, text: str) -> Found:
        """The calls in an answer, special tokens included in `text`."""

    def knows(self, template: str) -> bool:
        """Whether a chat template with tools writes calls like this."""


class HermesFormat:
    """`<tool_call>` JSON `</tool_call>`, anywhere in the answer: Hermes, Qwen 2.5 and 3, and many others."""

    name, marker, close, leads = "hermes", "<tool_call>", "</tool_call>", False

    def grammar(self, tools: Sequence[tuple[str, Any]], *, must: bool, many: bool, token: Token) -> str:
        opener, closer = _symbol(self.marker, token), _symbol(self.close, token)
        rules = _call_rules(tools, "arguments")
        body = '"\\n" one "\\n" ' + closer
        if must:
            more = f' ("\\n" {opener} {body})*' if many else ""
            return f"start: {opener} {body}{more}\n{rules}"
        if (number := token(self.marker)) is not None:
            text = f"(<[^{number}]>)*"
            return f"start: {text} ({opener} {body} {text if many else ''}){'*' if many else '?'}\n{rules}"
        start = "(open body)* TEXT" if many else "TEXT | open body"
        return f'start: {start}\nTEXT: /(.|\\n)*/\nopen[lazy]: TEXT "{self.marker}"\nbody: {body}\n{rules}'

    def read(self, text: str) -> Found:
        outside, found, broken = [], [], []
        before, *pieces = text.split(self.marker)
        outside.append(before)
        for piece in pieces:
            body, closed, after = piece.partition(self.close)
            call = _call(body, "arguments")
            if closed and call:
                found.append(call)
            else:
                broken.append(body.strip())
            outside.append(after if after.strip() else "")
        return "".join(outside), found, broken

    def knows(self, template: str) -> bool:
        return self.marker in template and "<function=" not in template


class LlamaFormat:
    """The answer is one JSON object with "name" and "parameters": Llama 3.1 and later."""

    name, marker, leads = "llama3", "{", True

    def grammar(self, tools: Sequence[tuple[str, Any]], *, must: bool, many: bool, token: Token) -> str:
        free = "" if must else " | TEXT\nTEXT: /([^{](.|\\n)*)?/"
        return f"start: one{free}\n{_call_rules(tools, 'parameters')}"

    def read(self, text: str) -> Found:
        call = _call(text, "parameters") or _call(text, "arguments")
        return ("", [call], []) if call else (text, [], [])

    def knows(self, template: str) -> bool:
        return "<|python_tag|>" in template and '"parameters"' in template


class MistralFormat:
    """`[TOOL_CALLS]` and a JSON list of calls: Mistral's v3 templates."""

    name, marker, leads = "mistral", "[TOOL_CALLS]", True

    def grammar(self, tools: Sequence[tuple[str, Any]], *, must: bool, many: bool, token: Token) -> str:
        more = ' (", " one)*' if many else ""
        calls = f'{_symbol(self.marker, token)} " "? "[" one{more} "]"'
        if must:
            return f"start: {calls}\n{_call_rules(tools, 'arguments')}"
        return f"start: {calls} | TEXT\nTEXT: /([^\\[](.|\\n)*)?/\n{_call_rules(tools, 'arguments')}"

    def read(self, text: str) -> Found:
        before, marked, after = text.partition(self.marker)
        if not marked:
            return text, [], []
        try:
            items = json.loads(after)
        except ValueError:
            return before, [], [after.strip()]
        calls = [(item, _of(item, "arguments")) for item in (items if isinstance(items, list) else [items])]
        found = [call for _, call in calls if call]
        return before, found, [json.dumps(item) for item, call in calls if not call]

    def knows(self, template: str) -> bool:
        return self.marker in template and "[ARGS]" not in template


FORMATS: dict[str, ToolFormat] = {
    each.name: each for each in (HermesFormat(), LlamaFormat(), MistralFormat())
}


def tool_format(tokenizer: Any, name: str | None) -> ToolFormat:
    """The named format, or the one that the tokenizer's chat template writes. Raises PromptError when there is none."""
    if name is not None:
        return FORMATS[name]
    if not template_has_tools(tokenizer):
        raise PromptError(
            "the chat template of this model knows no tools; load a model that was trained to call them, "
            'or pass tool_format="hermes", which describes the tools in the system message'
        )
    template = _template(tokenizer)
    for each in FORMATS.values():
        if each.knows(template):
            return each
    raise PromptError(
        "the chat template of this model writes calls of tools in a format that reader_rag does not read; "
        f"if it is one of {', '.join(FORMATS)} all the same, say so with tool_format="
    )


def template_has_tools(tokenizer: Any) -> bool:
    """Whether the chat template writes the tools that it is given."""
    if not getattr(tokenizer, "chat_template", None):
        return False
    function = {"name": "probe_tool", "description": "", "parameters": {"type": "object", "properties": {}}}
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "probe"}],
            tools=[{"type": "function", "function": function}],
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception:  # whatever a template raises
        return False
    return "probe_tool" in text


def _template(tokenizer: Any) -> str:
    """The template that serves tools; tokenizers may hold several by name."""
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        return str(template.get("tool_use") or template.get("default") or "")
    return str(template)


def _symbol(text: str, token: Token) -> str:
    """A control text in Lark: its token where it is one, else its characters."""
    number = token(text)
    return json.dumps(text, ensure_ascii=False) if number is None else f"<[{number}]>"


def _call_rules(tools: Sequence[tuple[str, Any]], key: str) -> str:
    """Rules for `one`: a call of any of the tools."""
    rules = [f"one: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, (name, parameters) in enumerate(tools):
        head = json.dumps(f'{{"name": "{name}", "{key}": ')
        schema = json.dumps(parameters, ensure_ascii=False)
        rules += [f'call_{i}: {head} args_{i} "}}"', f"args_{i}: %json {schema}"]
    return "\n".join(rules) + "\n"


def _call(text: str, key: str) -> tuple[str, dict[str, Any]] | None:
    try:
        return _of(json.loads(text), key)
    except ValueError:
        return None


def _of(item: Any, key: str) -> tuple[str, dict[str, Any]] | None:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return None
    arguments = item.get(key, {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    return (item["name"], arguments) if isinstance(arguments, dict) else None
