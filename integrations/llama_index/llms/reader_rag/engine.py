"""The Reader behind a ReaderLLM, loaded when it is first wanted."""

import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from reader_rag import Chunk
from reader_rag.errors import MissingExtraError, PromptError
from reader_rag.structured import plan_tools

if TYPE_CHECKING:
    from reader_rag import Reader

WAITING_CHUNKS = 256  # kept until the model is loaded; more than a few questions retrieve
PROBE = {"name": "probe"}  # a tool, to ask whether the model can be offered any


class Engine:
    """The Reader behind a ReaderLLM: loaded at first use, shared by copies, left behind by pickling."""

    def __init__(self, model: Any, loading: dict[str, Any], reader: "Reader | None" = None) -> None:
        self._model = model
        self._loading = loading
        self._reader = reader
        self._waiting: deque[tuple[Chunk, str]] = deque(maxlen=WAITING_CHUNKS)
        self._lock = threading.Lock()
        self._calling: dict[str | None, bool] = {}

    @property
    def loaded(self) -> bool:
        return self._reader is not None

    def load(self) -> "Reader":
        if self._reader is not None and not self._waiting:
            return self._reader
        with self._lock:
            if self._reader is None:
                from reader_rag.reader import Reader  # torch: not before a model is wanted

                self._reader = Reader.shared(self._model, **self._loading)
            while self._waiting:
                chunk, scope = self._waiting.popleft()
                self._reader.offer([chunk], scope=scope)
            return self._reader

    def calls_tools(self, tool_format: str | None) -> bool:
        """Whether the model's template, or the format named, says how tools are called."""
        if tool_format not in self._calling:
            try:
                plan_tools(self.load().tokenizer, [PROBE], format=tool_format)
            except (PromptError, MissingExtraError):
                self._calling[tool_format] = False
            else:
                self._calling[tool_format] = True
        return self._calling[tool_format]

    def offer(self, chunks: Sequence[Chunk], scope: str) -> None:
        if self._reader is None:
            self._waiting.extend((chunk, scope) for chunk in chunks)
        else:
            self._reader.offer(chunks, scope=scope)

    def __deepcopy__(self, memo: object) -> "Engine":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # An unpickled LLM starts from its fields (BaseComponent.__setstate__): this is never read again.
        return (Engine, (None, {}))
