"""Recordings: answers that a model has given, token by token, so that drafting can be measured without the model."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reader_rag.errors import SettingsError

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """One prompt and its answer.

    whole      the answer ended by itself; otherwise a length limit cut it
    chunks     token sequences of the request's own chunks, each tokenization a sequence of its own
    top_ids    [n, k] the model's likeliest tokens, row i after token i of prompt + output; None: no soft evidence was recorded
    top_probs  [n, k] their probabilities
    """

    name: str
    set: str
    prompt: Tokens
    output: Tokens
    whole: bool = True
    chunks: tuple[Tokens, ...] = ()
    top_ids: NDArray[np.int32] | None = None
    top_probs: NDArray[np.float32] | None = None

    @property
    def soft(self) -> bool:
        """Whether the model's own expectations were recorded."""
        return self.top_ids is not None


def save_recording(folder: str | Path, recording: Recording) -> Path:
    """Writes `folder`/<name>.npz, whole or not at all."""
    path = Path(folder) / f"{recording.name}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {
        "prompt": np.array(recording.prompt, np.int32),
        "output": np.array(recording.output, np.int32),
        "whole": np.array(recording.whole),
        "chunk_lengths": np.array([len(chunk) for chunk in recording.chunks], np.int32),
        "chunk_tokens": np.array([token for chunk in recording.chunks for token in chunk], np.int32),
    }
    if recording.top_ids is not None and recording.top_probs is not None:
        arrays["top_ids"] = recording.top_ids.astype(np.int32)
        arrays["top_probs"] = recording.top_probs.astype(np.float16)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez_compressed(file, **arrays)
    os.replace(part, path)
    return path


def load_recordings(
    folder: str | Path, *, sets: Iterable[str] = (), limit: int | None = None, ends: Iterable[int] = ()
) -> list[Recording]:
    """The recordings of a folder in the order of their names, at most `limit` of each set.

    A recording's set is its name without the last "-number". `ends` are end-of-sequence tokens: a file that does not say
    whether its answer is whole is asked for its last token. Raises SettingsError naming the file that cannot be used.
    """
    if limit is not None and limit < 1:
        raise SettingsError(f"the limit is {limit}; ask for at least 1 recording")
    files = sorted(Path(folder).glob("*.npz"))
    if not files:
        raise SettingsError(f"{folder} has no recordings; make them with `reader-rag bench record`")
    wanted, stops = set(sets), frozenset(ends)
    by_set: dict[str, list[Recording]] = {}
    for file in files:
        group = set_of(file.stem)
        kept = by_set.setdefault(group, [])
        if (not wanted or group in wanted) and (limit is None or len(kept) < limit):
            kept.append(_load(file, group, stops))
    unknown = wanted - set(by_set)
    if unknown:
        raise SettingsError(
            f"{folder} has no set {sorted(unknown)[0]!r}; its sets are: {', '.join(sorted(by_set))}"
        )
    return [recording for group in by_set.values() for recording in group]


def set_of(name: str) -> str:
    """`rag-003` is of the set `rag`."""
    return re.sub(r"-\d+$", "", name)


def _load(file: Path, group: str, ends: frozenset[int]) -> Recording:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            prompt, output = (tuple(arrays[key].tolist()) for key in ("prompt", "output"))
            whole = bool(arrays["whole"]) if "whole" in arrays else bool(output) and output[-1] in ends
            chunks = _cut(arrays) if "chunk_lengths" in arrays else ()
            ids = probs = None
            if "top_ids" in arrays:
                ids, probs = arrays["top_ids"].astype(np.int32), arrays["top_probs"].astype(np.float32)
                if ids.shape != probs.shape or len(ids) < len(prompt) + len(output) - 1:
                    raise ValueError("top_ids and top_probs do not have a row for every token")
            if not prompt or not output:
                raise ValueError("prompt or output is empty")
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise SettingsError(f"{file} is not a recording ({type(error).__name__}: {error})") from error
    return Recording(file.stem, group, prompt, output, whole, chunks, ids, probs)


def _cut(arrays: Any) -> tuple[Tokens, ...]:
    tokens: Sequence[int] = arrays["chunk_tokens"].tolist()
    chunks, start = [], 0
    for length in arrays["chunk_lengths"].tolist():
        chunks.append(tuple(tokens[start : start + length]))
        start += length
    return tuple(chunks)
