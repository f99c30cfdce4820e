"""The model to train, loaded or created from scratch, and the copy of it that answers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ramify.errors import ConfigError
from ramify.inference.base import TINY
from ramify.logging import RoomLogger
from ramify.progress import report_progress
from ramify.train.config import Run
from ramify.types.trajectory import Trajectory

if TYPE_CHECKING:
    from ramify.models.load import Policy

_log = RoomLogger("train")
NUM_TOKENIZER_TEXTS = 3000
"""Maximum number of demonstrations that a tokenizer is trained on; more change little."""


def policy_of(run: Run, demonstrations: Sequence[Trajectory]) -> Policy:
    """The initial policy of ``run``, with its tokenizer."""
    import torch
    from transformers import AutoConfig

    from ramify.models.load import from_config, load_policy, load_tokenizer
    from ramify.models.tokenizer import train_tokenizer, word_tokenizer

    spec = run.policy
    device = None if spec.device == "auto" else spec.device
    if spec.path:
        packaged = spec.path == "tiny" and not Path("tiny").exists()
        return load_policy(
            TINY if packaged else spec.path,
            None if spec.dtype == "auto" else getattr(torch, spec.dtype),
            device,
        )
    if spec.tokenizer:
        tokenizer = load_tokenizer(Path(spec.tokenizer))
    elif spec.words:
        tokenizer = word_tokenizer(spec.words)
    elif demonstrations:
        with report_progress("tokenizer", note="trained on the demonstrations"):
            tokenizer = train_tokenizer(_texts(demonstrations), spec.vocab_size)
    else:
        raise ConfigError(
            "policy: a model trained from scratch needs a tokenizer, or demonstrations to train "
            "one on"
        )
    config = AutoConfig.for_model(
        **{
            "vocab_size": len(tokenizer),
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            **spec.shape,
        }
    )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    policy = from_config(config, tokenizer, run.seed, device=device)
    if spec.dtype != "auto":
        policy.model.to(getattr(torch, spec.dtype))
    return policy


def serving_of(run: Run, policy: Policy, is_here: bool) -> Policy:
    """The policy that the engine serves. It is the trained one itself, or a copy that each
    publication renews: if the trained one has another precision or adapters, or is trained while
    rollouts continue."""
    from ramify.train.backends.lora import attach

    lora = run.policy.lora
    if not is_here:
        return policy
    waits = run.rl is None or not run.rl.sample.max_staleness
    if lora is None and str(policy.dtype) == "torch.float32" and waits:
        return policy
    serving = dataclasses.replace(policy, model=copy.deepcopy(policy.model))
    if lora is not None:
        num = attach(policy.model, lora.rank, lora.alpha, lora.targets, run.seed)
        _log.info(
            "adapters",
            f"adapters of rank {lora.rank}: {num:,} of {policy.num_parameters:,} parameters are "
            "trained",
            shown=True,
            rank=lora.rank,
            parameters=num,
        )
    return serving


def _texts(demonstrations: Sequence[Trajectory]) -> Iterator[str]:
    for trajectory in demonstrations[:NUM_TOKENIZER_TEXTS]:
        for call in trajectory.calls:
            yield from (message.content for message in trajectory.conversation(call))
