"""Chunks from any retriever of LangChain, without a change to it or to the chain."""

from collections.abc import Sequence
from contextvars import ContextVar
from threading import Lock
from types import TracebackType
from typing import Any, Self
from uuid import UUID
from weakref import ref

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.tracers.context import register_configure_hook

from langchain_reader_rag.asking import configured_scope
from langchain_reader_rag.face import ReaderFace
from langchain_reader_rag.messages import chunks_of
from reader_rag.errors import SettingsError


class Watch:
    """A reader being told what retrievers find, until `stop()` or the end of a `with` block."""

    def __init__(self, target: Any, scope: str) -> None:
        self.scope = scope
        self._target = _weak(target)

    def stop(self) -> None:
        """Watch no longer. Stopping twice is fine."""
        _handler.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _RetrieverHandler(BaseCallbackHandler):
    """The one handler of the process: gives what any retriever returns to the readers that watch.

    Not `run_inline`: beside an inline handler, langchain-core's async `on_llm_start` (1.8) passes over all
    handlers that are not. Async managers run this one in a thread, in a copy of the caller's context, and
    wait for it.
    """

    ignore_llm = ignore_chat_model = ignore_chain = ignore_agent = ignore_retry = ignore_custom_event = True

    def __init__(self) -> None:
        self._lock = Lock()
        self._watches: tuple[Watch, ...] = ()
        self._scopes: dict[UUID, str] = {}
        self._registered = False

    @property
    def ignore_retriever(self) -> bool:
        """True while nobody watches."""
        return not self._watches

    def add(self, watch: Watch) -> None:
        with self._lock:
            if not self._registered:
                # LangChain has no way to unregister: once, and only in a process that asked for it.
                register_configure_hook(ContextVar("reader_rag_watch", default=self), inheritable=True)
                self._registered = True
            self._watches = (*self._watches, watch)

    def remove(self, watch: Watch) -> None:
        with self._lock:
            self._watches = tuple(each for each in self._watches if each is not watch)
            if not self._watches:
                self._scopes.clear()

    def on_retriever_start(
        self,
        serialized: dict[str, Any] | None,
        query: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if scope := (metadata or {}).get("reader_scope"):
            self._scopes[run_id] = str(scope)

    def on_retriever_error(
        self, error: BaseException, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        self._scopes.pop(run_id, None)

    def on_retriever_end(
        self, documents: Sequence[Document], *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        named = self._scopes.pop(run_id, None) or configured_scope(None)
        chunks = chunks_of(documents)
        for watch in self._watches:
            target = watch._target()
            if target is None:
                watch.stop()
            elif chunks:
                target.offer(chunks, scope=named or watch.scope)


_handler = _RetrieverHandler()


def watch(reader: Any, scope: str | None = None) -> Watch:
    """Let `reader` draft from what every retriever of this process returns from now on.

        watch(llm)                  # until the end of the process, or of `llm`
        with watch(llm): ...        # for a while

    `reader` is a live Reader, a `ChatReader` or a `ReaderLLM`; it is held weakly. The documents of a
    request go to the scope that its chain's config names (`config={"configurable": {"reader_scope": ...}}`),
    else to `scope`, else to the face's own. What is watched changes how fast answers come, never what they
    say.
    """
    if not hasattr(reader, "offer"):
        raise SettingsError("watch() takes a live Reader, a ChatReader or a ReaderLLM")
    if scope is None:
        scope = reader.scope if isinstance(reader, ReaderFace) else "default"
    watching = Watch(reader, scope)
    _handler.add(watching)
    return watching


def _weak(target: Any) -> Any:
    """A weak reference, or for what cannot be referred to weakly a strong one."""
    try:
        return ref(target)
    except TypeError:
        return lambda: target
