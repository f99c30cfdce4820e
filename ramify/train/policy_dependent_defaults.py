"""Fill in defaults that depend on whether the policy is pretrained or trained from scratch.

    option                       checkpoint             from scratch
    rl.optim.lr, rl.critic.…     1e-6, adapters 1e-5    3e-4
    sft.optim.lr, warmup.…       1e-5, adapters 1e-4    1e-3
    *.optim.betas                0.9, 0.999             0.9, 0.98
    *.optim.warmup_steps         a tenth, at most 10    0
    policy.lora.alpha            32                     2 · rank
    limits.max_reply_tokens      1024, thinking 4096    a quarter of the window
    policy.thinking              as it was trained,     as in its template
                                 else off if it can be

The learning rates of checkpoints are those of TRL, verl and SkyRL for full weights, and ten times
as much for adapters (Thinking Machines, "LoRA Without Regret", whose alpha of 32 makes the best
rate independent of the rank). A policy that a recipe of Ramify trained from scratch (format
``scratch``) counts as from scratch. Only options that are not given are set. If
``limits.max_reply_tokens`` has the engine's default, it counts as not given.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ramify.engine.limits import Limits
from ramify.engine.prompt_scaffold import trained_policy_settings
from ramify.errors import ConfigError
from ramify.logging import ComponentLogger
from ramify.train.backends.base import OptimizerSpec
from ramify.train.config import PolicySpec, Run
from ramify.trained_policy_settings import packaged_policy_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_log = ComponentLogger("train")
_RATES = {"warmup": (1e-5, 1e-4), "sft": (1e-5, 1e-4), "rl": (1e-6, 1e-5)}
"""Usual learning rates for a checkpoint, by stage: of all weights, and of adapters."""
_FROM_SCRATCH_RATES = {"warmup": 1e-3, "sft": 1e-3, "rl": 3e-4}
"""Usual learning rates for a policy from scratch, by stage. A policy that has just learned to
imitate is certain of what it does, and at 1e-3 a few updates of ``rl`` unlearn it."""
_HIGH, _HIGH_FROM_SCRATCH = 10, 100
_HIGH_TEMPERATURE = 2.0
"""A learning rate is reported if it is at least this many times the usual one. Small policies from
scratch were trained well at 30 times the usual one."""
S = TypeVar("S", bound=msgspec.Struct)


def with_policy_defaults(run: Run) -> Run:
    """Return a copy of ``run`` in which unset options that depend on the policy are filled in.

    Raises ConfigError if the run sets ``policy.thinking``, but the model has no such switch.
    """
    policy = _fill_policy(run.policy)
    is_checkpoint = is_pretrained(run.policy)
    betas = (0.9, 0.999) if is_checkpoint else (0.9, 0.98)
    warmup_steps = None if is_checkpoint else 0
    stages: dict[str, Any] = {}
    for name in _RATES:
        stage = getattr(run, name)
        if stage is not None:
            usual = OptimizerSpec(
                lr=usual_learning_rate(run, name), betas=betas, warmup_steps=warmup_steps
            )
            stages[name] = _replace_fields(stage, optim=_fill_optimizer(stage.optim, usual))
            if name == "rl" and stage.critic.optim is not None:
                critic = _replace_fields(
                    stage.critic, optim=_fill_optimizer(stage.critic.optim, usual)
                )
                stages[name] = _replace_fields(stages[name], critic=critic)
    limits = run.limits
    if limits.max_reply_tokens == Limits().max_reply_tokens:
        limits = _replace_fields(limits, max_reply_tokens=_reply_tokens(policy, is_checkpoint))
    return _replace_fields(run, policy=policy, limits=limits, **stages)


def is_pretrained(policy: PolicySpec) -> bool:
    """Return True if the policy is a checkpoint of a model that was pretrained elsewhere."""
    if not policy.path:
        return False
    name = policy.path if packaged_policy_folder(policy.path) else f"local:{policy.path}"
    return not trained_policy_settings(name).is_from_scratch


def usual_warmup_steps(num_steps: int) -> int:
    """Return the usual number of learning-rate warm-up steps for a stage with ``num_steps``
    optimizer steps."""
    return min(10, num_steps // 10)


def usual_learning_rate(run: Run, stage: str) -> float:
    """Return the usual learning rate for training the run's policy in the given stage."""
    if not is_pretrained(run.policy):
        return _FROM_SCRATCH_RATES[stage]
    return _RATES[stage][run.policy.lora is not None]


