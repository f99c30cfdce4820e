"""Build a trainer from the loaded parts of a training run.

Resources are opened in the right order and closed in reverse.

    PreparedTrainingRun ─ machines ─ services ─ engines ─ rollout workers ─ trained models ─ stages
        ─> Trainer

One exit stack closes the resources in reverse. Each part is opened after the parts that it calls.
Trained models are opened late and closed after the engines, since an engine that comes back asks
for their weights. Loading and checking are done by ``load_run_parts.py``, starting engines and
workers by ``start_rollout_resources.py``, and the steps of a run by ``trainer.py``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ramify.actors.launcher import Launcher, add_to_exit_stack
from ramify.errors import ConfigError
from ramify.logging import ComponentLogger
from ramify.progress import track_progress
from ramify.store.folder_store import Store
from ramify.store.reply_cache import ModelReplyCache
from ramify.tasks.base import items_of
from ramify.tasks.mixture import TaskMixture
from ramify.train.advantages.base import needs_of
from ramify.train.call_depth_models import OwnCallsAlgorithm, temperature_by_call
from ramify.train.config import to_plain_data
from ramify.train.engine_consistency_checks import EngineConsistencyChecks, TokenIdHashingClient
from ramify.train.initial_policy import device_of, lora_adapter_spec, sharded_checkpoint_folder
from ramify.train.learner import Learner, PolicyWeightTransfer, WeightPublisher
from ramify.train.load_run_parts import PreparedTrainingRun
from ramify.train.metrics import RolloutCpuMeter, StepMetrics
from ramify.train.policy_evaluation import evaluate
from ramify.train.preflight import first_prompt
from ramify.train.rollouts.difficulty_pool import NoSignalItemFilter
from ramify.train.rollouts.rollouter import TaskRolloutRunner
from ramify.train.run_record import TrainingRunRecorder
from ramify.train.sft_training_data import num_demo_items
from ramify.train.signals.judge_calls import POLICY
from ramify.train.signals.signal_composition import Hybrid
from ramify.train.signals.signal_runner import TrainingSignalSet
from ramify.train.signals.teacher import needed_scorers
from ramify.train.signals.teacher_logprobs import TeacherModels
from ramify.train.stages import RlStage, TrainingStage, required_loss_inputs, with_schedule_defaults
from ramify.train.stall_watchdog import StallWatchdog, WatchedTrainingThread
from ramify.train.start_rollout_resources import RolloutResources, open_rollouts, reserve_machines
from ramify.train.trainer import PolicyEvaluationPlan, Trainer
from ramify.types.message import Message

if TYPE_CHECKING:
    from torch import Tensor

    from ramify.inference.http.http_engines import HttpEngineClient
    from ramify.models.load import Policy
    from ramify.train.backends.base import Backend, TrainableModel

_log = ComponentLogger("train")
_SWITCH_S = 5e-4
"""Seconds for which one thread may hold the interpreter lock before it must switch. The event loop
waits for the engine's thread after each system call. With Python's default of 5 ms, sampling takes
a fifth longer."""


@contextlib.asynccontextmanager
async def opened_trainer(
    parts: PreparedTrainingRun,
    out: Path,
    checkpoint: Path | None = None,
    *,
    listener: Callable[[StepMetrics], None] | None = None,
    on_stall: Callable[[str], None] | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> AsyncIterator[Trainer]:
    """Open a trainer that writes to the folder ``out``.

    Its engines, sandbox and other resources are open inside the ``async with`` block and closed
    after it. ``on_start`` is called once it is certain that the run can continue from
    ``checkpoint``.
    """
    import torch

    if checkpoint is not None:
        parts.check_checkpoint_tensors(checkpoint)
    on_start()
    _log.info(
        "run_started",
        f"the run {f'continues from {checkpoint}' if checkpoint else 'begins'}",
        name=parts.run.name,
        folder=out,
        process=os.getpid(),
    )
    if parts.run.threads is not None:
        torch.set_num_threads(parts.run.threads)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(_interpreter_for_training())
        with track_progress("preparing", note="engine and sandbox"):
            hosts = await reserve_machines(parts, out, stack)
            # Closed after the engines: one that comes back asks for the trained weights.
            models = await stack.enter_async_context(contextlib.AsyncExitStack())
            rollouts = await open_rollouts(parts, out, hosts, stack)
        trained = model_to_train(parts, out, hosts)
        add_to_exit_stack(models, "trained", trained.close)
        weights = PolicyWeightTransfer(parts.policy, parts.serving, rollouts.client, trained)
        teachers = teachers_of(parts, rollouts, out, trained, weights)
        if teachers is not None:
            add_to_exit_stack(stack, "teachers", teachers.close)
        record = _make_recorder(parts, rollouts, out, trained, listener)
        watch = StallWatchdog(
            out, parts.run.stall_s, others=getattr(trained, "stack_traces", None), on_stall=on_stall
        )
        wiring = LearnerContext(
            record,
            WatchedTrainingThread(watch),
            first_prompt(
                parts.scaffold, parts.run, parts.task, items_of(parts.task, "validation")[0]
            ),
            rollouts.client.name if parts.others else "",
        )
        learners = [
            _learner(parts, rollouts.audited, weights, trained, wiring),
            *_other_learners(parts, rollouts, out, weights, wiring, models),
        ]
        stages = [*parts.fixed, *_rl_stages(parts, rollouts, out, teachers)]
        trainer = Trainer(
            record, learners, stages, _evaluator(parts, rollouts), guard=parts.run.guard
        )
        await stack.enter_async_context(rollouts.rlm)
        yield trainer


@contextlib.contextmanager
def _interpreter_for_training() -> Iterator[None]:
    """Adjust thread switching and garbage collection to suit rollouts inside the ``with`` block.

    Threads switch more often, and objects that exist now are excluded from garbage collection.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    # Demonstrations and their rows stay in memory: scanning them in every garbage collection
    # would cost a tenth of a step.
    was_frozen = gc.get_freeze_count() > 0  # by the application, which knows what lives on
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        sys.setswitchinterval(interval)


