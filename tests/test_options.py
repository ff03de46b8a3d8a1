"""Options that a caller got wrong are refused with the mend that fits, in the core and in both adapters."""

from __future__ import annotations

from typing import Any

import pytest

from langchain_reader_rag import ChatReader
from langchain_reader_rag import ReaderLLM as TextModel
from llama_index.llms.reader_rag import ReaderLLM as LlamaIndexModel
from reader_rag import Reader
from reader_rag.errors import PromptError, SettingsError
from reader_rag.options import MENDS, OURS, SAMPLING, hint


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"model_id": "a/b"}, "did you mean 'model'"),
        ({"max_new_tokens": 5}, "did you mean 'max_tokens'"),
        ({"device_map": "auto"}, r"pass model_kwargs=\{'device_map': ...\}"),
        ({"quantization_config": None}, r"pass model_kwargs=\{'quantization_config': ...\}"),
        ({"do_sample": False}, r"temperature=0 \(the default\) for False"),
        ({"return_full_text": False}, "without the prompt, always"),
        ({"pipeline_kwargs": {}}, "as options by themselves"),
    ],
)
@pytest.mark.parametrize("face", [TextModel, ChatReader, LlamaIndexModel])
def test_what_the_ecosystems_own_local_models_take_is_named_as_we_take_it(
    face: Any, option: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):  # pydantic's ValidationError and SettingsError are both one
        face(**option)


def test_context_goes_by_the_name_of_each_framework() -> None:
    with pytest.raises(ValueError, match="did you mean 'context'"):
        TextModel(context_window=3900)
    with pytest.raises(ValueError, match="did you mean 'context_window'"):
        LlamaIndexModel(context=3900)


def test_nothing_far_fetched_is_suggested() -> None:
    known = tuple(TextModel.model_fields)
    assert hint("streaming", known) == hint("api_key", known) == ""
    assert "tags" not in hint("task", known)
    assert hint("temprature", known) == " (did you mean 'temperature'?)"


def test_every_foreign_name_is_unknown_somewhere_and_its_mend_fits_a_face() -> None:
    known = {*TextModel.model_fields, *LlamaIndexModel.model_fields, "tokenizer", "reader"}
    assert all(set(ours) <= known for ours in OURS.values())
    assert {needed for needed, _ in MENDS.values()} <= known


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_tokens": 4}, r"pass sampling=Sampling\(max_tokens=...\)"),
        ({"max_new_tokens": 4}, r"pass sampling=Sampling\(max_tokens=...\)"),
        ({"documents": []}, "has no option 'documents'; it has: chunks, "),
        ({"chunk": []}, "did you mean 'chunks'"),
        ({"sampling": {"max_tokens": 4}}, "pass a Sampling"),
        ({"drafting": "none"}, r"Drafting\(sources=\(\)\)"),
        ({"drafting": False}, r"Drafting\(sources=\(\)\)"),
        ({"scope": None}, "scope is None; name it"),
        ({"scope": ""}, "scope is ''; name it"),
    ],
)
def test_a_request_to_a_reader_says_what_it_takes(reader: Reader, options: dict[str, Any], says: str) -> None:
    for ask in (reader.generate, reader.stream, reader.submit):
        with pytest.raises(SettingsError, match=says):
            ask("Hi", **options)


@pytest.mark.parametrize("prompts", ["one text", {"role": "user", "content": "Hi"}, iter(["a"])])
def test_a_batch_is_a_list_of_prompts(reader: Reader, prompts: Any) -> None:
    with pytest.raises(PromptError, match="pass a list of prompts"):
        reader.generate_batch(prompts)


def test_the_samplings_names_are_no_names_of_a_request() -> None:
    assert "max_tokens" in SAMPLING
    assert "sampling" not in SAMPLING
