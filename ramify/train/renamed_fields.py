"""Old names and values of configuration fields, so that configurations of earlier versions can be
read and resumed.

    with_new_names({"rl": {"sample": {"late": 4}}})  ->  {"rl": {"sample": {"grace_steps": 4}}}
    new_name("late")                                 ->  "rl.sample.grace_steps"
    with_new_names({"threads": 0})                   ->  {"threads": None}

Not here: modules that moved (``ramify/plugins.py``), and classes that were renamed
(``CHANGELOG.md``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

RENAMED_FIELDS = {
    "cadence": "schedule",
    "schedule.evaluate": "schedule.evaluate_every",
    "schedule.checkpoint": "schedule.checkpoint_every",
    "schedule.rollouts": "schedule.save_rollouts_every",
    "rl.sample.late": "rl.sample.grace_steps",
    "rl.sample.straggle": "rl.sample.straggler_factor",
    "rl.algorithm.drop_silent": "rl.algorithm.drop_zero_variance",
    "inference.carrier": "inference.weight_sync",
    "inference.carrier_options": "inference.weight_sync_options",
}
"""Old dotted name -> new one. Rows apply in order: the second starts from the result of the
first."""

_OPTIMIZERS = ("warmup.optim", "sft.optim", "rl.optim", "rl.critic.optim")
ZERO_MEANT_NONE = (
    "threads",
    *(f"{optim}.{field}" for optim in _OPTIMIZERS for field in ("max_grad_norm", "num_steps")),
    "schedule.evaluate_every",
    "schedule.checkpoint_every",
    "schedule.save_rollouts_every",
    "rl.sample.max_items",
    "rl.sample.straggler_factor",
    "rl.rollout.min_concurrency",
    "rl.loss.value.clip",
    "rl.algorithm.max_rollout_tokens",
    "rl.algorithm.overlong_buffer",
    "rl.algorithm.outcome.max_rollout_tokens",
    "rl.algorithm.outcome.overlong_buffer",
    "rl.signals.*.top",
    "rl.signals.*.evidence",
    "guard.patience",
    "guard.max_kl",
    "guard.min_entropy",
    "guard.alarms.zero_variance",
    "guard.alarms.entropy",
    "guard.alarms.length",
    "guard.alarms.clipped",
    "compute.max_tokens",
    "compute.max_logits",
    "compute.shard.ranks",
    "compute.shard.port",
    "inference.sleep_level",
    "inference.tolerance",
    "placement.*.count",
    "placement.services.*.count",
    "placement.pools.*.memory_gb",
)
"""Fields in which an earlier version stored 0 for none, never or automatic; ``*``: any name."""


def with_new_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a stored configuration with today's names, and None where 0 meant that."""
    renamed = dict(config)
    for old, new in RENAMED_FIELDS.items():
        *path, old_name = old.split(".")
        owner: Any = renamed
        for part in path:
            inner = owner.get(part)
            if not isinstance(inner, Mapping):
                break
            owner[part] = owner = dict(inner)
        else:
            if old_name in owner:
                owner[new.rpartition(".")[2]] = owner.pop(old_name)
    for field in ZERO_MEANT_NONE:
        renamed = _zero_to_none(renamed, field.split("."))
    return renamed


def _zero_to_none(config: Any, path: Sequence[str]) -> Any:
    """A copy of ``config`` in which a 0 at ``path`` is None."""
    if not path:
        return None if config == 0 else config
    if not isinstance(config, Mapping):
        return config
    names = list(config) if path[0] == "*" else [path[0]] if path[0] in config else []
    return {**config, **{name: _zero_to_none(config[name], path[1:]) for name in names}}


def new_name(field: str) -> str | None:
    """Today's name of a field, given its old last name or dotted name; None if it was not
    renamed."""
    for old, new in RENAMED_FIELDS.items():
        if (
            field == old
            or field == old.rpartition(".")[2]
            or f"cadence.{old.rpartition('.')[2]}" == field
        ):
            return new
    return None
