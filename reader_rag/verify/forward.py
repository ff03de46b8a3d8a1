"""Fixed-shape passes: every forward pass is a function of absolute position only (docs/losslessness.md, rules 1 and 2).

Decoding passes are always [1, width], prefill chunks always [1, chunk] at positions that are multiples of `chunk`; the keys that a
pass sees depend only on the bucket of its first position. No other shape ever reaches the model, so a kernel that rounds the same
way for the same shape gives the same bits for the same token, whatever was drafted around it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from reader_rag.verify.arena import Arena

SMALLEST_BUCKET = 256


def bucket_edge(position: int) -> int:
    """The exclusive end of the bucket that `position` lies in: four buckets per doubling, none under 256 positions wide."""
    step = max(SMALLEST_BUCKET, 1 << max((position | 1).bit_length() - 3, 0))
    return (position // step + 1) * step


class FixedForward:
    """Runs the model in fixed shapes over arenas; knows logits and KV, nothing of text or sources.

    width: W, tokens of a decoding pass. chunk: C, tokens of a prefill pass. Both are part of the guarantee's key.
    """

    exact = True

    def __init__(
        self, model: nn.Module, config: Any, *, width: int, chunk: int, device: torch.device
    ) -> None:
        self.model, self.width, self.chunk, self.device = model, width, chunk, device
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._keeps = "logits_to_keep" in names
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self._layers: int = text.num_hidden_layers
        self._window: int | None = getattr(text, "sliding_window", None)
        kinds = getattr(text, "layer_types", None)
        if kinds is None:  # one kind of layer; a window applies to all of them
            windowed = self._window is not None and getattr(text, "use_sliding_window", True)
            kinds = ["sliding_attention" if windowed else "full_attention"]
        self._kinds = sorted(set(kinds))

    def new_arena(self) -> Arena:
        return Arena(self._layers, SMALLEST_BUCKET + self.width)

    @torch.inference_mode()
    def prefill(
        self, arena: Arena, tokens: Sequence[int], start: int, *, want_logits: bool
    ) -> torch.Tensor | None:
        """One chunk of at most C prompt tokens at `start`, a multiple of C; logits [len(tokens), vocabulary] if wanted."""
        count, chunk = len(tokens), self.chunk
        view = bucket_edge(start + chunk - 1)
        arena.reserve(view)
        arena.cursor, arena.view = start, view
        mask = np.zeros((chunk, view), dtype=bool)
        mask[:, :start] = True
        mask[:, start : start + chunk] = np.tri(chunk, dtype=bool)
        positions = np.arange(start, start + chunk)
        ids = np.zeros(chunk, dtype=np.int64)
        ids[:count] = tokens
        logits = self._call(arena, ids, positions, mask, np.arange(view), keep=0 if want_logits else 1)
        return logits[:count] if want_logits else None

    @torch.inference_mode()
    def decode(
        self, arena: Arena, position: int, tokens: Sequence[int], parents: Sequence[int]
    ) -> torch.Tensor:
        """One pass: tokens[0] is the last committed token at `position`, tokens[1:] the draft, whose `parents` count from -1.

        Returns logits [len(tokens), vocabulary]; row i belongs to tokens[i]. KV of tokens[0] and of the main chain end up in their
        final slots.
        """
        width, count = self.width, len(tokens)
        view = bucket_edge(position) + width
        arena.reserve(view)
        arena.cursor, arena.view = position, view
        inner = np.zeros((width, width), dtype=bool)
        inner[:, 0] = True
        np.fill_diagonal(inner, True)
        depth = np.ones(width, dtype=np.int64)
        depth[0] = 0
        for node, parent in enumerate(parents):
            inner[node + 1] |= inner[parent + 1]
            depth[node + 1] = depth[parent + 1] + 1
        mask = np.zeros((width, view), dtype=bool)
        mask[:, :position] = True
        mask[:, position : position + width] = inner
        ids = np.zeros(width, dtype=np.int64)
        ids[:count] = tokens
        key_positions = np.arange(view)
        key_positions[position : position + width] = position + depth
        return self._call(arena, ids, position + depth, mask, key_positions, keep=0)[:count]

    def chain_limit(self, position: int) -> int:
        """How many main-chain nodes may follow `position`: plain decoding would see other keys beyond the bucket's edge."""
        return min(self.width - 1, bucket_edge(position) - 1 - position)

    def _call(
        self,
        arena: Arena,
        ids: np.ndarray,
        positions: np.ndarray,
        mask: np.ndarray,
        key_positions: np.ndarray,
        *,
        keep: int,
    ) -> torch.Tensor:
        """Returns logits [rows, vocabulary] (the last `keep` rows; 0 means all)."""
        masks = {}
        for kind in self._kinds:
            seen = mask
            if kind == "sliding_attention" and self._window is not None:
                seen = mask & (positions[:, None] - key_positions[None, :] < self._window)
            masks[kind] = torch.from_numpy(seen).to(self.device)[None, None]
        options: dict[str, object] = {self._cache_name: arena}
        if self._keeps:
            options["logits_to_keep"] = keep
        out = self.model(
            input_ids=torch.from_numpy(ids).to(self.device)[None],
            position_ids=torch.from_numpy(positions).to(self.device)[None],
            attention_mask=masks[self._kinds[0]] if len(masks) == 1 else masks,
            use_cache=True,
            **options,
        )
        logits: torch.Tensor = out.logits[0]
        return logits
