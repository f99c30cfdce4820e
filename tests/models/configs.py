"""Small configurations of every model family that ``DenseModel`` supports, in their variants."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def configs() -> dict[str, Any]:
    """Return new configuration objects by name."""
    return {
        "llama": LlamaConfig(**_SIZES),
        "llama-biases": LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True, head_dim=16),
        "llama3-rope": LlamaConfig(**_SIZES, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
        "mistral": MistralConfig(**_SIZES, sliding_window=None, head_dim=12),
        "mistral-sliding": MistralConfig(
            **_SIZES, sliding_window=100, head_dim=12, rms_norm_eps=1e-5
        ),
        "qwen2": Qwen2Config(**_SIZES),
        "qwen2-tied": Qwen2Config(**_SIZES, tie_word_embeddings=True),
        "qwen3": Qwen3Config(**_SIZES, head_dim=16),
        "qwen3-tied": Qwen3Config(
            **_SIZES, head_dim=8, tie_word_embeddings=True, attention_bias=True
        ),
    }
