"""Create the policy that a run begins with.

This module chooses its device, and loads or initializes its weights and its tokenizer.

    policy.path   a checkpoint; only its shapes are read if just ranks and engines hold weights
    policy.shape  random weights, and a tokenizer trained on the demonstrations
    neither       a shape that follows from the demonstrations (``policy_dependent_defaults.py``)

This module also decides whether the engine in this process serves the trained policy itself or a
copy. Options that follow from the policy are set in ``policy_dependent_defaults.py``, and its
files are read by ``models/load.py``.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramify.clients.base import Tool
from ramify.engine.limits import Limits
from ramify.engine.prompt_scaffold import SCAFFOLDS
from ramify.errors import ConfigError
from ramify.logging import ComponentLogger
from ramify.progress import track_progress
from ramify.train.backends.base import BACKENDS
from ramify.train.config import PolicySpec, Run
from ramify.train.policy_dependent_defaults import scratch_model_config, vocabulary_size_for_chars
from ramify.train.preflight import policy_path
from ramify.train.sft_training_data import DemonstrationSet, tokenise_demonstrations
from ramify.trained_policy_settings import PolicyRolloutSettings
from ramify.types.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ramify.models.load import Policy

_log = ComponentLogger("train")
NUM_TOKENIZER_TEXTS = 3000
"""Maximum number of demonstrations to train a tokenizer on. Additional ones hardly change the
result."""


def device_of(run: Run) -> str:
    """Return the kind of device that the policy is trained on, such as ``cuda`` or ``cpu``."""
    import torch

    kind = run.policy.device.partition(":")[0]
    return kind if kind != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def stored_precision(run: Run) -> str:
    """Return the precision of the weights that the run loads, such as ``bfloat16``.

    It is float32 if the policy is trained from scratch.
    """
    if not run.policy.path:
        return "float32"
    from ramify.models.load import default_dtype, read_config

    return str(default_dtype(read_config(policy_path(run)), "cuda")).removeprefix("torch.")


def policy_of(
    run: Run,
    demonstrations: Sequence[DemonstrationSet],
    dtype: str,
    checkpoint: Path | None = None,
    tools: Sequence[Tool] = (),
) -> Policy:
    """Return the initial policy of ``run`` in the precision ``dtype``.

    If the run continues from a ``checkpoint`` and has trained its own tokenizer, the tokenizer is
    read from there. ``tools`` are the native tools of the scaffold.
    """
    import torch
    from transformers import AutoConfig

    from ramify.models.load import from_config, load_policy, load_tokenizer
    from ramify.models.tokenizer_training import train_tokenizer, word_tokenizer

    spec = run.policy
    device = None if spec.device == "auto" else spec.device
    if spec.path:
        device = "meta" if can_skip_weight_loading(run) else device
        return load_policy(policy_path(run), getattr(torch, dtype), device, thinking=spec.thinking)
    if spec.tokenizer:
        tokenizer = load_tokenizer(Path(spec.tokenizer))
    elif spec.words:
        tokenizer = word_tokenizer(spec.words)
    elif checkpoint is not None:
        tokenizer = load_tokenizer(checkpoint / "policy")
    elif shown := [each for one in demonstrations for each in one.trajectories]:
        with track_progress("tokenizer", note="trained on the demonstrations"):
            tokenizer = train_tokenizer(
                _texts(shown[:NUM_TOKENIZER_TEXTS]),
                spec.vocab_size or _usual_vocabulary(spec, shown),
                is_exact=spec.vocab_size is not None or bool(spec.shape),
            )
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
            **(spec.shape or _scratch_model_config(tokenizer, demonstrations, checkpoint, tools)),
        }
    )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    policy = from_config(config, tokenizer, run.seed, device=device)
    policy.model.to(getattr(torch, dtype))
    return policy


def trained_policy_settings(run: Run, policy: Policy, *, direct: bool) -> PolicyRolloutSettings:
    """Return the settings to save with a policy, so that it is used in the same way as in training.

    These are its scaffold, its task, the limits that differ from the defaults, and ``direct``:
    whether plain calls answer short inputs. A user's own scaffold is left out, because its file may
    no longer exist.
    """
    usual = Limits()
    own = {
        name: getattr(run.limits, name)
        for name in ("max_turns", "max_depth", "max_reply_tokens")
        if getattr(run.limits, name) != getattr(usual, name)
    }
    named = run.scaffold if run.scaffold in SCAFFOLDS.ours else None
    is_from_scratch = policy.card.is_from_scratch
    return PolicyRolloutSettings(
        named,
        **own,
        direct=direct,
        is_from_scratch=is_from_scratch,
        task=run.task.name if is_from_scratch else "",
    )


def _usual_vocabulary(spec: PolicySpec, demonstrations: Sequence[Trajectory]) -> int:
    return 512 if spec.shape else vocabulary_size_for_chars(sum(map(len, _texts(demonstrations))))


def _scratch_model_config(
    tokenizer: PreTrainedTokenizerFast,
    demonstrations: Sequence[DemonstrationSet],
    checkpoint: Path | None,
    tools: Sequence[Tool],
) -> dict[str, Any]:
    """Return the model configuration (the shape) of a policy that is trained from scratch.

    Its sizes fit the demonstrations. A resumed run reads them from the checkpoint, because its
    demonstrations may have changed.
    """
    from ramify.models.chat_renderer import renderer_of
    from ramify.models.load import read_config

    if checkpoint is not None:
        config: dict[str, Any] = read_config(checkpoint / "policy").to_dict()
        return config
    shown = tokenise_demonstrations(demonstrations, tokenizer, renderer_of(tokenizer), tools)
    lengths = [len(path.ids) for each in shown for call in each.calls for path in each.paths(call)]
    if not lengths:
        raise ConfigError(
            "policy: there are no demonstrations to determine the size of a new model: give "
            "policy.shape"
        )
    shape = scratch_model_config(sum(lengths), max(lengths))
    _log.info(
        "derived_shape",
        f"the policy follows from {sum(lengths):,} tokens of demonstrations: vocabulary "
        f"{len(tokenizer):,}, window {shape['max_position_embeddings']:,}, width "
        f"{shape['hidden_size']}, layers {shape['num_hidden_layers']}",
        shown=True,
        tokens=sum(lengths),
        longest=max(lengths),
    )
    return shape


def serving_policy(run: Run, policy: Policy, is_here: bool) -> Policy:
    """Return the policy from which the inference engine serves rollouts.

    It is the trained policy itself, or a copy that is updated each time weights are published. A
    copy is needed if the trained policy has another precision or adapters, or if training and
    rollouts overlap.
    """
    from ramify.train.backends.lora import attach

    lora = run.policy.lora
    if not is_here:
        return policy
    waits = run.rl is None or not run.rl.sample.max_staleness
    if lora is None and str(policy.dtype) == "torch.float32" and waits:
        return policy
    serving = dataclasses.replace(policy, model=copy.deepcopy(policy.model))
    if lora is not None:
        num = attach(policy.model, lora.rank, lora.effective_alpha, lora.targets, run.seed)
        _log.info(
            "adapters",
            f"adapters of rank {lora.rank}: {num:,} of {policy.num_parameters:,} parameters are "
            "trained",
            shown=True,
            rank=lora.rank,
            parameters=num,
        )
    return serving


def set_deterministic(policy: Policy) -> None:
    """Make the policy's computations reproducible from run to run.

    A GPU uses only deterministic kernels. Raises ConfigError if the model cannot compute in fixed
    shapes.
    """
    import torch

    from ramify.models.training_forward import fixed_shape_trunk

    fixed_shape_trunk(policy.model)
    if policy.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def lora_adapter_spec(run: Run) -> Any:
    """Return the specification of the run's LoRA adapters, or None if it trains without
    adapters."""
    from ramify.train.backends.sharded_lora import AdapterSpec

    lora = run.policy.lora
    if lora is None:
        return None
    return AdapterSpec(
        rank=lora.rank, alpha=lora.effective_alpha, targets=lora.targets, seed=run.seed
    )


def sharded_checkpoint_folder(run: Run) -> Path | None:
    """Return the checkpoint folder from which each rank reads only its own shard of the policy.

    Returns None if this process has to read the whole policy.
    """
    from ramify.models.load import read_config
    from ramify.models.model_config_files import local_model_folder
    from ramify.models.stored_weights import can_read_separately
    from ramify.train.backends.meta_model import build_meta_model

    if not run.policy.path or not can_read_separately(
        build_meta_model(read_config(policy_path(run)))
    ):
        return None
    return local_model_folder(policy_path(run))


def can_skip_weight_loading(run: Run) -> bool:
    """Return True if this process does not need the policy's weights.

    That is the case if ranks read theirs from the checkpoint, engines are other processes, and no
    signal scores with the policy here.
    """
    return (
        not BACKENDS.resolve(run.compute.backend).is_here
        and run.inference is not None
        and (run.rl is None or not run.rl.signals)
        and sharded_checkpoint_folder(run) is not None
    )


def _texts(demonstrations: Sequence[Trajectory]) -> Iterator[str]:
    for trajectory in demonstrations:
        for texts in _texts_by_call(trajectory):
            yield from texts


def _texts_by_call(trajectory: Trajectory) -> Iterator[list[str]]:
    """Yield the contents of the messages of each call in ``trajectory``, as one list per call."""
    for call in trajectory.calls:
        yield [message.content for message in trajectory.conversation(call)]
