"""Assembling a run: its parts, loaded and checked in the order that finds mistakes before anything
is spent.

    Run ── resolve ── assemble ──> RunParts ── build.py: start processes ──> Trainer

No process is started and nothing is written. Not here: what is done with the parts
(``build.py``), and resuming (``execute.py``).
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.actors.launcher import PlacementSlot
from ramify.clients.base import Tool
from ramify.engine.limits import Limits
from ramify.engine.scaffold import SCAFFOLDS, Scaffold, scaffold_of
from ramify.errors import ConfigError
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.logging import RoomLogger
from ramify.policy_card import PolicyCard
from ramify.progress import report_progress
from ramify.tasks.base import Task, task_of
from ramify.train.backends.base import BACKENDS, ComputeSpec, OptimizerSpec, has_bf16
from ramify.train.config import PolicySpec, Run, plain
from ramify.train.data.stored_rows import ROWS_FILE, key_of, read_rows, write_rows
from ramify.train.demonstrations import (
    DemonstrationSet,
    demonstrations_of,
    sft_rows,
    tokenised,
)
from ramify.train.depth_models import check_models, check_scaffolds
from ramify.train.policy_defaults import (
    RunPrecision,
    precision_of,
    shape_for,
    vocabulary_for,
    with_policy_defaults,
)
from ramify.train.preflight import (
    check_branches,
    check_deterministic,
    check_device,
    check_embedded,
    check_first_item,
    check_inference,
    check_names,
    check_policies,
    check_policy_files,
    check_prompts,
    check_scaffold,
    check_schedules,
    check_signals,
    check_task,
    note_missing_template,
    note_rewritten_history,
    path_of,
)
from ramify.train.resource_counts import engines_of, settled
from ramify.train.stages import SftStage, TrainingStage, WarmUpStage
from ramify.types.sequence import TokenSequence
from ramify.types.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ramify.models.load import Policy

_log = RoomLogger("train")
NUM_TOKENIZER_TEXTS = 3000
"""Maximum number of demonstrations that a tokenizer is trained on; more change little."""


@dataclasses.dataclass(frozen=True)
class RunParts:
    """The parts of one run, loaded, checked and ready to start."""

    run: Run
    """The configuration, with the number of processes settled."""
    placement_slots: Sequence[PlacementSlot]
    """Slots of the processes that the run starts elsewhere."""
    engines: InferenceSpec | None
    """Engines outside this process; None: the engine is in this process."""
    kind: Any
    """Class of the trained model, which implements ``TrainedModel``."""
    compute: ComputeSpec
    """How the backend computes, with the precision decided."""
    precision: RunPrecision
    task: Task
    scaffold: Scaffold
    policy: Policy
    """The policy that is trained."""
    serving: Policy
    """The policy that the engine of this process serves: the same one, or a copy."""
    rows: Sequence[TokenSequence]
    """What is imitated before rollouts."""
    fixed: Sequence[TrainingStage]
    """The stages that sample nothing."""
    others: Mapping[str, RunParts] = dataclasses.field(default_factory=dict)
    """Name of another policy -> its parts: its run is this one, with its policy and optimizer."""

    @property
    def is_placed(self) -> bool:
        """Whether processes are placed on other machines."""
        return self.run.placement is not None and self.run.placement.kind == "ray"

    @property
    def dtype(self) -> str:
        """Precision of the served policy, such as ``float32``."""
        return str(self.serving.dtype).removeprefix("torch.")

    def save_policy(self, folder: Path) -> None:
        """Write the initial policy, as engines load it."""
        from ramify.models.checkpoint_files import model_folder
        from ramify.models.load import save_policy
        from ramify.train.backends.write_checkpoint import copy_checkpoint

        if self.policy.device.type != "meta":
            return save_policy(self.serving, folder)
        source, serving = model_folder(path_of(self.run)), self.serving
        save_policy(
            serving,
            folder,
            write=lambda out: copy_checkpoint(source, out, serving.config, serving.dtype),
        )

    def keep_rows(self, out: Path) -> None:
        """Write the rows of supervised fine-tuning into the run's folder ``out``."""
        if self.rows:
            write_rows(out / ROWS_FILE, self.rows, _rows_key(self.run))

    def num_members(self, role: str) -> int:
        """Number of processes of ``role`` that have a slot."""
        return sum(member.role == role for slot in self.placement_slots for member in slot.members)

    def check_fits(self, checkpoint: Path) -> None:
        """Raise ConfigError with the first tensor in which a checkpoint's policy differs from this
        one."""
        from ramify.models.weights import check_weights, read_weights

        folder = checkpoint / "policy"
        check_weights(self.serving.model, read_weights(folder), str(folder))


