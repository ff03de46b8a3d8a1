"""The n-gram table: learns soft evidence, stays within its bytes, survives threads, crashes and damage."""

import logging
import random
import threading
import tracemalloc
from pathlib import Path

import pytest

from reader_rag.draft.ngrams import NgramSource, NgramTable
from reader_rag.draft.source import Row

LARGE = 151_935  # beyond 16 bits


def random_rows(rng: random.Random, count: int, vocabulary: int = 50_000) -> list[Row]:
    return [Row((rng.randrange(vocabulary), rng.random() / 5) for _ in range(5)) for _ in range(count)]


def filled(seed: int = 0, count: int = 300, limit: int = 64 << 20, vocabulary: int = 40) -> NgramTable:
    rng = random.Random(seed)
    table = NgramTable(limit)
    for row in random_rows(rng, count):
        table.add([[rng.randrange(vocabulary) + LARGE for _ in range(4)]], [row])
    return table


def everything(table: NgramTable) -> list[list[tuple[int, float, list[dict[int, float]]]]]:
    return [
        [(context, entry[0], [dict(row) for row in entry[1]]) for context, entry in entries.items()]
        for entries in table.tables
    ]


def test_every_order_of_a_context_is_learned() -> None:
    table = NgramTable()
    table.add([[1, 2, 3, LARGE]], [Row({5: 0.75, LARGE: 0.25})])
    table.add([[9, 9, 3, LARGE]], [Row({6: 1.0})])
    found = table.lookup([1, 2, 3, LARGE])
    assert [(order, seen) for order, seen, _ in found] == [(4, 1.0), (3, 1.0), (2, 2.0), (1, 2.0)]
    assert found[0][2] == (Row({5: 0.75, LARGE: 0.25}),)
    assert found[-1][2] == (Row({6: 1.0}), Row({5: 0.75, LARGE: 0.25})), "the latest first"
    assert table.lookup([1, 2, 3, LARGE & 0xFFFF]) == []


def test_what_a_request_learned_serves_the_next_of_its_scope_and_no_other() -> None:
    shared, other = NgramTable(), NgramTable()
    NgramSource(shared).observe([1, 2], [None, Row({2: 0.9})], False)
    later, stranger = NgramSource(shared), NgramSource(other)
    for source in (later, stranger):
        source.observe([1], [None], True)
    assert later.predict(later.root())[0].likelihood(2) == pytest.approx(0.9)
    assert stranger.predict(stranger.root()) == []


def test_a_branch_teaches_low_orders_only() -> None:
    table = NgramTable()
    source = NgramSource(table)
    source.observe([1, 2, 3], [None, None, None], True)
    source.observe_branch([4, 5], Row({6: 1.0}))
    assert [order for order, _, _ in table.lookup([2, 3, 4, 5])] == [2, 1]


@pytest.mark.parametrize("limit", [0, 20_000, 400_000])
def test_memory_stays_under_the_cap(limit: int) -> None:
    rng = random.Random(1)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    table = NgramTable(limit)
    tail = [0, 0, 0, 0]
    for _ in range(4000):
        tail = [*tail[1:], rng.randrange(3000)]
        table.add([tuple(tail)], random_rows(rng, 1))
        assert table.nbytes <= limit
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert used <= limit + 30_000
    assert used >= limit / 4, "the estimate is no excuse for using little"


def test_an_emptied_table_owes_no_bytes() -> None:
    table = filled()
    while table._evict():
        pass
    assert (table.nbytes, len(table), len(table._holders)) == (0, 0, 0)


def test_contexts_seen_again_outlive_those_seen_once() -> None:
    table = NgramTable(60_000)
    row = Row({2: 1.0})
    for number in range(2000):
        table.add([[1]], [row])
        table.add([[number + 10]], [Row({3: 1.0})])
    assert table.lookup([1])
    assert not table.lookup([11])


def test_round_trip_keeps_everything(tmp_path: Path) -> None:
    table = filled()
    table.save(tmp_path / "sub" / "ngrams.npz", "model-a")
    again = NgramTable.load(tmp_path / "sub" / "ngrams.npz", "model-a")
    assert len(again) == len(table) > 300
    assert again.nbytes == table.nbytes
    for one, two in zip(everything(table), everything(again), strict=True):
        assert [entry[:2] for entry in one] == [entry[:2] for entry in two]
        for (_, _, rows), (_, _, copies) in zip(one, two, strict=True):
            assert [list(row) for row in rows] == [list(row) for row in copies]
            for row, copy in zip(rows, copies, strict=True):
                assert list(copy.values()) == pytest.approx(list(row.values()), rel=1e-6)
    assert [file.name for file in (tmp_path / "sub").iterdir()] == ["ngrams.npz"]


def test_an_empty_table_is_saved_and_loaded(tmp_path: Path) -> None:
    NgramTable().save(tmp_path / "n.npz", "k")
    assert len(NgramTable.load(tmp_path / "n.npz", "k")) == 0


def test_loading_into_a_smaller_cap_evicts(tmp_path: Path) -> None:
    filled().save(tmp_path / "n.npz", "k")
    small = NgramTable.load(tmp_path / "n.npz", "k", limit=50_000)
    assert 0 < small.nbytes <= 50_000


def test_another_models_table_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "n.npz"
    filled().save(path, "model-a")
    with caplog.at_level(logging.WARNING, "reader_rag"):
        assert len(NgramTable.load(path, "model-b")) == 0
    assert "another model" in caplog.text
    assert path.exists()


def test_no_file_is_an_empty_table(tmp_path: Path) -> None:
    assert len(NgramTable.load(tmp_path / "none.npz", "k")) == 0


@pytest.mark.parametrize("damage", ["noise", "empty", "half", "flipped"])
def test_a_damaged_file_is_set_aside(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "n.npz"
    filled().save(path, "k")
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(
        {
            "noise": random.Random(3).randbytes(500),
            "empty": b"",
            "half": whole[:middle],
            "flipped": whole[:middle]
            + bytes(b ^ 0xFF for b in whole[middle : middle + 64])
            + whole[middle + 64 :],
        }[damage]
    )
    with caplog.at_level(logging.WARNING, "reader_rag"):
        assert len(NgramTable.load(path, "k")) == 0
    assert "cannot be read" in caplog.text
    assert not path.exists()
    assert (tmp_path / "n.npz.bad").exists()


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "n.npz"
    filled().save(path, "k")
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("numpy.savez_compressed", full)
    with pytest.raises(OSError, match="disk full"):
        filled(1).save(path, "k")
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["n.npz"]


def test_threads_do_not_corrupt_the_table(tmp_path: Path) -> None:
    table = NgramTable(300_000)
    failures: list[Exception] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        source = NgramSource(table)
        try:
            for row in random_rows(rng, 1500):
                source.observe([rng.randrange(30)], [row], False)
                source.predict(source.root())
                source.observe_branch([1, 2], row)
            table.save(tmp_path / f"{seed}.npz", "k")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for entries, turns in table._queues():
        assert sorted(entries) == sorted(turns)
    held = [row for entries in table.tables for _, rows in entries.values() for row in rows]
    assert sum(table._holders.values()) == len(held)
    while table._evict():
        pass
    assert table.nbytes == 0
