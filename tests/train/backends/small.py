"""A small policy and token sequences for it, created from a seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from ramify.models.dense import DenseModel, unsupported_reason
from ramify.models.load import Policy
from ramify.types.training_sequences import TokenSequence

VOCAB = 61
MIXTURE_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Fields of the configurations of small mixtures of experts."""
CONFIG = Qwen3Config(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    initializer_range=0.3,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=None,
)


def policy(config: Any = CONFIG, seed: int = 0) -> Policy:
    """Return a policy with random weights and no tokenizer, which backends do not use."""
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    if unsupported_reason(config) is None:
        dense = DenseModel(config)
        dense.load_state_dict(model.state_dict())
        model = dense.eval()
    return Policy(model, None, None, config, 0, "small")  # type: ignore[arg-type]


def as_module(config: Any) -> Policy:
    """Return a policy that runs transformers' own module even if ``DenseModel`` supports it."""
    torch.manual_seed(0)
    return Policy(AutoModelForCausalLM.from_config(config).eval(), None, None, config, 0, "small")  # type: ignore[arg-type]


def row(
    name: str, prompt: list[int], num_sampled: int, rng: np.random.Generator, **more: Any
) -> TokenSequence:
    """``prompt``, then random tokens: every third is an observation, the others carry loss."""
    ids = np.concatenate([prompt, rng.integers(0, VOCAB, num_sampled)]).astype(np.int64)
    mask = (np.arange(len(ids)) >= len(prompt)) & (np.arange(len(ids)) % 3 > 0)
    zeros = np.zeros(len(ids), np.float32)
    sampler = np.where(mask, rng.normal(-4, 0.3, len(ids)), 0).astype(np.float32)
    given: dict[str, Any] = {
        "advantages": np.where(mask, rng.normal(size=len(ids)), 0).astype(np.float32),
        "rl": np.where(mask, rng.uniform(0.5, 1.5, len(ids)), 0).astype(np.float32),
        "ce": np.where(mask & (np.arange(len(ids)) % 2 > 0), 0.5, zeros).astype(np.float32),
    } | more
    return TokenSequence(name=name, token_ids=ids, mask=mask, sampler_logprobs=sampler, **given)


def tree(seed: int = 0) -> list[TokenSequence]:
    """Two tasks. The first has five siblings under one prompt, three of which continue from a
    shared fork."""
    rng = np.random.default_rng(seed)
    prompt, other = rng.integers(0, VOCAB, 23).tolist(), rng.integers(0, VOCAB, 5).tolist()
    fork = [*prompt, *rng.integers(0, VOCAB, 11).tolist()]
    rows = [row(f"fork={index}", fork, 7 + 3 * index, rng) for index in range(3)]
    rows += [row(f"sibling={index}", prompt, 10, rng) for index in range(2)]
    return rows + [row(f"other={index}", other, 20 + index, rng) for index in range(4)]
