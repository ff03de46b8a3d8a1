"""LangChain's own standard tests, over a tiny model that really runs and a store that really searches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("langchain_tests")

from langchain_fakes import LetterEmbedder
from langchain_tests.integration_tests import ChatModelIntegrationTests, RetrieversIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_reader_rag import ChatReader, ReaderRetriever
from reader_rag import Chunk, Reader, Store

pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")


LONG = ("tool", "structured", "json_mode", "agent")
"""Tests that want a whole call or object; for all others a few tokens say as much."""


class ChatModel:
    """What both suites are told about ChatReader, over the demo model.

    Its template knows no tools (`tool_format`), it does not see by itself when to call one (`tool_choice`), and left to itself it
    repeats a sentence for ever (the penalties).
    """

    live: Any = None
    max_tokens = 12
    penalty: ClassVar[dict[str, float]] = {}

    @pytest.fixture(autouse=True)
    def _prepare(
        self, request: Any, demo_reader: Reader, tiny_model: Path, monkeypatch: Any, tmp_path: Path
    ) -> None:
        type(self).live = demo_reader
        type(self).max_tokens = 200 if any(word in request.node.name for word in LONG) else 12
        jokes = "structured_output" in request.node.name or "json_mode" in request.node.name
        type(self).penalty = {"repetition_penalty": 1.1} if jokes else {"frequency_penalty": 0.6}
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
            **self.penalty,
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
