"""A published drafter's own code as a cross-check of our rule: arctic-inference's suffix trees, where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from reader_rag.bench.rules.rule import Best, Proposal

MODULE = "arctic_inference.suffix_decoding"


class InstalledSuffixTrees:
    """SuffixDecoding by its authors. `pip install --no-deps arctic-inference` compiles it; it needs neither vLLM nor a GPU."""

    name = "suffix_decoding_installed"

    def __init__(self, *, factor: float = 64.0, longest: int = 64, least_prob: float = 0.0) -> None:
        self._cache: Any = import_module(MODULE).SuffixDecodingCache(max_tree_depth=longest)
        self._factor, self._longest, self._least_prob = factor, longest, least_prob
        self._requests = 0
        self._tail: list[int] = []

    def begin(self) -> None:
        self._requests += 1
        self._tail = []

    def end(self) -> None:
        self._cache.stop_request(self._requests)

    def observe(self, tokens: Sequence[int], best: Sequence[Best], prompt: bool) -> None:
        if prompt:
            self._cache.start_request(self._requests, list(tokens))
        else:
            self._cache.add_active_response(self._requests, list(tokens))
        self._tail = [*self._tail, *tokens][-self._longest :]

    def observe_branch(self, context: Sequence[int], best: Best) -> None: ...

    def propose(self, pending: Sequence[int], limit: int) -> Proposal:
        proposal = Proposal(limit)
        if limit > 0:
            draft = self._cache.speculate(
                self._requests,
                [*self._tail, *pending][-self._longest :],
                max_spec_tokens=limit,
                max_spec_factor=self._factor,
                min_token_prob=self._least_prob,
                use_tree_spec=True,
            )
            nodes: list[int | None] = []
            for token, parent in zip(draft.token_ids, draft.parents, strict=True):
                above = nodes[parent] if parent >= 0 else -1
                nodes.append(proposal.add(above, token) if above is not None else None)
        return proposal
