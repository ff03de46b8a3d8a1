"""N-gram tables that meet: merged saves of two processes, a frozen table beside the live one, copies; hard evidence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reader_rag.draft import NgramTable, make_drafter
from reader_rag.draft.ngrams import LATEST, NgramSource
from reader_rag.draft.source import Row


def table_of(*entries: tuple[int, int], limit: int = 64 << 20) -> NgramTable:
    table = NgramTable(limit)
    for before, after in entries:
        table.add([[before]], [Row({after: 0.9})])
    return table


def known(table: NgramTable) -> set[tuple[int, int]]:
    return {
        (before, token)
        for before in range(12)
        for _, _, rows in table.lookup([before])
        for row in rows
        for token in row
    }


def test_a_save_keeps_what_another_process_saved_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "n.npz"
    table_of((1, 2)).save(path, "model")
    mine, theirs = NgramTable.load(path, "model"), NgramTable.load(path, "model")
    mine.add([[3]], [Row({4: 0.9})])
    theirs.add([[5]], [Row({6: 0.9})])
    theirs.add([[1]], [Row({7: 0.9})])
    theirs.save(path, "model")
    mine.save(path, "model")
    both = NgramTable.load(path, "model")
    assert known(both) == {(1, 2), (1, 7), (3, 4), (5, 6)}
    assert both.lookup([1])[0][1] == 2.0, "the larger count, not the sum: both began as one table"
    mine.save(path, "model")
    assert known(NgramTable.load(path, "model")) == known(both), "merging again changes nothing"


def test_two_processes_that_save_at_once_lose_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from reader_rag.draft import NgramTable; from reader_rag.draft.source import Row\n"
        "table = NgramTable(); table.add([[int(sys.argv[2])]], [Row({9: 0.5})]); table.save(sys.argv[1], 'm')"
    )
    path = tmp_path / "n.npz"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(path), str(number)], env=env) for number in range(3)
    ]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert known(NgramTable.load(path, "m")) == {(0, 9), (1, 9), (2, 9)}


def test_merging_respects_the_limit_and_drops_the_others_first() -> None:
    mine = table_of((1, 2), (3, 4))
    mine.limit = mine.nbytes
    mine.merge(table_of((5, 6), (7, 8)))
    assert known(mine) == {(1, 2), (3, 4)}
    assert mine.nbytes <= mine.limit


def test_merged_predictions_are_the_latest_few() -> None:
    mine = table_of((1, 2))
    mine.merge(table_of(*((1, token) for token in range(20, 30))))
    rows = mine.lookup([1])[0][2]
    assert len(rows) == LATEST
    assert 2 in rows[0]


def test_a_table_of_another_model_is_not_merged(tmp_path: Path) -> None:
    path = tmp_path / "n.npz"
    table_of((1, 2)).save(path, "other")
    table_of((3, 4)).save(path, "mine")
    assert known(NgramTable.load(path, "mine")) == {(3, 4)}


def test_a_frozen_table_is_read_and_never_taught() -> None:
    frozen, live = table_of((1, 2)), NgramTable()
    before = frozen.nbytes
    drafter = make_drafter(["ngrams"], ngrams=live, frozen_ngrams=frozen)
    drafter.observe_prompt([1], None, None)
    assert drafter.draft([], 1, 1).tokens == [2]
    drafter.observe([3, 4], [[3], [4]], [[0.9], [0.9]])
    assert known(live) == {(1, 3), (3, 4)}
    assert (frozen.nbytes, known(frozen)) == (before, {(1, 2)})
    levels = {level for _, level in drafter.learned()}
    assert levels == {110}, "its reliability is its own"


def test_a_copy_learns_alone() -> None:
    first = table_of((1, 2))
    second = first.copy()
    second.add([[3]], [Row({4: 0.9})])
    assert (known(first), known(second)) == ({(1, 2)}, {(1, 2), (3, 4)})
    while second._evict():
        pass
    assert second.nbytes == 0
    assert first.nbytes > 0


def test_answers_without_predictions_teach_what_followed_and_prompts_do_not() -> None:
    table = NgramTable()
    source = NgramSource(table)
    source.observe([1, 2], [None, None], True)
    assert len(table) == 0
    source.observe([3], [None], False)
    assert known(table) == {(2, 3)}
    source.observe([7], [Row({8: 0.6, 7: 0.3})], False)
    assert known(table) == {(2, 3), (3, 8), (3, 7)}, "a draw teaches beside what was expected"
    expected = NgramTable()
    NgramSource(expected).observe([1, 8], [None, Row({8: 0.6})], False)
    assert len(expected.lookup([1])[0][2]) == 1, "what the model expected and said is one piece of evidence"
    assert expected.lookup([1])[0][2][0][8] == pytest.approx(0.6)
