"""What a Reader remembers between requests, scope by scope: n-gram statistics, recent chunks and answers."""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np

from reader_rag.draft import ChunkPool, NgramTable
from reader_rag.draft.corpus import Corpus
from reader_rag.settings import Drafting
from reader_rag.store.chunk import Chunk

log = logging.getLogger("reader_rag")

RECENT_CHUNKS = 32
"""Offered chunks per scope whose text is kept, for spans."""
SCOPES = 256
"""Scopes kept in memory; the longest unused one is saved and dropped."""


class ScopeMemory:
    """One scope's share: nobody else's requests read it, because acceptance timing would reveal it."""

    def __init__(self, pool: ChunkPool, ngrams: NgramTable, answers: ChunkPool | None = None) -> None:
        self.pool, self.ngrams = pool, ngrams
        self.answers = ChunkPool() if answers is None else answers
        self.corpus: Corpus | None = None
        self._recent: OrderedDict[str, Chunk] = OrderedDict()
        self._lock = threading.Lock()

    def offer(self, chunks: Sequence[Chunk], encodings: Callable[[str], list[list[int]]]) -> None:
        """Takes retrieved chunks, the best first; the best is the last to leave."""
        worst_first = tuple(reversed(chunks))
        for chunk in worst_first:
            self.pool.add(chunk.id, encodings(chunk.text))
        with self._lock:
            for chunk in worst_first:
                self._recent[chunk.id] = chunk
                self._recent.move_to_end(chunk.id)
            while len(self._recent) > RECENT_CHUNKS:
                self._recent.popitem(last=False)

    def learn_answer(self, tokens: Sequence[int]) -> None:
        """Takes the answer of a request that has ended. The same answer again is kept once, as the latest."""
        digest = hashlib.blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=16)
        self.answers.add(digest.hexdigest(), [tokens])

    def recent(self, exclude: Collection[str] = ()) -> tuple[Chunk, ...]:
        """Recently offered chunks, newest first."""
        with self._lock:
            return tuple(c for c in reversed(self._recent.values()) if c.id not in exclude)


class Memory:
    """Scopes by name; n-gram tables are kept in `folder` per model and scope unless `drafting.persist` is off."""

    def __init__(self, fingerprint: str, folder: Path, drafting: Drafting) -> None:
        self._fingerprint, self._folder, self._drafting = fingerprint, folder / "ngrams", drafting
        self._scopes: OrderedDict[str, ScopeMemory] = OrderedDict()
        self._lock = threading.Lock()
        if drafting.persist:
            weakref.finalize(self, _save_all, self._scopes, self._file, fingerprint)

    def of(self, scope: str) -> ScopeMemory:
        with self._lock:
            if scope not in self._scopes:
                limit = self._drafting.ngram_bytes
                if self._drafting.persist:
                    table = NgramTable.load(self._file(scope), self._fingerprint, limit)
                else:
                    table = NgramTable(limit)
                pool, answers = ChunkPool(self._drafting.pool_bytes), ChunkPool(self._drafting.answer_bytes)
                self._scopes[scope] = ScopeMemory(pool, table, answers)
                if len(self._scopes) > SCOPES:
                    name, old = self._scopes.popitem(last=False)
                    if self._drafting.persist:
                        _save_one(old, self._file(name), self._fingerprint)
            self._scopes.move_to_end(scope)
            return self._scopes[scope]

    def forget(self) -> None:
        with self._lock:
            self._scopes.clear()

    def save(self) -> None:
        if self._drafting.persist:
            with self._lock:
                _save_all(self._scopes, self._file, self._fingerprint)

    @property
    def _file(self) -> Callable[[str], Path]:
        folder, fingerprint = self._folder, self._fingerprint
        return lambda scope: folder / f"{fingerprint}-{hashlib.sha256(scope.encode()).hexdigest()[:16]}.npz"


def _save_all(scopes: OrderedDict[str, ScopeMemory], file: Callable[[str], Path], fingerprint: str) -> None:
    for name, memory in scopes.items():
        _save_one(memory, file(name), fingerprint)


def _save_one(memory: ScopeMemory, file: Path, fingerprint: str) -> None:
    if len(memory.ngrams):
        try:
            memory.ngrams.save(file, fingerprint)
        except OSError as error:
            log.warning("learned statistics could not be saved to %s: %s", file, error)
