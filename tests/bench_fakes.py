"""What the tests of replays share: small recordings, a file of answers, and a system that notes what it knew."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reader_rag.bench.recording import Recording
from reader_rag.bench.systems import ReaderSystem

ANSWER = "A chunk is a retrieved piece of text; a span stands verbatim in the answer and in a chunk."


def recording(
    prompt: Sequence[int], output: Sequence[int], *, name: str = "rag-000", **options: Any
) -> Recording:
    return Recording(name, "rag", tuple(prompt), tuple(output), **options)


def soft(one: Recording) -> Recording:
    """With the model's expectations: the true next token, half the time behind a wrong one."""
    known = [*one.prompt, *one.output]
    rows = [[token, 99] if token % 2 else [99, token] for token in known[1:]]
    probs = np.tile(np.array([0.6, 0.3], np.float32), (len(rows), 1))
    return Recording(
        one.name, one.set, one.prompt, one.output, one.whole, (), np.array(rows, np.int32), probs
    )


def answers_file(folder: Path) -> Path:
    """Two conversations of two turns; the last answer of the second is the first one's again."""
    lines = []
    for talk in "ab":
        for turn in (1, 2):
            copied = (talk, turn) in {("a", 1), ("b", 2)}
            text = ANSWER if copied else f"The reader looks up {talk} {turn} naïve sorted values."
            lines.append(
                {
                    "id": f"{talk}<::>{turn}",
                    "set": "x/talk",
                    "question": f"What is {talk}{turn}?",
                    "passages": [{"id": "p", "title": "", "text": "It goes on for a while."}],
                    "responses": {"big": text, "human": "The model verifies it in one pass."},
                }
            )
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return file


class Spy(ReaderSystem):
    """Notes what it had learned from at every request that was only tested: one that is learned from is closed, too."""

    def __init__(self, log: list[list[tuple[int, ...]]], learned: Sequence[tuple[int, ...]] = ()) -> None:
        super().__init__(("context",))
        self.log, self.learned = log, list(learned)

    def open(self, prompt: tuple[int, ...], chunks: Sequence[tuple[int, ...]] = ()) -> Any:
        self.log.append(list(self.learned))
        return super().open(prompt, chunks)

    def close(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> None:
        self.log.pop()
        self.learned.append(output)

    def copy(self) -> ReaderSystem:
        return Spy(self.log, self.learned)
