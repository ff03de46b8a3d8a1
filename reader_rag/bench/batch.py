"""Many requests at once: our rows in exact and throughput mode beside transformers' batched generate and one request at a time.

Tokens per second are those that a user sees: all answer tokens over the wall-clock seconds of the whole batch, prefill included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from reader_rag.bench.rows import read_rows
from reader_rag.bench.speed import greedy_generate, setting
from reader_rag.load import Loaded
from reader_rag.reader import Reader
from reader_rag.settings import Drafting, Sampling
from reader_rag.store.chunk import Chunk

SWEEP = (1, 2, 4, 8, 16)
Prompts = Sequence[tuple[list[int], Sequence[Chunk]]]


@dataclass(frozen=True, slots=True)
class BatchRun:
    """All answers of one system: `seconds` of the whole, and when each request was done, counted from the start."""

    answers: tuple[tuple[int, ...], ...]
    seconds: float
    done_s: tuple[float, ...]
    tokens_per_pass: float = 1.0

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.answers)) / self.seconds

    def percentile(self, share: float) -> float:
        """Seconds after which this share of the requests was done."""
        if len(self.done_s) == 1:
            return self.done_s[0]
        return statistics.quantiles(self.done_s, n=100, method="inclusive")[round(100 * share) - 1]


def reader_run(reader: Reader, prompts: Prompts, max_tokens: int) -> BatchRun:
    """All requests submitted at the start; they enter rows as others finish."""
    reader.forget()
    start = time.perf_counter()
    tickets = {
        i: reader.submit(prompt, sampling=Sampling(max_tokens=max_tokens), chunks=chunks)
        for i, (prompt, chunks) in enumerate(prompts)
    }
    answers, done = {}, {}
    while tickets:
        # The oldest is waited for; what finishes meanwhile is noted after each of its steps.
        steps = iter(tickets[min(tickets)])
        next(steps)
        for i in [i for i, ticket in tickets.items() if ticket.done]:
            done[i] = time.perf_counter() - start
            answers[i] = tickets.pop(i).result()
    stats = [answer.stats for answer in answers.values()]
    return BatchRun(
        tuple(answers[i].tokens for i in sorted(answers)),
        time.perf_counter() - start,
        tuple(done[i] for i in sorted(done)),
        sum(s.tokens for s in stats) / max(sum(s.passes for s in stats), 1),
    )


def generate_batch_run(reader: Reader, prompts: Prompts, max_tokens: int, rows: int) -> BatchRun:
    """transformers' greedy `generate` on batches of `rows` prompts, padded on the left; a batch ends with its longest answer."""
    start = time.perf_counter()
    answers: list[tuple[int, ...]] = []
    done: list[float] = []
    for first in range(0, len(prompts), rows):
        batch = [prompt for prompt, _ in prompts[first : first + rows]]
        for row in greedy_generate(reader, batch, max_tokens):
            length = next((i + 1 for i, token in enumerate(row) if token in reader.eos), len(row))
            answers.append(tuple(row[:length]))
        done += [time.perf_counter() - start] * len(batch)
    return BatchRun(tuple(answers), time.perf_counter() - start, tuple(done))


