"""`reader-rag bench fit`: the Beta priors of every source and level, from replayed answers (empirical Bayes)."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from reader_rag.bench.recording import Recording, load_recordings
from reader_rag.draft import ChunkPool, Drafter, NgramTable, Priors, make_drafter
from reader_rag.draft.priors import Counts
from reader_rag.errors import SettingsError
from reader_rag.settings import SOURCES

if TYPE_CHECKING:
    import argparse

ROUNDS = 4  # the order of evidence depends on the trusts, and those on the order
LEAST_CLAIMS = 20.0  # a level that claimed less keeps the source's own trust
WEAKEST, STRONGEST = 4.0, 100.0  # sightings that a prior may be worth


def run(args: argparse.Namespace) -> int:
    """The command: fits and writes the table; says on stderr what it was fitted on."""
    if args.responses and not args.data:
        raise SettingsError("--responses names answers of a --data file; leave it out with --recordings")
    recordings = _recordings(args)
    made_by = shlex.join(["reader-rag", *sys.argv[1:]])
    fit(recordings, made_by=made_by, progress=True).save(args.out)
    print(f"fitted on {len(recordings)} answers: {args.out}", file=sys.stderr)
    return 0


def _recordings(args: argparse.Namespace) -> list[Recording]:
    if args.recordings:
        return load_recordings(args.recordings, limit=args.limit)
    if args.responses:
        from reader_rag.bench.replay import answers_of
        from reader_rag.bench.tokenizer import load_tokenizer

        answers = answers_of(
            args.data, load_tokenizer(args.model), responses=args.responses, limit=args.limit
        )
        return [recording for given in answers.values() for _, recording in given]
    from reader_rag.bench.record import record
    from reader_rag.reader import Reader
    from reader_rag.settings import Drafting

    reader = Reader.load(args.model, drafting=Drafting(persist=False), progress=True)
    with tempfile.TemporaryDirectory() as folder:
        record(reader, args.data, folder, limit=args.limit)
        return load_recordings(folder)


@dataclass(slots=True)
class _Learned:
    """What a scope knows after some requests."""

    ngrams: NgramTable = field(default_factory=NgramTable)
    answers: ChunkPool = field(default_factory=ChunkPool)
    pool: ChunkPool = field(default_factory=ChunkPool)

    def take(self, recording: Recording) -> None:
        show(recording, make_drafter(["ngrams"], ngrams=self.ngrams))
        self.answers.add(recording.name, [recording.output])
        self.pool.add(recording.name, recording.chunks)

    def drafter(self, recording: Recording, priors: Priors) -> Drafter:
        return make_drafter(
            SOURCES,
            chunk_tokens=recording.chunks,
            pool=self.pool,
            ngrams=self.ngrams.copy(),  # what this request teaches must not meet it again in the next round
            answers=self.answers,
            priors=priors,
        )


def fit(
    recordings: Sequence[Recording], *, made_by: str, rounds: int = ROUNDS, progress: bool = False
) -> Priors:
    """Priors under which each source and level is trusted as often as it was right.

    Each round replays all recordings with the trusts of the round before, and takes the claims that the mixture upheld
    (deleted interpolation is expectation-maximisation for the trusts). A recording is replayed by a scope that knows
    nothing and by one that has served the other half of the recordings, each with the model's predictions and without.
    The strength of a prior comes from how much the share of upheld claims differs between answers: the less, the more
    sightings the prior is worth.
    """
    if len(recordings) < 2:
        raise SettingsError(
            f"{len(recordings)} answers to fit on; a fit needs at least 2, better 50 and more"
        )
    cases = list(_cases(recordings))
    priors = Priors({}, made_by)
    with tqdm(
        total=rounds * len(cases), unit="answer", desc="fit", disable=None if progress else True
    ) as bar:
        for _ in range(rounds):
            seen: dict[tuple[str, int], list[tuple[float, float]]] = {}
            for recording, scope in cases:
                drafter = scope.drafter(recording, priors)
                show(recording, drafter, score=True)
                for key, counts in drafter.learned().items():
                    seen.setdefault(key, []).append(counts)
                bar.update()
            fitted = {key: _beta(pairs) for key, pairs in seen.items()}
            priors = Priors({key: beta for key, beta in fitted.items() if beta is not None}, made_by)
    return priors


def _cases(recordings: Sequence[Recording]) -> Iterator[tuple[Recording, _Learned]]:
    for soft in (True, False):
        kept = [r if soft else replace(r, top_ids=None, top_probs=None) for r in recordings]
        if soft and not any(recording.soft for recording in kept):
            continue
        halves = _Learned(), _Learned()
        for number, recording in enumerate(kept):
            halves[number % 2].take(recording)
        for number, recording in enumerate(kept):
            yield recording, _Learned()
            yield recording, halves[1 - number % 2]


def show(recording: Recording, drafter: Drafter, *, score: bool = False) -> None:
    """Shows one answer to a drafter token by token; `score`: every position of the output scores every source."""
    prompt, output = recording.prompt, recording.output
    first, ids, probs = len(prompt) - 1, recording.top_ids, recording.top_probs
    rows: Sequence[tuple[list[int], list[float]]] = [([], [])] * len(output)
    if ids is None or probs is None or not first:
        drafter.observe_prompt(prompt, None, None)
    else:
        drafter.observe_prompt(prompt, ids[:first], probs[:first])
    if ids is not None and probs is not None:
        answered = slice(first, first + len(output))
        rows = list(zip(ids[answered].tolist(), probs[answered].tolist(), strict=True))
    for token, (top, shares) in zip(output, rows, strict=True):
        if score:
            drafter.draft([], 0, 0)
        drafter.observe([token], [top], [shares])


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