def _make_recorder(
    parts: PreparedTrainingRun,
    rollouts: RolloutResources,
    out: Path,
    trained: TrainableModel,
    listener: Callable[[StepMetrics], None] | None,
) -> TrainingRunRecorder:
    """Create the recorder that writes a training run's files and each step's extra metrics."""
    from ramify.inference.local.local_client import LocalClient

    run, client = parts.run, rollouts.client
    measures: list[Callable[[], Mapping[str, float]]] = []
    if run.depths:
        measures.append(rollouts.depths.take_step_metrics)
    meter = None
    if not isinstance(client, LocalClient):
        measures.append(client.engine_count_metrics)
    # With other backends, child processes of this one do more than run sessions.
    elif trained.is_here and rollouts.workers is None:
        meter = RolloutCpuMeter(client.engine.paces.take_totals)
    return TrainingRunRecorder(
        out,
        run.schedule,
        config=to_plain_data(run),
        first_item=max(
            run.rl.sample.first_item if run.rl is not None else 0, num_demo_items(run.sft)
        ),
        listener=listener,
        measures=measures,
        meter=meter,
    )


def _evaluator(parts: PreparedTrainingRun, rollouts: RolloutResources) -> PolicyEvaluationPlan:
    run = parts.run
    if not run.can_be_evaluated:
        return PolicyEvaluationPlan(None, keep=run.evaluate.keep)
    direct = parts.policy.card.direct
    evaluating = partial(evaluate, run, parts.task, rollouts.rlm, rollouts.workers, direct=direct)
    return PolicyEvaluationPlan(
        evaluating, run.evaluate.first, run.evaluate.final, run.evaluate.keep
    )


class LearnerContext(NamedTuple):
    """The parts of a training run that a learner needs, such as the run's recorder and training
    thread.

    The recorder and the thread are shared by all learners of the run. The names are those of the
    learner's policy. A learner trains one policy.
    """

    record: TrainingRunRecorder
    thread: WatchedTrainingThread
    prompt: Sequence[Message]
    """Prompt of the canary, which compares log-probabilities of engine and trainer."""
    model: str
    """Name under which the policy answers calls, if the run has several policies."""
    name: str = ""
    """Name of the policy in ``Run.policies``."""


