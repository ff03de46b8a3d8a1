"""A model's tokenizer without the model: all that a replay needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reader_rag.convert import convert
from reader_rag.errors import LoadError
from reader_rag.load import demo_model_file


def load_tokenizer(model: str | None = None) -> Any:
    """The tokenizer of a hub id, folder or .gguf file; the demo model's for None. Raises LoadError with the mend."""
    from transformers import AutoTokenizer

    source = demo_model_file() if model is None else Path(model)
    if source.suffix == ".gguf" and source.is_file():
        source = convert(source, progress=True)  # once; later calls find the folder in the cache
    try:
        return AutoTokenizer.from_pretrained(
            str(source) if source.exists() else model, local_files_only=source.is_dir()
        )
    except (OSError, ValueError, KeyError) as error:
        raise LoadError(
            f"no tokenizer could be loaded for {model!r} ({error}); name a hub id, a folder or a .gguf file"
        ) from error