def report_policy_defaults(given: Run, run: Run, *, resumed: bool = False) -> None:
    """Log the defaults filled in for the policy, and warn about unusually high learning rates and
    temperatures.

    A resumed run does not log the defaults again.
    """
    kind = "a pretrained checkpoint" if is_pretrained(run.policy) else "trained from scratch"
    names = ("policy", "limits", *_RATES)
    found = [
        f"{name}.{field}={_value_text(value)}"
        for name in names
        for field, value in [
            *_differences(getattr(given, name), getattr(run, name)),
            *_warmup(run, name),
        ]
    ]
    if found and not resumed:
        text = (
            f"set because the recipe does not, as usual for a policy that is {kind}: "
            f"{', '.join(found)}"
        )
        _log.info("policy_defaults", text, shown=True)
    what, high = "checkpoints", _HIGH
    if not is_pretrained(run.policy):
        what, high = "policies from scratch", _HIGH_FROM_SCRATCH
    for name in _RATES:
        stage = getattr(run, name)
        usual = usual_learning_rate(run, name)
        if stage is not None and stage.optim.lr >= high * usual * (1 - 1e-9):
            text = (
                f"{name}.optim.lr={stage.optim.lr:g} is {stage.optim.lr / usual:.3g} times what "
                f"{what} usually tolerate: {usual:g} is usual"
                + (" with adapters" if run.policy.lora and is_pretrained(run.policy) else "")
            )
            _log.warning("high_learning_rate", text, shown=True, stage=name)
    temperatures = {"evaluate.temperature": run.evaluate.temperature}
    if run.rl is not None:
        temperatures["rl.rollout.temperature"] = run.rl.rollout.temperature
    for name, temperature in temperatures.items():
        if temperature > _HIGH_TEMPERATURE:
            text = (
                f"{name}={temperature:g} samples almost random tokens: at most "
                f"{_HIGH_TEMPERATURE:g} is usual"
            )
            _log.warning("high_temperature", text, shown=True)


_SIZES = ((0, 128, 3), (5_000_000, 256, 4), (50_000_000, 512, 8))
"""Model sizes (minimum number of tokens in the demonstrations, width, layers). The models have
0.5M, 3M and 20M parameters."""
_WINDOWS = (512, 32_768)


def vocabulary_size_for_chars(num_chars: int) -> int:
    """Return a suitable vocabulary size for training data of ``num_chars`` characters.

    It is the power of two below the square root of that number, because the number of distinct
    words in a text grows as the root of its length (Heaps' law).

    1 million characters -> 512;  4 million -> 1024
    """
    return max(512, min(32_768, 1 << (math.isqrt(max(num_chars, 1)).bit_length() - 1)))


