"""A source that raises costs drafts, never the answer: it is dropped for its request and named in the stats."""

import logging
from collections.abc import Sequence
from typing import Any

from reader_rag.draft.source import BranchSource, Evidence, Row, Source

log = logging.getLogger("reader_rag")


class GuardedSource:
    """A source that falls silent after its first exception; `error` then says what it was."""

    def __init__(self, source: Source) -> None:
        self.name = source.name
        self._source = source
        self._all_branches = source if isinstance(source, BranchSource) else None
        self.error: str | None = None

    def observe(self, tokens: Sequence[int], rows: Sequence[Row | None], prompt: bool) -> None:
        if self.error is None:
            try:
                self._source.observe(tokens, rows, prompt)
            except Exception as error:  # whatever it is, the answer must not suffer
                self._drop(error)

    def observe_branch(self, context: Sequence[int], row: Row) -> None:
        self.observe_branches([context], [row])

    def observe_branches(self, contexts: Sequence[Sequence[int]], rows: Sequence[Row]) -> None:
        if self.error is None:
            try:
                if self._all_branches is not None:
                    self._all_branches.observe_branches(contexts, rows)
                else:
                    for context, row in zip(contexts, rows, strict=True):
                        self._source.observe_branch(context, row)
            except Exception as error:
                self._drop(error)

    def root(self) -> Any:
        if self.error is None:
            try:
                return self._source.root()
            except Exception as error:
                self._drop(error)
        return None

    def advance(self, state: Any, token: int) -> Any:
        if self.error is None:
            try:
                return self._source.advance(state, token)
            except Exception as error:
                self._drop(error)
        return None

    def predict(self, state: Any) -> list[Evidence]:
        if self.error is None:
            try:
                return self._source.predict(state)
            except Exception as error:
                self._drop(error)
        return []

    def locate(self, state: Any, token: int) -> tuple[int | None, int] | None:
        """Where `token` after `state` is copied from, as far as the source can tell."""
        find = getattr(self._source, "locate", None)
        if find is None or self.error is not None:
            return None
        try:
            found: tuple[int | None, int] | None = find(state, token)
            return found
        except Exception as error:
            self._drop(error)
        return None

    def _drop(self, error: Exception) -> None:
        self.error = f"{type(error).__name__}: {error}"
        log.warning("source %s is dropped for this request: %s", self.name, self.error)
