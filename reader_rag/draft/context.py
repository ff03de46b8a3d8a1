"""The `context` source: this request's own prompt and output, by suffix matches of any length, hard and soft."""

from collections import deque
from collections.abc import Sequence
from math import exp

from reader_rag.draft.source import Evidence, Row

# Matches of 8 tokens and more are told apart by these lengths: a long copy hardly ever ends.
LONGER = (12, 16, 24, 40)
POSITIONS = 16  # match positions that are followed: the longest-lived, then the latest
STEP = 0.9  # a match one token longer weighs exp(STEP) times as much
OUTPUT = 5.0  # a match in the output weighs this many times one in the prompt
# By level: the length of a match up to 8, then one more from each of LONGER on.
HARD = (0.15, 0.15, 0.30, 0.45, 0.60, 0.70, 0.75, 0.80, 0.85, 0.90, 0.94, 0.97, 0.98)
# Where the fitted table has no entry.
TRUST = (0.40, 0.55, 0.60, 0.70, 0.75, 0.80, 0.85, 0.85, 0.88, 0.92, 0.95, 0.97, 0.98)
_LEAST_SHARE = 1  # a match shorter than the longest by more than this only blurs what the longer ones say

# Evidence of length 0 is a habit, whatever the tail: the shares of three views of what this text keeps saying.
SAID, FAVOURED, PASSED_OVER = 0.55, 0.25, 0.20
SAID_TOKENS = 300  # last tokens of prompt and output
FAVOURED_ROWS = 64  # last predictions of the output
PASSED_OVER_ROWS = 2  # last predictions: what was likely and did not come often comes a little later
HABITS = 16  # tokens named by the evidence of length 0
HARD_ONLY = 20  # added to the level of matches at which the model's predictions are not known
HABITS_UP_TO = 2  # beside matches of this length and less

State = tuple[tuple[int, tuple[int, ...]], ...]
"""Earlier occurrences of the tail by length, the longest first: (length of the match, where what followed it stands)."""
_COUNTED = 40  # lengths that a state tells apart
_SHARE = tuple(exp(-STEP * shorter) for shorter in range(_LEAST_SHARE + 1))
_LEVEL = tuple(min(length, 8) + sum(length >= least for least in LONGER) for length in range(_COUNTED + 1))


class ContextSource:
    """Where did this tail stand before, what followed (hard), and what did the model expect there (soft)?

    A match's next token takes the share HARD[level], by the length of the match; the model's prediction at that position takes the rest.
    Prompt lookup and SAM-Decoding (hard), Token Recycling (soft, length 1) are special cases.
    """

    name = "context"

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._rows: list[Row | None] = []  # [i] is the prediction that token i was chosen from
        self._followers: dict[int, list[int]] = {}  # where what followed a token stands, the latest last
        self._state: State = ()
        self._prompt = 0
        self._habit = _Habit()
        self._habits: Evidence | None = None

    def observe(self, tokens: Sequence[int], rows: Sequence[Row | None], prompt: bool) -> None:
        known, followers = self._tokens, self._followers
        start = len(known)
        known.extend(tokens)
        self._rows.extend(rows)
        # Only matches that reach the end matter, and none of their lengths beyond what a state can say.
        first = max(start, len(known) - _COUNTED - 1) if prompt else start
        for place in range(start, first):
            followers.setdefault(known[place], []).append(place + 1)
        for place in range(first, len(known)):
            token = known[place]
            self._state = self._advance(self._state, token)
            followers.setdefault(token, []).append(place + 1)
        if prompt:
            self._prompt = len(known)
        self._habits = None

    def observe_branch(self, context: Sequence[int], row: Row) -> None:
        """Only committed positions are kept."""

    def root(self) -> State:
        return self._state

    def advance(self, state: State, token: int) -> State:
        moved = self._advance(state, token)
        known = self._tokens
        if not known or token != known[-1]:
            return moved
        end = len(known)  # what follows the last committed token is not known yet
        return tuple(
            (length, left)
            for length, places in moved
            if (left := tuple([place for place in places if place != end]))
        )

    def _advance(self, state: State, token: int) -> State:
        known = self._tokens
        moved: list[tuple[int, tuple[int, ...]]] = []
        taken: list[int] = []
        for length, places in state:
            kept = [place + 1 for place in places if known[place] == token]
            if kept:
                moved.append((length + 1 if length < _COUNTED else length, tuple(kept)))
                taken += kept
        room = POSITIONS - len(taken)
        if room > 0:
            followers = self._followers.get(token)
            if followers is not None:
                fresh = followers[: -room - 1 : -1]
                if taken:
                    fresh = [place for place in fresh if place not in taken]
                if fresh:
                    moved.append((1, tuple(fresh)))
        return tuple(moved)

    def predict(self, state: State) -> list[Evidence]:
        if not state:
            return [self._habitual()]
        found = [self._matched(state)]
        if state[0][0] <= HABITS_UP_TO:
            found.append(self._habitual())
        return found

    def _matched(self, state: State) -> Evidence:
        """What followed the matches and what the model expected there; longer matches and those in the output weigh more."""
        known, rows, prompt = self._tokens, self._rows, self._prompt
        longest = state[0][0]
        hards: dict[int, float] = {}
        get = hards.get
        soft: list[tuple[float, Row]] = []
        total = 0.0
        for length, places in state:
            shorter = longest - length
            if shorter > _LEAST_SHARE:
                break
            there = _SHARE[shorter]
            here = there * OUTPUT
            part = HARD[_LEVEL[length]]
            for place in places:
                weight = there if place <= prompt else here
                total += weight
                following = known[place]
                row = rows[place]
                if row is None:
                    hards[following] = get(following, 0.0) + weight
                    continue
                hard = weight * part
                hards[following] = get(following, 0.0) + hard
                soft.append((weight - hard, row))
        level = _LEVEL[longest]
        return Evidence(
            TRUST[level],
            level if soft else level + HARD_ONLY,
            {token: weight / total for token, weight in hards.items()},
            [(weight / total, row) for weight, row in soft],
        )

    def _habitual(self) -> Evidence:
        if self._habits is None:
            self._habits = Evidence(TRUST[0], 0, self._habit.of(self._tokens, self._rows, self._prompt), [])
        return self._habits

    def locate(self, state: State, token: int) -> tuple[None, int] | None:
        """The position whose longest match `token` continues."""
        known = self._tokens
        copied = [(length, place) for length, places in state for place in places if known[place] == token]
        return (None, max(copied)[1]) if copied else None


