"""Where a store lies: what is in a folder before it is opened."""

from __future__ import annotations

from pathlib import Path

from reader_rag.errors import StoreError
from reader_rag.store.database import Database


def holds_store(where: Path, create: bool) -> bool:
    """Whether there is a store in the folder; StoreError if there is none and none may be made."""
    try:
        if where.exists() and not where.is_dir():
            raise StoreError(f"{where} is a file, but a store is a folder: name a folder")
        if (where / "store.db").exists():
            return True
        pickled = where.is_dir() and any(where.glob("*.pkl"))
    except OSError as error:
        raise _cannot_open(where, error) from error
    if create:
        return False
    if pickled:
        raise StoreError(
            f"cannot open {where}: it holds the pickled index of another program, which could run any code "
            "and is never read; index the texts again"
        )
    missing = "there is no store in it" if where.is_dir() else "there is no such folder"
    raise StoreError(f"cannot open {where}: {missing}; mend the path, or index something into it first")


def database_in(where: Path) -> Database:
    """The database in this folder, which is made if it is missing."""
    try:
        where.mkdir(parents=True, exist_ok=True)
        return Database(where.resolve() / "store.db")
    except OSError as error:
        raise _cannot_open(where, error) from error


def _cannot_open(where: Path, error: OSError) -> StoreError:
    return StoreError(f"cannot open {where}: {error.strerror}; mend its permissions or the path")
