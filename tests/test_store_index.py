"""The store: search by FAISS and by matrix product, persistence, damage, threads, bad input."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import sqlite3
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reader_rag.errors import SettingsError, StoreError
from reader_rag.store import Chunk, Store
from reader_rag.store import index as index_module
from reader_rag.store import vectors as vectors_module
from reader_rag.store.vectors import FaissVectors, MatrixVectors, nearest


class HashingEmbedder:
    """Words to buckets: the more words two texts share, the nearer they are."""

    def __init__(self, name: str = "hashing", dim: int = 64) -> None:
        self.name, self.dim = name, dim
        self.documents = 0  # texts encoded so far

    def encode_query(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            for word in text.lower().split():
                vector[zlib.crc32(word.encode()) % self.dim] += 1
        return vectors  # not normalised: the store must do that

    def encode_document(self, texts: Sequence[str]) -> np.ndarray:
        self.documents += len(texts)
        return self.encode_query(texts)


WORDS = [
    "apple",
    "river",
    "stone",
    "cloud",
    "engine",
    "violin",
    "harbour",
    "pepper",
    "glacier",
    "lantern",
    "meadow",
    "copper",
]
TEXTS = [f"{a} {b} {a} number{i}" for i, (a, b) in enumerate((a, b) for a in WORDS for b in WORDS)]


def chunks_of(texts: Sequence[str] = TEXTS) -> list[Chunk]:
    return [Chunk.from_text(text, {"position": i}) for i, text in enumerate(texts)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def embedder() -> HashingEmbedder:
    return HashingEmbedder()


def found(store: Store, query: str, k: int = 5) -> list[tuple[str, float]]:
    return [(hit.chunk.id, hit.score) for hit in store.search(query, k)]


def state(store: Store) -> list[tuple[Any, ...]]:
    return store._database.query("SELECT row, id, text, metadata, path, vector FROM chunks ORDER BY row")


def brute_force(texts: Sequence[str], query: str, k: int) -> list[str]:
    embedder = HashingEmbedder()
    matrix, vector = embedder.encode_query(texts), embedder.encode_query([query])[0]
    scores = matrix @ vector / np.linalg.norm(matrix, axis=1) / np.linalg.norm(vector)
    return [texts[i] for i in np.argsort(-scores.round(6), kind="stable")[:k]]


# Search


@pytest.mark.parametrize("faiss", [True, False])
def test_search_gives_the_cosine_order_of_brute_force(
    folder: Path, embedder: HashingEmbedder, faiss: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not faiss:
        monkeypatch.setattr(index_module, "import_faiss", lambda: None)
        monkeypatch.setattr(vectors_module, "import_faiss", lambda: None)
    with Store.open(folder, embedder) as store:
        store.add(chunks_of())
        for query in ("river stone", "violin", "pepper pepper harbour copper"):
            hits = store.search(query, 10)
            assert [hit.chunk.text for hit in hits] == brute_force(TEXTS, query, 10)
            assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        exact = store.search(TEXTS[17], 1)[0]
        assert exact.chunk == chunks_of()[17]
        assert exact.score == pytest.approx(1)
        assert isinstance(store._index._vectors, FaissVectors if faiss else MatrixVectors)
        assert len(store.search("river", 10_000)) == len(TEXTS)
    assert (folder / "vectors.faiss").exists() is faiss


def test_faiss_and_matrix_product_agree_bit_for_bit_also_between_equal_vectors() -> None:
    random = np.random.default_rng(0)
    vectors = random.standard_normal((500, 48)).astype(np.float32)
    vectors[100:200] = vectors[7]  # the same text in many files
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = random.permutation(10_000)[:500].astype(np.int64)
    order = random.permutation(500)
    with_faiss, with_matrix = FaissVectors(48), MatrixVectors(48)
    with_faiss.add(rows, vectors)
    with_matrix.add(rows[order[:250]], vectors[order[:250]])
    with_matrix.add(rows[order[250:]], vectors[order[250:]])
    gone = rows[50:90]
    for both in (with_faiss, with_matrix):
        both.remove(gone)
    for query in (vectors[7], vectors[300], vectors[60]):
        for k in (1, 4, 16, 50, 1000):
            rows_1, scores_1 = nearest(with_faiss, query, k)
            rows_2, scores_2 = nearest(with_matrix, query, k)
            assert rows_1.tolist() == rows_2.tolist()
            assert scores_1.tolist() == scores_2.tolist()
            assert not set(rows_1) & set(gone)
            assert len(rows_1) == min(k, 460)


def test_equal_texts_under_two_ids_are_both_found_in_order_of_adding(
    folder: Path, embedder: HashingEmbedder
) -> None:
    with Store.open(folder, embedder) as store:
        store.add([Chunk(str(i), "the same words") for i in range(30)])
        assert [hit.chunk.id for hit in store.search("the same words", 3)] == ["0", "1", "2"]


def test_a_search_in_an_empty_store_finds_nothing(folder: Path, embedder: HashingEmbedder) -> None:
    with Store.open(folder, embedder) as store:
        assert store.search("anything") == []
        ids = store.add(chunks_of())
        assert store.delete(ids) == len(TEXTS)
        assert store.search("anything") == []


# Adding and deleting


def test_adding_a_known_id_replaces_its_chunk_everywhere(folder: Path, embedder: HashingEmbedder) -> None:
    with Store.open(folder, embedder) as store:
        store.add([Chunk("a", "apple pie", {"n": 1}), Chunk("b", "river bank")])
        store.token_arrays("t", lambda text: [len(text)])
        assert store.search("apple pie", 1)[0].chunk.metadata == {"n": 1}
        store.add([Chunk("a", "first try"), Chunk("a", "stone wall", {"n": 2})])
        assert len(store) == 2
        assert store.get(["a"]) == [Chunk("a", "stone wall", {"n": 2})]
        assert store.search("stone wall", 1)[0].chunk.id == "a"
        assert store.search("apple pie", 1)[0].score < 0.5
        assert store.token_arrays("t", lambda text: [len(text)])["a"].tolist() == [len("stone wall")]


def test_known_texts_are_not_embedded_again_but_their_metadata_is_renewed(
    folder: Path, embedder: HashingEmbedder
) -> None:
    with Store.open(folder, embedder) as store:
        store.add(chunks_of())
        store.add([Chunk(chunk.id, chunk.text, {"new": True}) for chunk in chunks_of()])
        assert embedder.documents == len(TEXTS)
        assert store.get([chunks_of()[3].id])[0].metadata == {"new": True}


def test_deleted_chunks_are_gone_and_their_rows_are_never_used_again(
    folder: Path, embedder: HashingEmbedder
) -> None:
    with Store.open(folder, embedder) as store:
        ids = store.add(chunks_of())
        before = max(row for row, *_ in state(store))
        assert store.search(TEXTS[-1], 1)[0].chunk.id == ids[-1]
        assert store.delete([ids[-1], "unknown"]) == 1
        assert store.get([ids[-1], ids[0]]) == [chunks_of()[0]]
        assert ids[-1] not in dict(found(store, TEXTS[-1], 200))
        store.add([Chunk("new", "entirely new")])
        assert max(row for row, *_ in state(store)) > before
        assert store.search("entirely new", 1)[0].chunk.id == "new"


def test_an_interrupted_add_leaves_the_store_as_it_was_and_goes_on_where_it_stopped(
    folder: Path, embedder: HashingEmbedder
) -> None:
    class Interrupted(HashingEmbedder):
        def encode_document(self, texts: Sequence[str]) -> np.ndarray:
            if self.documents >= 512:
                raise KeyboardInterrupt
            return super().encode_document(texts)

    many = [Chunk(str(i), f"{TEXTS[i % len(TEXTS)]} extra{i}") for i in range(700)]
    with Store.open(folder, embedder) as store:
        store.add(chunks_of())
        before = state(store)
    with Store.open(folder, Interrupted()) as store:
        with pytest.raises(KeyboardInterrupt):
            store.add(many)
        assert state(store) == before
    embedder.documents = 0
    with Store.open(folder, embedder) as store:
        assert state(store) == before
        store.add(many)
        assert len(store) == len(TEXTS) + 700
        assert embedder.documents == 700 - 512
        assert store.search(many[3].text, 1)[0].chunk.id == "3"
        assert store._database.query("SELECT * FROM embedded") == []


def test_a_failure_inside_the_transaction_changes_nothing(
    folder: Path, embedder: HashingEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(folder, embedder) as store:
        store.add(chunks_of())
        before = state(store)

        def fail(self: Store) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Store, "_changed", fail)
        with pytest.raises(KeyboardInterrupt):
            store.add([Chunk(chunks_of()[0].id, "another text"), Chunk("new", "new text")])
        with pytest.raises(KeyboardInterrupt):
            store.delete([chunks_of()[0].id])
        monkeypatch.undo()
        assert state(store) == before


def _add_and_die(folder: Path) -> None:
    store = Store.open(folder, HashingEmbedder())
    store.add([Chunk("late", "a late addition")])
    store._database.run("BEGIN IMMEDIATE")
    store._database.run("DELETE FROM chunks")
    os._exit(9)  # neither closed nor committed


def test_a_process_killed_half_way_loses_only_what_it_had_not_committed(
    folder: Path, embedder: HashingEmbedder
) -> None:
    with Store.open(folder, embedder) as store:
        store.add(chunks_of())
    process = multiprocessing.get_context("spawn").Process(target=_add_and_die, args=(folder,))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    with Store.open(folder, embedder) as store:
        assert len(store) == len(TEXTS) + 1
        assert store.search("a late addition", 1)[0].chunk.id == "late"


# Persistence


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


# Threads


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


# Token arrays


def test_token_arrays_are_int32_and_encoded_once_per_tokenizer(
    folder: Path, embedder: HashingEmbedder
) -> None:
    calls: list[str] = []

    def encode(text: str) -> list[int]:
        calls.append(text)
        return [151_935, *text.encode()]

    with Store.open(folder, embedder) as store:
        ids = store.add(chunks_of(TEXTS[:10]))
        arrays = store.token_arrays("tokenizer-1", encode)
        assert list(arrays) == ids
        assert all(array.dtype == np.int32 for array in arrays.values())
        assert arrays[ids[0]].tolist() == [151_935, *TEXTS[0].encode()]
    with Store.open(folder, embedder) as store:
        store.add(chunks_of(TEXTS[:12]))
        store.delete(ids[:1])
        assert store._database.query("SELECT count(*) FROM tokens") == [(9,)]  # a chunk's tokens go with it
        again = store.token_arrays("tokenizer-1", encode)
        assert calls == TEXTS[:12]
        assert list(again) == [*ids[1:], *(chunk.id for chunk in chunks_of(TEXTS[:12])[10:])]
        assert again[ids[1]].tolist() == arrays[ids[1]].tolist()
        other = store.token_arrays("tokenizer-2", lambda text: [])
        assert all(len(array) == 0 for array in other.values())
        assert store.token_arrays("tokenizer-1", encode)[ids[1]].tolist() == arrays[ids[1]].tolist()
        assert len(calls) == 12


@pytest.mark.parametrize("ids", [[-1], [2**31], [[1, 2]]])
def test_token_ids_that_do_not_fit_are_refused(folder: Path, embedder: HashingEmbedder, ids: Any) -> None:
    with Store.open(folder, embedder) as store:
        store.add(chunks_of(TEXTS[:1]))
        with pytest.raises(StoreError, match="token ids"):
            store.token_arrays("t", lambda text: ids)


# Bad input: one clear error each, and the store as it was


def test_a_store_made_by_another_embedder_is_refused(folder: Path, embedder: HashingEmbedder) -> None:
    with Store.open(folder, embedder) as store:
        store.add(chunks_of())
    with pytest.raises(StoreError, match=r"made by the embedder 'hashing', not by 'other'.*open it with"):
        Store.open(folder, HashingEmbedder("other"))
    with pytest.raises(StoreError, match="64 numbers, the embedder gives 32"):
        Store.open(folder, HashingEmbedder(dim=32))
    with Store.open(folder) as store:  # fine as long as no embedder is needed
        assert store.embedder_name == "hashing"
        assert len(store.get([chunks_of()[0].id])) == 1
        with pytest.raises(StoreError, match="embedder object 'hashing': pass it"):
            store.search("apple")
    with Store.open(folder, embedder) as store:
        assert len(store.search("apple")) == 4


def test_an_embedder_that_changes_its_dim_is_refused(folder: Path, embedder: HashingEmbedder) -> None:
    with Store.open(folder, embedder) as store:
        store.add(chunks_of())
        before = state(store)
        embedder.dim = 32
        for use in (lambda: store.search("apple"), lambda: store.add([Chunk("a", "b")])):
            with pytest.raises(StoreError, match="64 numbers, the embedder gives 32"):
                use()
        assert state(store) == before


def test_an_embedder_that_gives_nan_is_refused(
    folder: Path, embedder: HashingEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedder, "encode_document", lambda texts: np.full((len(texts), 64), np.nan))
    with Store.open(folder, embedder) as store:
        with pytest.raises(StoreError, match="finite"):
            store.add(chunks_of())
        assert len(store) == 0


def test_a_newer_format_is_refused_with_the_command_that_helps(
    folder: Path, embedder: HashingEmbedder
) -> None:
    Store.open(folder, embedder).close()
    with sqlite3.connect(folder / "store.db") as connection:
        connection.execute("UPDATE meta SET value = '99' WHERE key = 'format'")
    connection.close()
    with pytest.raises(StoreError, match=r"format 99.*pip install --upgrade reader-rag"):
        Store.open(folder, embedder)


@pytest.mark.parametrize("damage", ["text", "half", "page", "header"])
def test_a_damaged_database_is_reported_and_left_alone(
    folder: Path, embedder: HashingEmbedder, damage: str
) -> None:
    with Store.open(folder, embedder) as store:
        store.add(chunks_of())
    path = folder / "store.db"
    content = path.read_bytes()
    broken = {
        "text": b"This is not a database, it is a sentence. " * 200,
        "half": content[: len(content) // 2],
        "page": content[:8192] + b"\xff" * 4096 + content[12288:],
        "header": b"\0" * 100 + content[100:],
    }[damage]
    path.write_bytes(broken)
    with pytest.raises(
        StoreError, match=r"is corrupted \(.*restore it from a backup, or delete it and index"
    ):
        Store.open(folder, embedder)
    assert path.read_bytes() == broken


def test_metadata_that_was_damaged_is_reported(folder: Path, embedder: HashingEmbedder) -> None:
    with Store.open(folder, embedder) as store:
        store.add(chunks_of())
        store._database.run("UPDATE chunks SET metadata = '{'")
        with pytest.raises(StoreError, match="corrupted"):
            store.search("apple")


def test_a_database_that_stopped_before_its_first_table_is_a_new_store(
    folder: Path, embedder: HashingEmbedder
) -> None:
    folder.mkdir()
    (folder / "store.db").touch()
    with Store.open(folder, embedder) as store:
        assert len(store) == 0
        store.add(chunks_of())
        assert len(store.search("apple")) == 4


def test_a_foreign_database_is_not_touched(folder: Path, embedder: HashingEmbedder) -> None:
    folder.mkdir()
    with sqlite3.connect(folder / "store.db") as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()
    content = (folder / "store.db").read_bytes()
    with pytest.raises(StoreError, match="no store of reader_rag: name another folder"):
        Store.open(folder, embedder)
    assert (folder / "store.db").read_bytes() == content


def test_paths_that_hold_no_store_are_refused(tmp_path: Path, embedder: HashingEmbedder) -> None:
    file = tmp_path / "file.txt"
    file.write_text("text")
    with pytest.raises(StoreError, match="is a file, but a store is a folder"):
        Store.open(file, embedder)
    with pytest.raises(StoreError, match="cannot open"):
        Store.open(file / "below", embedder)
    with pytest.raises(StoreError, match="no such folder; mend the path"):
        Store.open(tmp_path / "missing", embedder, create=False)
    with pytest.raises(StoreError, match="there is no store in it"):
        Store.open(tmp_path, embedder, create=False)
    (tmp_path / "odd" / "store.db").mkdir(parents=True)
    with pytest.raises(StoreError, match="cannot open"):
        Store.open(tmp_path / "odd", embedder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.txt", "odd"]


def test_a_store_that_may_not_be_read_is_refused(folder: Path, embedder: HashingEmbedder) -> None:
    Store.open(folder, embedder).close()
    (folder / "store.db").chmod(0)
    if os.access(folder / "store.db", os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(StoreError, match="permissions"):
        Store.open(folder, embedder)


def test_a_store_on_a_read_only_disk_can_be_searched(
    folder: Path, embedder: HashingEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(folder, embedder) as store:
        store.add(chunks_of())
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    (copy / "vectors.faiss").unlink()
    with Store.open(copy, embedder) as store:
        store._database.run("PRAGMA query_only = ON")
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
        assert store.search(TEXTS[9], 1)[0].chunk.text == TEXTS[9]
        assert len(store.token_arrays("t", lambda text: [1])) == len(TEXTS)
        with pytest.raises(StoreError, match="read-only: mend its permissions"):
            store.add([Chunk("a", "b")])
    assert not (copy / "vectors.faiss").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Chunk("a", 3), "text of a chunk must be a str, not int"),  # type: ignore[arg-type]
        (lambda: Chunk.from_text(None), "must be a str, not NoneType"),  # type: ignore[arg-type]
        (lambda: Chunk("", "text"), "id of a chunk is empty"),
        (lambda: Chunk("a", "half \ud83d emoji"), "half a surrogate pair at character 5"),
        (lambda: Chunk("a", "text", ["x"]), "must be a mapping"),  # type: ignore[arg-type]
        (lambda: Chunk("a", " \n"), "text of chunk 'a' is empty"),
        (lambda: "a text", "takes Chunk objects, not str"),
        (lambda: Chunk("a", "text", {"path": Path("x")}), "metadata of chunk 'a' is not JSON"),
        (lambda: Chunk("a", "text", {1: "x"}), "metadata key 1"),  # type: ignore[dict-item]
    ],
)
def test_chunks_that_cannot_be_kept_are_refused_and_none_of_the_others_is_kept(
    folder: Path, embedder: HashingEmbedder, wrong: Any, message: str
) -> None:
    with Store.open(folder, embedder) as store:
        with pytest.raises(StoreError, match=message):
            store.add([Chunk("good", "good text"), wrong()])
        assert len(store) == 0


def test_questions_that_cannot_be_asked_are_refused(folder: Path, embedder: HashingEmbedder) -> None:
    with Store.open(folder, embedder) as store:
        store.add(chunks_of())
        for query in ("", " \n\t", None):
            with pytest.raises(StoreError, match="query is empty"):
                store.search(query)  # type: ignore[arg-type]
        with pytest.raises(SettingsError, match="k is 0"):
            store.search("apple", 0)
        with pytest.raises(StoreError, match=r"pass \['abc'\]"):
            store.delete("abc")
    with pytest.raises(StoreError, match="is closed: open it again"):
        store.search("apple")
    store.close()


def test_a_chunk_keeps_any_text_and_a_copy_of_its_metadata(folder: Path, embedder: HashingEmbedder) -> None:
    metadata = {"title": "日本語", "tags": ["a", None, 1.5], "nested": {"x": True}}
    chunk = Chunk("ключ", "nul \0, 👩‍👩‍👧, <|im_end|>, '; DROP TABLE chunks; --\r\n", metadata)
    metadata["title"] = "changed"
    assert hash(chunk) == hash(Chunk("ключ", chunk.text))
    with Store.open(folder, embedder) as store:
        store.add([chunk])
    with Store.open(folder, embedder) as store:
        assert store.get(["ключ"]) == [chunk]
        assert store.get(["ключ"])[0].metadata["title"] == "日本語"
