"""transformers' own decoding: the slow path that everything is held against."""

from __future__ import annotations

from typing import Any

import torch

from reader_rag import Reader


def generated(reader: Reader, prompt: Any, max_tokens: int, **options: Any) -> tuple[int, ...]:
    """Tokens of transformers' greedy `generate` on the reader's own model, for the reader's own prompt ids."""
    ids = torch.tensor([reader.encode_prompt(prompt)])
    out = reader.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=sorted(reader.eos),
        pad_token_id=0,
        **options,
    )
    return tuple(out[0, ids.shape[1] :].tolist())
