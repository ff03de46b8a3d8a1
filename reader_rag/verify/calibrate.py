"""The cost curve: seconds of a decoding pass by width, and the width that it recommends."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping

import torch

from reader_rag.verify.forward import FixedForward, Job

WIDTHS = (4, 8, 16, 32, 64)
SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Tokens of the passes that are timed; an accelerator's curve goes on, because there more rows are nearly free."""
ACCELERATOR_SIZES = (*SIZES, 128, 256, 512)
CONTEXT = 384
"""Positions already filled when a pass is timed: a short RAG prompt."""

EXPECTED_TOKENS: Mapping[int, float] = {4: 1.89, 8: 2.28, 16: 2.61, 32: 2.88, 64: 3.06}
"""Tokens per pass by width: 80 recorded rag and summarization answers of Spec-Bench, replayed cold (docs/log.md has the command).

Only the ratios matter here."""
NEARLY_FREE = 1.25
"""More rows are taken by default while a pass costs at most this many times one of a single row."""


def pass_seconds(forward: FixedForward, rounds: int = 4) -> dict[int, float]:
    """Seconds of a pass by its tokens: the fastest of `rounds`, taken in turns, after one untimed round."""
    sizes = SIZES if forward.device.type == "cpu" else ACCELERATOR_SIZES
    seconds = dict.fromkeys(sizes, float("inf"))
    arena = forward.new_arena()
    for turn in range(rounds + 1):
        for size in sizes:
            start = time.perf_counter()
            forward.decode_free([Job(arena, CONTEXT, [0] * size, [-1] * (size - 1))])
            if forward.device.type == "cuda":
                torch.cuda.synchronize(forward.device)
            if turn:
                seconds[size] = min(seconds[size], time.perf_counter() - start)
    return seconds


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
