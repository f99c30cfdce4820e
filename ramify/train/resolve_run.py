"""Resolve a run from its recipe: check the recipe and fill in unset options.

No tensor library is loaded.

    recipe.py          a file, a preset, an objective, overrides  ──> Run
    resolve            types ─ trackers ─ names and files ─ task  mistakes are found, cheapest first
                       ─ defaults of the policy ─ checkpoint      ──> ResolvedTrainingRun
    load_run_parts.py  device ─ placement ─ precision ─ policy    ──> PreparedTrainingRun
    build_trainer.py           machines ─ engines ─ stages        ──> Trainer

This module decides the order of the checks. The checks themselves are in ``preflight.py``, and the
fields that may differ from those of a checkpoint are listed in ``lineage.py``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from ramify.engine.prompt_scaffold import Scaffold, scaffold_of
from ramify.tasks.base import Task, task_of
from ramify.train.call_depth_models import check_frozen_model_access, check_scaffolds
from ramify.train.checkpoint import read_state, resolve_checkpoint, verify
from ramify.train.config import Run, to_plain_data
from ramify.train.config_redaction import check_field_types
from ramify.train.lineage import check_changes, with_checkpoint_demonstrations
from ramify.train.policy_dependent_defaults import with_policy_defaults
from ramify.train.preflight import (
    check_branches,
    check_component_names,
    check_determinism_options,
    check_first_items,
    check_inference_options,
    check_policies,
    check_policy_files,
    check_splits_and_gold_scores,
    check_system_message,
    check_teacher_top_p,
    traffic_task,
)
from ramify.train.recipe import with_defaults
from ramify.train.trackers.base import RunTrackers


@dataclasses.dataclass(frozen=True)
class ResolvedTrainingRun:
    """A run whose configuration, task and files have been checked, so that training can start.

    Its weights are not loaded yet.
    """

    given: Run
    """The recipe with the user's overrides."""
    run: Run
    """The recipe, completed with the options that depend on the policy or on the checkpoint."""
    task: Task
    """The task, of which the first items and their scores have been checked."""
    scaffold: Scaffold
    trackers: RunTrackers
    checkpoint: Path | None
    """The checkpoint that the run continues from; None for a new run."""


def resolve(given: Run, resume: Path | None = None) -> ResolvedTrainingRun:
    """Check a run as far as possible without its weights, and load the components that its recipe
    names.

    The components include the task. ``resume`` is the folder of a run or one of its checkpoints.

    Raises ConfigError for mistakes in the recipe, and StoreError for a damaged checkpoint. No
    tensor library is imported before the checks that do without one, so that mistakes are reported
    at once.
    """
    run = given
    check_field_types(run)
    trackers = RunTrackers(run.trackers, run.tracker_options)
    check_policies(run)
    check_component_names(run)
    check_policy_files(run)
    scaffold = scaffold_of(run.scaffold)
    check_scaffolds(run.depths, scaffold)
    check_frozen_model_access(run.depths, run.frozen)
    check_inference_options(run)
    check_teacher_top_p(run)
    check_branches(run)
    check_determinism_options(run)
    task = task_of(run.task.name, **run.task.options)
    if run.can_be_evaluated:
        check_system_message(run, scaffold)
        check_first_items(run, task)
        check_splits_and_gold_scores(run, task)
    task = traffic_task(run, task)
    run = with_policy_defaults(run)
    checkpoint = resolve_checkpoint(resume) if resume is not None else None
    if checkpoint is not None:
        run = _continue_from(run, checkpoint)
    return ResolvedTrainingRun(given, run, task, scaffold, trackers, checkpoint)


def _continue_from(run: Run, checkpoint: Path) -> Run:
    """Return a copy of ``run`` that continues from ``checkpoint``, with the demonstrations that the
    checkpoint recorded.

    Raises ConfigError if a field that must stay the same has changed, and StoreError if the
    checkpoint is damaged.
    """
    verify(checkpoint)
    state = read_state(checkpoint)
    recorded = msgspec.structs.replace(state, config=with_defaults(state.config))
    run = with_checkpoint_demonstrations(run, recorded)
    check_changes(recorded, to_plain_data(run))
    return run
