"""Drafting: from a tail of tokens to a tree of likely continuations. Knows token ids, counts and probabilities only."""

from reader_rag.draft.corpus import Corpus
from reader_rag.draft.drafter import Drafter, make_drafter
from reader_rag.draft.ngrams import NgramTable
from reader_rag.draft.pool import ChunkPool
from reader_rag.draft.priors import Priors
from reader_rag.draft.source import Source
from reader_rag.draft.tree import Draft, Origin

__all__ = [
    "ChunkPool",
    "Corpus",
    "Draft",
    "Drafter",
    "NgramTable",
    "Origin",
    "Priors",
    "Source",
    "make_drafter",
]
