"""LangChain's own standard tests, over models that really run and a store that really searches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langchain_tests")

from langchain_fakes import LetterEmbedder
from langchain_tests.integration_tests import ChatModelIntegrationTests, RetrieversIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_reader_rag import ChatReader, ReaderRetriever
from reader_rag import Chunk, Reader, Store
from tests.conftest import build_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")


UNDERSTOOD = (
    "test_tool_calling[",
    "test_tool_calling_async",
    "test_bind_runnables_as_tools",
    "test_unicode_tool_call",
)
"""Tests that look at what the model has understood: the demo model answers these."""
LONG = ("tool", "structured", "json_mode", "agent")
"""Tests that want a whole call or object; for all others a few tokens say as much."""


@pytest.fixture(scope="module")
def random_reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """Random weights, with room for prompts that describe tools in single bytes."""
    folder = build_tiny_model(tmp_path_factory.mktemp("random") / "tiny", max_position_embeddings=8192)
    cache = tmp_path_factory.mktemp("random-cache")
    return Reader.load(folder, dtype="float32", device="cpu", width=8, cache_dir=cache)


class ChatModel:
    """What both suites are told about ChatReader, over a model that really runs.

    Neither model's template knows tools (`tool_format`), neither sees by itself when to call one (`tool_choice`), and left to
    themselves both go on for ever (the penalty; `logit_bias` has them end a string of JSON soon).
    """

    live: Any = None
    max_tokens = 12
    ends_strings = 0.0

    @pytest.fixture(autouse=True)
    def _prepare(self, request: Any, tiny_model: Path, monkeypatch: Any, tmp_path: Path) -> None:
        understood = request.node.name.startswith(UNDERSTOOD)
        type(self).live = request.getfixturevalue("demo_reader" if understood else "random_reader")
        # A bias on the quotation mark: enough to end a string soon, too little to leave the demo model's empty.
        type(self).ends_strings = 3.0 if understood else 8.0
        type(self).max_tokens = 200 if any(word in request.node.name for word in LONG) else 12
        # The other model that a call may name: found by its folder, its statistics in a folder of this test.
        monkeypatch.chdir(tiny_model.parent)
        monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path))

    @property
    def chat_model_class(self) -> type[ChatReader]:
        return ChatReader

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "reader": self.live,
            "tool_format": "hermes",
            "tool_choice": "first",
            "frequency_penalty": 0.6,
            "logit_bias": dict.fromkeys(self.live.encode('"'), self.ends_strings),
        }

    @property
    def model_override_value(self) -> str:
        return "tiny-llama"

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestChatReaderUnit(ChatModel, ChatModelUnitTests):
    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        # No api_key: a local model has none, and an option without effect is refused.
        return {"temperature": 0, "max_tokens": 100, "timeout": 60, "stop": [], "max_retries": 2}


class TestChatReader(ChatModel, ChatModelIntegrationTests):
    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens}


class TestReaderRetriever(RetrieversIntegrationTests):
    store: Any = None

    @pytest.fixture(autouse=True)
    def _store(self, tmp_path: Path) -> Iterator[None]:
        with Store.open(tmp_path / "store", LetterEmbedder()) as store:
            store.add([Chunk.from_text(f"chunk {word}") for word in ("one", "two", "three", "four", "five")])
            type(self).store = store
            yield

    @property
    def retriever_constructor(self) -> type[ReaderRetriever]:
        return ReaderRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"store": self.store}

    @property
    def retriever_query_example(self) -> str:
        return "three"
