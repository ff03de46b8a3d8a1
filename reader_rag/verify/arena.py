"""The KV arena: preallocated slots with one cursor per row, so that accepted tokens are already in place.

Every request has an Arena of its own. A pass runs over one or several of them: `PassCache` is the cache that the model is called
with, and writes each stretch of the pass's tokens at its own row's cursor. Nothing is moved in exact mode: slots past the committed
length hold leftovers of earlier drafts, which every mask hides until they are overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH = 1.5
Storage = tuple[tuple[torch.Tensor | None, ...], tuple[torch.Tensor | None, ...]]
"""Keys and values by layer; None where a layer keeps none of its own."""


class RowMemory(Protocol):
    """Where a row's keys and values are written to and read from, layer by layer: an Arena, or a part of one that never moves."""

    @property
    def slots(self) -> int: ...

    def write(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None: ...

    def read(self, layer: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]: ...


class Arena:
    """Keys and values of one row: per layer [1, kv_heads, slots, head_dim], made by the first write, grown geometrically.

    `storage` may be longer than `slots`, and may be memory that recorded passes have baked in (graphs.py).
    """

    def __init__(self, layers: int, slots: int) -> None:
        self.slots = slots
        self._keys: list[torch.Tensor | None] = [None] * layers
        self._values: list[torch.Tensor | None] = [None] * layers

    def reserve(self, slots: int) -> None:
        """Makes room for at least `slots` slots; contents stay."""
        if slots > self.slots:
            before, self.slots = self.slots, max(slots, int(self.slots * GROWTH))
            for kept in (self._keys, self._values):
                kept[:] = [
                    old if old is None or old.shape[2] >= self.slots else _resized(old, self.slots, before)
                    for old in kept
                ]

    def write(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts keys and values [1, kv_heads, n, head_dim] into the slots from `start` on."""
        for kept, new in ((self._keys, keys), (self._values, values)):
            slots = kept[layer]
            if slots is None:
                slots = kept[layer] = new.new_zeros(1, new.shape[1], self.slots, new.shape[3])
            slots[:, :, start : start + new.shape[2]] = new

    def read(self, layer: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the slots [0, stop) of a layer that was written to."""
        keys, values = self._keys[layer], self._values[layer]
        assert keys is not None
        assert values is not None
        return keys[:, :, :stop], values[:, :, :stop]

    @property
    def storage(self) -> Storage:
        """The tensors that hold the keys and values of every layer right now."""
        return tuple(self._keys), tuple(self._values)

    def move_into(self, storage: Storage) -> None:
        """Copies its slots into tensors of at least as many slots and lives there from now on."""
        for kept, new in zip((self._keys, self._values), storage, strict=True):
            for layer, (old, target) in enumerate(zip(kept, new, strict=True)):
                if old is not None and target is not None:
                    target[:, :, : self.slots] = old[:, :, : self.slots]
                kept[layer] = target

    def move_out(self) -> None:
        """Leaves tensors that are needed for another row: copies its slots into its own."""
        for kept in (self._keys, self._values):
            kept[:] = [None if old is None else _resized(old, self.slots, self.slots) for old in kept]

    @torch.inference_mode()
    def gather(self, slots: Sequence[int], start: int) -> None:
        """Copies `slots` into those from `start` on, in order: what throughput mode accepts off the main chain."""
        for kept in (self._keys, self._values):
            for tensor in kept:
                if tensor is not None:
                    tensor[:, :, start : start + len(slots)] = tensor[:, :, list(slots)]

    @torch.inference_mode()
    def copy(self, length: int, slots: int) -> Arena:
        """A new arena of at least `slots` slots with the first `length` of this one."""
        new = Arena(len(self._keys), max(slots, length))
        for mine, theirs in ((self._keys, new._keys), (self._values, new._values)):
            theirs[:] = [None if old is None else _resized(old, new.slots, length) for old in mine]
        return new

    def bytes(self) -> int:
        """Bytes that keys and values of all slots take."""
        tensors = [t for t in (*self._keys, *self._values) if t is not None]
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in tensors) * self.slots


def _resized(old: torch.Tensor, slots: int, keep: int) -> torch.Tensor:
    new = old.new_zeros(*old.shape[:2], slots, old.shape[3])
    new[:, :, :keep] = old[:, :, :keep]
    return new


@dataclass(frozen=True, slots=True)
class Stretch:
    """`count` neighbouring tokens of a pass: they belong to one row, are written at `start`, and read the slots [0, view)."""

    arena: RowMemory
    start: int
    count: int
    view: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Keys (or values) of a pass over several rows: of each stretch its token count and its view [1, kv_heads, view, head_dim]."""

    counts: tuple[int, ...]
    views: tuple[torch.Tensor, ...]


class PassLayer(CacheLayerMixin):  # type: ignore[misc]
    """What one attention layer of the model sees of the pass."""

    is_sliding = False

    def __init__(self, cache: PassCache, index: int) -> None:
        super().__init__()
        self._cache, self._index = cache, index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Arenas make their own memory."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor | Rows, torch.Tensor | Rows]:
        """Takes keys and values [1, kv_heads, n, head_dim]; one stretch reads plain tensors, several read Rows."""
        first = 0
        read = []
        for stretch in self._cache.stretches:
            last = first + stretch.count
            keys, values = key_states[:, :, first:last], value_states[:, :, first:last]
            stretch.arena.write(self._index, stretch.start, keys, values)
            read.append(stretch.arena.read(self._index, stretch.view))
            first = last
        if len(read) == 1:
            return read[0]
        counts = tuple(stretch.count for stretch in self._cache.stretches)
        return Rows(counts, tuple(keys for keys, _ in read)), Rows(
            counts, tuple(values for _, values in read)
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return sum(stretch.view for stretch in self._cache.stretches), 0

    def get_seq_length(self) -> int:
        return self._cache.stretches[0].start

    def get_max_length(self) -> int:
        return self._cache.stretches[0].arena.slots


class PassCache(Cache):  # type: ignore[misc]
    """The cache of one forward pass over `stretches`, which lie one behind the other in its tokens."""

    def __init__(self, layers: int) -> None:
        self.stretches: tuple[Stretch, ...] = ()
        super().__init__(layers=[PassLayer(self, index) for index in range(layers)])
