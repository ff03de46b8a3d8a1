"""Options of the LlamaIndex face, checked when they are said, and the model that is loaded at first use."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("llama_index.core")

from llama_index_fakes import ALL, USER, FakeReader, astream_chat, replace_reader

from llama_index.llms.reader_rag import ReaderLLM
from llama_index.llms.reader_rag.llm import SAMPLING_OPTIONS
from reader_rag.errors import SettingsError
from reader_rag.settings import Drafting
from reader_rag.store import Chunk


def test_options_of_a_call_override_those_of_the_model(fake: FakeReader) -> None:
    llm = ReaderLLM(reader=fake, max_tokens=64, temperature=0.7, stop="END", seed=3, repetition_penalty=1.1)
    llm.complete("Why?")
    base = fake.asked.sampling
    assert (base.max_tokens, base.temperature, base.stop, base.seed) == (64, 0.7, ("END",), 3)
    assert base.repetition_penalty == 1.1
    llm.chat(USER, max_tokens=5, temperature=0.1, top_p=0.9, top_k=7, min_p=0.1, seed=9, stop=["a", "b"])
    own = fake.asked.sampling
    assert (own.max_tokens, own.temperature, own.top_p, own.top_k) == (5, 0.1, 0.9, 7)
    assert (own.min_p, own.seed, own.stop, own.repetition_penalty) == (0.1, 9, ("a", "b"), 1.1)
    llm.complete("Why?", stop="one", max_tokens=None)
    assert (fake.asked.sampling.stop, fake.asked.sampling.max_tokens) == (("one",), 64)
    llm.temperature = 0.2
    llm.complete("Why?")
    assert fake.asked.sampling.temperature == 0.2


def test_every_sampling_option_is_a_field() -> None:
    assert set(SAMPLING_OPTIONS) <= set(ReaderLLM.model_fields)


@pytest.mark.parametrize("method", ALL)
def test_an_unknown_option_of_a_call_raises_with_the_known_ones(
    llm: ReaderLLM, fake: FakeReader, method: str
) -> None:
    with pytest.raises(SettingsError, match=r"max_new_tokens.*max_tokens.*temperature"):
        ALL[method](llm, max_new_tokens=5)
    assert not fake.requests


def test_an_unknown_option_of_the_constructor_raises_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"device_map.*device.*max_tokens"):
        ReaderLLM("m", device_map="auto")


@pytest.mark.parametrize("options", [{"temperature": -1}, {"top_p": 0}, {"max_tokens": 0}])
def test_a_value_out_of_range_raises_at_once(llm: ReaderLLM, options: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        ReaderLLM("m", **options)
    with pytest.raises(SettingsError):
        llm.complete("Why?", **options)


def test_reader_and_options_of_loading_exclude_each_other(fake: FakeReader) -> None:
    with pytest.raises(SettingsError, match=r"model, dtype.*Reader\.load"):
        ReaderLLM("m", reader=fake, dtype="float32")


def test_options_of_loading_cannot_change_later(llm: ReaderLLM) -> None:
    with pytest.raises(ValueError, match="frozen"):
        llm.dtype = "float32"


def test_scope_and_drafting_reach_the_reader(fake: FakeReader) -> None:
    drafting = Drafting(sources=())
    ReaderLLM(reader=fake, scope="tenant-a", drafting=drafting).complete("Why?")
    assert (fake.asked.scope, fake.asked.drafting) == ("tenant-a", drafting)


def test_metadata_sizes_prompts_by_the_model(fake: FakeReader) -> None:
    metadata = ReaderLLM(reader=fake, max_tokens=99).metadata
    assert (metadata.context_window, metadata.num_output) == (4096, 99)
    assert metadata.is_chat_model
    assert not metadata.is_function_calling_model
    assert metadata.model_name == "fake/model"
    assert ReaderLLM(reader=fake, context_window=512).metadata.context_window == 512


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, fake: FakeReader) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def share(*args: Any, **options: Any) -> FakeReader:
        calls.append((args, options))
        return fake

    replace_reader(monkeypatch, share)
    return calls


def test_the_model_loads_once_at_first_use(shared: list[Any]) -> None:
    llm = ReaderLLM("org/model", dtype="float32", context_window=512, max_tokens=9)
    assert llm.to_payload()["model"] == "org/model"
    assert llm.to_payload()["temperature"] == 0.0
    assert "reader" not in repr(llm)
    assert not shared
    llm.complete("Why?")
    llm.chat(USER)
    assert shared == [(("org/model",), {"dtype": "float32", "context": 512})]
    assert llm.to_payload()["context_window"] == 512


def test_defaults_ask_for_the_plain_shared_reader(shared: list[Any]) -> None:
    assert ReaderLLM().reader is ReaderLLM(progress=False).reader
    assert shared == [((None,), {})] * 2
    path = Path("folder")
    assert ReaderLLM(path).model == "folder"
    live = SimpleNamespace(name_or_path="live/model")
    assert ReaderLLM(live, tokenizer=live).model == "live/model"


async def test_async_calls_load_the_model_off_the_loop(
    monkeypatch: pytest.MonkeyPatch, fake: FakeReader
) -> None:
    threads: list[int] = []

    def share(*args: Any) -> FakeReader:
        threads.append(threading.get_ident())
        return fake

    replace_reader(monkeypatch, share)
    await ReaderLLM().acomplete("Why?")
    await astream_chat(ReaderLLM())
    assert len(threads) == 2
    assert threading.get_ident() not in threads


def test_chunks_offered_before_loading_wait_for_the_model(shared: list[Any], fake: FakeReader) -> None:
    llm = ReaderLLM(scope="a")
    llm.offer([Chunk("1", "first")])
    llm.offer([Chunk("2", "second")], scope="b")
    assert not shared
    llm.complete("Why?")
    assert (fake.pool("a"), fake.pool("b")) == (["first"], ["second"])
    llm.offer([Chunk("3", "third")])
    assert fake.pool("a") == ["first", "third"]


def test_copies_share_the_engine_and_pickles_leave_it_behind(shared: list[Any], fake: FakeReader) -> None:
    llm = ReaderLLM("org/model", temperature=0.3)
    llm.complete("Why?")
    assert copy.deepcopy(llm).reader is fake
    assert llm.model_copy().reader is fake
    assert len(shared) == 1
    again = pickle.loads(pickle.dumps(llm))
    assert (again.model, again.temperature) == ("org/model", 0.3)
    again.complete("Why?")
    assert shared[1] == (("org/model",), {})
    rebuilt = ReaderLLM.from_dict(llm.to_dict())
    assert (rebuilt.model, rebuilt.temperature) == ("org/model", 0.3)
