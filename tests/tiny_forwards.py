"""Forwards of tiny models, one for each kind of attention."""

from __future__ import annotations

import torch

from reader_rag.verify.attention import use_grouped_attention
from reader_rag.verify.forward import FixedForward
from reader_rag.verify.kernels import twin_of
from tests.tiny_models import tiny

CPU = torch.device("cpu")
WIDTH, VOCABULARY = 8, 300
# Kinds of attention; the first window ends inside a tree.
KINDS = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "one window": ("mistral", {"sliding_window": 3}),
    "two windows": ("gemma3", {}),
}


def forward_of(kind="llama", *, rows=1, dtype=torch.float32):
    architecture, options = KINDS[kind]
    model = tiny(architecture, **options).to(dtype)
    net = twin_of(model)
    use_grouped_attention(net)
    return FixedForward(net, model.config, width=WIDTH, chunk=32, device=CPU, rows=rows)