class _Habit:
    """What a text says often, and what the model's predictions of the output have lately favoured; kept up token by token."""

    def __init__(self) -> None:
        self._counted = 0  # tokens of the text that are in what follows
        self._said: dict[int, int] = {}  # counts of the last SAID_TOKENS tokens
        self._again: dict[int, int] = {}  # those above 1
        self._favoured: dict[int, float] = {}  # sums of the last FAVOURED_ROWS predictions
        self._latest: deque[Row] = deque()  # these predictions

    def of(self, known: Sequence[int], rows: Sequence[Row | None], prompt: int) -> dict[int, float]:
        """The HABITS likeliest tokens and their shares."""
        self._count(known)
        favoured, latest = self._favoured, self._latest
        for row in rows[max(self._counted, prompt, 1) :]:
            if row is not None:
                latest.append(row)
                for token, prob in row.items():
                    favoured[token] = favoured.get(token, 0.0) + prob
        while len(latest) > FAVOURED_ROWS:
            for token, prob in latest.popleft().items():
                left = favoured[token] - prob
                if left > _NOTHING:
                    favoured[token] = left
                else:
                    del favoured[token]
        self._counted = len(known)

        once = SAID / max(1, min(len(known), SAID_TOKENS))
        sums = {token: once * count for token, count in self._again.items()}
        if latest:
            said, share = self._said.get, FAVOURED / len(latest)
            sums |= {token: once * said(token, 0) + share * prob for token, prob in favoured.items()}
            for age in range(min(PASSED_OVER_ROWS, len(latest))):
                came = known[-1 - age]
                for token, prob in latest[-1 - age].items():
                    if token != came:
                        sums[token] += PASSED_OVER / PASSED_OVER_ROWS * prob
        # Nothing that was said once and never favoured can be among the best if enough others beat it.
        best = [(-share, token) for token, share in sums.items() if share > once]
        if len(best) < HABITS:
            sums = dict.fromkeys(self._said, once) | sums
            best = [(-share, token) for token, share in sums.items()]
        best.sort()
        return {token: -negative for negative, token in best[:HABITS]}

    def _count(self, known: Sequence[int]) -> None:
        """Takes in the tokens that came, and lets those go that stand too far back now."""
        said, again = self._said, self._again
        for token in known[max(self._counted, len(known) - SAID_TOKENS) :]:
            said[token] = count = said.get(token, 0) + 1
            if count > 1:
                again[token] = count
        gone = max(0, min(self._counted, len(known) - SAID_TOKENS))
        for token in known[max(0, self._counted - SAID_TOKENS) : gone]:
            count = said[token] - 1
            if count > 1:
                said[token] = again[token] = count
            elif count:
                said[token] = count
                del again[token]
            else:
                del said[token]


_NOTHING = 1e-9  # what is left of a sum of probabilities once they have all been taken off again
