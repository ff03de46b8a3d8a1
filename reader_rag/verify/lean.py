"""A decoder of the Llama kind without the module tree around it: on a CPU, half of a narrow pass was Python between the products.

transformers' layers are some thirty small modules and fifty operators each. Here a layer is one stretch of code over packed weights that
are joined where they read the same input: query, key and value; gate and up. It computes what the model's own forward computes; the
self-check at load compares the two on the very model, and the tests do so for every architecture in ARCHITECTURES.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from reader_rag.verify.arena import PassCache
from reader_rag.verify.attention import grouped_attention
from reader_rag.verify.kernels import FORMS

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


@dataclass(frozen=True, slots=True)
class _Layer:
    before: torch.Tensor  # weight of the norm before attention
    joined: nn.Module  # query, key and value
    out: nn.Module
    between: torch.Tensor  # weight of the norm before the feed-forward part
    gate_up: nn.Module
    down: nn.Module


class LeanDecoder(nn.Module):
    """The forward pass of a causal model over packed weights; takes what `FixedForward` passes, gives an object with `logits`."""

    def __init__(self, model: Any, rows: int, form: str) -> None:
        super().__init__()
        config, inner = model.config, model.model
        pack = FORMS[form]

        def joined(*linears: nn.Linear) -> nn.Module:
            return pack(_join(linears), rows)

        attention = inner.layers[0].self_attn
        self.embed_tokens, self._rotary = inner.embed_tokens, inner.rotary_emb
        self._head = pack(model.lm_head, rows)
        self._norm, self._eps = inner.norm.weight.detach(), inner.norm.variance_epsilon
        self._dim: int = attention.head_dim
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._scaling: float = attention.scaling
        self._layers = [
            _Layer(
                layer.input_layernorm.weight.detach(),
                joined(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                pack(layer.self_attn.o_proj, rows),
                layer.post_attention_layernorm.weight.detach(),
                joined(layer.mlp.gate_proj, layer.mlp.up_proj),
                pack(layer.mlp.down_proj, rows),
            )
            for layer in inner.layers
        ]

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        past_key_values: PassCache,
        logits_to_keep: int = 0,
        use_cache: bool = True,
    ) -> SimpleNamespace:
        """ids and positions [1, n], additive mask as `grouped_attention` takes it -> logits [1, n or logits_to_keep, vocabulary]."""
        x = self.embed_tokens(input_ids)  # [1, n, hidden]
        count, hidden = x.shape[1], x.shape[2]
        cos, sin = (part[:, None] for part in self._rotary(x, position_ids))  # [1, 1, n, dim]
        half = self._dim // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        turned, all_heads = self._heads + self._kv_heads, self._heads + 2 * self._kv_heads
        for layer, cache in zip(self._layers, past_key_values.layers, strict=True):
            y = layer.joined(functional.rms_norm(x, (hidden,), layer.before, self._eps))
            y = y.view(1, count, all_heads, self._dim).transpose(1, 2)
            both = y[:, :turned]  # queries and keys are rotated together
            both = torch.addcmul(both * cos, both.roll(half, -1), sin)
            keys, values = cache.update(both[:, self._heads :], y[:, turned:])
            y, _ = grouped_attention(
                self, both[:, : self._heads], keys, values, attention_mask, scaling=self._scaling
            )
            x = x + layer.out(y.view(1, count, -1))
            y = layer.gate_up(functional.rms_norm(x, (hidden,), layer.between, self._eps))
            gate, up = y.chunk(2, -1)
            x = x + layer.down(functional.silu(gate) * up)
        x = functional.rms_norm(x[:, -logits_to_keep:], (hidden,), self._norm, self._eps)
        return SimpleNamespace(logits=self._head(x))


def is_lean(model: nn.Module) -> bool:
    """Whether `LeanDecoder` computes what this model computes: a known architecture, as transformers makes it, nothing hooked in."""
    config: Any = getattr(model, "config", None)
    if type(model).__name__ not in ARCHITECTURES or not type(model).__module__.startswith("transformers."):
        return False
    inner: Any = model.model
    linears = [
        *(
            getattr(layer.self_attn, name)
            for layer in inner.layers
            for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        ),
        *(
            getattr(layer.mlp, name)
            for layer in inner.layers
            for name in ("gate_proj", "up_proj", "down_proj")
        ),
        model.lm_head,
    ]
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    windowed = config.sliding_window is not None if hasattr(config, "sliding_window") else False
    return (
        config.hidden_act == "silu"
        and set(kinds) == {"full_attention"}
        and not (windowed and getattr(config, "use_sliding_window", True))
        and all(type(linear) is nn.Linear for linear in linears)  # no adapters, no quantized layers
        and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    )


def _join(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One linear layer with the outputs of several, side by side."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias for linear in linears]
    whole = nn.Linear(1, 1, bias=False)
    whole.in_features, whole.out_features = weight.shape[1], weight.shape[0]
    whole.weight = nn.Parameter(weight, requires_grad=False)
    if any(bias is not None for bias in biases):
        parts = [
            torch.zeros(linear.out_features, dtype=weight.dtype) if bias is None else bias.detach()
            for linear, bias in zip(linears, biases, strict=True)
        ]
        whole.bias = nn.Parameter(torch.cat(parts), requires_grad=False)
    return whole
