"""Record a run's lineage: when it was resumed or forked, and how its configuration changed.

    OUT/lineage.jsonl   {"step": 40, "checkpoint": "runs/a/checkpoints/step-000040",
                         "changes": [{"field": "rl.steps", "was": 40, "now": 80}]}

    ramify train --resume runs/a rl.steps=80 rl.optim.lr=2e-4              the same run, longer
    ramify train --resume runs/a/checkpoints/step-000040 --out runs/b …    a fork

This module also decides which fields may differ from the configuration of the checkpoint: all
except those that the checkpoint's content depends on (``_FIXED``) and those of a stage that is
over. The fields themselves are defined in ``config.py``, and files are copied by ``run_record.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ramify.errors import ConfigError
from ramify.train.checkpoint import CheckpointedProgress
from ramify.train.config import Run, TaskSpec, to_plain_data
from ramify.train.config_redaction import is_redacted, redacted_keys
from ramify.train.metrics import JsonlRecordFile

FILE = "lineage.jsonl"
STAGES = ("warmup", "sft", "rl")
"""Names of the fields of a run that are training stages, in order."""
_WEIGHTS = "the checkpoint holds weights of that model"
_OPTIMIZER = "the checkpoint holds that optimizer's state"
_FIXED = {
    "seed": "the order of the data and the seed of each rollout depend on it",
    "policy.path": _WEIGHTS,
    "policy.shape": _WEIGHTS,
    "policy.tokenizer": _WEIGHTS,
    "policy.words": _WEIGHTS,
    "policy.vocab_size": _WEIGHTS,
    "policy.dtype": _WEIGHTS,
    "policy.lora": "the checkpoint holds those adapters",
    "compute.backend": "the checkpoint holds that backend's state",
    "rl.critic.model": "the checkpoint holds that critic",
}
"""Map the prefix of each field that must not change to the reason."""
_SFT_MAY_CHANGE = ("sft.optim.", "sft.epochs")
"""Options of supervised fine-tuning that may change when a run resumes. All others decide which
rows each step learns from, and earlier steps have already used some."""
_SCORES = ("task.", "scaffold", "limits.", "evaluate.", "sandbox.", "depths")
"""Prefixes of the fields on which validation scores depend."""


class ConfigChange(msgspec.Struct, frozen=True):
    """The old and the new value of a changed configuration field."""

    field: str
    """Dotted name of the changed field."""
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.field} {_short_repr(self.was)} → {_short_repr(self.now)}"


class LineageEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A point in a run's history at which it was continued with changes, or forked from another
    run."""

    step: int
    """Number of optimizer steps that the run had made before this point."""
    checkpoint: str
    """The checkpoint from which the run continued."""
    is_fork: bool = False
    """True if the checkpoint belongs to a run in another folder."""
    changes: list[ConfigChange] = []

    def __str__(self) -> str:
        """Return the entry as one line, such as ``from step 40: rl.steps 40 → 80``."""
        how = f"forked from {self.checkpoint}" if self.is_fork else f"from step {self.step}"
        return f"{how}: {', '.join(map(str, self.changes)) or 'nothing changed'}"

    @property
    def makes_scores_incomparable(self) -> bool:
        """True if the changes affect evaluation, so that validation scores before and after them
        cannot be compared."""
        return any(change.field.startswith(_SCORES) for change in self.changes)

    def reopens_stage(self, stage: str) -> bool:
        """Return True if the changes reopen a ``stage`` that a training guard has ended.

        An example is a higher number of steps.
        """
        names = ("guard.", "frozen.", f"{stage}.steps", f"{stage}.epochs")
        return any(change.field.startswith(names) for change in self.changes)


LINEAGE = JsonlRecordFile(FILE, LineageEntry)


def changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[ConfigChange]:
    """Return the fields in which two configurations differ.

    Both are given as plain data. Redacted values are not compared.
    """
    return [
        change
        for change in differences(was, now)
        if not is_redacted(change.was) and not is_redacted(change.now)
    ]


def check_changes(state: CheckpointedProgress, now: Mapping[str, Any]) -> None:
    """Raise ConfigError if ``now`` changes a configuration field that must match the checkpoint.

    The error names the first such field and the reason.
    """
    for change in changes(state.config, now):
        why = _refusal(state, change)
        if why:
            raise ConfigError(
                f"the checkpoint at step {state.step} has a different config: {change.field} was "
                f"{_short_repr(change.was)} and is now {_short_repr(change.now)}; it "
                "cannot change, since "
                f"{why}: resume with its original value, or start again in another folder"
            )