@dataclasses.dataclass(frozen=True)
class ResolvedRun:
    """The task and the scaffold that a recipe names, loaded without a tensor library."""

    task: Task
    """The task. Its first items and their scores have been checked."""
    scaffold: Scaffold


def resolve(run: Run) -> ResolvedRun:
    """Check everything that needs no weights, and load the task and the scaffold.

    Raises ConfigError for mistakes in the recipe. Imports no tensor library, so that a mistake is
    reported at once."""
    check_policies(run)
    check_names(run)
    check_policy_files(run)
    scaffold = scaffold_of(run.scaffold)
    check_scaffolds(run.depths, scaffold)
    check_models(run.depths, run.frozen)
    check_inference(run)
    check_signals(run)
    check_branches(run)
    check_deterministic(run)
    task = task_of(run.task.name, **run.task.options)
    if run.is_evaluated:
        check_scaffold(run, scaffold)
        check_first_item(run, task)
        check_task(run, task)
    return ResolvedRun(task, scaffold)


def assemble(
    recipe: Run, checkpoint: Path | None = None, resolved: ResolvedRun | None = None
) -> RunParts:
    """Load the parts of the run that ``recipe`` describes. The run will continue from
    ``checkpoint``, if that is given: a trained tokenizer is read from it, and the rows of
    supervised fine-tuning are read from its run. ``resolved``: the result of ``resolve``, if that
    was called before. Raises ConfigError for mistakes in the recipe."""
    resolved = resolved or resolve(recipe)
    task, scaffold = resolved.task, resolved.scaffold
    run, placement_slots = settled(with_policy_defaults(recipe))
    check_device(run)
    device = device_of(run)
    kind: Any = BACKENDS.of(run.compute.backend)
    is_elsewhere = run.placement is not None and run.placement.kind == "ray" and not kind.is_here
    kind.check(run.compute, device, **({"elsewhere": True} if is_elsewhere else {}))
    check_schedules(run)
    precision = precision_of(run, _stored(run), device, has_bf16=has_bf16(device))
    engines = engines_of(run, device)
    rows = _stored_rows(run, checkpoint)
    demonstrations = demonstrations_of(run, task, scaffold) if rows is None else []
    _check_model(run, kind, device)
    # Engine and trainer of a deterministic run share weights in fp32.
    dtype = "float32" if run.deterministic else precision.engine
    policy = policy_of(run, demonstrations, dtype, checkpoint, scaffold.tools())
    policy.card = _card(run, policy)
    if not run.policy.path:
        _check_model(run, kind, device, policy.config)
    compute = msgspec.structs.replace(
        run.compute, precision=precision.trainer, deterministic=run.deterministic
    )
    if run.deterministic:
        _set_deterministic(policy)
    serving = serving_of(run, policy, kind.is_here)
    if run.is_evaluated:
        check_prompts(run, task, scaffold, policy)
    note_rewritten_history(run, policy)
    note_missing_template(policy)
    if rows is None and run.sft is not None:
        rows = sft_rows(run.sft, demonstrations, policy, scaffold, task.weights)
    rows = rows or []
    fixed = _fixed_stages(run, policy, rows)
    parts = RunParts(
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


def _stored_rows(run: Run, checkpoint: Path | None) -> list[TokenSequence] | None:
    """Return the rows of supervised fine-tuning that the checkpoint's run has stored."""
    if run.sft is None or checkpoint is None:
        return None
    return read_rows(checkpoint.resolve().parents[1] / ROWS_FILE, _rows_key(run))


def _rows_key(run: Run) -> str:
    config = plain(run)
    sft = config["sft"]
    chosen = [sft[name] for name in ("demos", "num", "options", "trajectories", "algorithm")]
    return key_of([chosen, sft["task"] or config["task"], config["seed"], config["scaffold"]])


def _other_parts(parts: RunParts, name: str) -> RunParts:
    """The parts of another policy."""
    run = with_policy_defaults(run_of_policy(parts.run, name))
    check_inference(run)
    check_schedules(run)
    device = device_of(run)
    precision = precision_of(run, _stored(run), device, has_bf16=has_bf16(device))
    dtype = "float32" if run.deterministic else precision.engine
    if parts.run.policies[name].policy is None:
        policy = dataclasses.replace(parts.serving, model=copy.deepcopy(parts.serving.model))
    else:
        policy = policy_of(run, [], dtype)
    if run.deterministic:
        _set_deterministic(policy)
    return dataclasses.replace(
        parts,
        run=run,
        engines=engines_of(run, device),
        compute=msgspec.structs.replace(parts.compute, precision=precision.trainer),
        precision=precision,
        policy=policy,
        serving=serving_of(run, policy, parts.kind.is_here),
        rows=[],
        fixed=[],
    )


def run_of_policy(run: Run, name: str) -> Run:
    """``run`` as if ``name``, one of its other policies, were its only one."""
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


def _set_deterministic(policy: Policy) -> None:
    """Raise ConfigError if the policy cannot compute in fixed shapes. On a GPU, choose only kernels
    that repeat themselves."""
    import torch

    from ramify.models.trunk import fixed_shape_trunk

    fixed_shape_trunk(policy.model)
    if policy.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _check_model(run: Run, kind: Any, device: str, config: Any = None) -> None:
    """Raise ConfigError if the loss does not suit the model, or the backend cannot train it over
    its mesh. A checkpoint is checked before its weights are read."""
    from ramify.models.load import read_config
    from ramify.train.backends.mesh import EXPERTS

    if config is None and not run.policy.path:
        return
    config = config or read_config(path_of(run))
    if run.rl is not None:
        replays = run.rl.rollout.replay_routes
        given: dict[str, object] = {
            "loss.router_aux_loss_coef": run.rl.loss.router_aux_loss_coef,
            "rollout.replay_routes": "true" if replays else None,
        }
        has_experts = any(getattr(config.get_text_config(), name, None) for name in EXPERTS)
        if (name := next((name for name in given if given[name]), "")) and not has_experts:
            raise ConfigError(
                f"rl.{name}={given[name]} is for mixtures of experts, and {config.model_type} has "
                "no experts: leave it out"
            )
    if not hasattr(kind, "check_model"):
        return
    kind.check_model(config, run.compute, device, adapters_of(run), _optims(run))
    if run.inference is None and not kind.is_here:
        check_embedded(config, run.policy.dtype, device)


def adapters_of(run: Run) -> Any:
    """The ``AdapterSpec`` of a run; None without adapters."""
    from ramify.train.backends.adapters import AdapterSpec

    lora = run.policy.lora
    if lora is None:
        return None
    return AdapterSpec(rank=lora.rank, alpha=lora.scale_alpha, targets=lora.targets, seed=run.seed)


def _optims(run: Run) -> list[OptimizerSpec]:
    """The optimizers of all stages and of a separate critic."""
    stages = [stage for stage in (run.warmup, run.sft, run.rl) if stage is not None]
    critic = [] if run.rl is None else [run.rl.critic.optim]
    return [optim for optim in [*(stage.optim for stage in stages), *critic] if optim is not None]


def device_of(run: Run) -> str:
    """Kind of the device that the policy is trained on."""
    import torch

    kind = run.policy.device.partition(":")[0]
    return kind if kind != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _fixed_stages(run: Run, policy: Policy, rows: Sequence[TokenSequence]) -> list[TrainingStage]:
    """The stages that sample nothing. They are built early, since only they know the number of
    steps for their schedules."""
    stages: list[TrainingStage] = []
    if run.warmup is not None:
        special = set(policy.tokenizer.all_special_ids)
        ids = [index for index in range(len(policy.tokenizer)) if index not in special]
        stages.append(
            WarmUpStage(run.warmup.steps, run.warmup.optim, ids, run.warmup.batch_tokens, run.seed)
        )
    if run.sft is not None:
        stages.append(SftStage(rows, run.sft.optim, run.sft.batch_tokens, run.sft.epochs, run.seed))
    return stages


def _stored(run: Run) -> str:
    """Precision of the checkpoint's weights; float32 without a checkpoint."""
    if not run.policy.path:
        return "float32"
    from ramify.models.load import read_config, stored_dtype

    return str(stored_dtype(read_config(path_of(run)), "cuda")).removeprefix("torch.")


def policy_of(
    run: Run,
    demonstrations: Sequence[DemonstrationSet],
    dtype: str,
    checkpoint: Path | None = None,
    tools: Sequence[Tool] = (),
) -> Policy:
    """Return the initial policy of ``run`` in precision ``dtype``. If the tokenizer was trained and
    a ``checkpoint`` is given, the tokenizer is read from it. ``tools`` are the native tools of the
    scaffold."""
    import torch
    from transformers import AutoConfig

    from ramify.models.load import from_config, load_policy, load_tokenizer
    from ramify.models.tokenizer import train_tokenizer, word_tokenizer

    spec = run.policy
    device = None if spec.device == "auto" else spec.device
    if spec.path:
        device = "meta" if is_bare(run) else device
        return load_policy(path_of(run), getattr(torch, dtype), device, thinking=spec.thinking)
    if spec.tokenizer:
        tokenizer = load_tokenizer(Path(spec.tokenizer))
    elif spec.words:
        tokenizer = word_tokenizer(spec.words)
    elif checkpoint is not None:
        tokenizer = load_tokenizer(checkpoint / "policy")
    elif shown := [each for one in demonstrations for each in one.trajectories]:
        with report_progress("tokenizer", note="trained on the demonstrations"):
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
            **(spec.shape or _shape(tokenizer, demonstrations, checkpoint, tools)),
        }
    )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    policy = from_config(config, tokenizer, run.seed, device=device)
    policy.model.to(getattr(torch, dtype))
    return policy


