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
TRUST = (0.40, 0.55, 0.60, 0.70, 0.75, 0.80, 0.85, 0.85, 0.85)  # where the fitted table has no entry
_SHARE = tuple(exp(-STEP * shorter) for shorter in range(LONGEST + 1))
_LEAST_SHARE = 3  # a match this much shorter than the longest is not worth its time

# Evidence of length 0 is a habit, whatever the tail: the shares of three views of what this text keeps saying.
SAID, FAVOURED, PASSED_OVER = 0.55, 0.25, 0.20
SAID_TOKENS = 300  # last tokens of prompt and output
FAVOURED_ROWS = 64  # last predictions of the output
PASSED_OVER_ROWS = 2  # last predictions: what was likely and did not come often comes a little later
HABITS = 16  # tokens named by the evidence of length 0
HARD_ONLY = 20  # added to the level of matches at which the model's predictions are not known
HABITS_UP_TO = 2  # beside matches of this length and less

State = tuple[int, ...]
"""Earlier occurrences of the tail's last token: position << _BITS | length of the match."""
_BITS = 4
_MASK = (1 << _BITS) - 1
_NEXT = (1 << _BITS) + 1  # one position further, one token longer


class ContextSource:
    """Where did this tail stand before, what followed (hard), and what did the model expect there (soft)?

    A match's next token takes the share HARD[length]; the model's prediction at that position takes the rest.
    Prompt lookup and SAM-Decoding (hard), Token Recycling (soft, length 1) are special cases.
    """

    name = "context"

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._rows: list[Row | None] = []  # [i] predicts what follows token i; the last is not known yet
        self._positions: dict[int, list[int]] = {}
        self._state: State = ()
        self._prompt = 0
        self._said: dict[int, int] = {}  # counts of the last SAID_TOKENS tokens
        self._counted = 0  # tokens that have been taken into them
        self._habits: dict[int, float] | None = None

    def observe(self, tokens: Sequence[int], rows: Sequence[Row | None], prompt: bool) -> None:
        known, positions = self._tokens, self._positions
        start = len(known)
        if self._rows and tokens:
            self._rows[-1] = rows[0]
        known.extend(tokens)
        self._rows.extend(rows[1:])
        if tokens:
            self._rows.append(None)
        # Only matches that reach the end matter, and none of their lengths beyond what a state can say.
        first = max(start, len(known) - _MASK - 1) if prompt else start
        for place in range(start, first):
            positions.setdefault(known[place], []).append(place)
        for place in range(first, len(known)):
            self._state = self._advance(self._state, known[place], place)
            positions.setdefault(known[place], []).append(place)
        if prompt:
            self._prompt = len(known)
        self._habits = None

    def observe_branch(self, context: Sequence[int], row: Row) -> None:
        """Only committed positions are kept."""

    def root(self) -> State:
        return self._state

    def advance(self, state: State, token: int) -> State:
        return self._advance(state, token, len(self._tokens))

    def _advance(self, state: State, token: int, end: int) -> State:
        """`end`: the tokens before it may be matched; the last of them has nothing after it yet."""
        known = self._tokens
        end -= 1
        moved = []
        for code in state:
            position = code >> _BITS
            if position < end and known[position + 1] == token:
                moved.append(code + _NEXT if code & _MASK < _MASK else code + _NEXT - 1)
        room = POSITIONS - len(moved)
        if room > 0:
            fresh = self._positions.get(token)
            if fresh is not None:
                taken = {code >> _BITS for code in moved}
                moved += [
                    position << _BITS | 1 for position in fresh[: -room - 1 : -1] if position not in taken
                ]
        return tuple(moved)

    def predict(self, state: State) -> list[Evidence]:
        known, rows = self._tokens, self._rows
        end = len(known) - 1
        longest = 0
        for code in state:
            length = code & _MASK
            if length > longest and code >> _BITS < end:
                longest = length
        if longest > LONGEST:
            longest = LONGEST
        found: list[Evidence] = []
        if longest:
            hards: dict[int, float] = {}
            soft: list[tuple[float, Row]] = []
            total = 0.0
            for code in state:
                length, position = code & _MASK, code >> _BITS
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
            level = longest if soft else longest + HARD_ONLY
            found.append(Evidence(TRUST[longest], level, hards, soft))
        if longest <= HABITS_UP_TO:
            if self._habits is None:
                self._habits = self._habit()
            found.append(Evidence(TRUST[0], 0, self._habits, []))
        return found

    def locate(self, state: State, token: int) -> tuple[None, int] | None:
        """The position whose longest match `token` continues."""
        known = self._tokens
        end = len(known) - 1
        copied = [code for code in state if code >> _BITS < end and known[(code >> _BITS) + 1] == token]
        return (None, (max(copied, key=lambda code: (code & _MASK, code)) >> _BITS) + 1) if copied else None

    def _habit(self) -> dict[int, float]:
        """What this text says often, and what the model's predictions of the output have lately favoured."""
        known, counts = self._tokens, self._said
        for place in range(max(self._counted, len(known) - SAID_TOKENS), len(known)):
            token = known[place]
            counts[token] = counts.get(token, 0) + 1
        for place in range(max(0, self._counted - SAID_TOKENS), min(self._counted, len(known) - SAID_TOKENS)):
            token = known[place]
            if counts[token] == 1:
                del counts[token]
            else:
                counts[token] -= 1
        self._counted = len(known)
        share = SAID / min(len(known), SAID_TOKENS)
        sums = {token: share * count for token, count in counts.items()}

        end = len(self._rows) - 1
        start = max(self._prompt - 1, end - FAVOURED_ROWS, 0)
        latest = [row for row in self._rows[start:end] if row is not None]
        for age, row in enumerate(reversed(latest)):
            share = FAVOURED / len(latest)
            passed_over = PASSED_OVER / PASSED_OVER_ROWS if age < PASSED_OVER_ROWS else 0.0
            came = known[end - age] if passed_over else -1
            for token, prob in row.items():
                weight = share if token == came else share + passed_over
                sums[token] = sums.get(token, 0.0) + weight * prob
        best = nlargest(HABITS, sums.items(), key=lambda item: (item[1], -item[0]))
        return dict(best)
