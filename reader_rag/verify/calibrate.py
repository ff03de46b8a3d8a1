"""The cost curve: seconds of a decoding pass by width, and the width that it recommends (DESIGN 4.4)."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from reader_rag.verify.forward import FixedForward

WIDTHS = (4, 8, 16, 32, 64)
CONTEXT = 384
"""Positions already filled when a pass is timed: a short RAG prompt."""

EXPECTED_TOKENS: Mapping[int, float] = {4: 1.90, 8: 2.40, 16: 2.85, 32: 3.10, 64: 3.25}
"""Tokens per pass by width on Spec-Bench rag with the demo model (docs/log.md); only the ratios matter here."""


def pass_seconds(forward: FixedForward, widths: tuple[int, ...] = WIDTHS, repeats: int = 3) -> dict[int, float]:
    """Fastest of `repeats` decoding passes at each width, in seconds, after one untimed pass."""
    seconds = {}
    kept = forward.width
    try:
        for width in widths:
            forward.width = width
            arena = forward.new_arena()
            best = float("inf")
            for attempt in range(repeats + 1):
                start = time.perf_counter()
                forward.decode(arena, CONTEXT, [0], [])
                if forward.device.type == "cuda":
                    torch.cuda.synchronize(forward.device)
                if attempt:
                    best = min(best, time.perf_counter() - start)
            seconds[width] = best
    finally:
        forward.width = kept
    return seconds


def best_width(seconds: Mapping[int, float]) -> int:
    """The width with the most expected tokens per second."""
    return max(seconds, key=lambda width: (EXPECTED_TOKENS[width] / seconds[width], -width))
