"""Records answers with what the model expected at every position, so that drafting can be replayed without the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from reader_rag.bench.engine_replay import Drafts
from reader_rag.bench.recording import Recording, save_recording
from reader_rag.bench.rows import read_rows
from reader_rag.bench.systems import ReaderSystem
from reader_rag.draft import Draft
from reader_rag.prompt import chunk_encodings
from reader_rag.reader import Reader
from reader_rag.settings import Drafting, Sampling


class Listener:
    """A drafter that hands everything on to another and keeps what the model said at prompt and answer."""

    def __init__(self, drafter: Drafts) -> None:
        self.source_names = drafter.source_names
        self.ids: list[list[int]] = []
        self.probs: list[list[float]] = []
        self._drafter = drafter

    def observe_prompt(
        self,
        tokens: Sequence[int],
        top_ids: NDArray[np.integer[Any]] | None,
        top_probs: NDArray[np.floating[Any]] | None,
    ) -> None:
        if top_ids is not None and top_probs is not None:
            known = len(tokens) - 1  # the last row comes with the first token of the answer
            self.ids += top_ids[:known].tolist()
            self.probs += top_probs[:known].tolist()
        self._drafter.observe_prompt(tokens, top_ids, top_probs)

    def observe(self, tokens: Sequence[int], top_ids: list[list[int]], top_probs: list[list[float]]) -> None:
        self.ids += top_ids
        self.probs += top_probs
        self._drafter.observe(tokens, top_ids, top_probs)

    def observe_branch(self, context: Sequence[int], top_ids: list[int], top_probs: list[float]) -> None:
        self._drafter.observe_branch(context, top_ids, top_probs)

    def observe_branches(
        self,
        contexts: Sequence[Sequence[int]],
        top_ids: Sequence[Sequence[int]],
        top_probs: Sequence[Sequence[float]],
    ) -> None:
        self._drafter.observe_branches(contexts, top_ids, top_probs)

    def draft(self, pending: Sequence[int], limit: int, chain_limit: int) -> Draft:
        return self._drafter.draft(pending, limit, chain_limit)

    def dropped(self) -> dict[str, str]:
        return self._drafter.dropped()


def record(
    reader: Reader,
    file: str | Path,
    folder: str | Path,
    *,
    sets: Sequence[str] = (),
    limit: int | None = None,
    max_tokens: int = 128,
    progress: bool = True,
) -> int:
    """Answers every row greedily and writes `folder`/<set>-<number>.npz; files that are there already are kept.

    Returns how many were written.
    """
    rows = [row for only in sets or (None,) for row in read_rows(file, only=only, limit=limit)]
    system = ReaderSystem.like(reader)
    numbers: Counter[str] = Counter()
    written = 0
    for row in tqdm(rows, desc="answers", disable=None if progress else True):
        group = row.set.rpartition("/")[2] or "rows"
        name = f"{group}-{numbers[group]:03d}"
        numbers[group] += 1
        if (Path(folder) / f"{name}.npz").exists():
            continue
        prompt = tuple(reader.encode_prompt(row.messages))
        chunks = tuple(tuple(way) for c in row.chunks for way in chunk_encodings(reader.tokenizer, c.text))
        listener: Any = Listener(system.open(prompt, chunks))
        answer = reader.generate(
            prompt,
            sampling=Sampling(max_tokens=max_tokens),
            chunks=row.chunks,
            drafting=Drafting(prompt_evidence=True),
            drafter=listener,
        )
        evidence: tuple[Any, Any] = (None, None)
        if len(listener.ids) == len(prompt) - 1 + len(answer.tokens):
            evidence = np.array(listener.ids, np.int32), np.array(listener.probs, np.float32)
        save_recording(
            folder,
            Recording(name, group, prompt, answer.tokens, answer.finish_reason == "stop", chunks, *evidence),
        )
        system.close(prompt, answer.tokens)
        written += 1
    return written
