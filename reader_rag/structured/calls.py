"""A text stream that keeps the calls of tools out of the text and hands them over when the answer ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reader_rag.stream import Delta, TextStream
from reader_rag.structured.formats import ToolFormat
from reader_rag.structured.tools import ToolCall, ToolUse, made_calls

__all__ = ["CallStream", "text_stream"]


def text_stream(tokenizer: Any, stop: Sequence[str], control_ids: frozenset[int], use: ToolUse) -> TextStream:
    """The stream of one answer: one that reads calls where tools are offered."""
    if use.tools and use.format is not None:
        return CallStream(tokenizer, stop, control_ids, format=use.format)
    return TextStream(tokenizer, stop, control_ids)


class CallStream(TextStream):
    """A TextStream whose deltas hold no call; `calls` and `broken` are there after `finish()`.

    `broken`: calls that could not be read, mostly because max_tokens cut them off.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        control_ids: frozenset[int] = frozenset(),
        *,
        format: ToolFormat,  # noqa: A002
    ) -> None:
        super().__init__(tokenizer, stop, control_ids)
        self.calls: tuple[ToolCall, ...] = ()
        self.broken: tuple[str, ...] = ()
        self._format = format
        self._whole = ""  # text with its calls
        self._given = 0  # characters of it that were shown
        self._calling = False
        marker = tokenizer.convert_tokens_to_ids(format.marker)
        # A marker that the decoder drops has to be seen among the tokens.
        self._token = marker if isinstance(marker, int) and self._is_skipped(marker) else None

    def push(self, tokens: Sequence[int]) -> Delta:
        """Takes the tokens of one pass; what belongs to a call is not shown."""
        at = tokens.index(self._token) if self._token in tokens and not self._calling else None
        if at is None:
            delta = super().push(tokens)
            return Delta(self._show(delta.text), delta.stopped, delta.kept_tokens)
        before = super().push(tokens[:at]) if at else Delta("", False, 0)
        shown = self._show(before.text)
        if before.stopped:
            return Delta(shown, True, before.kept_tokens)
        self._calling = True
        self._whole += self._format.marker
        after = super().push(tokens[at:])
        self._whole += after.text
        return Delta(shown, after.stopped, at + after.kept_tokens)

    def finish(self) -> str:
        """The rest of the text outside of calls."""
        self._whole += super().finish()
        text, found, broken = self._format.read(self._whole)
        self.calls, self.broken = made_calls(found), tuple(broken)
        rest = text[self._given :]
        self._given = len(text)
        return rest

    def _show(self, text: str) -> str:
        """The part of the whole text so far that cannot be a call, less what was shown before."""
        self._whole += text
        if self._calling:
            return ""
        marker, whole = self._format.marker, self._whole
        if self._format.leads:
            head = whole.lstrip()[: len(marker)]
            self._calling = head == marker
            end = 0 if marker.startswith(head) else len(whole)
        elif (end := whole.find(marker)) >= 0:
            self._calling = True
        else:
            held = next(n for n in range(len(marker) - 1, -1, -1) if whole.endswith(marker[:n]))
            end = len(whole) - held
        shown = whole[self._given : end]
        self._given = max(self._given, end)
        return shown
