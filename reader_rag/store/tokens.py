"""Token arrays of a store's chunks: encoded once per tokenizer and kept beside the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import RLock

import numpy as np
import numpy.typing as npt

from reader_rag.store.columns import to_int32
from reader_rag.store.database import Database


def token_arrays(
    database: Database, lock: RLock, fingerprint: str, encode: Callable[[str], Sequence[int]]
) -> dict[str, npt.NDArray[np.int32]]:
    """Every chunk's token ids by chunk id, in order of adding; `encode` is called without the lock."""
    with lock:
        missing = database.query(
            "SELECT row, text FROM chunks "
            "WHERE row NOT IN (SELECT row FROM tokens WHERE fingerprint = ?) ORDER BY row",
            (fingerprint,),
        )
    encoded = {row: to_int32(encode(text)) for row, text in missing}
    with lock:
        if encoded and not database.read_only:
            with database.transaction():
                database.run_many(
                    # A chunk may have been deleted meanwhile.
                    "INSERT OR IGNORE INTO tokens SELECT ?, row, ? FROM chunks WHERE row = ?",
                    [(fingerprint, ids.astype("<i4").tobytes(), row) for row, ids in encoded.items()],
                )
        stored = database.query(
            "SELECT chunks.row, id, ids FROM chunks LEFT JOIN tokens "
            "ON tokens.row = chunks.row AND fingerprint = ? ORDER BY chunks.row",
            (fingerprint,),
        )
    return {
        name: encoded[row] if blob is None else np.frombuffer(blob, "<i4").astype(np.int32)
        for row, name, blob in stored
        if blob is not None or row in encoded
    }
