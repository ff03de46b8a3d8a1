"""The source that drafts what the grammar leaves no choice about: names of properties, quotes, brackets."""

from __future__ import annotations

from collections.abc import Sequence

from reader_rag.draft.source import Evidence, Row
from reader_rag.structured.matching import Matching

__all__ = ["GrammarSource"]

TRUST = 0.995
"""A forced token is wrong only where the answer ends before it: at a stop string or an end token."""


class _State:
    """Tokens after the committed ones, and what is forced next: None until somebody asks."""

    __slots__ = ("forced", "path")

    def __init__(self, path: tuple[int, ...], forced: list[int] | None = None) -> None:
        self.path, self.forced = path, forced


class GrammarSource:
    """Drafts forced tokens; silent where the grammar leaves a choice (a Source of reader_rag.draft)."""

    name = "grammar"

    def __init__(self, matching: Matching) -> None:
        self._matching = matching
        self._answer: list[int] = []

    def observe(self, tokens: Sequence[int], rows: Sequence[Row | None], prompt: bool) -> None:
        """Takes newly committed tokens; those of the prompt are outside the grammar."""
        if not prompt:
            self._answer.extend(tokens)

    def observe_branch(self, context: Sequence[int], row: Row) -> None:
        """A grammar learns nothing."""

    def root(self) -> _State:
        """The state after everything committed."""
        return _State(())

    def advance(self, state: _State, token: int) -> _State:
        """The state after one more token; along a forced stretch the matcher need not be asked again."""
        rest = state.forced[1:] if state.forced and state.forced[0] == token else []
        return _State((*state.path, token), rest or None)

    def predict(self, state: _State) -> list[Evidence]:
        """The forced token, if there is one."""
        if state.forced is None:
            state.forced = self._matching.forced([*self._answer, *state.path])
        return [Evidence(TRUST, 0, {state.forced[0]: 1.0}, [])] if state.forced else []
