"""Token ids become text that is safe to show: whole characters, nothing of a stop string; joined, it is the final decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Delta", "TextStream"]

REPLACEMENT = "\ufffd"
CUT_BYTES = 3
"""Most bytes of a character that the end of an answer can leave without the rest; a decoder shows one U+FFFD for each, or for all."""
LONG_TAIL = 16
"""Undecided tokens after which bytes that will never be a character are told from a character on its way."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What a push brought: new text, whether a stop string ended the answer, and how many of the pushed tokens count."""

    text: str
    stopped: bool
    kept_tokens: int


class TextStream:
    """Detokenises one answer as it grows.

    The deltas and `finish()` join to `tokenizer.decode(kept tokens, skip_special_tokens=True,
    clean_up_tokenization_spaces=False)`, cut at the first stop string if there was one, and without a character that the end cut in
    two; how the tokens were split into pushes changes neither text nor cut. A stop string is seen at the token that completes it,
    and that token is the last to count.

    `calls` and `broken` stay empty here; a stream that reads calls of tools (reader_rag.structured.calls) fills them.

    The state is three parts of the token sequence: shown | context + undecided tail. A few decided tokens before the tail
    are decoded along with it, for the sake of tokenizers whose first token loses a space.
    """

    calls: tuple[Any, ...] = ()
    broken: tuple[str, ...] = ()

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), control_ids: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer, self._stop, self._control = tokenizer, tuple(stop), control_ids
        self._bytes = _byte_tokens(tokenizer)
        self._skipped: dict[int, bool] = {}
        self._kept: list[int] = []  # without special tokens
        self._context = 0  # start of the window in _kept
        self._decided = 0  # tokens before this one have their final text
        self._context_text = ""  # decoding of _kept[_context:_decided]
        self._held = ""  # decided text that may be the beginning of a stop string
        self._shown = 0  # characters given out
        self._stopped = False

    def push(self, tokens: Sequence[int]) -> Delta:
        """Takes the tokens of one pass; nothing counts after a stop string."""
        if self._stopped:
            return Delta("", True, 0)
        for count, token in enumerate(tokens, 1):
            if self._is_skipped(token):
                continue
            self._kept.append(token)
            undecided = self._advance()
            cut = self._find_stop(self._held + undecided) if self._stop else -1
            if cut >= 0:
                self._stopped = True
                return Delta(self._give((self._held + undecided)[:cut]), True, count)
        keep = self._stop_prefix()
        text = self._held[: len(self._held) - keep]
        self._held = self._held[len(text) :]
        return Delta(self._give(text), False, len(tokens))

    def finish(self) -> str:
        """The rest of the text when the answer ends here; bytes at the end that never became a character are left out."""
        if self._stopped:
            return ""
        self._stopped = True
        text = self._decode(self._kept)[self._shown :]
        for _ in range(CUT_BYTES):
            text = text.removesuffix(REPLACEMENT)
        return self._give(text)

    def _give(self, text: str) -> str:
        self._shown += len(text)
        return text

    def _advance(self) -> str:
        """Decodes the window; moves what is final to `_held`, and returns the text of the tail that is not."""
        window = self._decode(self._kept[self._context :])
        if not window.startswith(self._context_text):  # a decoder that looks further back than our context
            self._context, self._context_text = 0, self._decode(self._kept[: self._decided])
            window = self._decode(self._kept)
        new = window[len(self._context_text) :]
        if self._kept[-1] in self._bytes:
            # A run of byte tokens is decoded as a whole: one bad byte spoils all of it, so nothing is final before its end.
            return new.rstrip(REPLACEMENT)
        if new.endswith(REPLACEMENT):
            return self._settle(new)
        self._held += new
        self._decide(len(self._kept))
        return ""

    def _settle(self, new: str) -> str:
        """Keeps an endless tail of broken bytes from being decoded again and again.

        Three tokens before the end a boundary is sound when both sides decode to the same text apart as together: a
        character has at most four bytes, so one that the boundary tears would show.
        """
        border = len(self._kept) - 3
        if border - self._decided >= LONG_TAIL:
            left = self._decode(self._kept[self._context : border])[len(self._context_text) :]
            if new == left + self._decode(self._kept[border:]):
                self._held += left
                self._decide(border)
                new = new[len(left) :]
        return new.rstrip(REPLACEMENT)

    def _decide(self, border: int) -> None:
        """Makes `border` the end of the decided tokens; the new context is the shortest suffix of them that shows text."""
        start, text = border - 1, ""
        while start >= self._context:
            text = self._decode(self._kept[start:border])
            if text:
                break
            start -= 1
        else:
            start, text = self._context, self._decode(self._kept[self._context : border])
        self._context, self._decided, self._context_text = start, border, text

    def _find_stop(self, text: str) -> int:
        """Where the earliest stop string begins in `text`, or -1."""
        return min((at for stop in self._stop if (at := text.find(stop)) >= 0), default=-1)

    def _stop_prefix(self) -> int:
        """Length of the longest end of `_held` with which a stop string begins."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _is_skipped(self, token: int) -> bool:
        """Whether the decoder drops this token; an added token that it shows (`<think>`) is text like any other."""
        if token not in self._control:
            return False
        if token not in self._skipped:
            shown = self._tokenizer.decode(
                [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            self._skipped[token] = bool(shown) and not self._decode([token])
        return self._skipped[token]


def _byte_tokens(tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens `<0x00>` ... `<0xFF>` in which SentencePiece spells rare characters; empty for byte-level vocabularies."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    if tokenizer.convert_tokens_to_ids(names[0]) in (None, tokenizer.unk_token_id):
        return frozenset()
    return frozenset(
        i for i in tokenizer.convert_tokens_to_ids(names) if i not in (None, tokenizer.unk_token_id)
    )
