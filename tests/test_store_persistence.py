"""What lies in the folder: reopened, damaged, behind, written by two at once."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from store_fakes import TEXTS, HashingEmbedder, chunks_of, found

from reader_rag.errors import StoreError
from reader_rag.store import Chunk, Store
from reader_rag.store import index as index_module


def test_a_reopened_store_gives_the_same_hits_without_rebuilding(
    folder: Path, embedder: HashingEmbedder, caplog: pytest.LogCaptureFixture
) -> None:
    with Store.open(folder, embedder) as store:
        store.add(chunks_of())
        before = found(store, "river stone", 20)
    with caplog.at_level(logging.INFO, "reader_rag"), Store.open(folder, embedder, create=False) as store:
        assert found(store, "river stone", 20) == before
        assert len(store) == len(TEXTS)
        assert store.embedder_name == "hashing"
    assert not caplog.records
    assert sorted(path.name for path in folder.iterdir()) == ["store.db", "vectors.faiss"]


@pytest.mark.parametrize("damage", ["missing", "half", "flipped", "foreign", "empty", "older", "behind"])
def test_a_search_index_that_is_not_the_saved_one_is_rebuilt_silently(
    folder: Path, embedder: HashingEmbedder, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "vectors.faiss"
    with Store.open(folder, embedder) as store:
        store.add(chunks_of(TEXTS[:50]))
    older = path.read_bytes()
    with Store.open(folder, embedder) as store:
        store.add(chunks_of())
        store.delete([chunks_of()[0].id])
        expected = found(store, "apple river", 30)
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "behind":  # another process has written and not saved
        store = Store.open(folder, embedder)
        store.add([Chunk("x", "apple apple apple"), Chunk("y", "river river")])
        expected = found(store, "apple river", 30)
        store._database.close()
    else:
        middle = len(content) // 2
        path.write_bytes(
            {
                "half": content[:middle],
                "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
                "foreign": b"not an index",
                "empty": b"",
                "older": older,
            }[damage]
        )
    with caplog.at_level(logging.INFO, "reader_rag"), Store.open(folder, embedder) as store:
        assert found(store, "apple river", 30) == expected
        assert [record.levelname for record in caplog.records] == ([] if damage == "behind" else ["INFO"])
    caplog.clear()
    with caplog.at_level(logging.INFO, "reader_rag"), Store.open(folder, embedder) as store:
        assert found(store, "apple river", 30) == expected
    assert not caplog.records  # the search had saved what it rebuilt


def test_a_saved_index_that_matches_its_checksum_but_not_the_store_is_rebuilt(
    folder: Path, embedder: HashingEmbedder
) -> None:
    with Store.open(folder, embedder) as store:
        store.add(chunks_of())
        expected = found(store, "violin", 10)
    content = b"garbage that FAISS refuses"
    (folder / "vectors.faiss").write_bytes(content)
    with sqlite3.connect(folder / "store.db") as connection:
        (text,) = connection.execute("SELECT value FROM meta WHERE key = 'vectors'").fetchone()
        record = json.loads(text) | {"sha256": index_module._sha256(content)}
        connection.execute("UPDATE meta SET value = ? WHERE key = 'vectors'", (json.dumps(record),))
    connection.close()
    with Store.open(folder, embedder) as store:
        assert found(store, "violin", 10) == expected


def test_a_search_index_that_cannot_be_written_costs_nothing_but_the_rebuild(
    folder: Path, embedder: HashingEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, content: bytes) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(index_module, "_write_whole", fail)
    with Store.open(folder, embedder) as store:
        store.add(chunks_of())
        expected = found(store, "violin", 10)
    monkeypatch.undo()
    with Store.open(folder, embedder) as store:
        assert found(store, "violin", 10) == expected


def test_a_write_that_fails_leaves_the_old_file_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(KeyboardInterrupt):
        index_module._write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_open_stores_see_each_others_chunks(folder: Path, embedder: HashingEmbedder) -> None:
    with Store.open(folder, embedder) as one, Store.open(folder, HashingEmbedder()) as two:
        one.add(chunks_of())
        assert two.search(TEXTS[5], 1)[0].chunk.text == TEXTS[5]
        two.add([Chunk("new", "entirely new")])
        assert one.search("entirely new", 1)[0].chunk.id == "new"
        one.delete(["new"])
        assert "new" not in dict(found(two, "entirely new", 200))


def test_nothing_is_pickled() -> None:
    package = Path(index_module.__file__).parent
    assert not [path for path in package.glob("*.py") if "import pickle" in path.read_text()]


def test_searches_stay_right_while_other_threads_add_and_delete(
    folder: Path, embedder: HashingEmbedder
) -> None:
    fixed = chunks_of()
    errors: list[BaseException] = []
    done = threading.Event()

    def attempt(work: Any) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    with Store.open(folder, embedder) as store:
        store.add(fixed)

        def write(name: str) -> None:
            for i in range(15):
                ids = store.add([Chunk(f"{name}{i}{j}", f"filler {name} {i} {j}") for j in range(5)])
                store.delete(ids[:2])

        def search() -> None:
            turn = 0
            while not done.is_set():
                turn += 1
                chunk = fixed[turn % len(fixed)]
                assert store.search(chunk.text, 2)[0].chunk == chunk
                store.token_arrays("t", lambda text: [len(text)])

        writers = [threading.Thread(target=attempt, args=(lambda n=n: write(n),)) for n in "ab"]
        searchers = [threading.Thread(target=attempt, args=(search,)) for _ in range(3)]
        for thread in [*writers, *searchers]:
            thread.start()
        for thread in writers:
            thread.join()
        done.set()
        for thread in searchers:
            thread.join()
        assert not errors
        assert len(store) == len(fixed) + 2 * 15 * 3


# Without a folder, and into another one


def test_a_store_in_memory_does_what_one_in_a_folder_does(tmp_path: Path, embedder: HashingEmbedder) -> None:
    with Store.in_memory(embedder) as store, Store.open(tmp_path / "store", embedder) as other:
        assert store.folder is None
        for each in (store, other):
            each.add(chunks_of())
            each.delete([chunks_of()[7].id])
        assert found(store, "apple river", 30) == found(other, "apple river", 30)
        assert (
            store.token_arrays("t", lambda text: [len(text)]).keys()
            == other.token_arrays("t", lambda text: [len(text)]).keys()
        )
    with pytest.raises(StoreError, match="the store in memory is closed"):
        store.search("apple")


def test_a_saved_store_is_the_same_store(folder: Path, embedder: HashingEmbedder) -> None:
    with Store.in_memory(embedder) as store:
        store.add(chunks_of())
        before = found(store, "river stone", 20)
        store.save(folder)
        store.add([Chunk("late", "river stone")])
    assert sorted(path.name for path in folder.iterdir()) == ["store.db", "vectors.faiss"]
    with Store.open(folder, HashingEmbedder(), create=False) as store:
        assert found(store, "river stone", 20) == before
        assert store.add([Chunk("late", "river stone")]) == ["late"]
        store.save(folder)  # into itself: nothing to copy
        assert len(store) == len(TEXTS) + 1


def test_saving_replaces_a_store_and_nothing_else(tmp_path: Path, embedder: HashingEmbedder) -> None:
    with Store.open(tmp_path / "old", HashingEmbedder("other", 8)) as old:
        old.add([Chunk("old", "old text")])
    (tmp_path / "foreign").mkdir()
    with sqlite3.connect(tmp_path / "foreign" / "store.db") as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()
    (tmp_path / "file").write_text("text")
    with Store.in_memory(embedder) as store:
        store.add(chunks_of())
        store.save(tmp_path / "old")
        with pytest.raises(StoreError, match="no store of reader_rag"):
            store.save(tmp_path / "foreign")
        with pytest.raises(StoreError, match="is a file"):
            store.save(tmp_path / "file")
    with Store.open(tmp_path / "old", embedder) as store:
        assert store.get(["old"]) == []
        assert store.search(TEXTS[5], 1)[0].chunk.text == TEXTS[5]
