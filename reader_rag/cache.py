"""Where this user's converted models, demo store and learned statistics live."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reader_rag.errors import SettingsError

_STALE_S = 24 * 3600


def user_cache_dir(folder: str | Path | None = None) -> Path:
    """The folder for everything that can be rebuilt: `folder`, else $READER_RAG_CACHE, else the system's cache folder.

    The folder is not created here.
    """
    if folder is not None:
        return Path(folder).expanduser()
    if chosen := os.environ.get("READER_RAG_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "reader_rag"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "reader_rag"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "reader_rag"


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Fill a temporary folder next to `target`; it becomes `target` in one rename, and only if the block succeeds.

    A process that dies half-way leaves a folder named `.part-*`, which a later call removes after a day.
    When another process has finished `target` in the meantime, its result stays and this one is dropped.
    Raises SettingsError if nothing can be made there.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"cannot make the folder {target.parent} for the cache ({error.strerror}); mend its permissions, or name "
            "another folder by cache_dir= or READER_RAG_CACHE"
        ) from error
    for left in target.parent.glob(".part-*"):
        try:
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)
        except FileNotFoundError:
            continue  # its owner has just renamed it
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=target.parent))
    try:
        yield part
        try:
            part.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_text(file: Path, text: str) -> None:
    """Replace `file` by `text` in one step: a reader sees the old text or the new one, never a part."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, file)
    finally:
        Path(part).unlink(missing_ok=True)
