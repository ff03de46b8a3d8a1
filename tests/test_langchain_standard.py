"""LangChain's own standard tests, over a tiny model that really runs and a store that really searches."""

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

pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")


@pytest.fixture(scope="module")
def live(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    cache = tmp_path_factory.mktemp("cache")
    return Reader.load(tiny_model, dtype="float32", device="cpu", width=4, cache_dir=cache)


class ChatModel:
    """What both suites are told about ChatReader."""

    live: Any = None

    @pytest.fixture(autouse=True)
    def _share(self, live: Reader) -> None:
        type(self).live = live

    @property
    def chat_model_class(self) -> type[ChatReader]:
        return ChatReader

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # A random model may end its answer at once: these tests want text.
        return {"reader": self.live, "logit_bias": {self.live.tokenizer.eos_token_id: -100.0}}

    @property
    def supports_model_override(self) -> bool:
        return False


class TestChatReaderUnit(ChatModel, ChatModelUnitTests):
    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        # No api_key: a local model has none, and an option without effect is refused.
        return {"temperature": 0, "max_tokens": 100, "timeout": 60, "stop": [], "max_retries": 2}


class TestChatReader(ChatModel, ChatModelIntegrationTests):
    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"max_tokens": 12}


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