def _learner(
    parts: PreparedTrainingRun,
    audited: TokenIdHashingClient,
    weights: PolicyWeightTransfer,
    trained: TrainableModel,
    wiring: LearnerContext,
    source: Callable[[], Iterator[tuple[str, Tensor]]] | None = None,
) -> Learner:
    """Build the learner that trains one policy.

    It checks that the policy's engines and the trainer agree on log-probabilities. ``source``
    returns the initial weights of a policy that starts as a copy of another one.
    """
    from ramify.inference.local.local_client import LocalClient

    limits = parts.precision.canary_limits(parts.run)
    check = EngineConsistencyChecks(audited, weights.weights, wiring.prompt, limits)
    publisher = WeightPublisher(weights, wiring.record, wiring.thread, check, wiring.name)
    if not isinstance(audited.client, LocalClient):
        engines: HttpEngineClient = audited.client  # type: ignore[assignment]
        engines.availability.on_return = partial(
            publisher.sync_rejoined_engines, weights.sync_rejoined_engines
        )
    starts_at_base = parts.run.warmup is None and parts.run.sft is None
    return Learner(
        publisher,
        partial(_backend, parts, trained),
        reference_of=lambda folder: trained.reference(folder, starts_at_base),
        source=source,
        model=wiring.model,
        control_ids=_control_ids(parts.policy),
    )


def _other_learners(
    parts: PreparedTrainingRun,
    rollouts: RolloutResources,
    out: Path,
    main: PolicyWeightTransfer,
    wiring: LearnerContext,
    models: contextlib.AsyncExitStack,
) -> Iterator[Learner]:
    """Build the learners of the additional policies in ``Run.policies``.

    A policy for which no checkpoint is given starts with the weights of the main policy, taken from
    ``main``.
    """
    for name, (engine, audited) in rollouts.others.items():
        own = parts.others[name]
        trained = model_to_train(own, out / f"dumps-{name}")
        add_to_exit_stack(models, f"trained.{name}", trained.close)
        weights = PolicyWeightTransfer(own.policy, own.serving, engine, trained)
        source = main.weights if parts.run.policies[name].policy is None else None
        own_wiring = wiring._replace(model=engine.name, name=name)
        yield _learner(own, audited, weights, trained, own_wiring, source)


def _control_ids(policy: Policy) -> set[int]:
    """Return the ids of the policy's control tokens: special tokens that do not end a reply."""
    added = policy.tokenizer.added_tokens_decoder
    return {id for id, token in added.items() if token.special} - {*policy.renderer.stop_ids}


def model_to_train(
    parts: PreparedTrainingRun, out: Path, hosts: Launcher | None = None
) -> TrainableModel:
    """Create the model that the training run updates.

    It is either the policy object of this process, or a copy that is sharded over several
    processes.
    """
    run = parts.run
    if parts.kind.is_here:
        local: TrainableModel = parts.kind(parts.policy, parts.compute, out)
        return local
    folder = sharded_checkpoint_folder(run)
    source = folder if folder is not None else parts.policy.model.state_dict()
    critic = (
        run.rl is not None and needs_of(run.rl.algorithm).values and run.rl.critic.model == "shared"
    )
    placed: dict[str, Any] = {} if hosts is None else {"hosts": hosts}
    if parts.policy.device.type == "meta":
        placed["device"] = device_of(run)
    sharded: TrainableModel = parts.kind(
        parts.policy,
        parts.compute,
        out,
        lora=lora_adapter_spec(run),
        source=source,
        critic=critic,
        **placed,
    )
    return sharded


def _backend(parts: PreparedTrainingRun, trained: TrainableModel, stage: TrainingStage) -> Backend:
    """Return the training backend for a stage, including a critic if the stage needs one."""
    if not stage.critic:
        return trained.backend(stage.optim)
    assert parts.run.rl is not None
    spec = parts.run.rl.critic
    if spec.model == "shared":
        return trained.with_critic(stage.optim, None)
    critic_optim = (
        stage.optim
        if spec.optim is None or stage.optim.num_steps is None
        else with_schedule_defaults("rl.critic", spec.optim, stage.optim.num_steps)
    )
    return trained.with_critic(stage.optim, critic_optim)


