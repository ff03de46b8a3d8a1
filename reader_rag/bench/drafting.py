"""What drafting costs a pass, by part and by length of the context: CPU time of the thread, all sources filled, no model."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from reader_rag.bench.engine_replay import feed
from reader_rag.bench.recording import Recording, Tokens
from reader_rag.bench.synthetic import CONTROL, Expectations, Row, pieces, requests, with_expectations
from reader_rag.draft import ChunkPool, Corpus, Draft, Drafter, NgramTable, make_drafter
from reader_rag.errors import SettingsError
from reader_rag.settings import SOURCES
from reader_rag.verify.accept import ROOT, walk

T = TypeVar("T")

PARTS = ("draft", "origins", "learn", "observe", "branches")
SEED = 20
SYNTHETIC = 160  # requests that are made up
TESTED = 4  # of so many recordings one is a test; the others are what the scope, its store and its frozen table know


class Stopwatch:
    """CPU microseconds of this thread by part; a part that runs within another does not count there."""

    def __init__(self) -> None:
        self.us: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._within: list[float] = []  # of each part that runs, seconds of the parts inside it

    def timed(self, part: str, function: Callable[..., T]) -> Callable[..., T]:
        """`function`, counted as `part`."""

        def run(*given: Any) -> T:
            self._within.append(0.0)
            began = time.thread_time()
            try:
                return function(*given)
            finally:
                seconds = time.thread_time() - began
                us = 1e6 * (seconds - self._within.pop())
                self.us[part] = self.us.get(part, 0.0) + us
                if self._within:
                    self._within[-1] += seconds

        return run


@dataclass(frozen=True, slots=True)
class Scope:
    """What is known when a request comes."""

    pool: ChunkPool
    ngrams: NgramTable
    frozen: NgramTable
    answers: ChunkPool
    corpus: Corpus

    def drafter(self, chunks: Sequence[Tokens], forbidden: frozenset[int], vocabulary: int) -> Drafter:
        return make_drafter(
            SOURCES,
            chunk_tokens=chunks,
            pool=self.pool,
            ngrams=self.ngrams,
            frozen_ngrams=self.frozen,
            answers=self.answers,
            corpus=self.corpus,
            forbidden=forbidden,
            vocabulary=vocabulary,
        )


def drafting(
    recordings: Sequence[Recording] = (),
    *,
    contexts: Sequence[int] = (4000, 100_000),
    width: int = 16,
    passes: int = 200,
    forbidden: frozenset[int] = frozenset(range(CONTROL)),
    vocabulary: int = 1 << 31,
    progress: bool = True,
) -> dict[str, Any]:
    """Microseconds of a pass behind prompts of each length. Recordings: texts with or without the model's predictions, or
    none for made-up ones. A prompt is made as long as asked for by other texts in front of it.

    Raises SettingsError for fewer than two recordings: something must have been learned before.
    """
    given = recordings or requests(SEED, SYNTHETIC)
    if len(given) < 2:
        raise SettingsError("drafting is timed after other requests: give two recorded answers or more")
    filled, expected = with_expectations(given, SEED)
    tests = filled[::TESTED]
    lessons = [one for number, one in enumerate(filled) if number % TESTED]
    figures = []
    with tqdm(total=passes * len(contexts), desc="passes", disable=None if progress else True) as bar:
        for length in contexts:
            scope = _scope(lessons)
            watch, counts = Stopwatch(), Counter[str]()
            turn = 0
            while counts["passes"] < passes:
                one = _lengthened(tests[turn % len(tests)], lessons, length)
                drafter = scope.drafter(_chunks(one), forbidden, vocabulary)
                _serve(one, drafter, expected, width, passes, watch, counts, bar)
                turn += 1
            figures.append(_figures(length, turn, watch, counts))
    return {
        "text": "recorded" if recordings else f"made up from seed {SEED}",
        "width": width,
        "sources": [*SOURCES, "frozen n-grams"],
        "lessons": len(lessons),
        "contexts": figures,
    }


def _chunks(one: Recording) -> tuple[Tokens, ...]:
    """Its own chunks; where none were recorded, its prompt in pieces."""
    return one.chunks or pieces(one.prompt)


def _scope(lessons: Sequence[Recording]) -> Scope:
    """Every second lesson has taught the live table and the answers, the others the frozen one; the store holds all chunks."""
    pool, answers = ChunkPool(), ChunkPool()
    tables = NgramTable(), NgramTable()
    for number, one in enumerate(lessons):
        feed(one, make_drafter(["ngrams"], ngrams=tables[number % 2]))
        pool.add(one.name, _chunks(one))
        answers.add(one.name, [one.output])
    corpus = Corpus.build([chunk for one in lessons for chunk in _chunks(one)])
    return Scope(pool, tables[0], tables[1], answers, corpus)


def _lengthened(one: Recording, others: Sequence[Recording], length: int) -> Recording:
    """The recording with a prompt of `length` tokens: others' prompts stand before its own, or its beginning is left out."""
    assert one.top_ids is not None
    assert one.top_probs is not None
    parts, missing, turn = [one], length - len(one.prompt), 0
    while missing > 0:
        other = others[turn % len(others)]
        parts.insert(0, other)
        missing -= len(other.prompt)
        turn += 1
    ids = [part.top_ids[: len(part.prompt)] for part in parts[:-1] if part.top_ids is not None]
    probs = [part.top_probs[: len(part.prompt)] for part in parts[:-1] if part.top_probs is not None]
    prompt = tuple(token for part in parts for token in part.prompt)
    surplus = len(prompt) - length
    return replace(
        one,
        prompt=prompt[surplus:],
        chunks=_chunks(one),
        top_ids=np.concatenate([*ids, one.top_ids])[surplus:],
        top_probs=np.concatenate([*probs, one.top_probs])[surplus:],
    )


