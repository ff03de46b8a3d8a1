"""Steps of a Reader as the responses that LlamaIndex's eight methods return."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LogProb,
    MessageRole,
    TextBlock,
    ToolCallBlock,
)

from reader_rag.structured import ToolCall

if TYPE_CHECKING:
    from reader_rag import Answer

Decode = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Part:
    """The text so far, what is new in it, and at the end, and only there, the facts about the answer."""

    text: str
    delta: str
    raw: dict[str, Any] | None = None
    calls: tuple[ToolCall, ...] = ()
    logprobs: list[list[LogProb]] | None = None


def accumulate(steps: Any, model: str, decode: Decode) -> Generator[Part, None, None]:
    """A Part for every step that brings text, and a last one with the facts; closing it closes `steps`."""
    text = ""
    try:
        for step in steps:
            text += step.text
            if step.answer is not None:
                yield _last(text, step.text, step.answer, model, decode)
            elif step.text:
                yield Part(text, step.text)
    finally:
        steps.close()


def completion(part: Part) -> CompletionResponse:
    """The whole answer of `complete`."""
    return CompletionResponse(
        text=part.text, raw=part.raw, additional_kwargs=_usage(part), logprobs=part.logprobs
    )


def completion_part(part: Part) -> CompletionResponse:
    """One response of `stream_complete`."""
    return completion(part).model_copy(update={"delta": part.delta})


def chat(part: Part) -> ChatResponse:
    """The whole answer of `chat`; calls of tools are blocks of its message."""
    blocks = [TextBlock(text=part.text)] if part.text or not part.calls else []
    calls = [
        ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=call.arguments)
        for call in part.calls
    ]
    message = ChatMessage(role=MessageRole.ASSISTANT, blocks=[*blocks, *calls])
    return ChatResponse(message=message, raw=part.raw, additional_kwargs=_usage(part), logprobs=part.logprobs)


def chat_part(part: Part) -> ChatResponse:
    """One response of `stream_chat`."""
    return chat(part).model_copy(update={"delta": part.delta})


def _last(text: str, delta: str, answer: "Answer", model: str, decode: Decode) -> Part:
    # Plain numbers and texts: TokenCountingHandler reads "usage", observers may serialise all of it.
    tokens = len(answer.tokens)
    raw = {
        "model": model,
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": answer.prompt_tokens + tokens,
        },
        "finish_reason": answer.finish_reason,
        "reader": {**answer.stats.to_dict(), "spans": [span.to_dict() for span in answer.spans]},
    }
    if answer.broken_calls:
        raw["broken_calls"] = list(answer.broken_calls)
    logprobs = None
    if answer.logprobs is not None:
        logprobs = [
            [
                _logprob(token, value, decode)
                for token, value in dict([(each.token, each.logprob), *each.top]).items()
            ]
            for each in answer.logprobs
        ]
    return Part(text, delta, raw, answer.tool_calls, logprobs)


def _logprob(token: int, logprob: float, decode: Decode) -> LogProb:
    text = decode(token)
    return LogProb(token=text, logprob=logprob, bytes=list(text.encode()))


def _usage(part: Part) -> dict[str, int]:
    return dict(part.raw["usage"]) if part.raw is not None else {}
