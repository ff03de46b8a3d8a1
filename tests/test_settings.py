from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from reader_rag.errors import ReaderError, SettingsError
from reader_rag.settings import SOURCES, Drafting, Sampling


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "warm"),
        ("temperature", None),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", -0.5),
        ("min_p", -0.1),
        ("min_p", 1),
        ("top_k", -1),
        ("top_k", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 2.0),
        ("max_tokens", True),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("presence_penalty", math.inf),
        ("frequency_penalty", "x"),
        ("no_repeat_ngram_size", -1),
        ("stop", ("a", "")),
        ("stop", ""),
        ("stop", (1,)),
        ("stop", {"a": 1}),
        ("seed", 1.0),
        ("seed", -1),
        ("seed", 1 << 64),
        ("logit_bias", [1]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("processors", (1,)),
        ("processors", 5),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_by_name_with_a_mend(option: str, value: Any) -> None:
    with pytest.raises(SettingsError) as caught:
        Sampling(**{option: value})
    message = str(caught.value)
    assert option in message
    assert any(word in message for word in ("use ", "ask ", "drop "))
    assert isinstance(caught.value, ReaderError)
    assert isinstance(caught.value, ValueError)


def test_the_edges_of_every_range_are_allowed() -> None:
    Sampling(max_tokens=1, temperature=0, top_k=0, top_p=1, min_p=0, no_repeat_ngram_size=0, seed=0)
    Sampling(temperature=5, top_k=1, top_p=1e-9, min_p=0.999, repetition_penalty=0.01, seed=(1 << 64) - 1)
    Sampling(presence_penalty=-2, frequency_penalty=-2, logit_bias={0: -math.inf, 5: 100})


def test_stop_is_normalised() -> None:
    assert Sampling(stop="a").stop == ("a",)  # type: ignore[arg-type]
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert Sampling(stop=None).stop == ()  # type: ignore[arg-type]
    assert Sampling(stop=[]).stop == ()  # type: ignore[arg-type]


def test_settings_are_frozen_and_keep_their_own_copy() -> None:
    bias = {1: 2.0}
    sampling = Sampling(logit_bias=bias)
    bias[1] = 9.0
    assert sampling.logit_bias == {1: 2.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        sampling.top_k = 3  # type: ignore[misc]
    assert dataclasses.replace(sampling, top_k=3).top_k == 3


def test_an_unknown_option_raises() -> None:
    with pytest.raises(TypeError):
        Sampling(temprature=0.5)  # type: ignore[call-arg]


def test_drafting_knows_its_sources() -> None:
    assert Drafting().sources == SOURCES
    assert Drafting(sources=()).sources == ()
    assert Drafting(sources=["ngrams", "context", "ngrams"]).sources == ("ngrams", "context")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"telepathy.*context, chunks, ngrams"):
        Drafting(sources=("telepathy",))
    with pytest.raises(SettingsError, match="pool_bytes"):
        Drafting(pool_bytes=-1)
    with pytest.raises(SettingsError, match="ngram_bytes"):
        Drafting(ngram_bytes=1.5)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="persist"):
        Drafting(persist=1)  # type: ignore[arg-type]
