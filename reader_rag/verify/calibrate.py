"""The cost curve: seconds of a decoding pass by width, and the width that it recommends."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from reader_rag.verify.forward import FixedForward

WIDTHS = (4, 8, 16, 32, 64)
CONTEXT = 384
"""Positions already filled when a pass is timed: a short RAG prompt."""

EXPECTED_TOKENS: Mapping[int, float] = {4: 1.90, 8: 2.26, 16: 2.60, 32: 2.87, 64: 3.05}
"""Tokens per pass by width: 8, 16 and 32 replayed on recorded Spec-Bench rag answers (docs/log.md), 4 and 64 extrapolated.

Only the ratios matter here."""


def pass_seconds(
    forward: FixedForward, widths: tuple[int, ...] = WIDTHS, rounds: int = 4
) -> dict[int, float]:
    """Seconds of a decoding pass at each width: the fastest of `rounds`, taken in turns, after one untimed round."""
    seconds = dict.fromkeys(widths, float("inf"))
    arenas = {width: forward.new_arena() for width in widths}
    kept = forward.width
    try:
        for turn in range(rounds + 1):
            for width in widths:
                forward.width = width
                start = time.perf_counter()
                forward.decode(arenas[width], CONTEXT, [0], [])
                if forward.device.type == "cuda":
                    torch.cuda.synchronize(forward.device)
                if turn:
                    seconds[width] = min(seconds[width], time.perf_counter() - start)
    finally:
        forward.width = kept
    return seconds


def best_width(seconds: Mapping[int, float]) -> int:
    """The width with the most expected tokens per second."""
    return max(seconds, key=lambda width: (EXPECTED_TOKENS[width] / seconds[width], -width))
