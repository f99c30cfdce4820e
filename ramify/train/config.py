"""Define the configuration of a training run as plain data, with defaults for nearly every option.

This module builds and loads nothing.

    Run
    ├── policy     a checkpoint, or the shape of a model to create from scratch
    ├── policies, depths               further policies, and the model of the calls at each depth
    ├── task       the questions
    ├── warmup     ┐
    ├── sft        ├ the stages, in this order; any of them may be None
    ├── rl         ┘
    ├── limits, sandbox, scaffold      how the engine runs a rollout
    ├── inference                      engines in other processes, instead of the one here
    ├── placement                      on which machines processes run, by hand or by Ray
    └── evaluate, schedule, trackers   what is measured and saved, and when

A recipe is a function that returns a ``Run`` (``recipes/tiny.py``). ``ramify train`` overrides its
fields by dotted names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ramify.engine.limits import Limits
from ramify.errors import ConfigError
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.plugins import check_methods, replace_names_with_import_locations
from ramify.sandbox.base import (
    AnySandboxSpec,
    JailSpec,
    SandboxSpec,
    check_provider_exists,
    provider_spec,
)
from ramify.tasks.base import DATA_SUFFIXES
from ramify.train.advantages import ALGORITHMS
from ramify.train.advantages.group_estimators import DrGRPO
from ramify.train.advantages.sft import SFT
from ramify.train.backends.base import OptimizerSpec, TrainerComputeSpec
from ramify.train.call_depth_models import DepthSpec, FrozenModelBudget, check_depths
from ramify.train.config_overrides import Choices
from ramify.train.config_redaction import check_field_bounds, check_none_or_positive, redact_config
from ramify.train.losses import POLICY_LOSSES
from ramify.train.losses.total_loss import LossSpec
from ramify.train.named_objectives import (
    OBJECTIVES,
    advantage_estimator_of,
    build_advantage_estimator,
    canonical_objective_name,
    loss_of,
    replace_estimator,
)
from ramify.train.placement.placement_spec import PlacementSpec
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from ramify.train.rollouts.rollouter import RolloutOptions
from ramify.train.signals.judge_calls import BUDGET
from ramify.train.signals.signal_composition import Hybrid
from ramify.train.signals.signal_runner import build_signals
from ramify.train.training_guard import TrainingGuardSpec

STALL_S = 1800.0
"""Default of ``Run.stall_s``: the longest time in seconds without progress."""


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How often a training run evaluates its policy and saves checkpoints.

    Steps are counted within a stage.
    """

    evaluate_every: int | None = 5
    """Steps between evaluations on the validation stream, in a stage with rollouts; None: only at
    the end of the stage."""
    checkpoint_every: int | None = None
    """Steps between checkpoints. A checkpoint is also saved after each evaluation, including the
    one before the first step, and at the end of each stage. None: only those."""
    checkpoint_every_s: float | None = 1800.0
    """Save a checkpoint after a step if this many seconds have passed since the last checkpoint,
    whatever ``checkpoint_every`` says; None: never."""
    save_rollouts_every: int | None = None
    """Steps between complete saves of a step's rollouts in OUT/rollouts, to look at or learn from
    (``sft.trajectories``); None: no saves."""
    keep_last: int = 2
    """Number of most recent checkpoints to keep."""
    keep_best: int = 1
    """Number of checkpoints with the best validation scores to keep, in addition to the most recent
    ones (``keep_last``)."""

    def __post_init__(self) -> None:
        check_none_or_positive("schedule", "never", checkpoint_every=self.checkpoint_every)
        check_none_or_positive("schedule", "never", checkpoint_every_s=self.checkpoint_every_s)
        check_none_or_positive("schedule", "never", save_rollouts_every=self.save_rollouts_every)
        check_none_or_positive(
            "schedule", "only at the stage's end", evaluate_every=self.evaluate_every
        )
        check_field_bounds("schedule", least=1, keep_last=self.keep_last)
        check_field_bounds("schedule", least=0, keep_best=self.keep_best)


class LoraSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Train low-rank adapters instead of all weights; needs the extra ``lora``.

    Example:
        policy=train.PolicySpec(path="qwen3-8b", lora=train.LoraSpec(rank=32))
    """

    rank: int = 16
    """Rank of the adapters: the size of their inner dimension."""
    alpha: float | None = None
    """Adapters are scaled by ``alpha / rank``. None: a default that depends on the policy."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Linear modules that get an adapter, by the last part of their names, such as ``q_proj``.
    ``all-linear``: all except the output matrix."""

    @property
    def effective_alpha(self) -> float:
        return 2.0 * self.rank if self.alpha is None else self.alpha

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(
                f"policy.lora.rank={self.rank} must be at least 1; for training all weights set "
                "lora to null"
            )


class PolicySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model to train."""

    path: str = ""
    """A checkpoint's folder, a hub name, or the name of a packaged policy. Empty: create a model
    from ``shape`` with random weights."""
    shape: dict[str, Any] = {}
    """Fields of a Hugging Face configuration, including ``model_type``, of a model to create from
    scratch, if ``path`` is empty. If ``shape`` is empty too, the model is a transformer whose
    vocabulary, window and sizes follow from the demonstrations."""
    tokenizer: str = ""
    """A folder with the tokenizer for a model created from scratch. Empty: train one on the
    demonstrations."""
    words: tuple[str, ...] = ()
    """Vocabulary of a word-level tokenizer, one token per word, as an alternative to ``tokenizer``
    (``models.tokenizer_training.word_tokenizer``)."""
    vocab_size: int | None = None
    """Size of the vocabulary, if a tokenizer is trained; None: 512, or from the demonstrations if
    there is no ``shape``."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the engine. auto: the precision in ``compute.precision``. If that is also auto,
    fp32 on a CPU and for a model created from scratch, and otherwise the precision of the stored
    weights."""
    device: str = "auto"
    """Device of the policy, such as ``cuda``, ``cuda:1`` or ``cpu``. auto: a GPU if there is
    one."""
    slots: int | None = None
    """Maximum number of sequences that the engine decodes at once; None: 128 on a CPU, 256 on a
    GPU."""
    cache_bytes: int | None = None
    """Size of the engine's KV cache in bytes; None: 2 GiB on a CPU, a third of the memory on a
    GPU."""
    thinking: bool | None = None
    """Whether a hybrid model thinks, if its chat template has ``enable_thinking``; saved with the
    policy. None: a policy trained by Ramify keeps the setting it was trained with, and any other
    checkpoint does not think if its template can switch thinking off."""
    lora: LoraSpec | None = None

    def __post_init__(self) -> None:
        if self.shape and "model_type" not in self.shape:
            raise ConfigError(
                "policy.shape has no model_type: give one that transformers knows, as 'qwen3'"
            )
        check_none_or_positive("policy", "the device's usual size", slots=self.slots)
        check_none_or_positive("policy", "the device's usual size", cache_bytes=self.cache_bytes)


class TaskSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The task that supplies the questions of rollouts and evaluations, and scores the answers.

    >>> train.TaskSpec(name="my_task.py:logs", options={"lines": 500}).options["lines"]
    500
    """

    name: str = "ledger"
    """The task: a name that ``ramify plugins task`` lists, ``module:attribute``,
    ``file.py:attribute``, a .jsonl or .parquet file, ``hf:NAME`` or ``verifiers:ID``."""
    options: dict[str, Any] = {}
    """Arguments of the function that builds the task."""
    traffic: str = ""
    """Store of recorded traffic (``ramify serve-policy --record``). Training uses its rewarded
    replies instead of rollouts; evaluations still use the task's other splits. Empty: none."""
    validate: bool = True
    """Check before training that gold answers score 1 and wrong answers do not. Items without a
    gold answer are skipped. False: check no scores, e.g. for an environment whose gold answer takes
    more than one action."""

    def as_base_spec(self) -> TaskSpec:
        """Return a plain ``TaskSpec`` with the same name and options, without fields that a
        subclass adds."""
        if type(self) is TaskSpec:
            return self
        return TaskSpec(name=self.name, options=self.options, validate=self.validate)


class InductionWarmUpSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of a warm-up stage for a model created from scratch.

    The model learns to predict the second copy of random strings that are repeated, a skill known
    as induction.

    >>> train.InductionWarmUpSpec(steps=100).batch_tokens
    2048
    """

    steps: int = 150
    """Optimizer steps; each has new random strings."""
    batch_tokens: int = 2048
    """Tokens per step."""
    optim: OptimizerSpec = OptimizerSpec()

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(
                f"warmup.steps={self.steps} must be at least 1; for no warm-up set warmup to null"
            )
        check_field_bounds("warmup", least=1, batch_tokens=self.batch_tokens)


class SftSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of supervised fine-tuning: its demonstrations, trajectories and optimizer."""

    demos: str = ""
    """Source of demonstrations: a name in ``sft_data.DEMOS``, ``module:function``, or
    conversations, which are rows with ``messages`` of a .jsonl or .parquet file or of ``hf:NAME``.
    Empty: none."""
    num: int = 10_000
    """Number of demonstrations: one for each of the first items of the training split."""
    task: TaskSpec | None = None
    """The task that is demonstrated, if it differs from the task of the rollouts; None: the run's
    task."""
    options: dict[str, Any] = {}
    """Extra arguments of the demonstration function."""
    trajectories: str = ""
    """Trajectories to learn from, in addition to demonstrations or instead of them: a JSONL file, a
    folder of such files (a run's ``rollouts``), or a store's folder, whose evaluated runs have
    rewards. Set ``algorithm.min_reward`` to learn from the good ones only."""
    epochs: int = 1
    """Number of times each example is trained on."""
    batch_tokens: int = 2048
    """Maximum number of tokens per step. A longer example gets a separate step."""
    optim: OptimizerSpec = OptimizerSpec()
    algorithm: SFT = SFT()

    @property
    def shows_conversations(self) -> bool:
        """True if the demonstrations are conversations read from a file or a data set."""
        return self.demos.startswith("hf:") or self.demos.endswith(DATA_SUFFIXES)

    def __post_init__(self) -> None:
        if not self.demos and not self.trajectories:
            raise ConfigError("sft has nothing to learn from: give demos or trajectories")
        given = {"num": self.num, "epochs": self.epochs, "batch_tokens": self.batch_tokens}
        check_field_bounds("sft", least=1, **given)


class CriticSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of the critic (the value model), for an algorithm that uses one, such as ``ppo``.

    >>> train.CriticSpec(model="own").model
    'own'
    """

    model: Literal["shared", "own"] = "shared"
    """``shared``: a value head on the policy's own layers. ``own``: a second model with a value
    head that starts as a copy of the policy. It doubles the memory, but learning values then does
    not change the policy."""
    optim: OptimizerSpec | None = None
    """Optimizer of a separate critic; None: same as the policy's."""


_ALGORITHM, _LOSS = DrGRPO(), LossSpec()
"""Defaults of ``RlSpec``. A field that still holds one of these objects was not given."""


class RlSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of the reinforcement-learning stage: rollouts, advantages, loss and optimizer.

    >>> train.RlSpec(steps=200, algorithm=train.GRPO()).steps
    200
    """

    steps: int = 45
    """Training steps. Each one samples rollouts, scores them, and learns from them."""
    sample: RolloutBatchSpec = RolloutBatchSpec()
    rollout: RolloutOptions = RolloutOptions()
    objective: str = ""
    """Name of an objective in docs/objectives.md; empty for none. In a recipe, it sets
    ``algorithm`` and ``loss`` unless they are given. As an override on the command line, it
    replaces both, and overrides of single fields are applied afterwards."""
    algorithm: Any = _ALGORITHM
    """The algorithm that computes advantages. In a configuration: a name from
    ``docs/algorithms.md``, a dotted path, or a map with ``name`` and options."""
    signals: dict[str, Any] = {}
    """Name -> signal: feedback in addition to the reward, weighted by ``algorithm=Hybrid(…)``. A
    signal is a name in ``signals.signal_runner.SIGNALS``, an object, or a mapping with ``name`` and
    options."""
    judges: Limits = BUDGET
    """Limits on the calls, tokens and cost of all judges of this run together."""
    judge_cache: str = ""
    """A folder that caches judge replies, so that repeating a run does not pay for them again."""
    loss: LossSpec = _LOSS
    critic: CriticSpec = CriticSpec()
    optim: OptimizerSpec = OptimizerSpec()

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(
                f"rl.steps={self.steps} must be at least 1; for no reinforcement learning set rl "
                "to null"
            )
        if self.objective:
            name = canonical_objective_name(self.objective)
            msgspec.structs.force_setattr(self, "objective", name)
            objective = OBJECTIVES[name]
            if self.algorithm is _ALGORITHM:
                own = build_advantage_estimator(objective, _ALGORITHM)
                msgspec.structs.force_setattr(self, "algorithm", own)
            if self.loss is _LOSS:
                msgspec.structs.force_setattr(self, "loss", loss_of(objective, _LOSS))
        if isinstance(self.algorithm, str):  # by name, as for a loss
            msgspec.structs.force_setattr(self, "algorithm", ALGORITHMS.build(self.algorithm))
        if not isinstance(self.algorithm, Mapping | type):
            check_methods("rl.algorithm", self.algorithm, "assign_advantages")
        if not self.signals:
            if isinstance(self.algorithm, Hybrid):
                self.algorithm.check({})
            return
        signals = build_signals(self.signals)
        msgspec.structs.force_setattr(self, "signals", signals)
        if isinstance(self.algorithm, Hybrid):
            self.algorithm.check(signals)
        elif not isinstance(self.algorithm, Mapping):  # of a checkpoint: not made yet
            raise ConfigError(
                "rl.signals need an algorithm that weighs them: algorithm=Hybrid(outcome=…, "
                "terms=…)"
            )


class CoTrainedPolicySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An additional policy that is trained on the same rollouts as the main one, ``Run.policy``.

    It learns from the calls that it answered, with the algorithm and the loss of ``Run.rl``.

    >>> train.CoTrainedPolicySpec(optim=train.OptimizerSpec(lr=2e-6)).optim.lr
    2e-06
    """

    policy: PolicySpec | None = None
    """The model that this policy starts from. None: a copy of ``Run.policy``, as it is when
    rollouts begin."""
    optim: OptimizerSpec = OptimizerSpec()
    """Optimizer and learning rate of this policy. With ``lr=0``, the policy is not changed."""
    inference: InferenceSpec | None = None
    """Engines for this policy in separate processes; None: an engine in the trainer's process."""


class EvaluateSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of evaluations: which splits are evaluated, when, and with how many items."""

    num: int = 256
    """Number of items per reported split; the first ones are used."""
    validation: int | None = None
    """Number of items in the validation stream, which is evaluated repeatedly during training;
    None: same as ``num``."""
    attempts: int = 1
    """Attempts per item."""
    temperature: float = 1.0
    """Temperature at which the policy is sampled in evaluations."""
    max_failed: float = 0.1
    """Largest share of attempts that may fail for reasons other than the policy (no session, a lost
    engine, a scoring error). Failed attempts do not count towards the score. Above this share the
    evaluation has no score, and its checkpoint can never be the best."""
    keep: Literal["best", "last"] = "best"
    """Which checkpoint OUT/policy holds at the end: the best on the validation stream, or the last.
    Without a validation score it is the last. OUT/policy.json has its scores with intervals."""
    first: tuple[str, ...] = ()
    """Splits to report before the first rollout, in addition to the validation stream."""
    final: tuple[str, ...] = ("test",)
    """Splits to report at the end, for the last policy and for the best one on the validation
    stream."""

    def __post_init__(self) -> None:
        validation = self.num if self.validation is None else self.validation
        check_field_bounds(
            "evaluate", least=1, num=self.num, validation=validation, attempts=self.attempts
        )
        check_field_bounds("evaluate", above=0, temperature=self.temperature)
        if not 0 <= self.max_failed <= 1:
            raise ConfigError(
                f"evaluate.max_failed={self.max_failed} is a share of attempts: from 0 to 1"
            )


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The complete configuration of one training run."""

    name: str = "run"
    """Name of the run; its folder is ``runs/NAME`` unless ``--out`` gives another."""
    seed: int = 0
    """Random seed for new weights, demonstrations, the order of rows, and sampling."""
    deterministic: bool = False
    """Compute in shapes that do not depend on the batch, in the engine and in the trainer. The same
    run then gives the same bits at any concurrency, and a sampled token has the same
    log-probability in both. This makes the run slower; see docs/train.md."""
    policy: PolicySpec
    task: TaskSpec = TaskSpec()
    """Task that provides the questions of rollouts and evaluations. A run that only imitates
    conversations and names no task is not evaluated."""
    warmup: InductionWarmUpSpec | None = None
    sft: SftSpec | None = None
    rl: RlSpec | None = None
    policies: dict[str, CoTrainedPolicySpec] = {}
    """Name -> a policy that is trained in addition to ``policy``; ``depths`` names the calls that
    it answers."""
    depths: tuple[DepthSpec, ...] = ()
    """Models that answer the calls at each depth, the root's first. The last entry applies to all
    deeper calls. The second entry also answers every ``llm_query``. Empty: the policy answers all
    calls."""
    frozen: FrozenModelBudget = FrozenModelBudget()
    """Budgets of the models in ``depths`` that are not trained."""
    scaffold: str = "default"
    """How the model is prompted: a name that ``ramify plugins scaffold`` lists, ``file.py:name`` or
    ``module:name``."""
    limits: Limits = Limits()
    sandbox: AnySandboxSpec = JailSpec()
    """Where the sessions of rollouts and evaluations run: the spec of a provider."""
    evaluate: EvaluateSpec = EvaluateSpec()
    schedule: Schedule = Schedule()
    guard: TrainingGuardSpec = TrainingGuardSpec()
    compute: TrainerComputeSpec = TrainerComputeSpec()
    """How the trainer computes: its backend, ranks, precision and batch size."""
    trackers: tuple[str, ...] = ()
    """Experiment trackers that receive the metrics in addition to ``metrics.jsonl``: names in
    ``trackers.base.TRACKERS``, or ``module:Class``."""
    tracker_options: dict[str, dict[str, Any]] = {}
    """Tracker name -> arguments of its class: ``{"wandb": {"project": "mine"}}``."""
    inference: InferenceSpec | None = None
    """Inference engines in separate processes; None: the engine in the trainer's process, which
    shares the trainer's weights."""
    stall_s: float = STALL_S
    """Stall timeout in seconds. If no reply, rollout or step completes for this long, the run ends,
    and the stacks of its processes are written to OUT/stalled.txt."""
    placement: PlacementSpec | None = None
    """Machines that the run's processes use, and what starts the processes (e.g. Ray). None:
    everything runs on this machine."""
    threads: int | None = None
    """Threads that torch uses per operation; None: torch's default. One is best for small models
    and on shared machines."""

    @property
    def can_be_evaluated(self) -> bool:
        """True if the policy can be evaluated on the run's task.

        A run that only imitates conversations and names no task cannot be evaluated.
        """
        only_talks = self.rl is None and self.sft is not None and self.sft.shows_conversations
        return not only_talks or self.task != TaskSpec()

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "sandbox", provider_spec(self.sandbox))
        if isinstance(self.task, TaskSpec):
            msgspec.structs.force_setattr(self, "task", self.task.as_base_spec())
        if not self.stall_s > 0:
            raise ConfigError(
                f"stall_s={self.stall_s} must be above 0: it is the longest time without progress"
            )
        check_none_or_positive("run", "torch's default", threads=self.threads)
        workers = self.placement is not None and "rollouts" in self.placement.roles
        check_depths(self.depths, self.limits.max_depth, tuple(self.policies), has_workers=workers)
        if not self.policy.path and not self.policy.shape and self.sft is None:
            raise ConfigError(
                "policy: give path (a checkpoint), shape (a model created from scratch), or sft, "
                "whose demonstrations determine the size of a new model"
            )
        if self.warmup is None and self.sft is None and self.rl is None:
            raise ConfigError(f"run '{self.name}' has no stage: give warmup, sft or rl")


