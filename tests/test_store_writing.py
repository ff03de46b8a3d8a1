"""Adding and deleting: replaced, renewed, interrupted, all or none."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from store_fakes import TEXTS, HashingEmbedder, chunks_of, found, state

from reader_rag.store import Chunk, GivenVectors, Store


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


def test_given_vectors_are_kept_under_their_ids_even_for_equal_texts(embedder: HashingEmbedder) -> None:
    with Store.in_memory(GivenVectors()) as store:
        ids = store.add([Chunk("a", "same"), Chunk("b", "same")], vectors=[[3.0, 0.0], [0.0, 2.0]])
        assert ids == ["a", "b"]
        assert {name: vector.tolist() for name, vector in store.vectors(["b", "a", "c"]).items()} == {
            "a": [1, 0],
            "b": [0, 1],
        }
        assert [hit.chunk.id for hit in store.search_vector([0.1, 1.0])] == ["b", "a"]
    with Store.in_memory(embedder) as store:
        store.add([Chunk("a", "apple")], vectors=embedder.encode_query(["apple"]))
        assert embedder.documents == 0
        assert store.search("apple")[0].score == pytest.approx(1)


def test_a_known_text_gets_its_new_vector(embedder: HashingEmbedder) -> None:
    with Store.in_memory(GivenVectors()) as store:
        store.add([Chunk("a", "text", {"n": 1}), Chunk("b", "other")], vectors=[[1.0, 0.0], [0.6, 0.8]])
        assert store.search_vector([1.0, 0.0], 1)[0].chunk.id == "a"
        store.add([Chunk("a", "text", {"n": 2})], vectors=[[0.0, 1.0]])
        assert store.search_vector([1.0, 0.0], 1)[0].chunk.id == "b"
        row = state(store)[-1][0]
        store.add([Chunk("a", "text", {"n": 3})], vectors=[[0.0, 1.0]])
        assert state(store)[-1][0] == row  # nothing but its metadata is new
        assert store.get(["a"])[0].metadata == {"n": 3}


def test_chunks_are_listed_and_found_by_their_metadata(embedder: HashingEmbedder) -> None:
    with Store.in_memory(embedder) as store:
        store.add([Chunk("z", "one", {"doc": "d1", "a.b": 1}), Chunk("a", "two", {"doc": "d2"})])
        store.add([Chunk("m", "three", {"doc": "d1"})])
        assert [chunk.id for chunk in store.chunks()] == ["z", "a", "m"]
        assert [chunk.id for chunk in store.chunks(lambda chunk: "t" in chunk.text)] == ["a", "m"]
        assert store.ids_with("doc", "d1") == ["z", "m"]
        assert store.ids_with("a.b", 1) == ["z"]
        assert store.ids_with("nothing", "d1") == []
        assert store.clear() == 3
        assert store.clear() == len(store) == 0
        assert store.embedder_name == "hashing"
