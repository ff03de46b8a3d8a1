"""One line that lets a reader draft from what any LlamaIndex retriever returns."""

import logging
import threading
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent

from llama_index.llms.reader_rag.llm import ReaderLLM
from llama_index.llms.reader_rag.nodes import chunks_from

if TYPE_CHECKING:
    from reader_rag import Reader

SCOPE_TAG = "reader_scope"

_logger = logging.getLogger("reader_rag.llama_index")
_lock = threading.RLock()  # a weakref may die, and stop its watch, while this very thread holds it
_watches: list["Watch"] = []


def watch(reader: "Reader | ReaderLLM", scope: str | None = None) -> "Watch":
    """Offer the nodes of every retrieval in this process to the reader's pool of chunks.

        watch(llm)                      # until the process ends, or llm is gone
        with watch(llm): ...            # or for a while

    Only speed can change, never a text. `scope` is the pool that is fed: by default the model's own, or
    "default" for a bare `Reader`. With watches of several scopes a retrieval must say whose it is, or it is offered to
    nobody: `with instrument_tags({"reader_scope": "tenant-a"}): query_engine.query(...)`.

    The reader is held weakly: when nobody else holds it, the watch ends.
    """
    if scope is None:
        scope = reader.scope if isinstance(reader, ReaderLLM) else "default"
    watching = Watch(reader, scope)
    with _lock:
        _watches.append(watching)
        root = get_dispatcher()
        # A dispatcher cannot forget a handler, so there is one for all watches.
        if not any(isinstance(handler, _Retrievals) for handler in root.event_handlers):
            root.add_event_handler(_Retrievals())
    return watching


class Watch:
    """What `watch` returns: `stop()` ends it, and so does leaving its `with` block."""

    def __init__(self, reader: "Reader | ReaderLLM", scope: str) -> None:
        self.scope = scope
        self._reader = weakref.ref(reader, lambda _: self.stop())

    @property
    def reader(self) -> "Reader | ReaderLLM | None":
        """The watched reader, or None when it is gone."""
        return self._reader()

    @property
    def active(self) -> bool:
        return any(watching is self for watching in list(_watches))

    def stop(self) -> None:
        """Offer nothing from now on; may be called twice."""
        with _lock:
            _watches[:] = [watching for watching in _watches if watching is not self]

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Watch(scope={self.scope!r}, active={self.active})"


class _Retrievals(BaseEventHandler):
    """The one handler on the root dispatcher; called for every event, in the emitter's thread."""

    @classmethod
    def class_name(cls) -> str:
        return "ReaderRetrievals"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if not isinstance(event, RetrievalEndEvent) or not _watches:
            return
        try:
            _offer(event)
        except Exception:
            # The dispatcher would swallow it; a retrieval must not fail for want of speed.
            _logger.exception("retrieved nodes were not offered for drafting")


def _offer(event: RetrievalEndEvent) -> None:
    watches = list(_watches)
    scope = event.tags.get(SCOPE_TAG)
    if scope is None and len({watching.scope for watching in watches}) > 1:
        _logger.warning(
            "a retrieval without the tag %r was offered to nobody, since several scopes are watched: "
            "retrieve inside instrument_tags({%r: scope})",
            SCOPE_TAG,
            SCOPE_TAG,
        )
        return
    chunks = chunks_from(event.nodes)
    for watching in watches:
        reader = watching.reader
        if reader is not None and scope in (None, watching.scope):
            reader.offer(chunks, scope=watching.scope)
