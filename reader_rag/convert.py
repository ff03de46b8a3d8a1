"""GGUF files become plain transformers folders, once: a GGUF takes tens of seconds to load, the folder takes one."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from reader_rag.cache import new_folder, user_cache_dir
from reader_rag.errors import LoadError, MissingExtraError

_log = logging.getLogger("reader_rag")

# Part of every converted folder's name: raise it when the conversion changes.
_FORMAT = 1


def is_gguf(path: Path) -> bool:
    """Whether the file begins as every GGUF does."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def converted_folder(file: Path, cache_dir: str | Path | None = None) -> Path:
    """Where the conversion of this very content lives, whether it has been made yet or not."""
    return user_cache_dir(cache_dir) / "models" / f"{file.stem}-{sha256_of(file)[:16]}-v{_FORMAT}"


def convert(file: str | Path, *, cache_dir: str | Path | None = None, progress: bool = False) -> Path:
    """The transformers folder of a GGUF file; written on the first call, found again on every later one.

    Weights are kept in float32 or float16 where the file has these, else (quantized, bfloat16) in bfloat16.
    Raises LoadError for a file that cannot be read or is no GGUF, MissingExtraError without the `gguf` extra.
    """
    file = Path(file).expanduser()
    try:
        if not is_gguf(file):
            raise LoadError(
                f"{file} is not a GGUF file (it does not begin with 'GGUF'); "
                "give a .gguf file of llama.cpp, or the folder of a transformers model"
            )
        folder = converted_folder(file, cache_dir)
    except OSError as error:
        raise LoadError(
            f"cannot read {file}: {error.strerror or error}; check the path and its permissions"
        ) from error
    if folder.is_dir():
        return folder
    _require_gguf_extra(file)
    if progress:
        sys.stderr.write(f"Converting {file.name} (once; kept in {folder.parent})\n")
        sys.stderr.flush()
    _log.info("converting %s to %s", file, folder)
    with new_folder(folder) as part:
        _write(file, part, progress)
    return folder


def _require_gguf_extra(file: Path) -> None:
    from importlib.util import find_spec

    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"reading {file.name} needs the package{'s' if len(missing) > 1 else ''} {' and '.join(missing)}; "
            'run `pip install "reader-rag[gguf]"`'
        )


def _write(file: Path, folder: Path, progress: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": file.name, "local_files_only": True}
    dtype = _stored_dtype(file)
    try:
        with transformers_progress(progress):
            tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **where)
            model = AutoModelForCausalLM.from_pretrained(
                str(file.parent), dtype=dtype, **_unpacked(), **where
            )
            _forget_quantizer(model)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except Exception as error:  # transformers, gguf and tokenizers raise many classes
        raise LoadError(
            f"transformers cannot read {file}: {_first_line(error)}; "
            "download the file again, or use the model's transformers folder instead of its GGUF"
        ) from error
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    packed = [name for name, weight in model.named_parameters() if not weight.is_floating_point()]
    if "quantization_config" in config or packed:
        raise LoadError(
            f"transformers kept {file.name} quantized, so it cannot be converted; "
            "use the model's transformers folder instead, and please report this with the model's name"
        )
    source = {"file": file.name, "dtype": str(dtype).removeprefix("torch."), "format": _FORMAT}
    (folder / "source.json").write_text(json.dumps(source, indent=1) + "\n", encoding="utf-8")


def _unpacked() -> dict[str, Any]:
    """Newer transformers may keep the weights in GGUF blocks, which cannot be saved; older ones never do."""
    import transformers

    make = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": make(dequantize=True)} if make else {}


def _forget_quantizer(model: Any) -> None:
    """The weights are dequantized already, but save_pretrained refuses while these fields say otherwise."""
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    if hasattr(model, "quantization_method"):
        del model.quantization_method


def _stored_dtype(file: Path) -> Any:
    """The dtype that holds most of the file's matrix entries: float32, float16, or bfloat16 for anything smaller."""
    import torch
    from gguf import GGMLQuantizationType as Kind
    from gguf import GGUFReader

    entries = {torch.float32: 0, torch.float16: 0, torch.bfloat16: 0}
    kept = {Kind.F64: torch.float32, Kind.F32: torch.float32, Kind.F16: torch.float16}
    try:
        for tensor in GGUFReader(file).tensors:
            if len(tensor.shape) > 1:
                entries[kept.get(tensor.tensor_type, torch.bfloat16)] += int(tensor.n_elements)
    except Exception as error:  # the reader raises whatever numpy says about a cut or damaged file
        raise LoadError(
            f"{file} is damaged or incomplete ({_first_line(error)}); download it again"
        ) from error
    return max(entries, key=lambda dtype: entries[dtype])


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")


@contextmanager
def transformers_progress(shown: bool) -> Iterator[None]:
    """transformers' own loading bars and notices, only when asked for; bars only on a terminal."""
    from transformers import modeling_gguf_pytorch_utils as gguf_loader
    from transformers.utils import logging as transformers_logging

    shown = shown and sys.stderr.isatty()
    bars, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    # The GGUF loader's bar is a bare tqdm that the switch below does not reach.
    gguf_bar = getattr(gguf_loader, "tqdm", None)
    if not shown:
        transformers_logging.disable_progress_bar()
        if gguf_bar is not None:
            gguf_loader.tqdm = partial(gguf_bar, disable=True)
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if gguf_bar is not None:
            gguf_loader.tqdm = gguf_bar
        if bars:
            transformers_logging.enable_progress_bar()
