"""Models with random weights, as small as an architecture may be."""

from __future__ import annotations

import torch


def tiny(kind="llama", **options):
    from transformers import (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    shape = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        **options,
    }
    torch.manual_seed(3)
    if kind == "gemma3":
        config = Gemma3TextConfig(
            **shape, sliding_window=24, layer_types=["sliding_attention", "full_attention"]
        )
        return Gemma3ForCausalLM(config).eval()
    config, model = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[kind]
    return model(config(**({"sliding_window": None} if kind == "mistral" else {}) | shape)).eval()
