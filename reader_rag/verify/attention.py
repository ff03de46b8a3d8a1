"""Attention for a few queries over a long key view, without copying keys for grouped heads.

transformers repeats every key and value head for its group before calling torch's kernel: at 16 queries and a thousand keys the copy
costs more than the product. Here the queries of a group are stacked instead: [1, heads, n, d] -> [1, kv_heads, group * n, d].
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig

NAME = "reader_rag_grouped"


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Query [1, heads, n, d], key and value [1, kv_heads, view, d], boolean mask [1, 1, n, view] -> [1, n, heads, d]."""
    batch, heads, count, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    if group > 1:
        query = query.reshape(batch, kv_heads, group * count, dim)
        if attention_mask is not None:
            attention_mask = attention_mask.repeat(1, 1, group, 1)
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling
    )
    return out.reshape(batch, heads, count, value.shape[-1]).transpose(1, 2).contiguous(), None


def use_grouped_attention(model: nn.Module) -> None:
    """Makes `model` (our twin, never the caller's object) attend through `grouped_attention` instead of sdpa or flash kernels."""
    AttentionInterface.register(NAME, grouped_attention)
    for module in model.modules():
        own = getattr(module, "config", None)
        if isinstance(own, PreTrainedConfig) and str(own._attn_implementation).startswith(("sdpa", "flash")):
            own._attn_implementation = NAME
