"""Store: chunks and their vectors in a folder, added, found and deleted.

`store.db` (SQLite) is the truth; `vectors.faiss` is derived from it (reader_rag/store/index.py).
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from reader_rag.errors import SettingsError, StoreError
from reader_rag.store.chunk import Chunk, Hit
from reader_rag.store.columns import from_blob, to_blob, to_int32, to_json
from reader_rag.store.database import Database
from reader_rag.store.embed import DEFAULT_EMBEDDER, Embedder, SentenceTransformerEmbedder
from reader_rag.store.files import PathLike, Reading, Report, read_paths
from reader_rag.store.index import SearchIndex
from reader_rag.store.progress import Progress, progress_bar
from reader_rag.store.vectors import Floats

_EMBED_BATCH = 256  # chunks embedded between two saves of what is done


class Store:
    """Chunks in a folder, found by meaning. Threads may share one; several processes may open one folder.

    >>> with Store.open("my-store") as store:  # doctest: +SKIP
    ...     store.add_paths("docs")
    ...     hits = store.search("How do I install it?", k=4)

    Every method raises StoreError with the cause and the mend, and leaves the store as it was when it does.
    """

    def __init__(self, folder: Path, database: Database, embedder: Embedder | None) -> None:
        self.folder = folder
        self._database = database
        self._embedder = embedder
        self._index = SearchIndex(folder, database)
        self._lock = threading.RLock()  # guards database and index; never held while embedding
        self._wrote = False

    @classmethod
    def open(cls, folder: PathLike, embedder: Embedder | str | None = None, create: bool = True) -> Store:
        """Open the store in `folder`; with `create`, make an empty one if there is none.

        `embedder` is an object, a hub id or a folder; None is the one that made the store, or the default.
        Raises StoreError if another embedder made the store.
        """
        where = Path(folder).expanduser()
        path = where / "store.db"
        try:
            if where.exists() and not where.is_dir():
                raise StoreError(f"{where} is a file, but a store is a folder: name a folder")
            fresh = not path.exists()
            if fresh and not create:
                missing = "there is no store in it" if where.is_dir() else "there is no such folder"
                raise StoreError(
                    f"cannot open {where}: {missing}; mend the path, or index something into it first"
                )
            if isinstance(embedder, str) or (fresh and embedder is None):
                embedder = SentenceTransformerEmbedder(embedder)
            if fresh:
                where.mkdir(parents=True, exist_ok=True)
            where = where.resolve()
        except OSError as error:
            raise StoreError(
                f"cannot open {where}: {error.strerror}; mend its permissions or the path"
            ) from error
        store = cls(where, Database(where / "store.db"), embedder)
        try:
            if embedder is not None:
                store._check_embedder(embedder)
        except BaseException:
            store._database.close()
            raise
        return store

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
        return f"Store({str(self.folder)!r})"

    @property
    def embedder_name(self) -> str:
        """Name of the embedder that made the vectors, or will make the first."""
        with self._lock:
            recorded = self._database.get("embedder")
        return recorded or (self._embedder.name if self._embedder else DEFAULT_EMBEDDER)

    # Writing

    def add(self, chunks: Iterable[Chunk], progress: Progress = False) -> list[str]:
        """Embed and keep chunks, all or none, and give their ids. A chunk replaces the one with its id.

        Chunks whose id and text are known are not embedded again. `progress` shows a bar if stderr is a
        terminal, "always" in any case.
        """
        listed = list(chunks)
        for chunk in listed:
            _check_chunk(chunk)
        self._write(listed, progress)
        return [chunk.id for chunk in listed]

    def add_paths(self, paths: PathLike | Iterable[PathLike], progress: Progress = True) -> Report:
        """Split, embed and keep files, and the text files in folders, all or none.

        What the store held of these files is replaced; so is what it held of files gone from these folders.
        Folders are read recursively, without hidden files; text files in them are .txt, .text, .md, .markdown
        and .rst. A file named itself may have any name. Markdown is split at its headings.
        """
        reading = read_paths(paths, progress, leave_out=self.folder)
        chunks = [chunk for listed in reading.chunks.values() for chunk in listed]
        self._write(chunks, progress, reading)
        return Report(len(reading.chunks), len(chunks), reading.skipped)

    def delete(self, ids: Iterable[str]) -> int:
        """Delete chunks by id and give how many there were; unknown ids are no error."""
        wanted = _id_list(ids)
        with self._lock, self._database.transaction():
            return self._delete(wanted)

    def _delete(self, ids: Iterable[str]) -> int:
        deleted = sum(self._database.run("DELETE FROM chunks WHERE id = ?", (name,)) for name in ids)
        if deleted:
            self._changed()
        return deleted

    def _write(self, chunks: list[Chunk], progress: Progress, reading: Reading | None = None) -> None:
        """Embed, then in one transaction delete what is replaced and insert what is new."""
        latest = {chunk.id: chunk for chunk in chunks}  # of two chunks with one id the later counts
        metadata = {name: to_json(chunk) for name, chunk in latest.items()}
        path_of = {name: chunk.metadata["source"] if reading else None for name, chunk in latest.items()}
        vectors = self._embed(chunks, progress)
        with self._lock, self._database.transaction():
            if vectors:
                self._claim(len(next(iter(vectors.values()))))
            known = dict(self._database.query_in("SELECT id, text FROM chunks WHERE id IN ?", latest))
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
                [(name, text, metadata[name], path_of[name], to_blob(vectors[text])) for name, text in new],
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

    def search(self, query: str, k: int = 4) -> list[Hit]:
        """The k chunks nearest in meaning, best first; fewer if the store holds fewer."""
        if not isinstance(query, str) or not query.strip():
            raise StoreError("the query is empty: ask something")
        if k < 1:
            raise SettingsError(f"k is {k}: ask for at least one chunk")
        if not len(self):
            return []
        vector = self._encode("query", [query])[0]
        with self._lock:
            with self._database.snapshot():
                found = self._index.nearest(vector, k)
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
        with self._lock:
            missing = self._database.query(
                "SELECT row, text FROM chunks "
                "WHERE row NOT IN (SELECT row FROM tokens WHERE fingerprint = ?) ORDER BY row",
                (tokenizer_fingerprint,),
            )
        encoded = {row: to_int32(encode(text)) for row, text in missing}
        with self._lock:
            if encoded and not self._database.read_only:
                with self._database.transaction():
                    self._database.run_many(
                        # A chunk may have been deleted meanwhile.
                        "INSERT OR IGNORE INTO tokens SELECT ?, row, ? FROM chunks WHERE row = ?",
                        [
                            (tokenizer_fingerprint, ids.astype("<i4").tobytes(), row)
                            for row, ids in encoded.items()
                        ],
                    )
            stored = self._database.query(
                "SELECT chunks.row, id, ids FROM chunks LEFT JOIN tokens "
                "ON tokens.row = chunks.row AND fingerprint = ? ORDER BY chunks.row",
                (tokenizer_fingerprint,),
            )
        return {
            name: encoded[row] if blob is None else np.frombuffer(blob, "<i4").astype(np.int32)
            for row, name, blob in stored
            if blob is not None or row in encoded
        }

    # Embedding

    def _check_embedder(self, embedder: Embedder) -> None:
        """Refuse an embedder whose vectors cannot be compared with the stored ones."""
        made_by, dim = self._database.get("embedder"), self._database.get("dim")
        if made_by is not None and made_by != embedder.name:
            raise StoreError(
                f"the store in {self.folder} was made by the embedder {made_by!r}, not by {embedder.name!r}: "
                f"open it with {made_by!r}, or index into another folder"
            )
        # A SentenceTransformerEmbedder is known by its name; asking for its dim would load the model.
        if (
            dim is not None
            and not isinstance(embedder, SentenceTransformerEmbedder)
            and embedder.dim != int(dim)
        ):
            raise self._wrong_dim(embedder.dim, dim)

    def _wrong_dim(self, dim: int, recorded: str) -> StoreError:
        return StoreError(
            f"the store in {self.folder} holds vectors of {recorded} numbers, the embedder gives {dim}: "
            "open it with the embedder that made it, or index into another folder"
        )

    def _claim(self, dim: int) -> None:
        """Inside a transaction: the first vectors decide which embedder this store belongs to."""
        embedder = self._ready_embedder()
        self._check_embedder(embedder)
        recorded = self._database.get("dim")
        if recorded is None:
            self._database.put("embedder", embedder.name)
            self._database.put("dim", str(dim))
            if isinstance(embedder, SentenceTransformerEmbedder):
                self._database.put("embedder_source", embedder.source)
        elif dim != int(recorded):
            raise self._wrong_dim(dim, recorded)

    def _ready_embedder(self) -> Embedder:
        with self._lock:
            if self._embedder is None:
                name, source = self._database.get("embedder"), self._database.get("embedder_source")
                if name is not None and name != DEFAULT_EMBEDDER and source is None:
                    raise StoreError(
                        f"the store in {self.folder} was made by the embedder object {name!r}: "
                        "pass it to Store.open(folder, embedder=...)"
                    )
                embedder = SentenceTransformerEmbedder(
                    source if name not in (None, DEFAULT_EMBEDDER) else None
                )
                self._check_embedder(embedder)
                self._embedder = embedder
            return self._embedder

    def _encode(self, kind: str, texts: list[str]) -> Floats:
        """float32 [len(texts), dim], of length 1 even if the embedder's are not."""
        embedder = self._ready_embedder()
        encode = embedder.encode_query if kind == "query" else embedder.encode_document
        vectors = np.asarray(encode(texts), dtype=np.float32)
        if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
            raise StoreError(
                f"the embedder {embedder.name!r} gave shape {vectors.shape} for {len(texts)} texts, or NaN: "
                "it must give one finite vector for each text"
            )
        with self._lock:
            recorded = self._database.get("dim")
        if recorded is not None and vectors.shape[1] != int(recorded):
            raise self._wrong_dim(vectors.shape[1], recorded)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.asarray(vectors / np.where(lengths > 0, lengths, 1), dtype=np.float32)

    def _embed(self, chunks: list[Chunk], progress: Progress) -> dict[str, Floats]:
        """A vector for each text: the stored one if the store knows the chunk, else a new one.

        New ones are saved aside batch by batch, so that an interrupted add can go on where it was.
        """
        if not chunks:
            return {}
        name = self._ready_embedder().name
        with self._lock:
            stored = self._database.query_in(
                "SELECT text, vector FROM chunks WHERE id IN ?", {chunk.id for chunk in chunks}
            )
            vectors = {text: from_blob(blob) for text, blob in stored}
            keys = {
                chunk.text: hashlib.sha256(f"{name}\0{chunk.text}".encode()).hexdigest()
                for chunk in chunks
                if chunk.text not in vectors
            }
            aside = dict(
                self._database.query_in("SELECT key, vector FROM embedded WHERE key IN ?", keys.values())
            )
        vectors |= {text: from_blob(aside[key]) for text, key in keys.items() if key in aside}
        missing = [text for text in keys if text not in vectors]
        with progress_bar(progress, len(missing), "embedding", "chunk") as advance:
            for start in range(0, len(missing), _EMBED_BATCH):
                batch = missing[start : start + _EMBED_BATCH]
                made = self._encode("document", batch)
                vectors |= zip(batch, made, strict=True)
                if len(missing) > _EMBED_BATCH:
                    with self._lock, self._database.transaction():
                        self._database.run_many(
                            "INSERT OR REPLACE INTO embedded VALUES (?, ?)",
                            [(keys[text], to_blob(vector)) for text, vector in zip(batch, made, strict=True)],
                        )
                advance(len(batch))
        return vectors


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
