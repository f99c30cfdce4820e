"""A run as plain data: every knob of a recipe, with its vetted default. Nothing here is built or
loaded.

    Run
    ├── policy     a checkpoint, or a shape to make one from nothing
    ├── task       what is asked
    ├── warmup     ┐
    ├── sft        ├ the stages, in this order; any may be None
    ├── rl         ┘
    ├── limits, sandbox, scaffold      how the engine runs a rollout
    ├── inference                      which engines answer, where it is not the one in this process
    ├── placement                      where processes stand, on this machine or by Ray
    └── evaluate, cadence, trackers    what is measured and kept, how often, and who is told

A recipe is a function that returns one (``recipes/tiny.py``); ``ramify train`` overrides its fields
by dotted names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ramify.engine.limits import Limits
from ramify.errors import ConfigError
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.sandbox.base import SandboxSpec
from ramify.train.algorithms import ALGORITHMS
from ramify.train.algorithms.dr_grpo import DrGRPO
from ramify.train.algorithms.sft import SFT
from ramify.train.backends.base import ComputeSpec, OptimizerSpec
from ramify.train.guards import TrainingGuard
from ramify.train.loss import LossSpec
from ramify.train.placement.placement_spec import PlacementSpec
from ramify.train.policy_losses import POLICY_LOSSES
from ramify.train.redacted import redacted
from ramify.train.rollout import RolloutOptions
from ramify.train.signals.compose import Hybrid
from ramify.train.signals.judge_calls import BUDGET
from ramify.train.signals.signal_reader import signals_of
from ramify.train.stages import StepSampleSpec
from ramify.train.training_loop import Schedule


class LoraSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Low-rank adapters in place of all weights; needs ``ramify[lora]``."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the modules that get one."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(
                f"policy.lora.rank={self.rank} must be at least 1; for training all weights set "
                "lora to null"
            )


class PolicySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which model learns."""

    path: str = ""
    """A checkpoint's folder or hub name, ``tiny`` for the packaged one; empty: a model is made from
    ``shape``, with random weights."""
    shape: dict[str, Any] = {}
    """Where there is no path: fields of a Hugging Face configuration, ``model_type`` among them,
    for a model made from nothing."""
    tokenizer: str = ""
    """A folder with the tokenizer of a model made from nothing; empty: one is trained on the
    demonstrations."""
    words: tuple[str, ...] = ()
    """Instead: the words of a tokenizer that knows nothing else, one token each
    (``policy.tokenizer.word_tokenizer``)."""
    vocab_size: int = 512
    """Of the tokenizer that is trained."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: fp32 on a CPU and for what is made from nothing, as stored on a GPU."""
    device: str = "auto"
    """auto: a GPU where there is one."""
    slots: int | None = None
    """Sequences that the engine decodes at once; None: 128 on a CPU, 256 on a GPU."""
    cache_bytes: int | None = None
    """Memory for its keys and values; None: 2 GiB on a CPU, a third of a GPU's."""
    lora: LoraSpec | None = None

    def __post_init__(self) -> None:
        if not self.path and not self.shape:
            raise ConfigError(
                "policy: give path (a checkpoint) or shape (a model made from nothing)"
            )
        if self.shape and "model_type" not in self.shape:
            raise ConfigError(
                "policy.shape has no model_type: give one that transformers knows, as 'qwen3'"
            )


class TaskSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is asked."""

    name: str = "ledger"
    """Of ``tasks.base.TASKS``, or ``module:attribute``."""
    options: dict[str, Any] = {}
    """What its maker takes."""
    validate: bool = True
    """Prove before anything is spent that gold answers score 1 and wrong ones do not. Items without
    a gold answer are skipped. False: no score is checked, as for an environment whose gold is not
    reached by one action."""


class WarmUpSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Induction warm-up (``induction.py``), for a model made from nothing."""

    steps: int = 150
    batch_tokens: int = 2048
    optim: OptimizerSpec = OptimizerSpec()

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_tokens < 1:
            raise ConfigError(
                f"warmup: steps={self.steps} and batch_tokens={self.batch_tokens} must be at least "
                "1; or warmup=null"
            )


class SftSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Supervised fine-tuning."""

    demos: str = ""
    """Demonstrations: of ``sft.DEMOS``, or ``module:function``; empty for none."""
    num: int = 10_000
    """How many; one each of the first items of the training split."""
    task: TaskSpec | None = None
    """What is demonstrated, where it is another mix than what is asked in rollouts; None: the run's
    task."""
    options: dict[str, Any] = {}
    """What the demonstrations' function takes besides."""
    trajectories: str = ""
    """A JSONL file of trajectories, a folder of such (a run's ``rollouts``), or a store's folder,
    whose evaluated runs have rewards: to learn from, besides or instead; with
    ``algorithm.min_reward`` the good ones alone."""
    epochs: int = 1
    batch_tokens: int = 2048
    optim: OptimizerSpec = OptimizerSpec()
    algorithm: SFT = SFT()

    def __post_init__(self) -> None:
        if not self.demos and not self.trajectories:
            raise ConfigError("sft has nothing to learn from: give demos or trajectories")
        if self.num < 1 or self.epochs < 1 or self.batch_tokens < 1:
            raise ConfigError(
                f"sft: num={self.num}, epochs={self.epochs}, batch_tokens={self.batch_tokens} must "
                "be positive"
            )


class CriticSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The critic of an algorithm that has one (``ppo``)."""

    model: Literal["shared", "own"] = "shared"
    """``shared``: a value head on the policy's own layers. ``own``: a second model, which begins as
    a copy of the policy with a value head: twice the memory, and what the critic learns does not
    move the policy."""
    optim: OptimizerSpec | None = None
    """Of a model of its own; None: as the policy's."""


class RlSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Reinforcement learning."""

    steps: int = 45
    sample: StepSampleSpec = StepSampleSpec()
    rollout: RolloutOptions = RolloutOptions()
    algorithm: Any = DrGRPO()
    """Implements ``algorithms.base.Algorithm``; on the command line by a name of
    ``docs/algorithms.md`` or a dotted path."""
    signals: dict[str, Any] = {}
    """Name -> signal: what is read off rollouts besides their reward, for ``algorithm=Hybrid(…)``
    to weigh. One of ``signals.registry.SIGNALS`` by name, made already, or a mapping with ``name``
    and options."""
    judges: Limits = BUDGET
    """What judges of this run may spend in all."""
    judge_cache: str = ""
    """A folder in which judges' replies are kept, so that a run that is repeated does not pay for
    them again."""
    loss: LossSpec = LossSpec()
    critic: CriticSpec = CriticSpec()
    optim: OptimizerSpec = OptimizerSpec()

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(
                f"rl.steps={self.steps} must be at least 1; for no reinforcement learning set rl "
                "to null"
            )
        if not self.signals:
            if isinstance(self.algorithm, Hybrid):
                self.algorithm.check({})
            return
        signals = signals_of(self.signals)
        msgspec.structs.force_setattr(self, "signals", signals)
        if isinstance(self.algorithm, Hybrid):
            self.algorithm.check(signals)
        elif not isinstance(self.algorithm, Mapping):  # of a checkpoint: not made yet
            raise ConfigError(
                "rl.signals need an algorithm that weighs them: algorithm=Hybrid(outcome=…, "
                "terms=…)"
            )


class EvaluateSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is measured."""

    num: int = 256
    """Items of each split that is reported, its first."""
    validation: int | None = None
    """Items of the validation stream, which is asked again and again during training; None: as
    many."""
    attempts: int = 1
    """At each item."""
    temperature: float = 1.0
    max_failed: float = 0.1
    """Share of attempts that may fail for reasons not the policy's own (no session, an engine that
    went, a score that raised). They are left out of the score; above this share there is none, and
    its checkpoint is never the best."""
    first: tuple[str, ...] = ()
    """Splits that are reported before the first rollout, besides the validation stream."""
    final: tuple[str, ...] = ("test",)
    """Splits that are reported at the end, for the last policy and for the best on the validation
    stream."""

    def __post_init__(self) -> None:
        if (
            min(self.num, self.attempts, self.num if self.validation is None else self.validation)
            < 1
        ):
            raise ConfigError(
                f"evaluate: num={self.num}, validation={self.validation} and "
                f"attempts={self.attempts} must be at least 1"
            )
        if not self.temperature > 0:
            raise ConfigError(f"evaluate.temperature={self.temperature} must be above 0")
        if not 0 <= self.max_failed <= 1:
            raise ConfigError(
                f"evaluate.max_failed={self.max_failed} is a share of attempts: from 0 to 1"
            )


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run."""

    name: str = "run"
    seed: int = 0
    policy: PolicySpec
    task: TaskSpec = TaskSpec()
    warmup: WarmUpSpec | None = None
    sft: SftSpec | None = None
    rl: RlSpec | None = None
    scaffold: str = "default"
    limits: Limits = Limits()
    sandbox: SandboxSpec = SandboxSpec()
    evaluate: EvaluateSpec = EvaluateSpec()
    schedule: Schedule = Schedule()
    guard: TrainingGuard = TrainingGuard()
    compute: ComputeSpec = ComputeSpec()
    """How the trainer computes."""
    trackers: tuple[str, ...] = ()
    """Services that are told what is measured, besides ``metrics.jsonl``: of
    ``trackers.base.TRACKERS``, or ``module:Class``."""
    tracker_options: dict[str, dict[str, Any]] = {}
    """Name of a tracker -> what its class takes: ``{"wandb": {"project": "mine"}}``."""
    inference: InferenceSpec | None = None
    """Engines in processes of their own; None: the one in the trainer's process, which holds the
    trainer's weights."""
    stall_s: float = 1800.0
    """How long the run may stand still, without a reply, a rollout or a step that ends, before it
    ends with all stacks in OUT/stalled.txt."""
    placement: PlacementSpec | None = None
    """Where processes stand, and who starts them; None: on this machine."""
    threads: int = 0
    """Of torch, for one operation; 0: its own choice. One is best for small models, and on machines
    that are shared."""

    def __post_init__(self) -> None:
        if not self.stall_s > 0:
            raise ConfigError(
                f"stall_s={self.stall_s} must be above 0: it is how long the run may stand still"
            )
        if self.warmup is None and self.sft is None and self.rl is None:
            raise ConfigError(f"run '{self.name}' has no stage: give warmup, sft or rl")


CHOICES = {"rl.algorithm": ALGORITHMS, "rl.loss.policy": POLICY_LOSSES}
"""Fields that hold one of several classes -> name -> class."""


def plain(run: Run) -> dict[str, Any]:
    """``run`` as plain data, as a checkpoint keeps it and trackers are sent it: without secrets
    (``redacted.py``). Raises ConfigError for a part that has no such form."""
    try:
        data: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(run))
    except TypeError as error:
        raise ConfigError(
            "a run is kept with its checkpoints, and a part of it cannot be written down "
            f"({error}): give judges and the like "
            "as 'module:Class', or as a msgspec.Struct"
        ) from error
    return redacted(data)
