"""Files and folders to chunks."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from reader_rag.errors import StoreError
from reader_rag.store.chunk import Chunk
from reader_rag.store.progress import Progress, progress_bar
from reader_rag.store.split import split_titled

MARKDOWN = (".md", ".markdown")
TEXT = (*MARKDOWN, ".rst", ".text", ".txt")

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Report:
    """What `Store.add_paths` did: files indexed, their chunks, and (path, reason) of each file left out."""

    files: int
    chunks: int
    skipped: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """Chunks by file, the files left out with the reason, and the folders that were read."""

    chunks: dict[str, list[Chunk]]
    skipped: tuple[tuple[str, str], ...]
    folders: tuple[str, ...]


def read_paths(
    paths: PathLike | Iterable[PathLike], progress: Progress, leave_out: Path | None = None
) -> Reading:
    """Read and split files named in `paths` and the text files in folders named there, hidden ones excepted.

    Nothing of `leave_out` (the store's own folder) is read. Raises StoreError if a path is missing or
    unreadable, is a binary or an empty file, or a folder without text.
    """
    named = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not named:
        raise StoreError("no path to index was given: name at least one file or folder")
    roots = [_resolved(path) for path in named]
    files, skipped = _collect(roots, leave_out)
    chunks: dict[str, list[Chunk]] = {}
    with progress_bar(progress, len(files), "reading", "file") as advance:
        for file, explicit in files.items():
            text, reason = _text(file)
            if reason and explicit:
                raise StoreError(f"cannot index {file}: {reason}")
            if reason:
                skipped.append((str(file), reason))
            else:
                chunks[str(file)] = file_chunks(file, text)
            advance(1)
    for root in roots:
        if root.is_dir() and not any(Path(file).is_relative_to(root) for file in chunks):
            reasons = Counter(reason for path, reason in skipped if Path(path).is_relative_to(root))
            found = "; ".join(f"{count} left out: {reason}" for reason, count in reasons.most_common(3))
            raise StoreError(
                f"there is no text file to index in {root}{f' ({found})' if found else ''}: "
                f"put {', '.join(TEXT)} files there, or name other text files one by one"
            )
    return Reading(chunks, tuple(skipped), tuple(str(root) for root in roots if root.is_dir()))


def file_chunks(path: Path, text: str) -> list[Chunk]:
    """The chunks of one file. Metadata: source (path), start (characters), title (heading path or file name).

    Ids depend on path and text alone, so a chunk keeps its id when something is inserted above it.
    """
    seen: Counter[str] = Counter()
    chunks = []
    for piece in split_titled(text, markdown=path.suffix.lower() in MARKDOWN):
        key = f"{path}\0{seen[piece.text]}\0{piece.text}"
        seen[piece.text] += 1
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        metadata = {"source": str(path), "start": piece.start, "title": piece.title or path.name}
        chunks.append(Chunk(digest[:16], piece.text, metadata))
    return chunks


def _resolved(path: PathLike) -> Path:
    """The path in full; raises StoreError if nothing readable is there."""
    where = Path(path).expanduser()
    try:
        resolved = where.resolve(strict=True)
        if not (resolved.is_dir() or resolved.is_file()):
            raise StoreError(f"cannot index {where}: it is neither a file nor a folder; name a text file")
    except FileNotFoundError as error:
        raise StoreError(f"cannot index {where}: there is no such file or folder; mend the path") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
        raise StoreError(
            f"cannot index {where}: {_cause(error)}; mend its permissions or the path"
        ) from error
    return resolved


def _collect(roots: Sequence[Path], leave_out: Path | None) -> tuple[dict[Path, bool], list[tuple[str, str]]]:
    """The files to read, with whether each was named itself; and what is left out, with the reason."""
    files = {root: True for root in roots if root.is_file()}
    skipped: dict[str, str] = {}
    for root in roots:
        if root.is_dir():
            for path in _walk(root, leave_out, skipped):
                if path.suffix.lower() in TEXT:
                    files.setdefault(path, False)
                elif path not in files:
                    skipped[str(path)] = f"its name does not end in {', '.join(TEXT)}"
    return files, list(skipped.items())


def _walk(root: Path, leave_out: Path | None, skipped: dict[str, str]) -> Iterator[Path]:
    """Every file below `root` that is not hidden; folders that cannot be read go to `skipped`."""

    def note(error: OSError) -> None:
        if Path(error.filename) == root:
            raise StoreError(
                f"cannot read the folder {root}: {_cause(error)}; mend its permissions"
            ) from error
        skipped[str(error.filename)] = f"it cannot be read ({_cause(error)}); mend its permissions"

    for folder, folders, names in os.walk(root, onerror=note):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and Path(folder, name) != leave_out
        )
        if Path(folder) != leave_out:
            yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def _text(path: Path) -> tuple[str, str]:
    """The file's text and "", or "" and the reason why it has none."""
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        return "", "its name is not UTF-8; rename it"
    try:
        if not path.is_file():
            return "", "it is not a regular file"
        content = path.read_bytes()
    except OSError as error:
        return "", f"it cannot be read ({_cause(error)}); mend its permissions"
    if b"\0" in content:
        return "", "it is binary (it holds NUL bytes); convert it to UTF-8 text"
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return "", f"it is not UTF-8 text (byte {error.start}); convert it to UTF-8"
    return (text, "") if text.strip() else ("", "it is empty; write some text into it")


def _cause(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
