"""Sampled drafts of one request: the speculator draws them, a rule decides about them (docs/decisions/0009-stochastic-drafts.md).

Why the text keeps the target's distribution: a token is emitted after a path either by the rule, from candidates drawn after
that very path, or by the sampler's own draw. Both have the target's law whatever came before, as long as the numbers that they
use are new. Hence
- candidates of another pass belong to another turn, tests and choices to the position of the token that they bring about, and
  a position is decided once;
- no candidate is left out of a pass because of what it is, nor for what its neighbours or successors are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from reader_rag.draft import Draft, Drafter
from reader_rag.draft.speculator import MOST_BRANCHES, Speculator
from reader_rag.errors import SettingsError
from reader_rag.verify.sampling import Sampler, uniform
from reader_rag.verify.stochastic import RULES, Probs, decide, draw_candidates

LANES = MOST_BRANCHES + 1
"""Uniform numbers of one position and turn. Turn 0 is the target's: lane 0 the choice that the sampler's own draw uses too, the
others the tests of candidates."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Candidates for one place, and the probabilities [V] that they were drawn from."""

    probs: Probs
    candidates: tuple[int, ...]


class Draws:
    """What a request with `Sampling.draft_rule` drafts by chance. `source` goes into its drafter.

    vocabulary: the target reads ids below it; a draft model may have padded its own otherwise.
    """

    def __init__(self, speculator: Speculator, sampler: Sampler, vocabulary: int) -> None:
        self._sampler, self._vocabulary = sampler, vocabulary
        self._rule = RULES[str(sampler.sampling.draft_rule)]
        self.source = speculator.for_sampling(self._propose, sampler.eos_ids)

    def extend(self, draft: Draft, names: Sequence[str], left: int) -> Draft:
        """`draft` with all candidates that can matter to an answer of `left` more tokens; names: the drafter's sources."""
        if not self.source.proposals:
            return draft
        return self.source.extend(draft, names.index(self.source.name), left)

    def choose(self, logits: torch.Tensor, prefix: Sequence[int], path: Sequence[int]) -> int | None:
        """The token after `prefix`, which ends in the pass's own `path`, by the rule; None where nothing was drawn. logits: [V]."""
        drawn = self.source.proposals.get(tuple(path))
        if drawn is None:
            return None
        target = self._sampler.distribution(logits, prefix)
        draft = drawn.probs
        size = max(len(target), len(draft))
        target, draft = (np.pad(probs, (0, size - len(probs))) for probs in (target, draft))
        trial = self._rule.trial(target, draft, drawn.candidates)
        lanes = [*range(1, len(drawn.candidates) + 1), 0]
        token, _ = decide(trial, drawn.candidates, [self._uniform(prefix, 0, lane) for lane in lanes])
        return token

    def _propose(self, logits: torch.Tensor, prefix: Sequence[int], turn: int, count: int) -> Drawn:
        missing = self._vocabulary - len(logits)  # fewer than none: ids that nobody uses
        logits = torch.nn.functional.pad(logits.float(), (0, missing), value=-torch.inf)
        probs = self._sampler.distribution(logits, prefix)
        uniforms = [self._uniform(prefix, turn, lane) for lane in range(count)]
        return Drawn(probs, draw_candidates(probs, uniforms, with_replacement=self._rule.with_replacement))

    def _uniform(self, prefix: Sequence[int], turn: int, lane: int) -> float:
        return uniform(self._sampler.seed, len(prefix), turn * LANES + lane)


def plan_draws(
    sources: Sequence[Any], sampler: Sampler, mode: str, vocabulary: int, drafter: Drafter | None = None
) -> tuple[tuple[Any, ...], Draws | None]:
    """A request's sources, with a speculator that samples where its `Sampling.draft_rule` asks for one.

    `drafter` is the caller's own, if there is one. Raises SettingsError where the rule cannot be had.
    """
    rule = sampler.sampling.draft_rule
    if rule is None or mode == "plain":  # a model that cannot be verified ahead has no drafts at all
        return tuple(sources), None
    if mode == "exact":
        raise SettingsError(
            f"draft_rule is {rule!r}, and in exact mode every draw belongs to its seed: load the model with exact=False, "
            "or leave draft_rule out"
        )
    speculator = next((source for source in sources if isinstance(source, Speculator)), None)
    if speculator is None or drafter is not None:
        raise SettingsError(
            f"draft_rule is {rule!r}, and no speculator is there to sample drafts: put one into Drafting.sources "
            "(reader_rag.draft.speculator) and give no drafter, or leave draft_rule out"
        )
    draws = Draws(speculator, sampler, vocabulary)
    return tuple(draws.source if source is speculator else source for source in sources), draws
