"""The retriever over a Store."""

# ruff: noqa: A002 - `input` is the parameter's name in every Runnable of LangChain

from pathlib import Path
from threading import Lock
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever, LangSmithRetrieverParams
from langchain_core.runnables import RunnableConfig, run_in_executor
from pydantic import ConfigDict, Field, PrivateAttr, field_validator, model_validator

import reader_rag
from langchain_reader_rag.asking import configured_scope
from reader_rag.errors import SettingsError
from reader_rag.options import refuse_unknown

_opening = Lock()


class ReaderRetriever(BaseRetriever):
    """The `k` chunks of a Store nearest to a question, as Documents with their cosine as metadata `score`.

    With a `reader` (a live Reader, a `ChatReader` or a `ReaderLLM`) the nearest `draft_k` chunks are
    offered to its drafter: what did not fit the prompt still makes the answer faster.

        retriever = ReaderRetriever(store="docs.store", reader=llm, k=4, draft_k=16)
        retriever.invoke("What is a context manager?")
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    store: Any = Field(exclude=True, repr=False)
    """A Store, or the folder of one."""
    k: int = Field(default=4, ge=1)
    draft_k: int = Field(default=16, ge=1)
    """Chunks offered to the reader; never fewer than `k`."""
    reader: Any = Field(default=None, exclude=True, repr=False)
    scope: str | None = None
    """Who may draft from the chunks; None is the reader's own. The config's `reader_scope` comes first."""
    embedder: Any = Field(default=None, exclude=True, repr=False)
    """The embedder to open a folder with; None is the one that the store was built with."""

    _opened: Any = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_options(cls, values: Any) -> Any:
        if isinstance(values, dict):
            refuse_unknown(values, cls.model_fields, "ReaderRetriever()")
        return values

    @field_validator("store")
    @classmethod
    def _check_store(cls, store: Any) -> Any:
        if isinstance(store, str | Path) or hasattr(store, "search"):
            return store
        raise SettingsError(f"store must be a Store or the folder of one, not {type(store).__name__}")

    @field_validator("reader")
    @classmethod
    def _check_reader(cls, reader: Any) -> Any:
        if reader is None or hasattr(reader, "offer"):
            return reader
        raise SettingsError("reader must be a live Reader, a ChatReader or a ReaderLLM")

    def invoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        """The nearest chunks; `k=` of the call comes before the retriever's own."""
        return super().invoke(input, config, **self._with_scope(config, kwargs))

    async def ainvoke(
        self, input: str, config: RunnableConfig | None = None, **kwargs: Any
    ) -> list[Document]:
        """The nearest chunks; the event loop stays free."""
        return await super().ainvoke(input, config, **self._with_scope(config, kwargs))

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
        k: int | None = None,
        scope: str | None = None,
    ) -> list[Document]:
        k = self.k if k is None else k
        if k < 1:
            raise SettingsError(f"k is {k}: ask for at least 1 chunk")
        hits = self._store.search(query, k if self.reader is None else max(k, self.draft_k))
        scope = scope or configured_scope(None) or self.scope
        if self.reader is not None and hits:
            named = {} if scope is None else {"scope": scope}
            self.reader.offer([hit.chunk for hit in hits], **named)
        return [_document(hit) for hit in hits[:k]]

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun,
        k: int | None = None,
        scope: str | None = None,
    ) -> list[Document]:
        return await run_in_executor(
            None, self._get_relevant_documents, query, run_manager=run_manager.get_sync(), k=k, scope=scope
        )

    @property
    def _store(self) -> "reader_rag.Store":
        with _opening:
            if self._opened is None:
                self._opened = self.store
                if isinstance(self.store, str | Path):
                    self._opened = reader_rag.Store.open(self.store, self.embedder, create=False)
            return self._opened  # type: ignore[no-any-return]

    def _with_scope(self, config: RunnableConfig | None, options: dict[str, Any]) -> dict[str, Any]:
        scope = configured_scope(config)
        return options if scope is None or "scope" in options else {**options, "scope": scope}

    def _get_ls_params(self, **kwargs: Any) -> LangSmithRetrieverParams:
        """Names the scope too, so that `watch` never puts these chunks into another."""
        params = LangSmithRetrieverParams(
            ls_retriever_name="reader_rag", ls_vector_store_provider="reader_rag"
        )
        scope = kwargs.get("scope") or self.scope
        return {**params, "reader_scope": scope} if scope else params  # type: ignore[typeddict-unknown-key]


def _document(hit: Any) -> Document:
    metadata = {**hit.chunk.metadata, "score": float(hit.score)}
    return Document(id=hit.chunk.id, page_content=hit.chunk.text, metadata=metadata)