def with_checkpoint_demonstrations(run: Run, state: CheckpointedProgress) -> Run:
    """Return a copy of ``run`` that uses the same demonstrations as its checkpoint.

    If the task has changed, demonstrations still come from the task recorded in the checkpoint.
    """
    recorded = state.config.get("sft")
    if run.sft is None or recorded is None or run.sft.task is not None:
        return run
    shown = recorded.get("task") or state.config.get("task")
    if _is_same_task(shown, to_plain_data(run)["task"]) or any(redacted_keys(shown)):
        return run
    task = msgspec.convert(shown, TaskSpec)
    return msgspec.structs.replace(run, sft=msgspec.structs.replace(run.sft, task=task))


def differences(was: Any, now: Any, name: str = "") -> Iterator[ConfigChange]:
    """Yield the innermost fields that differ between two configurations, and both values of each.

    A missing value counts as None. ``name`` is the dotted path of the compared values.
    """
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        # Fields of a class that another has replaced say nothing more.
        is_replaced = "name" in was and "name" in now and was["name"] != now["name"]
        gone = {*was} - {*now} if is_replaced else set()
        for key in [*was, *(key for key in now if key not in was)]:
            if key in gone:
                continue
            yield from differences(
                was.get(key), now.get(key), f"{name}.{key}" if name else str(key)
            )
    elif was != now:
        yield ConfigChange(name, was, now)


def _refusal(state: CheckpointedProgress, change: ConfigChange) -> str:
    """Return the reason why a field cannot change at this checkpoint, or an empty string if it
    can."""
    if change.field.startswith("policies."):
        return _policy_refusal(state, change.field)
    reasons = (why for prefix, why in _FIXED.items() if _is_in(change.field, prefix))
    return next(reasons, "") or _stage_refusal(state, change)


def _policy_refusal(state: CheckpointedProgress, field: str) -> str:
    """Return the reason why a field of an additional policy cannot change, or an empty string if it
    can.

    Additional policies are trained only in the stage ``rl``, so their fields are fixed only if the
    checkpoint belongs to that stage.
    """
    _, name, *rest = field.split(".")
    stages = [each for each in STAGES if state.config.get(each) is not None]
    if stages[state.stage : state.stage + 1] != ["rl"]:
        return ""
    if not rest:
        return (
            f"the stage rl has begun with{'out' if name not in _other_policies(state) else ''} it"
        )
    if rest == ["optim", "kind"]:
        return _OPTIMIZER
    return _WEIGHTS if rest[0] == "policy" else ""


def _other_policies(state: CheckpointedProgress) -> Mapping[str, Any]:
    others: Mapping[str, Any] = state.config.get("policies") or {}
    return others


def _stage_refusal(state: CheckpointedProgress, change: ConfigChange) -> str:
    stages = [name for name in STAGES if state.config.get(name) is not None]
    begun = stages[: state.stage + 1]
    stage = change.field.partition(".")[0]
    if stage not in STAGES:
        is_order = change.field == "scaffold" and begun[-1:] == ["sft"]
        return "the rows of the stage sft are written with it" if is_order else ""
    if change.field == "sft.task.validate":
        return ""
    if stage not in begun:
        before = STAGES.index(stage) < STAGES.index(begun[-1]) if begun else False
        return f"the stage {begun[-1]} has begun without it" if before else ""
    if change.field == stage:
        return f"the stage {stage} has begun"
    if change.field == "sft.task" and _is_same_task(state.config.get("task"), change.now):
        return ""
    if stage != begun[-1]:
        return f"the stage {stage} is over"
    if change.field == f"{stage}.optim.kind":
        return _OPTIMIZER
    if change.field == f"{stage}.steps" and change.now < state.stage_step:
        return f"{state.stage_step} steps of the stage are done"
    if stage == "sft" and not change.field.startswith(_SFT_MAY_CHANGE):
        return "the steps so far have used a part of these rows"
    return ""


def _is_same_task(was: Any, now: Any) -> bool:
    names = ("name", "options")
    return bool(was and now) and all(was.get(name) == now.get(name) for name in names)


def _is_in(field: str, prefix: str) -> bool:
    return field == prefix or field.startswith(prefix + ".")


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
