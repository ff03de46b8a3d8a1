"""Attention for a few queries over long key views, without copying keys for grouped heads and without padding rows.

transformers repeats every key and value head for its group before calling torch's kernel: at 16 queries and a thousand keys the copy
costs more than the product. Here the queries of a group are stacked instead: [1, heads, n, d] -> [1, kv_heads, group * n, d].
A pass over several rows is one long sequence for every other layer; here each stretch of it reads the keys of its own row, in a call
of its own, so that no row can see or round another.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig

from reader_rag.verify.arena import Rows

NAME = "reader_rag_grouped"


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | Rows,
    value: torch.Tensor | Rows,
    attention_mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Query [1, heads, n, d], keys and values [1, kv_heads, view, d] of each stretch -> [1, n, heads, d].

    The additive mask is [1, 1, n, view]; of several stretches, side by side, [1, 1, tokens of the longest, sum of views].
    """
    group = query.shape[1] // _key_heads(key)
    if not (isinstance(key, Rows) and isinstance(value, Rows)):
        assert isinstance(key, torch.Tensor)
        assert isinstance(value, torch.Tensor)
        mask = _stacked(attention_mask, group, query.shape[2], 0, key.shape[2])
        return _attend(query, key, value, mask, scaling), None
    outs, first, left = [], 0, 0
    for count, keys, values in zip(key.counts, key.views, value.views, strict=True):
        right = left + keys.shape[2]
        mask = _stacked(attention_mask, group, count, left, right)
        outs.append(_attend(query[:, :, first : first + count], keys, values, mask, scaling))
        first, left = first + count, right
    return torch.cat(outs, dim=1), None


def _key_heads(key: torch.Tensor | Rows) -> int:
    """Key heads of a layer."""
    return int((key.views[0] if isinstance(key, Rows) else key).shape[1])


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    batch, heads, count, dim = query.shape
    kv_heads = key.shape[1]
    query = query.reshape(batch, kv_heads, heads // kv_heads * count, dim)
    out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, count, value.shape[-1]).transpose(1, 2).contiguous()


class _Memo(threading.local):
    """The latest masks of this thread and their parts, stacked."""

    def __init__(self) -> None:
        self.masks: OrderedDict[int, tuple[torch.Tensor, dict[tuple[int, ...], torch.Tensor]]] = OrderedDict()


_MEMO = _Memo()
_KINDS = 2  # a model's layers share one mask, or two where some look through a window


def _stacked(mask: torch.Tensor, group: int, count: int, left: int, right: int) -> torch.Tensor:
    """The part of a mask that belongs to one stretch, once per query of a group; made once per pass, not once per layer."""
    masks = _MEMO.masks
    if id(mask) not in masks:  # the memo holds the masks that it names, so an id cannot be another's
        masks[id(mask)] = mask, {}
        while len(masks) > _KINDS:
            masks.popitem(last=False)
    parts, key = masks[id(mask)][1], (group, count, left, right)
    if key not in parts:
        parts[key] = mask[:, :, :count, left:right].repeat(1, 1, group, 1)
    return parts[key]


def use_grouped_attention(model: nn.Module) -> None:
    """Makes `model` (our twin, never the caller's object) attend through `grouped_attention` instead of sdpa or flash kernels."""
    AttentionInterface.register(NAME, grouped_attention)
    for module in model.modules():
        own = getattr(module, "config", None)
        if isinstance(own, PreTrainedConfig) and str(own._attn_implementation).startswith(("sdpa", "flash")):
            own._attn_implementation = NAME