def batch(
    loaded: Loaded,
    file: str | Path,
    *,
    rows: int = 8,
    width: int | None = None,
    only: str | None = None,
    limit: int | None = None,
    max_tokens: int = 128,
    exact: bool = True,
    sweep: bool = False,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Requests from `file` through every system, one after the other, in one process; `sweep` adds a table over rows and modes."""
    questions = read_rows(file, only=only, limit=limit)

    def engine(count: int, is_exact: bool) -> Reader:
        drafting = Drafting(persist=False)
        return Reader(
            loaded,
            rows=count,
            width=width,
            exact=is_exact,
            drafting=drafting,
            prefix_bytes=0,
            cache_dir=cache_dir,
        )

    own, alone = engine(rows, exact), engine(1, True)
    prompts: Prompts = [(own.encode_prompt(q.messages), q.chunks) for q in questions]
    table = [(count, mode) for count in (SWEEP if sweep else ()) for mode in (True, False)]
    bar = tqdm(total=3 + len(table), desc="batches", disable=None if progress else True)

    def step(run: BatchRun) -> BatchRun:
        bar.update()
        return run

    generated = step(generate_batch_run(own, prompts, max_tokens, rows))
    together = step(reader_run(own, prompts, max_tokens))
    single = step(reader_run(alone, prompts, max_tokens))
    lines = [
        _line(count, mode, step(reader_run(engine(count, mode), prompts, max_tokens)))
        for count, mode in table
    ]
    bar.close()
    return {
        "rows": rows,
        "requests": len(prompts),
        "mode": own.mode,
        "reader_tokens_per_s": round(together.tokens_per_s, 3),
        "generate_batch_tokens_per_s": round(generated.tokens_per_s, 3),
        "one_at_a_time_tokens_per_s": round(single.tokens_per_s, 3),
        "speedup_vs_generate_batch": round(together.tokens_per_s / generated.tokens_per_s, 3),
        "speedup_vs_one_at_a_time": round(together.tokens_per_s / single.tokens_per_s, 3),
        "identical": sum(a == b for a, b in zip(together.answers, single.answers, strict=True)),
        "identical_to_generate": sum(
            a == b for a, b in zip(together.answers, generated.answers, strict=True)
        ),
        "tokens_per_pass": round(together.tokens_per_pass, 3),
        "p50_s": round(together.percentile(0.5), 3),
        "p95_s": round(together.percentile(0.95), 3),
        "generate_p50_s": round(generated.percentile(0.5), 3),
        "generate_p95_s": round(generated.percentile(0.95), 3),
        "one_at_a_time_p50_s": round(single.percentile(0.5), 3),
        "one_at_a_time_p95_s": round(single.percentile(0.95), 3),
        **setting(own),
        **({"table": lines} if lines else {}),
    }


def _line(rows: int, exact: bool, run: BatchRun) -> dict[str, Any]:
    return {
        "rows": rows,
        "mode": "exact" if exact else "throughput",
        "tokens_per_s": round(run.tokens_per_s, 3),
        "tokens_per_pass": round(run.tokens_per_pass, 3),
        "p50_s": round(run.percentile(0.5), 3),
        "p95_s": round(run.percentile(0.95), 3),
    }


def report(result: dict[str, Any]) -> str:
    """The result as a table for people."""

    def line(name: str, tokens_per_s: float, p50: float, p95: float) -> str:
        return f"{name:34}{tokens_per_s:10.1f}{p50:7.1f} s{p95:7.1f} s"

    rows, own = result["rows"], "{} rows, {}"
    lines = [
        f"{result['requests']} requests, {result['model']}, {result['dtype']}, {result['kernels']} kernels, {result['machine']}",
        f"{'':34}{'tokens/s':>10}{'p50':>9}{'p95':>9}",
        line(
            f"generate, batches of {rows}",
            *(result[f"generate_{key}"] for key in ("batch_tokens_per_s", "p50_s", "p95_s")),
        ),
        line("READER, one at a time", *(result[f"one_at_a_time_{key}"] for key in _FIGURES)),
        line(
            f"READER, {rows} rows of {result['width']}, {result['mode']}",
            *(result[key] for key in ("reader_tokens_per_s", "p50_s", "p95_s")),
        ),
        *(
            line("  " + own.format(entry["rows"], entry["mode"]), *(entry[key] for key in _FIGURES))
            for entry in result.get("table", ())
        ),
    ]
    lines.append(
        f"{result['speedup_vs_generate_batch']:.2f}x batched generate, {result['speedup_vs_one_at_a_time']:.2f}x one at a time; "
        f"texts equal to one at a time {result['identical']}/{result['requests']}"
    )
    return "\n".join(lines)


_FIGURES = ("tokens_per_s", "p50_s", "p95_s")
