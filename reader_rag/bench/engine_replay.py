"""A recorded answer through a drafter, pass by pass, as the engine would run it, without the model."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from reader_rag.bench.recording import Recording
from reader_rag.draft import Draft
from reader_rag.verify.accept import ROOT, walk

Evidence = tuple[list[list[int]], list[list[float]]]


class Drafts(Protocol):
    """What the engine asks of a drafter; `reader_rag.draft.Drafter` has these methods, and so have the peers' rules."""

    source_names: tuple[str, ...]

    def observe_prompt(
        self,
        tokens: Sequence[int],
        top_ids: NDArray[np.integer[Any]] | None,
        top_probs: NDArray[np.floating[Any]] | None,
    ) -> None: ...

    def observe(
        self, tokens: Sequence[int], top_ids: list[list[int]], top_probs: list[list[float]]
    ) -> None: ...

    def observe_branch(self, context: Sequence[int], top_ids: list[int], top_probs: list[float]) -> None: ...

    def observe_branches(
        self,
        contexts: Sequence[Sequence[int]],
        top_ids: Sequence[Sequence[int]],
        top_probs: Sequence[Sequence[float]],
    ) -> None: ...

    def draft(self, pending: Sequence[int], limit: int, chain_limit: int) -> Draft: ...

    def dropped(self) -> dict[str, str]: ...


@dataclass(slots=True)
class Tally:
    """What one replay cost. `seconds` is drafting and learning from the verdicts, `prompt_seconds` reading the prompt."""

    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    prompt_seconds: float = 0.0
    drafted_by_source: Counter[str] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0


def total(tallies: Sequence[Tally]) -> Tally:
    """The sum of several replays."""
    whole = Tally()
    for one in tallies:
        whole.tokens += one.tokens
        whole.passes += one.passes
        whole.drafted += one.drafted
        whole.accepted += one.accepted
        whole.seconds += one.seconds
        whole.prompt_seconds += one.prompt_seconds
        whole.drafted_by_source.update(one.drafted_by_source)
        whole.accepted_by_source.update(one.accepted_by_source)
    return whole


def replay(
    recording: Recording,
    drafter: Drafts,
    width: int,
    *,
    any_path: bool = False,
    chain_room: Callable[[int], int] | None = None,
) -> Tally:
    """Counts the passes in which an engine of `width` tokens a pass would have given this answer.

    `any_path`: a side branch that the answer runs into is emitted in the same pass, as tree verifiers without canonical execution
    do (our throughput mode); otherwise it leads the next draft. `chain_room(position)` limits the main chain after `position`,
    where the model's key buckets do. The drafter sees a token, and what the model expected there, only after the pass that gives it.
    """
    tally = Tally()
    output, before = recording.output, len(recording.prompt)
    began = time.perf_counter()
    _read_prompt(recording, drafter)
    tally.prompt_seconds = time.perf_counter() - began
    pending: tuple[int, ...] = ()
    while tally.tokens < len(output):
        done = tally.tokens
        # An answer that was cut was cut by a budget, and the engine drafts no further than that.
        left = width if recording.whole else len(output) - done
        limit = min(width - 1, left - 1)
        room = limit if chain_room is None else min(limit, chain_room(before + done - 1))
        began = time.perf_counter()
        draft = drafter.draft(pending[:room], limit, room)
        tally.seconds += time.perf_counter() - began

        target = _Recorded(output, done)
        verdict = walk(draft.tokens, draft.parents, draft.chain, target.choose, target.ends)
        taken, pending, accepted = verdict.tokens, verdict.pending, verdict.accepted
        if any_path and pending:
            accepted += len(pending)
            taken, pending = taken + pending, ()
        _count(tally, draft, drafter.source_names, taken, accepted)

        began = time.perf_counter()
        _learn(recording, drafter, draft, done, len(taken), len(verdict.tokens) + len(verdict.pending))
        tally.seconds += time.perf_counter() - began
    return tally


class _Recorded:
    """Chooses, in the model's place, what the model chose; after `done` tokens of it."""

    def __init__(self, output: Sequence[int], done: int) -> None:
        self._rest = output[done:]
        self._last = False

    def choose(self, node: int, path: Sequence[int]) -> int:
        self._last = len(path) == len(self._rest) - 1
        return self._rest[len(path)]

    def ends(self, token: int) -> bool:
        """Nothing comes after the last token, whatever it is."""
        return self._last


def feed(recording: Recording, drafter: Drafts) -> None:
    """Lets a drafter see prompt and answer without drafting: what it keeps beyond the request, it has learned."""
    _read_prompt(recording, drafter)
    step = 8
    for start in range(0, len(recording.output), step):
        stop = min(start + step, len(recording.output))
        drafter.observe(recording.output[start:stop], *_rows(recording, start, stop))


def _read_prompt(recording: Recording, drafter: Drafts) -> None:
    known = (
        len(recording.prompt) - 1
    )  # the last one is the root of the first pass: its row comes with the first token
    if recording.top_ids is None or recording.top_probs is None or not known:
        drafter.observe_prompt(recording.prompt, None, None)
    else:
        drafter.observe_prompt(recording.prompt, recording.top_ids[:known], recording.top_probs[:known])


def _learn(
    recording: Recording, drafter: Drafts, draft: Draft, done: int, taken: int, confirmed: int
) -> None:
    """What the pass computed, as far as the recording knows it: the answer's own positions, also those only pending."""
    if recording.soft:
        truth = recording.output[done : done + confirmed]
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(draft.parents):
            paths.append(((*paths[parent],) if parent != ROOT else ()) + (draft.tokens[node],))
            depth = len(paths[node])
            if taken <= depth < confirmed and paths[node] == truth[:depth]:
                ids, probs = _rows(recording, done + depth, done + depth + 1)
                drafter.observe_branch(paths[node], ids[0], probs[0])
    drafter.observe(recording.output[done : done + taken], *_rows(recording, done, done + taken))


def _rows(recording: Recording, start: int, stop: int) -> Evidence:
    """What the model expected where output[start:stop] were chosen; empty rows where nothing was recorded."""
    if recording.top_ids is None or recording.top_probs is None:
        return [[] for _ in range(start, stop)], [[] for _ in range(start, stop)]
    first = len(recording.prompt) - 1
    rows = slice(first + start, first + stop)
    return recording.top_ids[rows].tolist(), recording.top_probs[rows].tolist()


def _count(tally: Tally, draft: Draft, names: Sequence[str], taken: Sequence[int], accepted: int) -> None:
    tally.passes += 1
    tally.tokens += len(taken)
    tally.drafted += len(draft.tokens)
    tally.accepted += accepted
    reached = ROOT
    depth = 0
    for node, origin in enumerate(draft.origins):
        tally.drafted_by_source[names[origin]] += 1
        if draft.parents[node] == reached and depth < accepted and draft.tokens[node] == taken[depth]:
            tally.accepted_by_source[names[origin]] += 1
            reached, depth = node, depth + 1
