"""Load the parts of a run, such as its demonstrations and its policy.

Cheap checks come first, so that mistakes are found before time is spent.

    ResolvedTrainingRun ─ device ─ placement ─ precision ─ demonstrations ─ policy
        ─> PreparedTrainingRun

No process is started and nothing is written. Checks that need no tensor library are in
``resolve_run.py``, the policy is created in ``initial_policy.py``, and ``build_trainer.py`` starts
the run from these parts.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.actors.launcher import NodeResourceSlot
from ramify.engine.prompt_scaffold import Scaffold
from ramify.errors import ConfigError
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.tasks.base import Task
from ramify.train.backends.base import BACKENDS, OptimizerSpec, TrainerComputeSpec, has_bf16
from ramify.train.config import Run, to_plain_data
from ramify.train.data.sft_row_cache import ROWS_FILE, read_rows, settings_hash, write_rows
from ramify.train.initial_policy import (
    device_of,
    lora_adapter_spec,
    policy_of,
    serving_policy,
    set_deterministic,
    stored_precision,
    trained_policy_settings,
)
from ramify.train.numeric_precision import RunNumericPrecision, choose_precisions
from ramify.train.placement_plan import plan_placement, resolved_inference
from ramify.train.policy_dependent_defaults import with_policy_defaults
from ramify.train.preflight import (
    check_device,
    check_engine_memory,
    check_inference_options,
    check_prompts,
    check_reply_fits,
    check_schedules,
    policy_path,
    warn_history_rewritten,
    warn_missing_chat_template,
)
from ramify.train.resolve_run import ResolvedTrainingRun
from ramify.train.sft_training_data import (
    DemonstrationSet,
    are_sessionless_calls,
    demonstrations_of,
    sft_rows,
)
from ramify.train.stages import RandomStringWarmUpStage, SftStage, TrainingStage
from ramify.train.traffic_training import RecordedTrafficTask
from ramify.trained_policy_settings import read_policy_settings
from ramify.types.training_sequences import TokenSequence

if TYPE_CHECKING:
    from ramify.models.load import Policy


@dataclasses.dataclass(frozen=True)
class PreparedTrainingRun:
    """All parts of a run, loaded and checked so that the run can start."""

    run: Run
    """The configuration of the run, in which the number of processes of each role is already
    determined."""
    placement_slots: Sequence[NodeResourceSlot]
    """Placement slots (machine and devices) of the processes that the run starts outside this
    process."""
    engines: InferenceSpec | None
    """Engines outside this process; None: the engine is in this process."""
    kind: Any
    """Class of the trained model, which implements ``TrainableModel``."""
    compute: TrainerComputeSpec
    """Compute settings of the backend, in which the precision is already chosen."""
    precision: RunNumericPrecision
    task: Task
    scaffold: Scaffold
    policy: Policy
    """The policy that is trained."""
    serving: Policy
    """The policy that the engine of this process serves: the trained policy itself, or a copy."""
    rows: Sequence[TokenSequence]
    """Token sequences for the supervised stages that precede reinforcement learning."""
    fixed: Sequence[TrainingStage]
    """The training stages without rollouts."""
    others: Mapping[str, PreparedTrainingRun] = dataclasses.field(default_factory=dict)
    """Maps the name of each additional policy to its parts. Their ``run`` is a copy of this run
    with that policy and its optimizer."""

    @property
    def is_placed_by_ray(self) -> bool:
        """True if the run uses Ray to start processes on other machines."""
        return self.run.placement is not None and self.run.placement.kind == "ray"

    @property
    def serving_dtype(self) -> str:
        """The precision of the served policy, such as ``float32``."""
        return str(self.serving.dtype).removeprefix("torch.")

    def export_initial_policy(self, folder: Path) -> None:
        """Write the initial policy to ``folder``, in the format that engines load."""
        from ramify.models.load import save_policy
        from ramify.models.model_config_files import local_model_folder
        from ramify.train.backends.safetensors_export import convert_checkpoint_dtype

        if self.policy.device.type != "meta":
            return save_policy(self.serving, folder)
        source, serving = local_model_folder(policy_path(self.run)), self.serving
        save_policy(
            serving,
            folder,
            write=lambda out: convert_checkpoint_dtype(source, out, serving.config, serving.dtype),
        )

    def save_sft_rows(self, out: Path) -> None:
        """Save the token sequences for fine-tuning in the run folder ``out``, for resuming the
        run."""
        if self.rows:
            write_rows(out / ROWS_FILE, self.rows, _rows_key(self.run))

    def num_placed_processes(self, role: str) -> int:
        """Return how many processes of a role, such as the trainer, have been assigned to placement
        slots."""
        return sum(member.role == role for slot in self.placement_slots for member in slot.members)

    def check_checkpoint_tensors(self, checkpoint: Path) -> None:
        """Raise ConfigError if a checkpoint's policy tensors do not match those of this run's
        policy.

        The error names the first tensor that differs.
        """
        from ramify.models.weights import check_weights, read_weights

        folder = checkpoint / "policy"
        check_weights(self.serving.model, read_weights(folder), str(folder))


def assemble(resolved: ResolvedTrainingRun) -> PreparedTrainingRun:
    """Load and check all parts of a run, so that the run can start.

    Raises ConfigError for mistakes in the recipe that can only be found with a tensor library or
    with the model's files.

    A run that continues from a checkpoint reads its trained tokenizer from the checkpoint, and its
    fine-tuning data from the folder of the earlier run.
    """
    task, scaffold, checkpoint = resolved.task, resolved.scaffold, resolved.checkpoint
    run, placement_slots = plan_placement(resolved.run)
    check_device(run)
    device = device_of(run)
    kind: Any = BACKENDS.resolve(run.compute.backend)
    is_elsewhere = run.placement is not None and run.placement.kind == "ray" and not kind.is_here
    kind.check(run.compute, device, **({"elsewhere": True} if is_elsewhere else {}))
    check_schedules(run)
    precision = choose_precisions(run, stored_precision(run), device, has_bf16=has_bf16(device))
    engines = resolved_inference(run, device)
    rows = _stored_rows(run, checkpoint)
    demonstrations = demonstrations_of(run, task, scaffold) if rows is None else []
    _check_model(run, kind, device)
    # Engine and trainer of a deterministic run share weights in fp32.
    dtype = "float32" if run.deterministic else precision.engine
    policy = policy_of(run, demonstrations, dtype, checkpoint, scaffold.tools())
    if not run.policy.path:
        check_reply_fits(run, policy.window, "by its demonstrations; policy.shape sets it")
    direct = _answers_directly(run, demonstrations, scaffold, checkpoint)
    policy.card = trained_policy_settings(run, policy, direct=direct)
    if isinstance(task, RecordedTrafficTask):
        from ramify.models.policy_vocabulary_identity import policy_identity

        task.check_policy_compatible(policy_identity(policy))
    if not run.policy.path:
        _check_model(run, kind, device, policy.config)
    compute = msgspec.structs.replace(
        run.compute, precision=precision.trainer, deterministic=run.deterministic
    )
    if run.deterministic:
        set_deterministic(policy)
    serving = serving_policy(run, policy, kind.is_here)
    if run.can_be_evaluated:
        check_prompts(run, task, scaffold, policy)
    warn_history_rewritten(run, policy)
    warn_missing_chat_template(policy)
    if rows is None and run.sft is not None:
        rows = sft_rows(run.sft, demonstrations, policy, scaffold, task.weights)
    rows = rows or []
    fixed = _fixed_stages(run, policy, rows)
    parts = PreparedTrainingRun(
        run,
        placement_slots,
        engines,
        kind,
        compute,
        precision,
        task,
        scaffold,
        policy,
        serving,
        rows,
        fixed,
    )
    others = {name: _other_parts(parts, name) for name in run.policies}
    return dataclasses.replace(parts, others=others)


def _answers_directly(
    run: Run,
    demonstrations: Sequence[DemonstrationSet],
    scaffold: Scaffold,
    checkpoint: Path | None,
) -> bool:
    """Return True if training answers short inputs with plain calls instead of sandboxed sessions.

    Rollouts decide this, or demonstrations if the run has no rollouts.
    """
    if run.rl is not None:
        return run.rl.rollout.direct
    if checkpoint is not None:  # its demonstrations are stored as token ids
        return read_policy_settings(checkpoint / "policy").direct
    return are_sessionless_calls(demonstrations, scaffold)


def _stored_rows(run: Run, checkpoint: Path | None) -> list[TokenSequence] | None:
    """Return the token sequences for fine-tuning that the checkpoint's run stored.

    Returns None if there is none for these settings.
    """
    if run.sft is None or checkpoint is None:
        return None
    return read_rows(checkpoint.resolve().parents[1] / ROWS_FILE, _rows_key(run))


def _rows_key(run: Run) -> str:
    config = to_plain_data(run)
    sft = config["sft"]
    chosen = [sft[name] for name in ("demos", "num", "options", "trajectories", "algorithm")]
    return settings_hash(
        [chosen, sft["task"] or config["task"], config["seed"], config["scaffold"]]
    )


def _other_parts(parts: PreparedTrainingRun, name: str) -> PreparedTrainingRun:
    """Return the parts of the run that are loaded for one of its additional policies.

    ``name`` is its name in ``Run.policies``, and ``parts`` belongs to the main policy.
    """
    run = with_policy_defaults(run_for_policy(parts.run, name))
    check_inference_options(run)
    check_schedules(run)
    device = device_of(run)
    precision = choose_precisions(run, stored_precision(run), device, has_bf16=has_bf16(device))
    dtype = "float32" if run.deterministic else precision.engine
    if parts.run.policies[name].policy is None:
        policy = dataclasses.replace(parts.serving, model=copy.deepcopy(parts.serving.model))
    else:
        policy = policy_of(run, [], dtype)
    if run.deterministic:
        set_deterministic(policy)
    return dataclasses.replace(
        parts,
        run=run,
        engines=resolved_inference(run, device),
        compute=msgspec.structs.replace(parts.compute, precision=precision.trainer),
        precision=precision,
        policy=policy,
        serving=serving_policy(run, policy, parts.kind.is_here),
        rows=[],
        fixed=[],
    )


def run_for_policy(run: Run, name: str) -> Run:
    """Return a copy of ``run`` that trains only the additional policy ``name`` of
    ``Run.policies``."""
    spec = run.policies[name]
    assert run.rl is not None
    return msgspec.structs.replace(
        run,
        name=f"{run.name}.{name}",
        policy=spec.policy or run.policy,
        rl=msgspec.structs.replace(run.rl, optim=spec.optim),
        inference=spec.inference,
        policies={},
        depths=(),
    )


def _check_model(run: Run, kind: Any, device: str, config: Any = None) -> None:
    """Raise ConfigError if the loss or the backend's device mesh does not suit the model.

    Checkpoints are checked before their weights are read.
    """
    from ramify.models.load import read_config
    from ramify.train.backends.mesh import EXPERTS

    if config is None and not run.policy.path:
        return
    config = config or read_config(policy_path(run))
    if run.rl is not None:
        replays = run.rl.rollout.replay_routes
        given: dict[str, object] = {
            "loss.router_aux_loss_coef": run.rl.loss.router_aux_loss_coef,
            "rollout.replay_routes": "true" if replays else None,
        }
        has_experts = any(getattr(config.get_text_config(), name, None) for name in EXPERTS)
        if (name := next((name for name in given if given[name]), "")) and not has_experts:
            raise ConfigError(
                f"rl.{name}={given[name]} applies only to mixture-of-experts models, which "
                f"{config.model_type} is not: remove it"
            )
    if not hasattr(kind, "check_model"):
        return
    kind.check_model(config, run.compute, device, lora_adapter_spec(run), _optims(run))
    if run.inference is None and not kind.is_here:
        check_engine_memory(config, run.policy.dtype, device)


def _optims(run: Run) -> list[OptimizerSpec]:
    """Return the optimizer options of all of a run's stages.

    The optimizer options of a separate critic are included, if there is one.
    """
    stages = [stage for stage in (run.warmup, run.sft, run.rl) if stage is not None]
    critic = [] if run.rl is None else [run.rl.critic.optim]
    return [optim for optim in [*(stage.optim for stage in stages), *critic] if optim is not None]


def _fixed_stages(run: Run, policy: Policy, rows: Sequence[TokenSequence]) -> list[TrainingStage]:
    """Return the stages that need no rollouts: the warm-up and supervised fine-tuning.

    They are built early, because learning-rate schedules need their number of steps.
    """
    stages: list[TrainingStage] = []
    if run.warmup is not None:
        special = set(policy.tokenizer.all_special_ids)
        ids = [index for index in range(len(policy.tokenizer)) if index not in special]
        stages.append(
            RandomStringWarmUpStage(
                run.warmup.steps, run.warmup.optim, ids, run.warmup.batch_tokens, run.seed
            )
        )
    if run.sft is not None:
        stages.append(SftStage(rows, run.sft.optim, run.sft.batch_tokens, run.sft.epochs, run.seed))
    return stages
