"""Copies of a face share its model; a pickled face is loaded by name where it is read."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from langchain_reader_rag import ChatReader, ReaderLLM
from reader_rag import Reader

FACES = [ReaderLLM, ChatReader]


@pytest.mark.parametrize("face", FACES)
def test_a_deep_copy_has_its_own_options_and_the_same_reader(reader: Reader, face: Any) -> None:
    one = face(reader=reader, max_tokens=4, logit_bias={5: 1.0})
    one.load()
    other = copy.deepcopy(one)
    other.logit_bias[5] = 2.0
    assert other.load() is reader
    assert one.logit_bias == {5: 1.0}


@pytest.mark.parametrize("face", FACES)
def test_a_face_that_has_loaded_its_model_by_name_is_pickled_without_it(
    tiny_model: Path, tiny_calibration: Path, face: Any
) -> None:
    one = face(
        model=str(tiny_model), width=4, max_tokens=4, dtype="float32", cache_dir=tiny_calibration.parent
    )
    live = one.load()
    written = pickle.dumps(one)
    assert len(written) < 100_000
    other = pickle.loads(written)
    assert (other.max_tokens, other._is_live()) == (4, False)
    assert other.load() is live  # one process, one Reader for the same name and options


def test_a_live_reader_cannot_be_pickled_and_the_mend_is_told_at_once(reader: Reader) -> None:
    with pytest.raises(TypeError, match="give model= as a hub id or a path"):
        pickle.dumps(ReaderLLM(reader=reader))
    with pytest.raises(TypeError, match="give model= as a hub id or a path"):
        pickle.dumps(ChatReader(reader=ReaderLLM(reader=reader)))