def _rl_stages(
    parts: PreparedTrainingRun,
    rollouts: RolloutResources,
    out: Path,
    teachers: TeacherModels | None,
) -> Iterator[RlStage]:
    """Yield the run's reinforcement-learning stage, if it has one.

    Yields nothing if the run has none.
    """
    run, rl = parts.run, parts.run.rl
    if rl is None:
        return
    signals = _signals(parts, rollouts, teachers) if isinstance(rl.algorithm, Hybrid) else None
    rollouter = TaskRolloutRunner(
        rollouts.rlm,
        parts.task,
        rl.rollout,
        seed=run.seed,
        greedy=needs_of(rl.algorithm).greedy,
        gauge=getattr(rollouts.client, "pressure", None),
        rollout_worker=rollouts.workers,
    )
    pool = None
    if rl.sample.settled_share is not None:
        pool = NoSignalItemFilter(
            rl.sample.settled_share,
            out,
            seed=run.seed,
            has_parts=isinstance(parts.task, TaskMixture),
        )
    names = {POLICY: rollouts.client.name}
    names |= {name: client.name for name, (client, _) in rollouts.others.items()}
    temperature = temperature_by_call(run.depths, names, rl.rollout.temperature)
    stage = partial(RlStage, task=parts.task, rollouts=rollouter, temperature=temperature)
    if not parts.others:
        yield stage(rl, rl.algorithm, signals=signals, pool=pool)
        return
    others = {
        name: stage(each.run.rl, OwnCallsAlgorithm(each.run.rl.algorithm, names[name]))
        for name, each in parts.others.items()
        if each.run.rl is not None
    }
    own = OwnCallsAlgorithm(rl.algorithm, names[POLICY])
    yield stage(rl, own, signals=signals, others=others, pool=pool)


def teachers_of(
    parts: PreparedTrainingRun,
    rollouts: RolloutResources,
    out: Path,
    trained: TrainableModel,
    weights: PolicyWeightTransfer,
) -> TeacherModels | None:
    """Return the teacher models with which training signals score rollouts.

    Returns None if no signal needs one. Raises ConfigError if a signal needs the current policy
    while rollouts may be stale.
    """
    from ramify.inference.local import connect
    from ramify.inference.local.local_client import LocalClient
    from ramify.train.backends.single_device import SingleBackend

    rl, client = parts.run.rl, rollouts.client
    if rl is None or not isinstance(rl.algorithm, Hybrid):
        return None
    sources = needed_scorers(rl.signals)
    if "live" in sources and rl.sample.max_staleness:
        raise ConfigError(
            "a signal scores with the current policy (teacher source=live, "
            "student=recomputed, choose=overlap or support=student), which is trained at the "
            "same time if rl.sample.max_staleness is above 0: set it to 0"
        )
    if not sources:
        return None
    shares = isinstance(client, LocalClient) and parts.serving is parts.policy and trained.is_here
    return TeacherModels(
        sources,
        parts.policy,
        lambda policy: SingleBackend(policy, None, parts.compute, dumps=out),
        out,
        weights.save,
        trained.weights,
        connect,
        parts.run.seed,
        client.run if shares and isinstance(client, LocalClient) else None,
        is_copy=not trained.is_here,
    )


def _signals(
    parts: PreparedTrainingRun, rollouts: RolloutResources, teachers: TeacherModels | None
) -> TrainingSignalSet:
    """Build the training signals that score a run's rollouts in addition to the task's reward."""
    rl = parts.run.rl
    assert rl is not None
    assert isinstance(rl.algorithm, Hybrid)
    return TrainingSignalSet(
        rl.signals,
        rl.algorithm,
        pool=rollouts.rlm.pool,
        budget=rl.judges,
        policy=rollouts.audited,
        teachers=teachers,
        cache=ModelReplyCache(Store(rl.judge_cache)) if rl.judge_cache else None,
        writing=parts.policy.renderer,
        weights=parts.task.weights,
        temperature=rl.rollout.temperature,
        wants_reference="ref_logprobs"
        in required_loss_inputs(rl.loss) | needs_of(rl.algorithm).streams,
    )
