"""Token arrays of chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_fakes import TEXTS, HashingEmbedder, chunks_of

from reader_rag.errors import StoreError
from reader_rag.store import Store


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
