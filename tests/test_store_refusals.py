"""Bad input: one clear error each, and the store as it was."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_fakes import TEXTS, HashingEmbedder, chunks_of, state

from reader_rag.errors import SettingsError, StoreError
from reader_rag.store import Chunk, GivenVectors, Store


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


def test_a_store_that_may_not_be_read_is_refused(
    folder: Path, embedder: HashingEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store.open(folder, embedder).close()

    def refuse(*args: Any, **options: Any) -> None:
        raise sqlite3.OperationalError("unable to open database file")

    monkeypatch.setattr(sqlite3, "connect", refuse)
    with pytest.raises(StoreError, match="permissions"):
        Store.open(folder, embedder)


def test_a_folder_with_the_pickled_index_of_another_program_is_not_read(
    tmp_path: Path, embedder: HashingEmbedder
) -> None:
    (tmp_path / "index.faiss").write_bytes(b"IxFI")
    (tmp_path / "index.pkl").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(StoreError, match=r"pickled index .* never read; index the texts again"):
        Store.open(tmp_path, embedder, create=False)


def test_vectors_that_cannot_be_compared_are_refused(folder: Path, embedder: HashingEmbedder) -> None:
    with Store.open(folder, embedder) as store:
        store.add(chunks_of())
        before = state(store)
        wrong = {
            "64 numbers, the embedder gives 3": [[1.0, 2.0, 3.0]],
            "for 1 texts": [[1.0] * 64, [1.0] * 64],
            "NaN": [[float("nan")] * 64],
            "no vectors of numbers": [["a"] * 64],
        }
        for message, vectors in wrong.items():
            with pytest.raises(StoreError, match=message):
                store.add([Chunk("a", "b")], vectors=vectors)
        assert state(store) == before
        with pytest.raises(StoreError, match="64 numbers"):
            store.search_vector([1.0, 2.0])
        with pytest.raises(SettingsError, match="k is 0"):
            store.search_vector([1.0] * 64, 0)
        with pytest.raises(SettingsError, match="between 0"):
            store.search_diverse([1.0] * 64, relevance=2)
        assert len(store.search("apple")) == 4


def test_a_store_of_given_vectors_says_that_it_cannot_embed(folder: Path, embedder: HashingEmbedder) -> None:
    with Store.open(folder, GivenVectors()) as store:
        assert not store.embeds
        store.add([Chunk("a", "some text")], vectors=[[1.0, 0.0]])
        for use in (lambda: store.search("text"), lambda: store.add([Chunk("b", "more")])):
            with pytest.raises(StoreError, match="give a vector with the text"):
                use()
    with Store.open(folder) as store:  # it knows what it is
        assert not store.embeds
        assert store.search_vector([1.0, 0.0])[0].chunk.id == "a"
    with pytest.raises(StoreError, match="made by the embedder 'given vectors', not by 'hashing'"):
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
