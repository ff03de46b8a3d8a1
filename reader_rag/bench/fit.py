"""`reader-rag bench fit`: the Beta priors of every source and level, from replayed answers (empirical Bayes)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from reader_rag.draft import Drafter
from reader_rag.draft.priors import Counts, Priors

ROUNDS = 4  # the order of evidence depends on the trusts, and those on the order
LEAST_CLAIMS = 20.0  # a level that claimed less keeps the source's own trust
WEAKEST, STRONGEST = 4.0, 100.0  # sightings that a prior may be worth


@dataclass(frozen=True, slots=True)
class Recording:
    """One answer and, where the model was there, its predictions.

    prompt, output        token ids
    top_ids, top_probs    [len(prompt) + len(output) - 1, k]: row i predicts what follows token i; None: hard evidence only
    chunks                tokenizations of the chunks that the answer was given
    """

    prompt: Sequence[int]
    output: Sequence[int]
    top_ids: NDArray[np.integer[Any]] | None = None
    top_probs: NDArray[np.floating[Any]] | None = None
    chunks: Sequence[Sequence[int]] = ()


def replay(recording: Recording, drafter: Drafter) -> None:
    """Shows one answer to a drafter token by token, so that every position of the output scores every source."""
    prompt, output = recording.prompt, recording.output
    known, end = len(prompt), len(prompt) + len(output) - 1
    ids, probs = recording.top_ids, recording.top_probs
    if ids is None or probs is None:
        drafter.observe_prompt(prompt, None, None)
        rows: Iterable[tuple[list[int], list[float]]] = (([], []) for _ in output)
    else:
        drafter.observe_prompt(prompt, ids[:known], probs[:known])
        rows = zip(ids[known - 1 : end].tolist(), probs[known - 1 : end].tolist(), strict=True)
    for number, (token, (top, shares)) in enumerate(zip(output, rows, strict=True)):
        if number:  # the first token comes with the prompt: nothing is ever drafted for it
            drafter.draft([], 0, 0)
        drafter.observe([token], [top], [shares])


def fit(
    recordings: Sequence[Recording],
    drafter: Callable[[Recording, Priors], Drafter],
    *,
    made_by: str,
    rounds: int = ROUNDS,
    progress: bool = False,
) -> Priors:
    """Priors under which each source and level is trusted as often as it was right.

    Each round replays all recordings with the trusts of the round before, and takes the claims that the mixture upheld
    (deleted interpolation is expectation-maximisation for the trusts). The strength of a prior comes from how much
    the share of upheld claims differs between answers: the less, the more sightings the prior is worth.
    """
    priors = Priors({}, made_by)
    with tqdm(
        total=rounds * len(recordings), unit="answer", disable=not (progress and sys.stderr.isatty())
    ) as bar:
        for _ in range(rounds):
            seen: dict[tuple[str, int], list[tuple[float, float]]] = {}
            for recording in recordings:
                one = drafter(recording, priors)
                replay(recording, one)
                for key, counts in one.learned().items():
                    seen.setdefault(key, []).append(counts)
                bar.update()
            counts = {key: _beta(pairs) for key, pairs in seen.items()}
            priors = Priors({key: beta for key, beta in counts.items() if beta is not None}, made_by)
    return priors


def _beta(pairs: Sequence[tuple[float, float]]) -> Counts | None:
    """The Beta distribution that (claims upheld, claims) of many answers were drawn from, by its first two moments."""
    upheld, claims = np.array(pairs).T
    total = claims.sum()
    if total < LEAST_CLAIMS:
        return None
    mean = float(np.clip(upheld.sum() / total, 0.002, 0.995))
    shares = np.divide(upheld, claims, out=np.full_like(upheld, mean), where=claims > 0)
    variance = float((claims * (shares - mean) ** 2).sum() / total)
    # Of n claims in an answer the share varies by mean (1 - mean) / n even if all answers are alike.
    binomial = mean * (1.0 - mean)
    between = variance - binomial * len(pairs) / total
    strength = binomial / between - 1.0 if between > 0.0 else STRONGEST
    strength = float(np.clip(strength, WEAKEST, STRONGEST))
    return mean * strength, (1.0 - mean) * strength