def scratch_model_config(num_tokens: int, longest: int) -> dict[str, Any]:
    """Return the configuration of a model to train from scratch.

    Its size follows from ``num_tokens``, the number of tokens in all demonstrations. Its context
    window is the next power of two above 5/4 of ``longest``, the number of tokens in the longest
    conversation, and within 512 to 32,768 tokens.
    """
    width, layers = next(size[1:] for size in reversed(_SIZES) if num_tokens >= size[0])
    low, high = _WINDOWS
    return {
        "model_type": "qwen3",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
        "num_key_value_heads": max(2, width // 64),
        "head_dim": 32,
        "intermediate_size": 2 * width,
        "max_position_embeddings": min(high, max(low, 1 << (longest * 5 // 4).bit_length())),
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
    }


def _fill_policy(policy: PolicySpec) -> PolicySpec:
    lora, thinking = policy.lora, policy.thinking
    if lora is not None and lora.alpha is None:
        lora = _replace_fields(lora, alpha=32.0 if is_pretrained(policy) else 2.0 * lora.rank)
    tokenizer = _tokenizer(policy)
    can_think = tokenizer is not None and "enable_thinking" in str(tokenizer.chat_template)
    if thinking is not None and not can_think:
        raise ConfigError(
            f"policy.thinking={str(thinking).lower()}: the chat template of "
            f"{policy.path or 'a policy from scratch'} has no enable_thinking: remove it"
        )
    if thinking is None and tokenizer is not None and can_think:
        from ramify.models.chat_template import thinking_default

        thinking = bool(thinking_default(tokenizer))
    return _replace_fields(policy, lora=lora, thinking=thinking)


def _tokenizer(policy: PolicySpec) -> PreTrainedTokenizerFast | None:
    """Load the tokenizer of a pretrained policy.

    Returns None for a policy from scratch, or if the tokenizer cannot be used.
    """
    if not is_pretrained(policy):
        return None
    from ramify.models.load import load_tokenizer
    from ramify.models.model_config_files import local_model_folder

    try:
        return load_tokenizer(Path(local_model_folder(policy.path)))
    except ConfigError:  # reported where the policy is loaded, after what costs nothing to check
        return None


def _fill_optimizer(optim: OptimizerSpec, usual: OptimizerSpec) -> OptimizerSpec:
    """Return a copy of ``optim`` whose unset options are filled in from ``usual``.

    For a checkpoint, the warm-up stays unset until ``stages.scheduled`` knows the number of steps.
    """
    values: dict[str, Any] = {
        name: getattr(usual, name)
        for name in ("lr", "betas", "warmup_steps")
        if getattr(optim, name) is None
    }
    return _replace_fields(optim, **values)


def _reply_tokens(policy: PolicySpec, is_checkpoint: bool) -> int:
    if is_checkpoint:
        return 4096 if policy.thinking else 1024
    window = policy.shape.get("max_position_embeddings", 4096) if policy.shape else 512
    return max(1, int(window) // 4)


def _replace_fields(value: S, **fields: Any) -> S:
    return msgspec.structs.replace(value, **fields)


def _differences(given: Any, now: Any) -> list[tuple[str, Any]]:
    """Return the dotted name and the new value of each configuration field filled in since
    ``given``."""
    if not isinstance(now, msgspec.Struct) or not isinstance(given, msgspec.Struct):
        return []
    found: list[tuple[str, Any]] = []
    for field in now.__struct_fields__:
        before, after = getattr(given, field), getattr(now, field)
        if isinstance(after, msgspec.Struct) and isinstance(before, msgspec.Struct):
            found += [(f"{field}.{name}", value) for name, value in _differences(before, after)]
        elif (before is None and after is not None) or (
            field == "max_reply_tokens" and before != after
        ):
            found.append((field, after))
    return found


def _warmup(run: Run, name: str) -> list[tuple[str, Any]]:
    """Return the default number of learning-rate warm-up steps of a stage, for the report of
    defaults.

    The result is a list with one (field, value) pair. The list is empty if the run sets the warm-up
    itself or has no such stage.
    """
    stage = getattr(run, name)
    if name not in _RATES or stage is None or stage.optim.warmup_steps is not None:
        return []
    if name == "sft":  # its steps depend on the demonstrations
        return [("optim.warmup_steps", "a tenth of the steps, at most 10")]
    steps = stage.steps * (stage.sample.minibatches if name == "rl" else 1)
    return [("optim.warmup_steps", usual_warmup_steps(steps))]


def _value_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) else msgspec.json.encode(value).decode()
