"""Fixed-shape passes: every forward pass is a function of absolute position only (docs/losslessness.md, rules 1 and 2).

Decoding passes are always [rows * width], or [live rows * width] where kernels were seen not to care; prefill chunks always
[chunk] at positions that are multiples of `chunk`, but for a prompt's last one, whose shape depends on the prompt's length alone;
the keys that a token sees depend only on the bucket of its row's first position. No other shape ever reaches the model in exact mode,
so a kernel that rounds the same way for the same shape gives the same bits for the same token, whatever was drafted around it and
whatever its neighbours do. `decode_free` is the pass of throughput mode, which takes as many tokens as it is given.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from reader_rag.verify.arena import GROWTH, Arena, PassCache, Stretch

SMALLEST_BUCKET = 256
TAIL_STEP = 32
"""A prompt's last chunk is padded to a multiple of this many tokens."""


def bucket_edge(position: int) -> int:
    """The exclusive end of the bucket that `position` lies in: four buckets per doubling, none under 256 positions wide."""
    step = max(SMALLEST_BUCKET, 1 << max((position | 1).bit_length() - 3, 0))
    return (position // step + 1) * step


@dataclass(frozen=True, slots=True)
class Job:
    """One row's share of a decoding pass.

    tokens[0] is the last committed token, at `position`; tokens[1:] is the draft, whose `parents` count from -1.
    """

    arena: Arena
    position: int
    tokens: Sequence[int]
    parents: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Block:
    """The tokens of one stretch, ready for the model: ids and positions [n], who sees what [n, view], positions of the keys [view]."""

    stretch: Stretch
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    mask: NDArray[np.bool_]
    key_positions: NDArray[np.int64]


class Recorded(Protocol):
    """Runs decoding passes in another way than by calling the model once more; see graphs.py."""

    def decode(self, jobs: Sequence[Job]) -> list[torch.Tensor] | None:
        """What `FixedForward.decode` gives, bit for bit; None where the pass must run there."""

    def trim(self) -> None:
        """Frees the memory that is kept for arenas which are gone."""


class FixedForward:
    """Runs the model in fixed shapes over arenas; knows logits and KV, nothing of text or sources.

    width: W, tokens of a row in a decoding pass. rows: R, rows of a decoding pass. chunk: C, tokens of a prefill pass.
    All are part of the guarantee's key. More rows than one need a model that attends through `attention.grouped_attention`.
    """

    exact = True

    def __init__(
        self,
        model: nn.Module,
        config: Any,
        *,
        width: int,
        chunk: int,
        device: torch.device,
        rows: int = 1,
        single: nn.Module | None = None,
    ) -> None:
        """`single`: the same weights in the form that is fastest for one or two tokens (throughput mode); None means `model`."""
        self.model, self.width, self.chunk, self.device, self.rows = model, width, chunk, device, rows
        self.single = single or model
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._keeps = "logits_to_keep" in names
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self._layers: int = text.num_hidden_layers
        self.window: int | None = getattr(text, "sliding_window", None)
        kinds = getattr(text, "layer_types", None)
        if kinds is None:  # one kind of layer; a window applies to all of them
            windowed = self.window is not None and getattr(text, "use_sliding_window", True)
            kinds = ["sliding_attention" if windowed else "full_attention"]
        self.layer_kinds = sorted(set(kinds))
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        self.slot_bytes = self._layers * _kv_size(text) * self.dtype.itemsize
        self.recorded: Recorded | None = None
        self.idle_rows = True
        """Whether `decode` also computes the rows that no job is in; False where `selfcheck.idle_rows_matter` says that they do not."""
        self._cache = PassCache(self._layers)
        self._idle = self.new_arena()

    def new_arena(self) -> Arena:
        return Arena(self._layers, SMALLEST_BUCKET + self.width)

    def view(self, position: int) -> int:
        """Key slots that a row of an exact pass reads whose first token stands at `position`."""
        return bucket_edge(position) + self.width

    def reserve(self, arena: Arena, tokens: int) -> None:
        """Makes room for a sequence of this many tokens, so that no pass until then has to."""
        arena.reserve(self.view(tokens))

    def bytes_for(self, tokens: int) -> int:
        """Bytes that the KV of one row takes until its sequence has this many tokens, the arena's growth included."""
        return int(GROWTH * (bucket_edge(tokens) + max(self.width, self.chunk)) * self.slot_bytes)

    @torch.inference_mode()
    def prefill(
        self, arena: Arena, tokens: Sequence[int], start: int, *, want_logits: bool
    ) -> torch.Tensor | None:
        """One chunk of at most C prompt tokens at `start`, a multiple of C; logits [len(tokens), vocabulary] if wanted.

        Fewer than C tokens must be the prompt's last: the shape is then a function of the prompt's length, whatever came before.
        """
        count = len(tokens)
        size = min(self.chunk, -(-count // TAIL_STEP) * TAIL_STEP)
        view = bucket_edge(start + size - 1)
        arena.reserve(view)
        mask = np.zeros((size, view), dtype=bool)
        mask[:, :start] = True
        mask[:, start : start + size] = np.tri(size, dtype=bool)
        ids = np.zeros(size, dtype=np.int64)
        ids[:count] = tokens
        stretch = Stretch(arena, start, size, view)
        block = _Block(stretch, ids, np.arange(start, start + size), mask, np.arange(view))
        logits = self._call(self.model, [block], keep=0 if want_logits else 1)
        return logits[:count] if want_logits else None

    @torch.inference_mode()
    def decode(self, jobs: Sequence[Job]) -> list[torch.Tensor]:
        """One pass over at most R rows; logits [len(job.tokens), vocabulary] of each job, row i of tokens[i].

        KV of tokens[0] and of the main chain end up in their final slots.
        """
        done = None if self.recorded is None else self.recorded.decode(jobs)
        if done is not None:
            return done
        idle = [Job(self._idle, 0, (0,), ())] * (self.rows - len(jobs) if self.idle_rows else 0)
        blocks = [self._block(job, self.width) for job in (*jobs, *idle)]
        logits = self._call(self.model, blocks, keep=0)
        return [logits[row * self.width : row * self.width + len(job.tokens)] for row, job in enumerate(jobs)]

    @torch.inference_mode()
    def decode_free(self, jobs: Sequence[Job]) -> list[torch.Tensor]:
        """`decode` without fixed shapes: the pass has exactly the tokens of the jobs, however many rows and tokens these are."""
        blocks = [self._block(job, len(job.tokens)) for job in jobs]
        total = sum(len(job.tokens) for job in jobs)
        logits = self._call(self.single if total <= 2 else self.model, blocks, keep=0)
        return list(torch.split(logits, [len(job.tokens) for job in jobs]))

    def trim(self) -> None:
        """Frees the memory that recorded passes keep for arenas which are gone."""
        if self.recorded is not None:
            self.recorded.trim()

    def chain_limit(self, position: int) -> int:
        """How many main-chain nodes may follow `position`: plain decoding would see other keys beyond the bucket's edge."""
        return min(self.width - 1, bucket_edge(position) - 1 - position)

    def _block(self, job: Job, width: int) -> _Block:
        position = job.position
        view = bucket_edge(position) + width
        job.arena.reserve(view)
        ids, depth, inner = tree_arrays(job.tokens, job.parents, width)
        mask = np.zeros((width, view), dtype=bool)
        mask[:, :position] = True
        mask[:, position : position + width] = inner
        key_positions = np.arange(view)
        key_positions[position : position + width] = position + depth
        return _Block(Stretch(job.arena, position, width, view), ids, position + depth, mask, key_positions)

    def _call(self, model: nn.Module, blocks: Sequence[_Block], *, keep: int) -> torch.Tensor:
        """Returns logits [tokens, vocabulary] (the last `keep` tokens; 0 means all)."""
        masks = {kind: self._mask(kind, blocks) for kind in self.layer_kinds}
        ids = np.concatenate([block.ids for block in blocks])
        positions = np.concatenate([block.positions for block in blocks])
        return self.run(
            model,
            [block.stretch for block in blocks],
            torch.from_numpy(ids).to(self.device)[None],
            torch.from_numpy(positions).to(self.device)[None],
            masks,
            keep=keep,
        )

    def run(
        self,
        model: nn.Module,
        stretches: Sequence[Stretch],
        ids: torch.Tensor,
        positions: torch.Tensor,
        masks: Mapping[str, torch.Tensor],
        *,
        keep: int,
    ) -> torch.Tensor:
        """Calls the model on ids and positions [1, tokens], which lie in `stretches` one behind the other; logits as `_call`."""
        self._cache.stretches = tuple(stretches)
        options: dict[str, object] = {self._cache_name: self._cache}
        if self._keeps:
            options["logits_to_keep"] = keep
        out = model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=masks[self.layer_kinds[0]] if len(masks) == 1 else masks,
            use_cache=True,
            **options,
        )
        logits: torch.Tensor = out.logits[0]
        return logits

    def _mask(self, kind: str, blocks: Sequence[_Block]) -> torch.Tensor:
        """What is added to attention scores, 0 or -inf: the blocks side by side, [1, 1, tokens of the longest, sum of views].

        Kernels turn a boolean mask into this one again in every layer.
        """
        longest = max(len(block.ids) for block in blocks)
        seen = np.full((longest, sum(block.stretch.view for block in blocks)), -np.inf, dtype=np.float32)
        left = 0
        for block in blocks:
            count, view = block.mask.shape
            part = block.mask
            if kind == "sliding_attention" and self.window is not None:
                part = part & (block.positions[:, None] - block.key_positions[None, :] < self.window)
            seen[:count, left : left + view][part] = 0.0
            left += view
        return torch.from_numpy(seen).to(self.device, self.dtype)[None, None]


def tree_arrays(
    tokens: Sequence[int], parents: Sequence[int], width: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Of one row of a pass, padded to `width`: ids [W], depth below the root [W], and which node sees which [W, W].

    Padding sees the root and itself: a query that sees nothing gives NaN.
    """
    ids, depth = np.zeros(width, dtype=np.int64), np.ones(width, dtype=np.int64)
    ids[: len(tokens)] = tokens
    depth[0] = 0
    inner = np.eye(width, dtype=bool)
    inner[:, 0] = True
    for node, parent in enumerate(parents):
        inner[node + 1] |= inner[parent + 1]
        depth[node + 1] = depth[parent + 1] + 1
    return ids, depth, inner


def _kv_size(config: Any) -> int:
    """Numbers that one layer keeps of one token."""
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return int(2 * dim * kv_heads)
