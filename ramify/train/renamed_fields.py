"""Old names of configuration fields, so that configurations of earlier versions can be read and
resumed.

    with_new_names({"rl": {"sample": {"late": 4}}})  ->  {"rl": {"sample": {"grace_steps": 4}}}
    new_name("late")                                 ->  "rl.sample.grace_steps"

Not here: classes and modules that were renamed (``CHANGELOG.md``).
"""

from __future__ import annotations

from collections.abc import Mapping
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


def with_new_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a stored configuration with today's names."""
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
    return renamed


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
