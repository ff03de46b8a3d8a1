"""Search by FAISS and by matrix product: the same hits in the same order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_fakes import TEXTS, HashingEmbedder, brute_force, chunks_of

from reader_rag.store import Chunk, Store
from reader_rag.store import index as index_module
from reader_rag.store import vectors as vectors_module
from reader_rag.store.vectors import FaissVectors, MatrixVectors, diverse, nearest


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


@pytest.mark.parametrize("faiss", [True, False])
def test_a_filtered_search_is_the_search_among_what_passes(
    embedder: HashingEmbedder, faiss: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not faiss:
        monkeypatch.setattr(index_module, "import_faiss", lambda: None)
        monkeypatch.setattr(vectors_module, "import_faiss", lambda: None)
    many = [Chunk(str(i), f"{TEXTS[i % len(TEXTS)]} extra{i}", {"n": i}) for i in range(600)]
    with Store.in_memory(embedder) as store:
        store.add(many)
        everything = store.search("river stone", len(many))
        for rule in (
            lambda chunk: chunk.metadata["n"] % 2,
            lambda chunk: chunk.metadata["n"] == 599,
            lambda chunk: chunk.id > "9",
            lambda chunk: False,
        ):
            expected = [hit for hit in everything if rule(hit.chunk)]
            for k in (1, 7, 700):
                assert store.search("river stone", k, where=rule) == expected[:k]
                assert store.search_vector(store.embed_query("river stone"), k, rule) == expected[:k]


def test_a_vector_finds_what_its_text_finds(embedder: HashingEmbedder) -> None:
    with Store.in_memory(embedder) as store:
        assert store.search_vector(embedder.encode_query(["violin"])[0]) == []
        store.add(chunks_of())
        vector = embedder.encode_query(["violin harbour"])[0]  # of any length
        assert store.search_vector(vector.tolist(), 9) == store.search("violin harbour", 9)


def test_a_diverse_search_passes_over_repetitions(embedder: HashingEmbedder) -> None:
    texts = ["apple river", "apple river", "apple river stone", "apple cloud", "violin"]
    with Store.in_memory(embedder) as store:
        store.add(Chunk(str(i), text) for i, text in enumerate(texts))
        query = store.embed_query("apple river")

        def ids(**options: Any) -> list[str]:
            return [hit.chunk.id for hit in store.search_diverse(query, **options)]

        assert ids(k=3, relevance=1.0) == ["0", "1", "2"]
        assert ids(k=2, relevance=0.4) == ["0", "4"]
        assert ids(k=5, relevance=0.0)[-1] == "1"  # the exact repetition comes last
        assert ids(k=2, fetch_k=2, relevance=0.0) == ["0", "1"]  # no more was fetched
        assert ids(k=2, relevance=0.5, where=lambda chunk: chunk.id > "2") == ["3", "4"]
        assert ids(k=9) == ids(k=5)
        store.clear()
        assert ids(k=3) == []


@given(st.integers(1, 9), st.integers(1, 9), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_each_diverse_choice_is_the_best_by_the_formula(n: int, k: int, relevance: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    matrix = random.standard_normal((n + 1, 4)).astype(np.float32)
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    query, vectors = matrix[0], matrix[1:]
    chosen = diverse(vectors, query, k, relevance)
    assert len(chosen) == len(set(chosen)) == min(n, k)

    def gain(position: int, before: list[int]) -> float:
        repeated = max((float(vectors[position] @ vectors[b]) for b in before), default=0.0)
        return relevance * float(vectors[position] @ query) - (1 - relevance) * repeated

    for turn, position in enumerate(chosen):
        left = set(range(n)) - set(chosen[:turn])
        assert gain(position, chosen[:turn]) >= max(gain(p, chosen[:turn]) for p in left) - 1e-5
