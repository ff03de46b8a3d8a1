"""One-token passes through the model's own cache, for models whose state cannot be verified ahead (recurrent layers and the like)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from reader_rag.verify.forward import Job


class OwnCache:
    """The model's own cache object, created by the model in its first pass."""

    def __init__(self) -> None:
        self.state: Any = None


class PlainForward:
    """The interface of `FixedForward` at width 1 with whatever cache the model makes for itself: no drafts, the model's own text."""

    exact = False
    width = 1
    rows = 1

    def __init__(self, model: nn.Module, *, chunk: int, device: torch.device) -> None:
        self.model, self.chunk, self.device = model, chunk, device
        names = inspect.signature(model.forward).parameters
        self._name = next(
            (n for n in ("cache", "past_key_values", "cache_params") if n in names), "past_key_values"
        )
        self._keeps = "logits_to_keep" in names

    def new_arena(self) -> OwnCache:
        return OwnCache()

    def reserve(self, arena: OwnCache, tokens: int) -> None:
        """The model makes its own cache."""

    def bytes_for(self, tokens: int) -> int:
        """Unknown: the model makes its own cache."""
        return 0

    def prefill(
        self, arena: OwnCache, tokens: Sequence[int], start: int, *, want_logits: bool
    ) -> torch.Tensor | None:
        if start == 0:
            arena.state = None
        logits = self._call(arena, tokens, keep=0 if want_logits else 1)
        return logits if want_logits else None

    def decode(self, jobs: Sequence[Job]) -> list[torch.Tensor]:
        (job,) = jobs
        arena: Any = job.arena
        if job.position == 0:
            arena.state = None
        return [self._call(arena, job.tokens, keep=0)]

    def trim(self) -> None:
        """Keeps nothing for arenas that are gone."""

    def chain_limit(self, position: int) -> int:
        return 0

    @torch.inference_mode()
    def _call(self, arena: OwnCache, tokens: Sequence[int], *, keep: int) -> torch.Tensor:
        options: dict[str, object] = {self._name: arena.state} if arena.state is not None else {}
        if self._keeps:
            options["logits_to_keep"] = keep
        out = self.model(
            input_ids=torch.tensor([list(tokens)], device=self.device), use_cache=True, **options
        )
        arena.state = getattr(out, self._name, None) or getattr(out, "past_key_values", None)
        logits: torch.Tensor = out.logits[0]
        return logits
