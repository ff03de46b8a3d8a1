"""Store: chunks and their vectors in a folder, added, found and deleted.

`store.db` (SQLite) is the truth; `vectors.faiss` is derived from it (reader_rag/store/index.py).
The vectors are all of one embedder (reader_rag/store/embedding.py).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from reader_rag.errors import SettingsError, StoreError
from reader_rag.store.chunk import Chunk, Hit
from reader_rag.store.columns import from_blob, to_blob, to_json
from reader_rag.store.database import Database
from reader_rag.store.embed import GIVEN_VECTORS, Embedder, SentenceTransformerEmbedder
from reader_rag.store.embedding import Encoder
from reader_rag.store.files import PathLike, Reading, Report, read_paths
from reader_rag.store.folder import database_in, holds_store
from reader_rag.store.index import SearchIndex
from reader_rag.store.progress import Progress
from reader_rag.store.tokens import token_arrays
from reader_rag.store.vectors import Floats, diverse

Where = Callable[[Chunk], bool]
"""Which chunks a search may find."""


class Store:
    """Chunks in a folder, found by meaning. Threads may share one; several processes may open one folder.

    >>> with Store.open("my-store") as store:  # doctest: +SKIP
    ...     store.add_paths("docs")
    ...     hits = store.search("How do I install it?", k=4)

    Every method raises StoreError with the cause and the mend, and leaves the store as it was when it does.
    """

    def __init__(self, database: Database, embedder: Embedder | None) -> None:
        self._database = database
        self._index = SearchIndex(database)
        self._lock = threading.RLock()  # guards database and index; never held while embedding
        self._encoder = Encoder(database, self._lock, embedder)
        self._wrote = False

    @classmethod
    def open(cls, folder: PathLike, embedder: Embedder | str | None = None, create: bool = True) -> Store:
        """Open the store in `folder`; with `create`, make an empty one if there is none.

        `embedder` is an object, a hub id or a folder; None is the one that made the store, or the default.
        Raises StoreError if another embedder made the store.
        """
        where = Path(folder).expanduser()
        fresh = not holds_store(where, create)
        if isinstance(embedder, str) or (fresh and embedder is None):
            embedder = SentenceTransformerEmbedder(embedder)
        database = database_in(where)
        try:
            return cls(database, embedder)
        except BaseException:
            database.close()
            raise

    @classmethod
    def in_memory(cls, embedder: Embedder | str | None = None) -> Store:
        """An empty store without a folder: gone when it is closed, unless `save` has put it into one."""
        if embedder is None or isinstance(embedder, str):
            embedder = SentenceTransformerEmbedder(embedder)
        return cls(Database(None), embedder)

    def save(self, folder: PathLike) -> None:
        """Make the store in `folder` like this one, in one transaction; a store that was there is replaced."""
        where = Path(folder).expanduser()
        holds_store(where, create=True)
        with self._lock:
            if where.resolve() == self.folder:
                self._index.save()
                return
            target = database_in(where)
            try:
                self._database.copy_to(target)
                SearchIndex(target).save()
            finally:
                target.close()

    def close(self) -> None:
        """Save the search index if this store changed it, and release the file. Closing twice is fine."""
        with self._lock:
            if self._database.is_open:
                try:
                    if self._wrote:
                        self._index.save()
                finally:
                    self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        with self._lock:
            return int(self._database.query("SELECT count(*) FROM chunks")[0][0])

    def __repr__(self) -> str:
        return f"Store({str(self.folder)!r})" if self.folder else "Store.in_memory()"

    @property
    def folder(self) -> Path | None:
        """Where the store is; None for one in memory."""
        return self._database.path and self._database.path.parent

    @property
    def embedder_name(self) -> str:
        """Name of the embedder that made the vectors, or will make the first."""
        return self._encoder.name

    @property
    def embeds(self) -> bool:
        """Whether texts can be added and searched by themselves; else every one needs its vector."""
        return self.embedder_name != GIVEN_VECTORS

    # Writing

    def add(
        self,
        chunks: Iterable[Chunk],
        progress: Progress = False,
        vectors: Iterable[Sequence[float] | Floats] | None = None,
    ) -> list[str]:
        """Embed and keep chunks, all or none, and give their ids. A chunk replaces the one with its id.

        Chunks whose id and text are known are not embedded again. `progress` shows a bar if stderr is a
        terminal, "always" in any case. `vectors`, one for each chunk, spares the embedding; they must be what
        the store's embedder would give.
        """
        listed = list(chunks)
        for chunk in listed:
            _check_chunk(chunk)
        if vectors is None:
            self._write(listed, self._embedded(listed, progress))
        elif listed:
            matrix = self._encoder.checked(list(vectors), len(listed), "vectors=")
            given = dict(zip((chunk.id for chunk in listed), matrix, strict=True))
            self._write(listed, given, renew_vectors=True)
        return [chunk.id for chunk in listed]

    def add_paths(self, paths: PathLike | Iterable[PathLike], progress: Progress = True) -> Report:
        """Split, embed and keep files, and the text files in folders, all or none.

        What the store held of these files is replaced; so is what it held of files gone from these folders.
        Folders are read recursively, without hidden files; text files in them are .txt, .text, .md, .markdown
        and .rst. A file named itself may have any name. Markdown is split at its headings.
        """
        reading = read_paths(paths, progress, leave_out=self.folder)
        chunks = [chunk for listed in reading.chunks.values() for chunk in listed]
        self._write(chunks, self._embedded(chunks, progress), reading)
        return Report(len(reading.chunks), len(chunks), reading.skipped)

    def delete(self, ids: Iterable[str]) -> int:
        """Delete chunks by id and give how many there were; unknown ids are no error."""
        wanted = _id_list(ids)
        with self._lock, self._database.transaction():
            return self._delete(wanted)

    def clear(self) -> int:
        """Delete all chunks and give how many there were; the store stays with its embedder."""
        with self._lock, self._database.transaction():
            deleted = self._database.run("DELETE FROM chunks")
            if deleted:
                self._changed()
            return deleted

    def _delete(self, ids: Iterable[str]) -> int:
        deleted = sum(self._database.run("DELETE FROM chunks WHERE id = ?", (name,)) for name in ids)
        if deleted:
            self._changed()
        return deleted

    def _embedded(self, chunks: Sequence[Chunk], progress: Progress) -> dict[str, Floats]:
        """Vectors by chunk id; whatever cannot be kept is found before anything is embedded."""
        for chunk in chunks:
            to_json(chunk)
        vectors = self._encoder.embed(chunks, progress)
        return {chunk.id: vectors[chunk.text] for chunk in chunks}

    def _write(
        self,
        chunks: Sequence[Chunk],
        vectors: Mapping[str, Floats],
        reading: Reading | None = None,
        renew_vectors: bool = False,
    ) -> None:
        """In one transaction delete what is replaced and insert what is new; `vectors` are by chunk id."""
        latest = {chunk.id: chunk for chunk in chunks}  # of two chunks with one id the later counts
        metadata = {name: to_json(chunk) for name, chunk in latest.items()}
        path_of = {name: chunk.metadata["source"] if reading else None for name, chunk in latest.items()}
        blobs = {name: to_blob(vectors[name]) for name in latest}
        with self._lock, self._database.transaction():
            if latest:
                self._encoder.claim(len(next(iter(vectors.values()))))
            known = {
                name: text if not renew_vectors or blob == blobs[name] else None
                for name, text, blob in self._database.query_in(
                    "SELECT id, text, vector FROM chunks WHERE id IN ?", latest
                )
            }
            same = [name for name, chunk in latest.items() if known.get(name) == chunk.text]
            new = [(name, chunk.text) for name, chunk in latest.items() if known.get(name) != chunk.text]
            self._delete([name for name, _ in new if name in known])
            self._delete(self._outdated(reading, latest))
            self._database.run_many(
                "UPDATE chunks SET metadata = ?, path = coalesce(?, path) WHERE id = ?",
                [(metadata[name], path_of[name], name) for name in same],
            )
            self._database.run_many(
                "INSERT INTO chunks (id, text, metadata, path, vector) VALUES (?, ?, ?, ?, ?)",
                [(name, text, metadata[name], path_of[name], blobs[name]) for name, text in new],
            )
            self._database.run("DELETE FROM embedded")
            if new:
                self._changed()

    def _outdated(self, reading: Reading | None, kept: Container[str]) -> list[str]:
        """Ids that were read from the files of `reading`, or from files since gone from its folders."""
        if reading is None:
            return []
        known = self._database.query("SELECT DISTINCT path FROM chunks WHERE path IS NOT NULL")
        paths = {path for (path,) in known}
        gone = {
            path
            for path in paths.difference(reading.chunks)
            if any(Path(path).is_relative_to(folder) for folder in reading.folders)
            and not Path(path).exists()
        }
        found = self._database.query_in(
            "SELECT id FROM chunks WHERE path IN ?", sorted(gone | paths.intersection(reading.chunks))
        )
        return [name for (name,) in found if name not in kept]

    def _changed(self) -> None:
        self._database.run("UPDATE meta SET value = value + 1 WHERE key = 'generation'")
        self._wrote = True

    # Reading

    def get(self, ids: Iterable[str]) -> list[Chunk]:
        """The chunks with these ids, in this order; unknown ids are left out."""
        wanted = _id_list(ids)
        with self._lock:
            rows = self._database.query_in("SELECT id, text, metadata FROM chunks WHERE id IN ?", wanted)
            found = {columns[0]: self._chunk(*columns) for columns in rows}
        return [found[name] for name in wanted if name in found]

    def _chunk(self, name: str, text: str, metadata: str) -> Chunk:
        try:
            return Chunk(name, text, json.loads(metadata))
        except ValueError as error:
            raise self._database.corrupted(f"the metadata of chunk {name!r} is not JSON") from error

    def chunks(self, where: Where | None = None) -> list[Chunk]:
        """All chunks, or those for which `where` is true, in order of adding."""
        with self._lock:
            rows = self._database.query("SELECT id, text, metadata FROM chunks ORDER BY row")
        chunks = [self._chunk(*columns) for columns in rows]
        return chunks if where is None else [chunk for chunk in chunks if where(chunk)]

    def ids_with(self, key: str, value: str | int) -> list[str]:
        """Ids of the chunks whose metadata has this value under this key, in order of adding."""
        with self._lock:
            rows = self._database.query(
                "SELECT chunks.id FROM chunks, json_each(chunks.metadata) AS entry "
                "WHERE entry.key = ? AND entry.value = ? ORDER BY chunks.row",
                (key, value),
            )
        return [name for (name,) in rows]

    def vectors(self, ids: Iterable[str]) -> dict[str, Floats]:
        """The vectors, float32 and of length 1, of the chunks with these ids; unknown ids are left out."""
        wanted = _id_list(ids)
        with self._lock:
            found = self._database.query_in("SELECT id, vector FROM chunks WHERE id IN ?", wanted)
            return {name: from_blob(blob) for name, blob in found}

    def embed_query(self, query: str) -> Floats:
        """The vector, float32 and of length 1, that `search` would use."""
        if not isinstance(query, str) or not query.strip():
            raise StoreError("the query is empty: ask something")
        [vector] = self._encoder.encode("query", [query])
        return vector  # type: ignore[no-any-return]

    def search(self, query: str, k: int = 4, where: Where | None = None) -> list[Hit]:
        """The k chunks nearest in meaning, best first; fewer if the store holds fewer.

        `where` says which chunks may be found, and costs nothing but a wider search.
        """
        if not isinstance(query, str) or not query.strip():
            raise StoreError("the query is empty: ask something")
        if k < 1:
            raise SettingsError(f"k is {k}: ask for at least one chunk")
        return self._nearest(self.embed_query(query), k, where) if len(self) else []

    def search_vector(
        self, vector: Sequence[float] | Floats, k: int = 4, where: Where | None = None
    ) -> list[Hit]:
        """`search` with the query's vector instead of its text."""
        if k < 1:
            raise SettingsError(f"k is {k}: ask for at least one chunk")
        query = self._encoder.checked([vector], 1, "the query's vector")[0]
        return self._nearest(query, k, where) if len(self) else []

    def search_diverse(
        self,
        vector: Sequence[float] | Floats,
        k: int = 4,
        fetch_k: int = 20,
        relevance: float = 0.5,
        where: Where | None = None,
    ) -> list[Hit]:
        """Of the fetch_k nearest chunks the k that are near the query and unlike each other.

        `relevance` weighs nearness to the query, 1 - relevance difference from what is chosen already.
        """
        if not 0 <= relevance <= 1:
            raise SettingsError(f"relevance is {relevance}: it lies between 0 (diverse) and 1 (relevant)")
        hits = self.search_vector(vector, max(k, fetch_k), where)
        stored = self.vectors([hit.chunk.id for hit in hits])
        hits = [hit for hit in hits if hit.chunk.id in stored]  # another thread may have deleted one
        if not hits:
            return []
        query = self._encoder.checked([vector], 1, "the query's vector")[0]
        matrix = np.stack([stored[hit.chunk.id] for hit in hits])
        return [hits[position] for position in diverse(matrix, query, k, relevance)]

    def _nearest(self, query: Floats, k: int, where: Where | None) -> list[Hit]:
        # Hits come best first, so the first k that pass are the best k that pass: widen until there are k.
        fetch = k if where is None else max(64, 4 * k)
        while True:
            hits = self._hits(query, fetch)
            kept = hits if where is None else [hit for hit in hits if where(hit.chunk)]
            if len(kept) >= k or len(hits) < fetch:
                return kept[:k]
            fetch *= 4

    def _hits(self, query: Floats, k: int) -> list[Hit]:
        with self._lock:
            with self._database.snapshot():
                found = self._index.nearest(query, k)
                chunks = {
                    row: self._chunk(*columns)
                    for row, *columns in self._database.query_in(
                        "SELECT row, id, text, metadata FROM chunks WHERE row IN ?", (row for row, _ in found)
                    )
                }
            self._index.save_if_rebuilt()
        return [Hit(chunks[row], score) for row, score in found]

    def token_arrays(
        self, tokenizer_fingerprint: str, encode: Callable[[str], Sequence[int]]
    ) -> dict[str, npt.NDArray[np.int32]]:
        """Every chunk's token ids by chunk id, int32, encoded once per tokenizer and kept in the store.

        `encode` is called without the lock, for chunks that have no ids under this fingerprint yet.
        """
        return token_arrays(self._database, self._lock, tokenizer_fingerprint, encode)


def _check_chunk(chunk: object) -> None:
    if not isinstance(chunk, Chunk):
        kind = type(chunk).__name__
        raise StoreError(f"a store takes Chunk objects, not {kind}: use Chunk.from_text(text, metadata)")
    if not chunk.text.strip():
        raise StoreError(f"the text of chunk {chunk.id!r} is empty: leave the chunk out")


def _id_list(ids: Iterable[str]) -> list[str]:
    if isinstance(ids, str):
        raise StoreError(f"ids must be a list of ids, not the one str {ids!r}: pass [{ids!r}]")
    return list(ids)
