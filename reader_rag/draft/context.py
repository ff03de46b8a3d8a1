"""The `context` source: this request's own prompt and output, by suffix matches of any length, hard and soft."""

from collections.abc import Sequence
from heapq import nlargest
from math import exp

from reader_rag.draft.source import Evidence, Row

LONGEST = 8  # longer matches count as this long
POSITIONS = 16  # match positions that are followed: the longest-lived, then the latest
STEP = 0.9  # a match one token longer weighs exp(STEP) times as much
OUTPUT = 5.0  # a match in the output weighs this many times one in the prompt
HARD = (0.15, 0.15, 0.30, 0.45, 0.60, 0.70, 0.75, 0.80, 0.85)
TRUST = (0.30, 0.55, 0.60, 0.70, 0.75, 0.80, 0.85, 0.85, 0.85)
RECENT = 64  # positions whose predictions make up the evidence of length 0
RECENT_TOKENS = 16
_SHARE = tuple(exp(-STEP * shorter) for shorter in range(LONGEST + 1))
_LEAST_SHARE = 3  # a match this much shorter than the longest is not worth its time

State = dict[int, int]  # position of an earlier occurrence of the tail's last token -> length of the match


class ContextSource:
    """Where did this tail stand before, what followed (hard), and what did the model expect there (soft)?

    A match's next token takes the share HARD[length]; the model's prediction at that position takes the rest.
    Prompt lookup and SAM-Decoding (hard), Token Recycling (soft, length 1) are special cases.
    Evidence of length 0 is what the model has lately been inclined to say, whatever the tail.
    """

    name = "context"

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._rows: list[Row | None] = []  # [i] predicts what follows token i; the last is not known yet
        self._positions: dict[int, list[int]] = {}
        self._state: State = {}
        self._prompt = 0
        self._recent: dict[int, float] | None = None

    def observe(self, tokens: Sequence[int], rows: Sequence[Row | None], prompt: bool) -> None:
        for token, row in zip(tokens, rows, strict=True):
            if self._rows:
                self._rows[-1] = row
            self._state = self.advance(self._state, token)
            self._positions.setdefault(token, []).append(len(self._tokens))
            self._tokens.append(token)
            self._rows.append(None)
        if prompt:
            self._prompt = len(self._tokens)
        self._recent = None

    def observe_branch(self, context: Sequence[int], row: Row) -> None:
        """Only committed positions are kept."""

    def root(self) -> State:
        return self._state

    def advance(self, state: State, token: int) -> State:
        known = self._tokens
        end = len(known) - 1
        matches = {
            position + 1: length + 1
            for position, length in state.items()
            if position < end and known[position + 1] == token
        }
        room = POSITIONS - len(matches)
        if room > 0:
            for position in self._positions.get(token, ())[: -room - 1 : -1]:
                if position not in matches:
                    matches[position] = 1
        return matches

    def predict(self, state: State) -> list[Evidence]:
        known, rows = self._tokens, self._rows
        end = len(known) - 1
        longest = 0
        for position, length in state.items():
            if length > longest and position < end:
                longest = length
        if longest > LONGEST:
            longest = LONGEST
        found: list[Evidence] = []
        if longest:
            hards: dict[int, float] = {}
            soft: list[tuple[float, Row]] = []
            total = 0.0
            for position, length in state.items():
                shorter = longest - length
                if shorter > _LEAST_SHARE or position >= end:
                    continue
                weight = _SHARE[shorter] if shorter > 0 else 1.0
                if position >= self._prompt:
                    weight *= OUTPUT
                total += weight
                following = known[position + 1]
                row = rows[position]
                if row is None:
                    hards[following] = hards.get(following, 0.0) + weight
                    continue
                hard = weight * HARD[length if length < LONGEST else LONGEST]
                hards[following] = hards.get(following, 0.0) + hard
                soft.append((weight - hard, row))
            hards = {token: weight / total for token, weight in hards.items()}
            soft = [(weight / total, row) for weight, row in soft]
            found.append(Evidence(TRUST[longest], longest, hards, soft))
        if longest < 3:
            if self._recent is None:
                self._recent = self._lately()
            found.append(Evidence(TRUST[0], 0, self._recent, []))
        return found

    def _lately(self) -> dict[int, float]:
        """The tokens that the model's last RECENT predictions of the output favoured."""
        sums: dict[int, float] = {}
        start = max(self._prompt - 1, len(self._rows) - 1 - RECENT, 0)
        latest = [row for row in self._rows[start:-1] if row is not None]
        for row in latest:
            for token, prob in row.items():
                sums[token] = sums.get(token, 0.0) + prob
        best = nlargest(RECENT_TOKENS, sums.items(), key=lambda item: (item[1], -item[0]))
        return {token: mass / len(latest) for token, mass in best}
