"""The `ngrams` source: one request's view of the tables that its scope has learned."""

from collections.abc import Sequence
from functools import lru_cache

from reader_rag.draft.ngram_table import LATEST, Entry, Keys, NgramTable, keys_of, longer
from reader_rag.draft.source import Evidence, Row

__all__ = ["LATEST", "NgramSource", "NgramTable"]

BRANCH_ORDERS = 2  # a branch was not committed: only its last tokens are worth learning from
TRUST = (0.0, 0.50, 0.75, 0.88, 0.93)  # by order, for contexts that were seen very often
DOUBT = 0.5  # a context seen n times keeps n / (n + DOUBT) of that
FROZEN = 100  # added to the levels of the frozen table: its reliability is its own


class NgramSource:
    """One request's view of a NgramTable, and of a frozen one beside it; its state is the keys of the tail."""

    name = "ngrams"

    def __init__(self, table: NgramTable, frozen: NgramTable | None = None) -> None:
        self._table = table
        # (tables by order, what is added to their levels)
        self._read = [
            (({}, *known.tables), base) for known, base in ((table, 0), (frozen, FROZEN)) if known is not None
        ]
        self._tail: Keys = ()

    def observe(self, tokens: Sequence[int], rows: Sequence[Row | None], prompt: bool) -> None:
        """Learns what the model expected (soft), and what it said where that was something else or is not known (hard).

        What a prompt's text says is for `context` to copy; it is not the model's habit.
        """
        if not tokens:
            return
        contexts: list[Keys] = []
        known: list[Row] = []
        tail = self._tail
        for token, row in zip(tokens, rows, strict=True):
            if tail and row:
                contexts.append(tail)
                known.append(row)
            if tail and not prompt and (not row or token != max(row, key=row.__getitem__)):
                contexts.append(tail)  # a draw, or an answer that came without predictions
                known.append(_hard(token))
            tail = longer(tail, token)
        self._tail = tail
        block = 64  # keeps the table's lock short
        for start in range(0, len(known), block):
            self._table.learn(contexts[start : start + block], known[start : start + block])

    def observe_branch(self, context: Sequence[int], row: Row) -> None:
        self.observe_branches([context], [row])

    def observe_branches(self, contexts: Sequence[Sequence[int]], rows: Sequence[Row]) -> None:
        tail = self._tail[:BRANCH_ORDERS]
        last = tail[:1]
        branches = [
            keys_of((*last, *context[-BRANCH_ORDERS:]))[:BRANCH_ORDERS] if context else tail
            for context in contexts
        ]
        self._table.learn(branches, rows)

    def root(self) -> Keys:
        return self._tail

    def advance(self, state: Keys, token: int) -> Keys:
        return longer(state, token)

    def predict(self, state: Keys) -> list[Evidence]:
        found: list[Evidence] = []
        for tables, base in self._read:
            for order in range(len(state), 0, -1):
                entry = tables[order].get(state[order - 1])
                if entry is not None:
                    found.append(_evidence(order, entry, base))
        return found


def _evidence(order: int, entry: Entry, base: int) -> Evidence:
    seen, rows = entry
    share = 1.0 / len(rows)
    trust = TRUST[order] * seen / (seen + DOUBT)
    return Evidence(trust, base + _level(order, seen), {}, [(share, row) for row in rows])


@lru_cache(maxsize=1 << 14)
def _hard(token: int) -> Row:
    """One row per token: tables count a shared row's memory once."""
    return {token: 1.0}


def _level(order: int, seen: float) -> int:
    """Reliability is learned per order and per how often the context was seen: 10 * order + 0, 1, 2, 3 (2, 4, 8 times)."""
    return 10 * order + (seen >= 2.0) + (seen >= 4.0) + (seen >= 8.0)
