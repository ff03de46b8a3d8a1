"""What stands in the columns of a store: JSON, float32 vectors and int32 token ids, never pickle."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from reader_rag.errors import StoreError
from reader_rag.store.chunk import Chunk
from reader_rag.store.vectors import Floats


def to_json(chunk: Chunk) -> str:
    wrong = next((key for key in chunk.metadata if not isinstance(key, str)), None)
    if wrong is not None:
        raise StoreError(f"metadata key {wrong!r} of chunk {chunk.id!r} is no str: use str keys")
    try:
        return json.dumps(dict(chunk.metadata))
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"the metadata of chunk {chunk.id!r} is not JSON ({error}): convert it to str"
        ) from error


def to_blob(vector: Floats) -> bytes:
    return vector.astype("<f4").tobytes()


def from_blob(blob: bytes) -> Floats:
    return np.frombuffer(blob, dtype="<f4").astype(np.float32)


def to_int32(ids: Sequence[int]) -> npt.NDArray[np.int32]:
    wide = np.asarray(ids, dtype=np.int64)
    if wide.ndim != 1 or (len(wide) and (wide.min() < 0 or wide.max() > np.iinfo(np.int32).max)):
        raise StoreError("encode must give one flat list of token ids between 0 and 2**31 - 1")
    return wide.astype(np.int32)