def _card(run: Run, policy: Policy) -> PolicyCard:
    """What the trained policy's folder will say. A scaffold of the user's own is not named, since
    its file may be elsewhere when the policy is asked."""
    usual = Limits()
    own = {
        name: getattr(run.limits, name)
        for name in ("max_turns", "max_depth", "max_reply_tokens")
        if getattr(run.limits, name) != getattr(usual, name)
    }
    named = run.scaffold if run.scaffold in SCAFFOLDS.ours else None
    return PolicyCard(named, **own, is_from_scratch=policy.card.is_from_scratch)


def _usual_vocabulary(spec: PolicySpec, demonstrations: Sequence[Trajectory]) -> int:
    return 512 if spec.shape else vocabulary_for(sum(map(len, _texts(demonstrations))))


def _shape(
    tokenizer: PreTrainedTokenizerFast,
    demonstrations: Sequence[DemonstrationSet],
    checkpoint: Path | None,
    tools: Sequence[Tool],
) -> dict[str, Any]:
    """The shape that follows from the demonstrations, or that of the checkpoint, since a resumed
    run may have other demonstrations."""
    from ramify.models.load import read_config
    from ramify.models.renderer import renderer_of

    if checkpoint is not None:
        config: dict[str, Any] = read_config(checkpoint / "policy").to_dict()
        return config
    shown = tokenised(demonstrations, tokenizer, renderer_of(tokenizer), tools)
    lengths = [len(path.ids) for each in shown for call in each.calls for path in each.paths(call)]
    if not lengths:
        raise ConfigError("policy: no demonstrations, from which the sizes of a new model follow")
    shape = shape_for(sum(lengths), max(lengths))
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


def read_in_parts(run: Run) -> Path | None:
    """The folder from which each rank can read its own part of the policy; None if this process
    has to read all of it."""
    from ramify.models.checkpoint_files import model_folder
    from ramify.models.load import read_config
    from ramify.models.stored_weights import is_read_in_parts
    from ramify.train.backends.meta_model import on_meta

    if not run.policy.path or not is_read_in_parts(on_meta(read_config(path_of(run)))):
        return None
    return model_folder(path_of(run))


def is_bare(run: Run) -> bool:
    """Whether this process needs no weights: ranks read theirs from the checkpoint, engines are
    other processes, and no signal scores with the policy here."""
    return (
        not BACKENDS.of(run.compute.backend).is_here
        and run.inference is not None
        and (run.rl is None or not run.rl.signals)
        and read_in_parts(run) is not None
    )


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
        num = attach(policy.model, lora.rank, lora.scale_alpha, lora.targets, run.seed)
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
    for trajectory in demonstrations:
        for texts in _calls(trajectory):
            yield from texts


def _calls(trajectory: Trajectory) -> Iterator[list[str]]:
    """The messages of each call."""
    for call in trajectory.calls:
        yield [message.content for message in trajectory.conversation(call)]
