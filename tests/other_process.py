"""What a process says of a model: its fingerprints and a drafted answer. Run as a script, another process says it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from reader_rag import Drafting, Reader, Sampling
from reader_rag.load import load_model, model_fingerprint, tokenizer_fingerprint


def fingerprints(folder: Path | str, dtype: str) -> list[str]:
    """Of model and tokenizer, after the tokenizer was used with options of its own."""
    loaded = load_model(folder, dtype=dtype, device="cpu")
    loaded.tokenizer("text", truncation=True, max_length=2)
    return [model_fingerprint(loaded.model, loaded.tokenizer), tokenizer_fingerprint(loaded.tokenizer)]


def drafted_answer(folder: Path | str, cache: Path | str) -> list[Any]:
    """Tokens, passes, and what was drafted and accepted by source."""
    drafting = Drafting(prompt_evidence=True)  # None measures whether it pays
    reader = Reader.load(folder, dtype="float32", width=8, drafting=drafting, cache_dir=cache)
    answer = reader.generate("How does a text go on?", sampling=Sampling(max_tokens=40))
    stats = answer.stats
    return [list(answer.tokens), stats.passes, dict(stats.drafted_by_source), dict(stats.accepted_by_source)]


if __name__ == "__main__":
    said = {"fingerprints": fingerprints(sys.argv[1], "bfloat16"), "answer": drafted_answer(*sys.argv[1:3])}
    print(json.dumps(said))
