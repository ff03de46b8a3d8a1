"""The cost curve: seconds of a decoding pass by width, the width that it recommends, and whether the prompt's evidence pays."""

from __future__ import annotations

import copy
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping

from reader_rag.device import synchronize
from reader_rag.verify.arena import Arena
from reader_rag.verify.forward import FixedForward, Job
from reader_rag.verify.graphs import RecordedPasses, Recorder
from reader_rag.verify.sampling import top_evidence

WIDTHS = (4, 8, 16, 32, 64)
SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Tokens of the passes that are timed; an accelerator's curve goes on, because there more rows are nearly free."""
ACCELERATOR_SIZES = (*SIZES, 128, 256, 512)
CONTEXT = 384
"""Positions already filled when a pass is timed: a short RAG prompt."""

EXPECTED_TOKENS: Mapping[int, float] = {4: 1.89, 8: 2.28, 16: 2.61, 32: 2.88, 64: 3.06}
"""Tokens per pass by width: 80 recorded rag and summarization answers of Spec-Bench, replayed cold (docs/log.md has the command).

Only the ratios matter here."""
PROMPT_EVIDENCE_GAIN: Mapping[int, float] = {4: 1.017, 8: 1.052, 16: 1.079, 32: 1.106, 64: 1.117}
"""By width, how many times as many tokens a pass gives when the model's expectations at the prompt's positions are known too: the same
answers, replayed with and without these rows."""
USUAL_PROMPT, USUAL_ANSWER = 1000, 128
"""Tokens of the RAG request for which the output matrix over the prompt must pay."""
NEARLY_FREE = 1.25
"""More rows are taken by default while a pass costs at most this many times one of a single row."""


def pass_seconds(
    forward: FixedForward, rounds: int = 4, recorder: Recorder | None = None
) -> dict[int, float]:
    """Seconds of a pass by its tokens: the fastest of `rounds`, taken in turns, after one untimed round.

    recorder: how passes will be recorded, so that what is timed is what will run.
    """
    sizes = SIZES if forward.device.type == "cpu" else ACCELERATOR_SIZES
    seconds = dict.fromkeys(sizes, float("inf"))
    arena = forward.new_arena()
    passes = {size: _timed_pass(forward, arena, size, recorder) for size in sizes}
    for turn in range(rounds + 1):
        for size in sizes:
            start = time.perf_counter()
            passes[size]()
            synchronize(forward.device)
            if turn:
                seconds[size] = min(seconds[size], time.perf_counter() - start)
    return seconds


def _timed_pass(
    forward: FixedForward, arena: Arena, size: int, recorder: Recorder | None
) -> Callable[[], object]:
    """A pass of `size` tokens; recorded, in rows of at most the largest width."""
    job = Job(arena, CONTEXT, [0] * size, [-1] * (size - 1))
    if recorder is None:
        return lambda: forward.decode_free([job])
    sized = copy.copy(forward)
    sized.width, sized.rows = min(size, WIDTHS[-1]), max(size // WIDTHS[-1], 1)
    passes = RecordedPasses(sized, recorder, record_after=0)
    forward.decode_free([job])  # the arena's first write
    row = [0] * sized.width, [-1] * (sized.width - 1)
    jobs = [Job(arena.copy(CONTEXT, arena.slots), CONTEXT, *row) for _ in range(sized.rows)]
    return lambda: passes.decode(jobs) or forward.decode_free([job])


def prompt_evidence_pays(forward: FixedForward, rounds: int = 2) -> bool:
    """Whether the passes that the prompt's evidence saves take longer than the output matrix over the prompt; measured.

    Decided once for a usual request, not for each: read prompts are reused by later requests only where these want the same.
    """
    arena, tokens = forward.new_arena(), [0] * forward.chunk
    with_evidence = without = a_pass = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        forward.prefill(arena, tokens, 0, want_logits=False)
        synchronize(forward.device)
        read = time.perf_counter()
        logits = forward.prefill(arena, tokens, 0, want_logits=True)
        assert logits is not None
        top_evidence(logits)
        listened = time.perf_counter()
        forward.decode([Job(arena, CONTEXT, [0], [])])
        synchronize(forward.device)
        without, with_evidence = min(without, read - start), min(with_evidence, listened - read)
        a_pass = min(a_pass, time.perf_counter() - listened)
    width = max((w for w in WIDTHS if w <= forward.width), default=None)
    if width is None:  # hardly a draft
        return False
    saved = USUAL_ANSWER / EXPECTED_TOKENS[width] * (PROMPT_EVIDENCE_GAIN[width] - 1)
    return (with_evidence - without) / forward.chunk * USUAL_PROMPT < saved * a_pass


def seconds_of(seconds: Mapping[int, float], tokens: int) -> float:
    """Seconds of a pass of `tokens`: interpolated between measured sizes, beyond them along the last stretch."""
    sizes = sorted(seconds)
    upper = min(max(bisect_left(sizes, tokens), 1), len(sizes) - 1)
    low, high = sizes[upper - 1], sizes[upper]
    share = (tokens - low) / (high - low)
    return seconds[low] + share * (seconds[high] - seconds[low])


def best_width(seconds: Mapping[int, float], rows: int = 1) -> int:
    """The width with the most expected tokens per second when a pass serves `rows` requests."""
    return max(WIDTHS, key=lambda width: (EXPECTED_TOKENS[width] / seconds_of(seconds, rows * width), -width))


def best_rows(seconds: Mapping[int, float], width: int) -> int:
    """The most rows (a power of two) that are nearly free: in exact mode a lone request pays for all of them."""
    limit = NEARLY_FREE * seconds_of(seconds, width)
    return max(
        rows for rows in (1, 2, 4, 8, 16, 32) if rows == 1 or seconds_of(seconds, rows * width) <= limit
    )
