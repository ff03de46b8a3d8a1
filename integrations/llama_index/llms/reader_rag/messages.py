"""LlamaIndex chat messages as a Reader takes them: roles that templates know, text, calls of tools and their results."""

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from reader_rag.errors import PromptError

ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}


def as_dicts(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """{"role", "content"} of every message, with "tool_calls" where it calls, "tool_call_id" and "name" where it answers.

    Raises:
        PromptError: a message holds an image, a sound or anything else that a text model cannot read.
    """
    names: dict[str, str] = {}  # of the tools, by the id of the call
    return [_as_dict(message, names) for message in messages]


def _as_dict(message: ChatMessage, names: dict[str, str]) -> dict[str, Any]:
    for block in message.blocks:
        if not isinstance(block, TextBlock | ThinkingBlock | CachePoint | ToolCallBlock):
            raise PromptError(
                f"a message holds a {type(block).__name__}, the model reads text: send text blocks only"
            )
    plain: dict[str, Any] = {"role": ROLES[message.role], "content": message.content or ""}
    if calls := _calls(message):
        plain["tool_calls"] = calls
        names.update({call["id"]: call["function"]["name"] for call in calls if call["id"]})
    if plain["role"] == "tool":
        call_id = message.additional_kwargs.get("tool_call_id")
        name = message.additional_kwargs.get("name") or names.get(str(call_id))
        plain |= {key: str(value) for key, value in (("tool_call_id", call_id), ("name", name)) if value}
    return plain


def _calls(message: ChatMessage) -> list[dict[str, Any]]:
    """The calls of a message in OpenAI's form: from its blocks, or from where older LLM classes keep them."""
    blocks = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    if blocks:
        return [_call(block.tool_call_id, block.tool_name, block.tool_kwargs) for block in blocks]
    found = []
    for given in message.additional_kwargs.get("tool_calls") or []:
        call = given if isinstance(given, Mapping) else given.model_dump()
        function = call.get("function", call)
        found.append(_call(call.get("id"), function.get("name"), function.get("arguments", {})))
    return found


def _call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    return {
        "id": str(call_id or ""),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
