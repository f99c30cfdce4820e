"""A small policy, and reference sampling: one request at a time, with a plain forward pass for each
token."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config

from ramify.inference.http.inference_spec import KEY_VARIABLE
from ramify.inference.local.engine import InferenceEngineLimits, LocalEngine
from ramify.inference.local.generation_request import GenerationState, sample_tokens
from ramify.inference.local.local_client import LocalClient
from ramify.inference.local.model_runner import create_runner
from ramify.models.dense import DenseModel
from ramify.models.load import Policy, from_config
from tests.models.templates import tokenizer_of

WINDOW = 256
ENGINE_KEY = os.environ.setdefault(KEY_VARIABLE, "rk-of-the-engines-of-tests")
"""Key of engines that a test serves: a trainer finds it in this variable."""


def policy(seed: int = 0, *, sharpness: float = 12.0, **sizes: Any) -> Policy:
    """Random weights, sharpened so that the next token depends on all that came before."""
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        max_position_embeddings=WINDOW,
        bos_token_id=None,
        eos_token_id=3,
        pad_token_id=0,
    )
    config.update(sizes)
    made = from_config(config, tokenizer_of("tiny"), seed)
    with torch.no_grad():
        made.model.get_parameter("model.embed_tokens.weight").mul_(sharpness)
    return made


def engine(made: Policy, **room: Any) -> LocalEngine:
    assert isinstance(made.model, DenseModel)
    limits = {"slots": 8, "prefill_tokens": 64, "cache_bytes": 64 << 20, "window": WINDOW, **room}
    return LocalEngine(create_runner(made.model), InferenceEngineLimits(**limits))


def drained(running: LocalEngine) -> list[GenerationState]:
    """Step until the engine is idle and return all finished generations."""
    done = []
    while not running.is_idle:
        done += running.step()
    return done


def causal(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float) -> Tensor:
    q, k, v = (each.transpose(0, 1)[None] for each in (q_THd, k_TKd, v_TKd))
    attended = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


@torch.no_grad()
def logits(made: Policy, ids: Sequence[int]) -> Tensor:
    """Return [T, V] from one forward pass over all ids."""
    model = made.model
    assert isinstance(model, DenseModel)
    return model.logits(model.hidden(torch.tensor(list(ids)), torch.arange(len(ids)), causal))


def expected(made: Policy, like: GenerationState) -> GenerationState:
    """Sample ``like`` to its end alone and without a cache."""
    while like.end is None:
        drawn = sample_tokens(logits(made, like.ids)[-1:], [like.draw], [like.uniform()])
        like.append(drawn.ids[0], drawn.logprobs[0], drawn.kept[0], 0)
    return like


def pauses(client: LocalClient, after: int) -> threading.Event:
    """Pause the client's engine after ``after`` more steps, in the middle of its work. The returned
    event is set once it is paused; ``client.resume`` belongs after that."""
    last, stands = client.engine.num_steps + after, threading.Event()

    def look(*_: object) -> None:
        if client.engine.num_steps >= last - 1:
            handle.remove()
            client.pause()
            stands.set()

    handle = client.policy.model.get_submodule("model.norm").register_forward_hook(look)
    return stands
