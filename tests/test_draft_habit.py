"""What a text keeps saying, kept up token by token: the same as counted afresh at every length."""

import random

import pytest

from reader_rag.draft.context import HABITS, _Habit
from reader_rag.draft.source import Row


@pytest.mark.parametrize("vocabulary", [8, 60, 2000])
def test_kept_up_it_says_what_a_recount_says(vocabulary: int) -> None:
    rng = random.Random(vocabulary)
    prompt = 250
    known = [int(rng.paretovariate(0.7)) % vocabulary for _ in range(prompt)]
    rows: list[Row | None] = [None] * prompt
    habit = _Habit()
    while len(known) < 900:
        for _ in range(rng.randrange(1, 6)):
            known.append(int(rng.paretovariate(0.7)) % vocabulary)
            rows.append(Row((rng.randrange(vocabulary), rng.randrange(1, 64) / 256) for _ in range(4)))
        if rng.random() < 0.5:  # it is not asked for at every pass
            continue
        kept, fresh = habit.of(known, rows, prompt), _Habit().of(known, rows, prompt)
        assert list(kept) == list(fresh)
        assert list(kept.values()) == pytest.approx(list(fresh.values()))
        assert len(kept) == min(
            HABITS, len(set(known[-300:]) | {t for row in rows[-64:] if row for t in row})
        )
        assert list(kept.values()) == sorted(kept.values(), reverse=True)
