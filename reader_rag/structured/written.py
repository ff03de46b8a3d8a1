"""Tools, calls and results as plain messages, for chat templates that know none of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from reader_rag.errors import PromptError
from reader_rag.structured.formats import HermesFormat, ToolFormat
from reader_rag.structured.tools import arguments_of

__all__ = ["native_messages", "talks_of_tools", "written_messages"]

DESCRIPTION = """\
You can use tools. Each line between <tools> and </tools> describes one, as JSON:
<tools>
{tools}
</tools>
To use a tool, answer with its name and its arguments:
<tool_call>
{{"name": "the tool's name", "arguments": {{"argument": "value"}}}}
</tool_call>
The tool's result will come between <tool_response> and </tool_response>."""


def talks_of_tools(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a message calls a tool or holds a tool's result."""
    return any(message.get("tool_calls") or message["role"] == "tool" for message in messages)


def native_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates with tools want them: calls in OpenAI's nesting, their arguments as objects."""
    native = [dict(message) for message in messages]
    for message in native:
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_nested(call) for call in calls]
    return native


def written_messages(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    format: ToolFormat | None,  # noqa: A002
) -> list[dict[str, Any]]:
    """Messages without tool roles and calls: Hermes' writing in a system message, in the assistant's and in the user's turns.

    Without a format there are no tools, and what a tool returned stands in the user's turn as it is.
    """
    if format is not None and not isinstance(format, HermesFormat):
        raise PromptError(
            f"the chat template of this model knows no tools, and only tool_format='hermes' can describe them; not {format.name!r}"
        )
    written: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if calls := message.get("tool_calls"):
            if format is None:
                raise PromptError(
                    "the chat template of this model knows no calls of tools; leave that message out, or pass "
                    'tool_format="hermes", which writes them as text'
                )
            content = "\n".join([*([content] if content.strip() else []), *map(_written, calls)])
        elif role == "tool":
            role = "user"
            if format is not None:
                content = f"<tool_response>\n{content}\n</tool_response>"
        written.append({"role": role, "content": content})
    if not tools:
        return written
    lines = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    system = DESCRIPTION.format(tools="\n".join(lines))
    if written and written[0]["role"] == "system":
        return [{"role": "system", "content": f"{written[0]['content']}\n\n{system}"}, *written[1:]]
    return [{"role": "system", "content": system}, *written]


def _written(call: Mapping[str, Any]) -> str:
    name, arguments = arguments_of(call)
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def _nested(call: Mapping[str, Any]) -> dict[str, Any]:
    name, arguments = arguments_of(call)
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
