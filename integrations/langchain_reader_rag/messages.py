"""LangChain's messages and documents, as what a Reader takes: role and text, and chunks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, ToolMessage

from reader_rag.errors import PromptError
from reader_rag.store.chunk import Chunk

ROLES = {"system": "system", "human": "user", "ai": "assistant", "tool": "tool", "function": "user"}
CALLS = ("tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call")
"""Content blocks that repeat what stands in `tool_calls`."""


def reader_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Messages as OpenAI's dicts: role and content, calls of tools, and which call a tool's result belongs to.

    Raises PromptError for what a text model cannot be given: images and other media, roles without a meaning here.
    """
    if not messages:
        raise PromptError("there is no message to answer: give at least one")
    return [_written(message) for message in messages]


def message_chunks(messages: Sequence[BaseMessage]) -> list[Chunk]:
    """The documents that travel with messages: `ToolMessage.artifact`, `additional_kwargs["documents"]`."""
    found: list[Chunk] = []
    for message in messages:
        if isinstance(message, ToolMessage):
            found += _artifact_chunks(message.artifact)
        documents = message.additional_kwargs.get("documents")
        if documents is not None:
            found += chunks_of(documents)
    return found


def chunks_of(documents: Any) -> list[Chunk]:
    """Documents, Chunks, strings, mappings with `page_content` or `text`, or one of these, as Chunks.

    A document keeps its own id, so that spans point back to it; without one the id is the hash of its text.
    """
    if isinstance(documents, (str, Document, Chunk, Mapping)):
        documents = [documents]
    if not isinstance(documents, Iterable):
        raise PromptError(f"documents must be a list of Documents, Chunks or strings, not {documents!r}")
    chunks = [_chunk(document) for document in documents]
    return [chunk for chunk in chunks if chunk.text]


def _chunk(document: Any) -> Chunk:
    if isinstance(document, Chunk):
        return document
    if isinstance(document, Document):
        return _named_chunk(document.id, document.page_content, document.metadata)
    if isinstance(document, str):
        return Chunk.from_text(document)
    if isinstance(document, Mapping):
        text = document.get("page_content", document.get("text"))
        if isinstance(text, str):
            return _named_chunk(document.get("id"), text, document.get("metadata") or {})
    raise PromptError(f"a document must be a Document, a Chunk or a string, not {type(document).__name__}")


def _named_chunk(name: str | None, text: str, metadata: Mapping[str, Any]) -> Chunk:
    return Chunk(name, text, metadata) if name else Chunk.from_text(text, metadata)


def _artifact_chunks(artifact: Any) -> list[Chunk]:
    """An artifact may be anything; only documents in it concern us."""
    if isinstance(artifact, (Document, Chunk)):
        artifact = [artifact]
    if not isinstance(artifact, (list, tuple)):
        return []
    return chunks_of([item for item in artifact if isinstance(item, (Document, Chunk))])


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    kind = message.type.removesuffix("MessageChunk").lower()  # what was streamed may be sent back as it came
    if kind in ROLES:
        return ROLES[kind]
    raise PromptError(f"a {type(message).__name__} cannot be sent to the model: remove it from the messages")


def _written(message: BaseMessage) -> dict[str, Any]:
    written: dict[str, Any] = {"role": _role(message), "content": _text(message)}
    if isinstance(message, ToolMessage):
        written["tool_call_id"] = message.tool_call_id
        if message.name:
            written["name"] = message.name
    if isinstance(message, AIMessage) and message.tool_calls:
        written["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["args"]},
            }
            for call in message.tool_calls
        ]
    return written


def _text(message: BaseMessage) -> str:
    if isinstance(message, AIMessage) and message.invalid_tool_calls:
        raise PromptError(
            "a message holds a call of a tool that could not be read: leave it out, or ask again with more max_tokens"
        )
    if isinstance(message.content, str):
        return message.content
    return "".join(_block_text(block) for block in message.content)


def _block_text(block: str | dict[Any, Any]) -> str:
    if isinstance(block, str):
        return block
    if block.get("type") in CALLS:
        return ""
    if isinstance(block.get("text"), str) and block.get("type", "text") == "text":
        return str(block["text"])
    raise PromptError(f"the model reads text only: remove the content block of type {block.get('type')!r}")
