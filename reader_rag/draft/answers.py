"""The `answers` source: earlier answers of the same scope, by suffix matches."""

from reader_rag.draft.chunks import ChunkSource
from reader_rag.draft.pool import ChunkPool


class AnswerSource(ChunkSource):
    """Continues what earlier answers said after the same two tokens or more (SuffixDecoding's global tree).

    `pool` holds one sequence per answer; `ScopeMemory.learn_answer` fills it when a request ends, so that an answer
    never drafts itself.
    """

    name = "answers"

    def __init__(self, pool: ChunkPool | None = None) -> None:
        super().__init__((), pool)
