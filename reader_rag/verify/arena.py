"""The KV arena: preallocated slots with one cursor, so that accepted tokens are already in place.

A pass writes its keys and values at `cursor` and attention reads slots [0, view). Nothing is ever moved or cropped: slots past the
committed length hold leftovers of earlier drafts, which every mask hides until they are overwritten.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH = 1.5


class ArenaLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, [1, kv_heads, slots, head_dim]."""

    is_sliding = False

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.arena = arena

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        _, heads, _, dim = key_states.shape
        self.keys = key_states.new_zeros(1, heads, self.arena.slots, dim)
        self.values = value_states.new_zeros(
            1, value_states.shape[1], self.arena.slots, value_states.shape[3]
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, count, view = self.arena.cursor, key_states.shape[2], self.arena.view
        self.keys[:, :, start : start + count] = key_states
        self.values[:, :, start : start + count] = value_states
        return self.keys[:, :, :view], self.values[:, :, :view]

    def grow(self, slots: int) -> None:
        if self.is_initialized:
            for name in ("keys", "values"):
                old = getattr(self, name)
                new = old.new_zeros(*old.shape[:2], slots, old.shape[3])
                new[:, :, : old.shape[2]] = old
                setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.arena.view, 0

    def get_seq_length(self) -> int:
        return self.arena.cursor

    def get_max_length(self) -> int:
        return self.arena.slots


class Arena(Cache):  # type: ignore[misc]
    """The cache that the model is called with: one row, `layers` layers, grown geometrically by `reserve`."""

    def __init__(self, layers: int, slots: int) -> None:
        self.slots, self.cursor, self.view = slots, 0, slots
        super().__init__(layers=[ArenaLayer(self) for _ in range(layers)])

    def reserve(self, slots: int) -> None:
        """Makes room for at least `slots` slots; contents stay."""
        if slots > self.slots:
            self.slots = max(slots, int(self.slots * GROWTH))
            for layer in self.layers:
                layer.grow(self.slots)

    def bytes(self) -> int:
        """Bytes held by keys and values."""
        return sum(
            t.numel() * t.element_size()
            for layer in self.layers
            if layer.is_initialized
            for t in (layer.keys, layer.values)
        )
