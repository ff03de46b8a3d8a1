"""Seats: the memory of a pass's rows, at addresses that stay the same from request to request.

A recorded pass has addresses baked in. Arenas come and go with requests, so each of R seats owns tensors, and an arena that decodes
moves into those of a free seat: one copy per request, a fraction of a pass on the devices where passes are recorded. It stays there
while it lives (also as a kept prefix) unless another one needs the seat.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from reader_rag.verify.arena import Arena, Storage


@dataclass(slots=True)
class _Seat:
    storage: Storage | None = None
    owner: weakref.ref[Arena] | None = None
    used: int = 0

    @property
    def arena(self) -> Arena | None:
        """The living arena that took the seat last."""
        return None if self.owner is None else self.owner()

    @property
    def slots(self) -> int:
        return 0 if self.storage is None else length_of(self.storage)


class Seats:
    """R seats; memory is the largest arena that each has seen, until `trim`. Used by one thread at a time."""

    def __init__(self, count: int) -> None:
        self._seats = [_Seat() for _ in range(count)]
        self._turn = 0

    def storage(self, seat: int) -> Storage:
        """The tensors of a seat that was taken."""
        storage = self._seats[seat].storage
        assert storage is not None
        return storage

    def take(self, arenas: Sequence[Arena]) -> tuple[list[int], set[int]]:
        """Seats each of at most R different arenas, which were written to. Returns their seats, and the seats whose tensors changed."""
        self._turn += 1
        owners = {id(arena): seat for seat in self._seats if (arena := seat.arena) is not None}
        taken = {arena: owners[id(arena)] for arena in arenas if id(arena) in owners}
        free = [seat for seat in self._seats if not any(seat is one for one in taken.values())]
        for arena in arenas:
            if arena not in taken:
                best = min(free, key=lambda seat: self._cost(seat, arena))
                free = [seat for seat in free if seat is not best]
                taken[arena] = best
        changed = {self._index(seat) for arena, seat in taken.items() if self._place(arena, seat)}
        return [self._index(taken[arena]) for arena in arenas], changed

    def trim(self) -> set[int]:
        """Frees the tensors of seats whose arenas are gone; returns these seats."""
        empty = {i for i, seat in enumerate(self._seats) if seat.storage is not None and seat.arena is None}
        for i in empty:
            self._seats[i] = _Seat()
        return empty

    def _index(self, seat: _Seat) -> int:
        return next(i for i, one in enumerate(self._seats) if one is seat)

    def _cost(self, seat: _Seat, arena: Arena) -> tuple[bool, bool, int]:
        """First the seats that nobody holds, then those that are long enough, then the longest unused."""
        return seat.arena is not None, seat.slots < arena.slots, seat.used

    def _place(self, arena: Arena, seat: _Seat) -> bool:
        """Puts the arena into the seat's tensors, or takes over the arena's where those are too short; True if so."""
        seat.used = self._turn
        if seat.storage is not None and _lives_in(arena, seat.storage):
            return False
        other = seat.arena
        adopted = seat.slots < arena.slots
        if adopted:
            seat.storage = arena.storage
        else:
            assert seat.storage is not None
            if other is not None and other is not arena and _lives_in(other, seat.storage):
                other.move_out()
            arena.move_into(seat.storage)
        seat.owner = weakref.ref(arena)
        return adopted


class BakedRow:
    """A seat as a recorded pass sees it: writes go to the slots `at` [n], a tensor, and never to a place that Python knows."""

    def __init__(self, storage: Storage, at: torch.Tensor) -> None:
        (self._keys, self._values), self._at = storage, at

    @property
    def slots(self) -> int:
        """Slots of the seat."""
        return length_of((self._keys, self._values))

    def write(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts keys and values [1, kv_heads, n, head_dim] into the slots; `start` is not looked at."""
        for kept, new in ((self._keys[layer], keys), (self._values[layer], values)):
            assert kept is not None
            kept.index_copy_(2, self._at, new)

    def read(self, layer: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the slots [0, stop)."""
        keys, values = self._keys[layer], self._values[layer]
        assert keys is not None
        assert values is not None
        return keys[:, :, :stop], values[:, :, :stop]


def length_of(storage: Storage) -> int:
    """Slots of the tensors."""
    return _first(storage).shape[2]


def _first(storage: Storage) -> torch.Tensor:
    return next(tensor for tensor in storage[0] if tensor is not None)


def _lives_in(arena: Arena, storage: Storage) -> bool:
    return _first(arena.storage) is _first(storage)
