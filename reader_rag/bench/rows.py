"""Benchmark rows: questions with their passages, read from JSON lines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reader_rag.errors import SettingsError
from reader_rag.store.chunk import Chunk

EXAMPLE = '{"question": "...", "passages": [{"text": "..."}]}'
"""The least that a row must hold, and the passages that most have."""


@dataclass(frozen=True, slots=True)
class Row:
    """One question: the messages that are put to the model and the chunks that were retrieved for it.

    responses: recorded answers by the name of who gave them; where there are none, the reference answer.
    Rows of one conversation share what stands before "<::>" in their ids.
    """

    id: str
    set: str
    messages: tuple[dict[str, str], ...]
    chunks: tuple[Chunk, ...]
    responses: tuple[tuple[str, str], ...] = ()

    @property
    def conversation(self) -> str:
        return self.id.partition("<::>")[0]


def read_rows(file: str | Path, *, only: str | None = None, limit: int | None = None) -> list[Row]:
    """Rows of a JSON-lines file: {"id", "set", "question", "messages"?, "passages": [{"id", "title", "text"}], "responses"?: {name: text}}.

    `only` keeps the sets whose name is it or ends in "/" + it. Raises SettingsError naming the line that cannot be used.
    """
    if limit is not None and limit < 1:
        raise SettingsError(f"the limit is {limit}; ask for at least 1 question")
    path = Path(file)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"{path} cannot be read ({error}); pass a JSON-lines file of questions"
        ) from error
    rows, sets = [], set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = _row(line, f"{path}:{number}")
        sets.add(row.set)
        if only is None or row.set == only or row.set.endswith(f"/{only}"):
            rows.append(row)
    if not rows:
        known = ", ".join(sorted(sets)) or "none"
        raise SettingsError(
            f"{path} has no rows of the set {only!r}; its sets are: {known}"
            if only
            else f"{path} has no rows; write one question a line, as in {EXAMPLE}"
        )
    return rows[:limit]


def _row(line: str, where: str) -> Row:
    try:
        raw: dict[str, Any] = json.loads(line)
        if not isinstance(raw, dict):
            raise TypeError("it is no JSON object")
        chunks = tuple(
            Chunk(id=str(p.get("id", i)), text=p["text"], metadata={"title": p.get("title", "")})
            for i, p in enumerate(raw.get("passages") or [])
            if p["text"]
        )
        messages = tuple({"role": m["role"], "content": m["content"]} for m in raw.get("messages") or [])
        question = raw["question"]
        responses = tuple((str(name), str(text)) for name, text in (raw.get("responses") or {}).items())
        reference = raw.get("reference")
        if not responses and isinstance(reference, str) and reference.strip():
            responses = (("reference", reference),)
        if not isinstance(question, str) or not question.strip():
            raise ValueError("its question is empty")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        cause = f"it has no {error}" if isinstance(error, KeyError) else error
        raise SettingsError(f"{where} is not a question row ({cause}); write it as in {EXAMPLE}") from error
    earlier = messages[:-1] if messages else ()
    if chunks:
        context = "\n\n".join(chunk.text for chunk in chunks)
        question = f"Answer the question from the context.\n\nContext:\n{context}\n\nQuestion: {question}"
    return Row(
        str(raw.get("id", where)),
        str(raw.get("set", "")),
        (*earlier, {"role": "user", "content": question}),
        chunks,
        responses,
    )
