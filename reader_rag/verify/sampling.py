"""The target's own next token: logits processors, then the argmax or a seeded draw.

Everything is a function of (logits, prefix, seed, position), so a walk over a draft chooses exactly what plain decoding
chooses. The processors are transformers' own, in the order of its `generate`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from reader_rag.errors import ReaderError, SettingsError
from reader_rag.settings import Sampling
from reader_rag.stats import TokenLogprob

SHORTLIST = 1024
"""Most probable tokens that top_p looks at first; sorting a whole vocabulary costs milliseconds."""
BLOCKS = 256
"""Rows that a vocabulary is folded into to find its largest entries."""
EVIDENCE = 8
"""Top tokens kept of every computed position: the model's soft evidence."""
ROWS, ACCELERATOR_ROWS = 16, 128
"""Positions whose evidence is computed at a time: on a CPU, what stays in its caches."""


class Rules(Protocol):
    """What may follow an answer so far; a function of its arguments alone."""

    def restrict(self, scores: torch.Tensor, answer: Sequence[int], *, greedy: bool) -> torch.Tensor:
        """Scores [V] with -inf for what may not come next. A greedy caller needs only the best token to be right."""


class Sampler:
    """Chooses the next token of one request.

    `prompt_tokens`: leading tokens of every prefix that belong to the prompt; presence and frequency penalties skip them.
    `rules`: what the sampling's constraint allows after an answer so far.
    """

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        eos_ids: frozenset[int] = frozenset(),
        *,
        prompt_tokens: int = 0,
        rules: Rules | None = None,
    ) -> None:
        self.sampling, self.seed, self.eos_ids = sampling, seed, eos_ids
        self._rules = rules
        self._prompt_tokens = prompt_tokens
        self._early: list[RepetitionPenaltyLogitsProcessor] = []
        self._late = list(sampling.processors)
        if sampling.repetition_penalty != 1.0:
            self._early.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if sampling.no_repeat_ngram_size:
            self._late.insert(0, NoRepeatNGramLogitsProcessor(sampling.no_repeat_ngram_size))
        self._counts_outputs = bool(sampling.presence_penalty or sampling.frequency_penalty)
        self._logprobs: list[TokenLogprob] = []

    @property
    def is_greedy_plain(self) -> bool:
        """Whether the choice is the bare argmax, so that a caller may take it for all rows at once."""
        adjusted = self._early or self._late or self._counts_outputs or self.sampling.logit_bias
        plain = not adjusted and self._rules is None
        return plain and self.sampling.temperature == 0

    def choose(self, logits: torch.Tensor, prefix: Sequence[int] | torch.Tensor, position: int) -> int:
        """The token at absolute `position`, after `prefix` (prompt, answer and the walk's own path). logits: [V]."""
        scores = self._allowed(logits, prefix)
        if self.sampling.temperature == 0:
            best = int(_argmax(scores[None])[0])
            if not torch.isfinite(scores[best]):
                raise ReaderError(_NOTHING_LEFT)
            return best
        ids, kept = self.warp(scores)
        return _draw(ids, kept, uniform(self.seed, position))

    def distribution(self, logits: torch.Tensor, prefix: Sequence[int] | torch.Tensor) -> NDArray[np.float64]:
        """The probabilities [V] that `choose` draws from; logits [V] of this model or of another one."""
        ids, kept = self.warp(self._allowed(logits, prefix))
        probs = np.zeros(len(logits))
        probs[ids.cpu().numpy()] = kept.detach().to("cpu").double().softmax(-1).numpy()
        if not probs.sum() > 0:  # NaN included
            raise ReaderError(_NOTHING_LEFT)
        return probs

    def _allowed(self, logits: torch.Tensor, prefix: Sequence[int] | torch.Tensor) -> torch.Tensor:
        scores = self.process(logits, prefix)
        if self._rules is None:
            return scores
        answer = [int(token) for token in prefix[self._prompt_tokens :]]
        return self._rules.restrict(scores, answer, greedy=self.sampling.temperature == 0)

    def keep(self, logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Takes committed tokens and which row of logits [n, V] each was chosen from; remembers them if logprobs are wanted."""
        if self.sampling.logprobs is not None:
            self._logprobs += token_logprobs(logits[list(rows)], tokens, self.sampling.logprobs)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Of the tokens that were kept; None when nobody asked."""
        return None if self.sampling.logprobs is None else tuple(self._logprobs)

    def process(self, logits: torch.Tensor, prefix: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Logits [V] after bias, penalties and processors, in float32; the argument is left as it is."""
        scores = logits.to(torch.float32, copy=True)[None]
        if self.sampling.logit_bias:
            self._add_bias(scores, self.sampling.logit_bias)
        if self._early or self._late:
            input_ids = torch.as_tensor(prefix, dtype=torch.long, device=logits.device)[None]
        for processor in self._early:
            scores = processor(input_ids, scores)
        if self._counts_outputs:
            self._subtract_penalties(scores, prefix)
        for processor in self._late:
            scores = processor(input_ids, scores)
        return scores[0]

    def warp(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Temperature, top_k, top_p, min_p: the ids [m] that may be drawn, ascending or all, and their scores [m]."""
        sampling = self.sampling
        row = scores[None]
        if sampling.temperature != 1.0:
            row = TemperatureLogitsWarper(sampling.temperature)(None, row)
        ids, top_p = None, sampling.top_p
        if sampling.top_k:
            row = TopKLogitsWarper(sampling.top_k)(None, row)
            ids = torch.isfinite(row[0]).nonzero()[:, 0]
            row = row[:, ids]
        elif top_p < 1 and row.shape[1] > 2 * SHORTLIST:
            # The nucleus of all tokens is that of the shortlist with top_p divided by the shortlist's mass.
            listed = (row[0] >= row[0].topk(SHORTLIST).values[-1]).nonzero()[:, 0]
            mass = float(row[0].softmax(-1)[listed].sum())
            if mass > top_p:
                ids, row, top_p = listed, row[:, listed], top_p / min(mass, 1.0)
        if top_p < 1:
            row = TopPLogitsWarper(top_p)(None, row)
        if sampling.min_p:
            row = MinPLogitsWarper(sampling.min_p)(None, row)
        if ids is None:
            ids = torch.arange(row.shape[1], device=row.device)
        return ids, row[0]

    def _add_bias(self, scores: torch.Tensor, bias: object) -> None:
        assert isinstance(bias, dict)
        outside = [token for token in bias if token >= scores.shape[1]]
        if outside:
            raise SettingsError(
                f"logit_bias names token {outside[0]}, and the model has {scores.shape[1]}; use ids of its tokenizer"
            )
        ids = torch.tensor(list(bias), device=scores.device)
        scores[0, ids] += torch.tensor(list(bias.values()), dtype=torch.float32, device=scores.device)

    def _subtract_penalties(self, scores: torch.Tensor, prefix: Sequence[int] | torch.Tensor) -> None:
        """score -= presence + frequency * count, for every token of the answer so far."""
        output = prefix[self._prompt_tokens :]
        counts = Counter(output.tolist() if isinstance(output, torch.Tensor) else output)
        if counts:
            ids = torch.tensor(list(counts), device=scores.device)
            times = torch.tensor(list(counts.values()), dtype=torch.float32, device=scores.device)
            scores[0, ids] -= self.sampling.presence_penalty + self.sampling.frequency_penalty * times


_NOTHING_LEFT = (
    "no token is left to choose: the logits are not finite, or logit_bias, no_repeat_ngram_size or a processor bans "
    "every token (that the constraint allows); loosen them, or load the model with dtype='float32'"
)


def uniform(seed: int, position: int, lane: int = 0) -> float:
    """A number in [0, 1) that belongs to (seed, position, lane): 53 bits of Philox, whatever was drawn before.

    Lane 0 chooses tokens; sampled drafts use others (reader_rag/draws.py).
    """
    counter = position + (lane << 64)
    return (int(np.random.Philox(key=seed, counter=counter).random_raw()) >> 11) * 2.0**-53


def _draw(ids: torch.Tensor, scores: torch.Tensor, u: float) -> int:
    """Inverse-CDF draw over softmax(scores) in float64: the first id whose cumulative probability exceeds u."""
    values = scores.detach().to("cpu").double()
    if not len(values):
        raise ReaderError(_NOTHING_LEFT)
    cumulative = values.softmax(-1).cumsum(-1).numpy()
    total = float(cumulative[-1])
    if not total > 0:  # NaN included
        raise ReaderError(_NOTHING_LEFT)
    index = int(np.searchsorted(cumulative, u * total, side="right"))
    if index >= len(cumulative):  # u * total was rounded up to total: the last token of non-zero probability
        index = int(np.searchsorted(cumulative, total, side="left"))
    return int(ids[index])


def _argmax(rows: torch.Tensor) -> torch.Tensor:
    """The lowest index of each row's maximum; numpy's argmax is 20 times faster on a CPU, and the same."""
    if rows.device.type != "cpu":
        return rows.argmax(-1)
    return torch.from_numpy(rows.detach().float().numpy().argmax(-1))


Expected = tuple[list[int], list[list[int]], list[list[float]]]
"""What the model says at n positions: argmax [n], ids of the most probable tokens [n][k], their probabilities [n][k]."""


def top_evidence(logits: torch.Tensor, k: int = EVIDENCE) -> Expected:
    """What the model says at each position of logits [n, V] of any dtype, computed in float32.

    Each row is sorted by falling probability, then rising id; the argmax is torch's.
    """
    return pass_evidence([logits], k)[0]


def pass_evidence(outputs: Sequence[torch.Tensor], k: int = EVIDENCE) -> list[Expected]:
    """`top_evidence` of each of `outputs`, with one copy to the host: reading it is where a pass on an accelerator is waited for."""
    parts = _parts([logits.detach() for logits in outputs], joined=outputs[0].device.type != "cpu")
    found = [_evidence(part, k) for part in parts]
    host = (torch.cat(found) if len(found) > 1 else found[0]).cpu().numpy()
    k = host.shape[1] // 2
    best, ids, probs = host[:, 0], host[:, 1 : 1 + k], host[:, 1 + k :].view(np.float32)
    if (probs[:, 1:] >= probs[:, :-1]).any():  # equals, which topk leaves in any order
        order = np.lexsort((ids, -probs), axis=-1)
        ids, probs = np.take_along_axis(ids, order, 1), np.take_along_axis(probs, order, 1)
    every = best.tolist(), ids.tolist(), probs.tolist()
    if len(outputs) == 1:
        return [every]
    ends = list(accumulate(map(len, outputs)))
    return [
        (every[0][first:last], every[1][first:last], every[2][first:last])
        for first, last in pairwise([0, *ends])
    ]


def _parts(outputs: Sequence[torch.Tensor], *, joined: bool) -> list[torch.Tensor]:
    """The positions that are computed together; `joined`: across requests, for as few launches as memory allows."""
    if not joined:
        return [part for logits in outputs for part in torch.split(logits, ROWS)]
    return list(torch.split(torch.cat(list(outputs)) if len(outputs) > 1 else outputs[0], ACCELERATOR_ROWS))


def _evidence(part: torch.Tensor, k: int) -> torch.Tensor:
    """Logits [n, V] -> int32 [n, 1 + 2k]: argmax, ids of the k most probable tokens, the bits of their float32 probabilities."""
    scores = part if part.dtype == torch.float32 else _scratch(part, "scores").copy_(part)
    best = _argmax(scores)
    values, tokens = _top(torch.softmax(scores, -1, out=_scratch(part, "probs")), min(k, part.shape[1]))
    return torch.cat([best[:, None].int(), tokens.int(), values.view(torch.int32)], 1)


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """log softmax of `logits` [n, V] at `tokens`, and of the `top` likeliest tokens of each row."""
    kept = []
    for row, token in zip(
        logits, tokens, strict=True
    ):  # row by row: the same sums, whatever stands beside it
        logs = row.to(torch.float32).log_softmax(-1)
        best = logs.topk(min(top, len(logs)))
        likeliest = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        kept.append(TokenLogprob(token, float(logs[token]), likeliest))
    return kept


def _top(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row and their indices, as `topk` gives them, in a tenth of its time.

    The k largest of V numbers lie in the k columns with the largest maxima when V is folded into a table.
    """
    n, size = rows.shape
    columns = size // BLOCKS
    if columns <= 4 * k:
        top = rows.topk(k)
        return top.values, top.indices
    folded = columns * BLOCKS
    best = rows[:, :folded].view(n, BLOCKS, columns).amax(1).topk(k).indices  # [n, k] columns
    starts = torch.arange(0, folded, columns, device=rows.device)
    ids = (best[:, None] + starts[:, None]).flatten(1)  # [n, BLOCKS * k]: all entries of these columns
    if folded < size:  # what the fold leaves over takes part as it is
        ids = torch.cat([ids, torch.arange(folded, size, device=rows.device).expand(n, -1)], 1)
    top = rows.gather(1, ids).topk(k)
    return top.values, ids.gather(1, top.indices)


_KEPT = threading.local()


def _scratch(like: torch.Tensor, use: str) -> torch.Tensor:
    """float32 memory of the shape of `like`, kept per thread and use: fresh megabytes at every pass cost more in page faults
    than the arithmetic on them."""
    kept: torch.Tensor | None = getattr(_KEPT, use, None)
    if kept is None or kept.device != like.device or kept.numel() < like.numel():
        with torch.inference_mode(False):  # what is made in inference mode cannot be written outside of it
            kept = torch.empty(like.numel(), dtype=torch.float32, device=like.device)
        setattr(_KEPT, use, kept)
    return kept[: like.numel()].view(like.shape)