def with_objective(run: Run, name: str) -> Run:
    """Return a copy of ``run`` whose RL stage uses a published objective, such as ``grpo`` or
    ``gspo``.

    The objective's options are those of its paper (docs/objectives.md). An algorithm that combines
    several signals (``Hybrid``) keeps its other terms. Raises ConfigError if the name is unknown or
    the run has no RL stage.

    Example:
        return train.with_objective(run, "gspo")     # in a recipe; rl.objective=gspo as an override
    """
    if run.rl is None:
        raise ConfigError(f"run '{run.name}' has no rl stage to set an objective for: set rl")
    name = canonical_objective_name(name)
    objective = OBJECTIVES[name]
    before = run.rl.algorithm
    algorithm = replace_estimator(
        before, build_advantage_estimator(objective, advantage_estimator_of(before))
    )
    loss = loss_of(objective, run.rl.loss)
    rl = msgspec.structs.replace(run.rl, objective=name, algorithm=algorithm, loss=loss)
    return msgspec.structs.replace(run, rl=rl)


def with_sandbox(run: Run, provider: str) -> Run:
    """Return a copy of ``run`` that uses another sandbox provider.

    Limits that all providers have in common keep their values.
    """
    common = {name: getattr(run.sandbox, name) for name in SandboxSpec.__struct_fields__}
    check_provider_exists(spec := SandboxSpec(**{**common, "provider": provider}))
    return msgspec.structs.replace(run, sandbox=provider_spec(spec))


CHOICES: Choices = {
    "sandbox.provider": with_sandbox,
    "rl.objective": with_objective,
    "rl.algorithm": ALGORITHMS,
    "rl.loss.policy": POLICY_LOSSES,
}
"""Map each field that holds one of several classes to its choices, which map names to classes."""


def to_plain_data(run: Run) -> dict[str, Any]:
    """Return ``run`` as plain data without secrets.

    Checkpoints store this form, and experiment trackers receive it.

    Raises ConfigError if a part of ``run`` cannot be serialized.
    """
    try:
        data: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(run))
    except TypeError as error:
        raise ConfigError(
            "a run is stored with its checkpoints, and one of its parts cannot be serialized "
            f"({error}): give judges and similar objects as 'module:Class' or as a msgspec.Struct"
        ) from error
    if run.rl is not None:
        rl = data["rl"]
        replace_names_with_import_locations(run.rl.algorithm, rl["algorithm"])
        replace_names_with_import_locations(run.rl.loss.policy, rl["loss"]["policy"])
        replace_names_with_import_locations(run.rl.loss.corrections, rl["loss"]["corrections"])
    return redact_config(data)
