"""Where the time of a decoding pass goes: model, drafting, and bookkeeping (all else between two forward passes), by context length."""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from reader_rag.bench.speed import greedy_generate, headline, setting
from reader_rag.load import Loaded
from reader_rag.reader import Reader
from reader_rag.request import PromptEvidence
from reader_rag.settings import Drafting, Sampling
from reader_rag.verify.forward import FixedForward

CONTEXTS = (512, 2048, 8192)
ROUNDS = 3
PROFILED = 14
"""Functions in the table of `--profile`."""
TEXT = "The reader looks up what stands in the chunks, and says it again where it answers the question. "
EVERY_ROW_ITS_OWN = 1 << 40


class _Timed:
    """Calls a model and counts calls and seconds; a profile that runs meanwhile does not see the model."""

    def __init__(self, model: Any, profile: cProfile.Profile | None) -> None:
        self._model, self._profile = model, profile
        self.calls, self.seconds = 0, 0.0

    def __call__(self, **given: Any) -> Any:
        if self._profile is not None:
            self._profile.disable()
        start = time.perf_counter()
        out = self._model(**given)
        self.seconds += time.perf_counter() - start
        self.calls += 1
        if self._profile is not None:
            self._profile.enable()
        return out


def passes(
    loaded: Loaded,
    *,
    rows: int = 8,
    width: int | None = None,
    contexts: Sequence[int] = CONTEXTS,
    max_tokens: int = 64,
    profile: bool = False,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Passes of `rows` requests behind prompts of each length; and plain decoding beside transformers' `generate`."""

    def engine(count: int, *, exact: bool) -> Reader:
        return Reader(
            loaded,
            rows=count,
            width=width,
            exact=exact,
            drafting=Drafting(persist=False, prompt_evidence=False),
            prefix_bytes=EVERY_ROW_ITS_OWN,
            cache_dir=cache_dir,
        )

    reader, alone = engine(rows, exact=True), engine(1, exact=True)
    room = reader.context_length - max_tokens
    fitting = [length for length in contexts if length <= room]
    with tqdm(total=len(fitting) + 2, desc="measurements", disable=None if progress else True) as bar:

        def done(figures: dict[str, Any]) -> dict[str, Any]:
            bar.update()
            return figures

        shares = [done(_share(reader, length, max_tokens)) for length in fitting]
        single = done(_share(alone, min(fitting), max_tokens))
        plain = done(_plain(engine(1, exact=False), min(fitting), max_tokens))
    result: dict[str, Any] = {
        "rows": rows,
        "contexts": shares,
        "left_out": [length for length in contexts if length > room],
        "one_row": single,
        "plain": plain,
        **setting(reader),
    }
    if profile:
        watch = cProfile.Profile()
        profiled = _share(alone, min(fitting), max_tokens, watch)
        result["profile"] = _own_time(watch, profiled["passes"])
    return result


def _prompt(reader: Reader, length: int) -> list[int]:
    sentence = reader.encode(TEXT)
    return (sentence * (length // len(sentence) + 1))[:length]


def _share(
    reader: Reader, length: int, max_tokens: int, profile: cProfile.Profile | None = None
) -> dict[str, Any]:
    """Milliseconds of a pass over all rows of `reader`, each behind its own copy of one prompt, and whose they are."""
    prompt = _prompt(reader, length)
    forward, prefixes = reader._forward, reader._loop.prefixes
    assert isinstance(forward, FixedForward)
    reader.forget()
    arena = forward.new_arena()
    for start in range(0, length - 1, forward.chunk):
        forward.prefill(
            arena, prompt[start : min(start + forward.chunk, length - 1)], start, want_logits=False
        )
    tickets = []
    for row in range(
        reader.rows
    ):  # a scope of its own for each, or the first would take what is kept for all
        prefixes.put(f"row {row}", prompt[:-1], arena.copy(length, arena.slots), PromptEvidence())
        tickets.append(reader.submit(prompt, sampling=Sampling(max_tokens=max_tokens), scope=f"row {row}"))
    requests, steps = [ticket._request for ticket in tickets], iter(tickets[0])
    while not all(request.is_read for request in requests):
        next(steps)
    model, timed = forward.model, _Timed(forward.model, profile)
    forward.model = timed  # type: ignore[assignment]
    drafted = sum(request.stats.draft_s for request in requests)
    start_s = time.perf_counter()
    if profile is not None:
        profile.enable()
    try:
        for ticket in tickets:
            ticket.result()
    finally:
        if profile is not None:
            profile.disable()
        forward.model = model
    seconds = time.perf_counter() - start_s
    drafting = sum(request.stats.draft_s for request in requests) - drafted
    reader.forget()
    per_pass = 1000 / max(timed.calls, 1)
    rest = seconds - timed.seconds - drafting
    return {
        "context": length,
        "passes": timed.calls,
        "pass_ms": round(per_pass * seconds, 3),
        "model_ms": round(per_pass * timed.seconds, 3),
        "draft_ms": round(per_pass * drafting, 3),
        "bookkeeping_ms": round(per_pass * rest, 3),
        "bookkeeping_share": round(rest / seconds, 4),
    }


def _plain(reader: Reader, length: int, max_tokens: int) -> dict[str, Any]:
    """Plain decoding by passes of one token beside `generate`, in turns; the fastest of each."""
    prompt, off = _prompt(reader, length), Drafting(sources=())
    ours = theirs = 0.0
    for _ in range(ROUNDS):
        stats = reader.generate(prompt, sampling=Sampling(max_tokens=max_tokens), drafting=off).stats
        ours = max(ours, stats.tokens_per_s)
        start = time.perf_counter()
        greedy_generate(reader, [prompt], 1)
        first = time.perf_counter()
        (new,) = greedy_generate(reader, [prompt], max_tokens)
        seconds = (time.perf_counter() - first) - (first - start)
        theirs = max(theirs, (len(new) - 1) / seconds)
    return {
        "context": length,
        "reader_tokens_per_s": round(ours, 3),
        "generate_tokens_per_s": round(theirs, 3),
        "ratio": round(ours / theirs, 3),
    }


def _own_time(profile: cProfile.Profile, count: int) -> list[dict[str, Any]]:
    """The functions with the most time of their own, in microseconds of one of `count` passes."""
    entries: dict[Any, Any] = pstats.Stats(profile, stream=io.StringIO()).stats  # type: ignore[attr-defined]
    best = sorted(entries.items(), key=lambda entry: -entry[1][2])[:PROFILED]
    return [
        {
            "function": f"{Path(file).name}:{line} {name}" if line else name,
            "calls": round(calls / count, 1),
            "own_us": round(1e6 * own / count, 1),
            "with_callees_us": round(1e6 * whole / count, 1),
        }
        for (file, line, name), (_, calls, own, whole, _) in best
    ]


def report(result: dict[str, Any]) -> str:
    """The result as tables for people."""
    lines = [
        headline(result),
        f"{'':22}{'ms a pass':>10}{'model':>8}{'drafting':>10}{'bookkeeping':>13}{'share':>8}",
    ]
    lines += [_line(f"{result['rows']} rows, {s['context']} tokens", s) for s in result["contexts"]]
    lines.append(_line(f"1 row, {result['one_row']['context']} tokens", result["one_row"]))
    if result["left_out"]:
        lines.append(f"left out, longer than the model's context: {', '.join(map(str, result['left_out']))}")
    plain = result["plain"]
    lines.append(
        f"plain decoding by passes of one token: {plain['reader_tokens_per_s']:.1f} tokens/s, transformers' generate "
        f"{plain['generate_tokens_per_s']:.1f}: {plain['ratio']:.2f}x"
    )
    if "profile" in result:
        lines.append(f"{'a pass of one row outside the model':56}{'calls':>8}{'own us':>9}{'whole us':>10}")
        lines += [
            f"{f['function'][:54]:56}{f['calls']:8.1f}{f['own_us']:9.1f}{f['with_callees_us']:10.1f}"
            for f in result["profile"]
        ]
    return "\n".join(lines)


def _line(name: str, share: dict[str, Any]) -> str:
    return (
        f"{name:22}{share['pass_ms']:10.1f}{share['model_ms']:8.1f}{share['draft_ms']:10.2f}"
        f"{share['bookkeeping_ms']:13.2f}{100 * share['bookkeeping_share']:7.1f}%"
    )
