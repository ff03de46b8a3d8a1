"""What goes into and out of passes of one shape: a static buffer that the host fills, masks that the device computes, logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from reader_rag.verify.forward import Job, tree_arrays


class Inputs:
    """All that the host tells a pass, in one static buffer [R, W, 2 + W] and one copy: id, position, which nodes are seen."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self._width = width
        self._buffer = torch.zeros(rows, width, 2 + width, dtype=torch.long, device=device)
        self._nodes = torch.arange(width, device=device)
        ids, depth, inner = tree_arrays((0,), (), width)
        self._idle = torch.from_numpy(_packed(ids, depth, inner)).repeat(rows, 1, 1).numpy()

    def fill(self, jobs: dict[int, Job]) -> None:
        """Sets the rows of `jobs`, all others to idle ones."""
        rows = self._idle.copy()
        for row, job in jobs.items():
            ids, depth, inner = tree_arrays(job.tokens, job.parents, self._width)
            rows[row] = _packed(ids, job.position + depth, inner)
        # From pageable memory the driver takes its copy before it returns: the array may go, and the device is not waited for.
        self._buffer.copy_(torch.from_numpy(rows), non_blocking=True)

    def read(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """On the device: ids [R, W], positions [R, W], which node sees which [R, W, W]."""
        return self._buffer[..., 0], self._buffer[..., 1], self._buffer[..., 2:].bool()

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        """Where the nodes' keys are written [R, W]: one slot after another from the root's position on."""
        return positions[:, :1] + self._nodes


class Output:
    """The logits of the latest pass, in one static buffer that all recordings share."""

    def __init__(self) -> None:
        self._logits: torch.Tensor | None = None

    def put(self, logits: torch.Tensor) -> None:
        """Takes logits [R * W, V]; the first ones make the buffer, so their pass must not be recorded."""
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        self._logits.copy_(logits)

    def copy(self) -> torch.Tensor:
        """The logits, safe from the next pass."""
        assert self._logits is not None
        return self._logits.clone()


class Keys:
    """The keys of a pass, row after row: `views` of them, S in all. Gives the masks of `FixedForward`, built on the device."""

    def __init__(self, views: Sequence[int], width: int, device: torch.device) -> None:
        self._width = width
        rows = np.repeat(np.arange(len(views)), views)
        self._row = torch.from_numpy(rows).to(device)  # [S]
        self._slot = torch.from_numpy(np.concatenate([np.arange(view) for view in views])).to(device)  # [S]

    def mask(
        self, positions: torch.Tensor, inner: torch.Tensor, window: int | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """What is added to scores, 0 or -inf [1, 1, W, S]: a node sees all before the root, and of its own row what `inner` says."""
        width = self._width
        after = self._slot - positions[:, 0].index_select(
            0, self._row
        )  # slots behind the root's, of each key
        inside = (after >= 0) & (after < width)
        node = self._row * width + after.clamp(0, width - 1)  # which node of the pass the key is, if one
        seen = inner.permute(1, 0, 2).reshape(width, -1).index_select(1, node)
        seen = (after < 0) | (inside & seen)
        if window is not None:
            place = torch.where(inside, positions.reshape(-1).index_select(0, node), self._slot)
            seen &= positions.t().index_select(1, self._row) - place < window
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return mask.masked_fill_(~seen, -torch.inf)[None, None]


def _packed(
    ids: NDArray[np.int64], positions: NDArray[np.int64], inner: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """One row of the buffer [W, 2 + W]."""
    return np.concatenate([ids[:, None], positions[:, None], inner], axis=1)