def _serve(
    one: Recording,
    drafter: Drafter,
    expected: Expectations,
    width: int,
    passes: int,
    watch: Stopwatch,
    counts: Counter[str],
    bar: Any,
) -> None:
    """One request, pass by pass as the engine runs it: every node of a draft comes back with the model's prediction."""
    assert one.top_ids is not None
    assert one.top_probs is not None
    known = len(one.prompt) - 1
    began = time.thread_time()
    drafter.observe_prompt(one.prompt, one.top_ids[:known], one.top_probs[:known])
    counts["prompt_us"] += round(1e6 * (time.thread_time() - began))
    rows = list(zip(one.top_ids[known:].tolist(), one.top_probs[known:].tolist(), strict=True))
    drafter._origins = watch.timed("origins", drafter._origins)  # type: ignore[method-assign]
    drafter._learn = watch.timed("learn", drafter._learn)  # type: ignore[method-assign]
    draft_next = watch.timed("draft", drafter.draft)
    observe = watch.timed("observe", drafter.observe)
    branches = watch.timed("branches", drafter.observe_branches)
    pending: tuple[int, ...] = ()
    done = 0
    while done < len(one.output) and counts["passes"] < passes:
        draft: Draft = draft_next(pending[: width - 1], width - 1, width - 1)
        rest = one.output[done:]
        verdict = walk(
            draft.tokens,
            draft.parents,
            draft.chain,
            lambda _, path, rest=rest: rest[min(len(path), len(rest) - 1)],  # type: ignore[misc]
            lambda _: False,
        )
        taken, pending = verdict.tokens[: len(rest)], verdict.pending
        branches(*_not_taken(draft, len(taken), rest, rows[done:], expected))
        came = rows[done : done + len(taken)]
        observe(taken, [ids for ids, _ in came], [probs for _, probs in came])
        done += len(taken)
        counts.update(passes=1, tokens=len(taken), nodes=len(draft.tokens))
        bar.update()


def _not_taken(
    draft: Draft, taken: int, rest: Sequence[int], rows: Sequence[Row], expected: Expectations
) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    """The paths to all nodes that were not committed, and what the model expected after each."""
    paths: list[list[int]] = []
    found: list[list[int]] = []
    ids: list[list[int]] = []
    probs: list[list[float]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        path = [*(paths[parent] if parent != ROOT else ()), token]
        paths.append(path)
        true = path == list(rest[: len(path)])
        if true and len(path) < taken:
            continue
        row = rows[len(path)] if true and len(path) < len(rows) else expected.after(token)
        found.append(path)
        ids.append(row[0])
        probs.append(row[1])
    return found, ids, probs


def _figures(length: int, served: int, watch: Stopwatch, counts: Counter[str]) -> dict[str, Any]:
    passes = counts["passes"]
    parts = {f"{part}_us": round(watch.us[part] / passes, 1) for part in PARTS}
    return {
        "context": length,
        "passes": passes,
        "requests": served,
        "tokens_per_pass": round(counts["tokens"] / passes, 4),
        "nodes_per_pass": round(counts["nodes"] / passes, 2),
        **parts,
        "pass_us": round(sum(watch.us.values()) / passes, 1),
        "prompt_ms": round(counts["prompt_us"] / 1000 / served, 1),
    }


def report(result: dict[str, Any]) -> str:
    """The result as a table for people."""
    lines = [
        f"CPU microseconds of a pass at width {result['width']}, text {result['text']}, {result['lessons']} requests before",
        f"{'tokens of context':>18}{'pass':>8}"
        + "".join(f"{part:>10}" for part in PARTS)
        + f"{'tokens/pass':>13}",
    ]
    lines += [
        f"{one['context']:18}{one['pass_us']:8.0f}"
        + "".join(f"{one[f'{part}_us']:10.0f}" for part in PARTS)
        + f"{one['tokens_per_pass']:13.2f}"
        for one in result["contexts"]
    ]
    return "\n".join(lines)
