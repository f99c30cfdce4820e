"""Opening a run: its processes and engines, and the trainer over them, closed again in order.

    RunParts ── open_rollouts.py ─ trained models ──> Trainer

Decides what each part is given, and that callers end before the parts they call. Not here: checks
(``assemble.py``) and the order of a run's steps (``trainer.py``).
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

from ramify.actors.launcher import closing
from ramify.errors import ConfigError
from ramify.logging import RoomLogger
from ramify.progress import report_progress
from ramify.store.call_cache import CallCache
from ramify.store.store import Store
from ramify.tasks.base import items_of
from ramify.tasks.mixture import MixtureTask
from ramify.train.advantages.base import needs_of
from ramify.train.assemble import RunParts, adapters_of, device_of, read_in_parts
from ramify.train.config import RlSpec, plain
from ramify.train.demonstrations import num_demonstrated
from ramify.train.depth_models import OwnCalls, temperatures
from ramify.train.evaluation_metrics import evaluate
from ramify.train.learner import Learner, PolicyWeights, Publisher
from ramify.train.metrics import CpuMeter, StepMetrics
from ramify.train.open_rollouts import Closable, RolloutParts, open_rollouts
from ramify.train.preflight import first_prompt
from ramify.train.rollouts.difficulty_pool import DifficultyPool
from ramify.train.rollouts.rollouter import Rollouter
from ramify.train.run_record import RunRecord
from ramify.train.selfcheck import AuditedClient, SelfCheck
from ramify.train.signals.compose import Hybrid
from ramify.train.signals.judge_calls import POLICY
from ramify.train.signals.scorer import RunTeachers
from ramify.train.signals.signal_reader import RunSignals
from ramify.train.signals.teacher import needed
from ramify.train.stages import RlStage, TrainingStage, scheduled, streams_of
from ramify.train.trainer import SplitEvaluator, Trainer
from ramify.train.watchdog import RunWatchdog, WatchedThread
from ramify.types.message import Message

if TYPE_CHECKING:
    from torch import Tensor

    from ramify.inference.http.http_engines import HttpEngines
    from ramify.models.load import Policy
    from ramify.train.backends.base import Backend, TrainedModel

_log = RoomLogger("train")
_CLOSED_IN_ORDER = (
    "teachers",
    "rollout_workers",
    "depths",
    "client",
    "trained",
    "services",
    "hosts",
)
"""Callers before the parts they call."""
_SWITCH_S = 5e-4
"""How long one thread may keep the interpreter from another. The event loop's thread, which talks
to sessions, waits for the engine's thread after each system call; with Python's 5 ms, a step of
rollouts takes a fifth longer."""


@contextlib.asynccontextmanager
async def opened_run(
    parts: RunParts,
    out: Path,
    checkpoint: Path | None = None,
    *,
    listener: Callable[[StepMetrics], None] | None = None,
    on_stall: Callable[[str], None] | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> AsyncIterator[Trainer]:
    """The trainer of ``parts`` in the folder ``out``, with everything that it needs open inside the
    block. ``on_start`` is called when it is known that the run can continue from ``checkpoint``."""
    import torch

    interval = sys.getswitchinterval()
    if checkpoint is not None:
        parts.check_fits(checkpoint)
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
    opened: dict[str, Closable] = {}
    others = (f"{part}.{name}" for part in ("client", "trained") for name in parts.others)
    order = [*_CLOSED_IN_ORDER, *others]
    async with closing({part: partial(_close, opened, part) for part in order}):
        sys.setswitchinterval(_SWITCH_S)
        gc.collect()
        # Demonstrations and their rows stay in memory: scanning them in every garbage collection
        # would cost a tenth of a step.
        gc.freeze()
        try:
            with report_progress("preparing", note="engine and sandbox"):
                rollouts = await open_rollouts(parts, out, opened)
            async with rollouts.rlm:
                yield trainer_of(parts, rollouts, out, opened, listener, on_stall)
        finally:
            gc.unfreeze()
            sys.setswitchinterval(interval)


def trainer_of(
    parts: RunParts,
    rollouts: RolloutParts,
    out: Path,
    opened: dict[str, Closable],
    listener: Callable[[StepMetrics], None] | None = None,
    on_stall: Callable[[str], None] | None = None,
) -> Trainer:
    """The trainer over started parts. What it opens is added to ``opened``."""
    from ramify.inference.local.local_client import LocalClient

    run, client = parts.run, rollouts.client
    prompt = first_prompt(parts.scaffold, run, items_of(parts.task, "validation")[0])
    trained = trained_model(parts, out, opened.get("hosts"))
    opened["trained"] = trained
    weights = PolicyWeights(parts.policy, parts.serving, client, trained)
    stages = _stages(parts, rollouts, out, trained, weights, opened)
    watch = RunWatchdog(
        out, run.stall_s, others=getattr(trained, "stacks", None), on_stall=on_stall
    )
    measures: list[Callable[[], Mapping[str, float]]] = []
    if run.depths:
        measures.append(rollouts.depths.step_metrics)
    meter = None
    if not isinstance(client, LocalClient):
        measures.append(client.metrics)
    # With other backends, child processes of this one do more than run sessions.
    elif trained.is_here and rollouts.workers is None:
        meter = CpuMeter(client.engine.paces.taken)
    record = RunRecord(
        out,
        run.schedule,
        config=plain(run),
        first_item=max(
            run.rl.sample.first_item if run.rl is not None else 0, num_demonstrated(run.sft)
        ),
        listener=listener,
        measures=measures,
        meter=meter,
    )
    thread = WatchedThread(watch)
    model = client.name if parts.others else ""
    learners = [
        _learner(parts, rollouts.audited, weights, trained, Wiring(record, thread, prompt, model))
    ]
    for name, (engine, audited) in rollouts.others.items():
        each = parts.others[name]
        model_of = opened[f"trained.{name}"] = trained_model(each, out / f"dumps-{name}")
        handle = PolicyWeights(each.policy, each.serving, engine, model_of)
        wiring = Wiring(record, thread, prompt, engine.name, name)
        source = weights.weights if run.policies[name].policy is None else None
        learners.append(_learner(each, audited, handle, model_of, wiring, source))
    evaluating = partial(evaluate, run, parts.task, rollouts.rlm, rollouts.workers)
    splits = (run.evaluate.first, run.evaluate.final) if run.is_evaluated else ((), ())
    return Trainer(
        record,
        learners,
        stages,
        SplitEvaluator(evaluating if run.is_evaluated else None, *splits, run.evaluate.keep),
        guard=run.guard,
    )


class Wiring(NamedTuple):
    """What the learners of one run share, and the names of one of them."""

    record: RunRecord
    thread: WatchedThread
    prompt: Sequence[Message]
    """Prompt of the canary."""
    model: str
    """Name under which its policy answers calls, if there are several."""
    name: str = ""
    """Name in ``Run.policies``."""


def _learner(
    parts: RunParts,
    audited: AuditedClient,
    weights: PolicyWeights,
    trained: TrainedModel,
    wiring: Wiring,
    source: Callable[[], Iterator[tuple[str, Tensor]]] | None = None,
) -> Learner:
    """The learner of one policy, with the checks of its engines. ``source``: see ``Learner``."""
    from ramify.inference.local.local_client import LocalClient

    limits = parts.precision.canary_limits(parts.run)
    check = SelfCheck(audited, weights.weights, wiring.prompt, limits)
    publisher = Publisher(weights, wiring.record, wiring.thread, check, wiring.name)
    if not isinstance(audited.client, LocalClient):
        engines: HttpEngines = audited.client  # type: ignore[assignment]
        engines.membership.on_return = partial(publisher.rejoin, weights.rejoin)
    starts_at_base = parts.run.warmup is None and parts.run.sft is None
    return Learner(
        publisher,
        partial(_backend, parts, trained),
        reference_of=lambda folder: trained.reference(folder, starts_at_base),
        source=source,
        model=wiring.model,
        control_ids=_control_ids(parts.policy),
    )


def _control_ids(policy: Policy) -> set[int]:
    """The special tokens of a policy that do not end its replies."""
    added = policy.tokenizer.added_tokens_decoder
    return {id for id, token in added.items() if token.special} - {*policy.renderer.stop_ids}


def trained_model(parts: RunParts, out: Path, hosts: Closable | None = None) -> TrainedModel:
    """The model to train: the policy of this process, or a copy of it sharded over ranks."""
    run = parts.run
    if parts.kind.is_here:
        local: TrainedModel = parts.kind(parts.policy, parts.compute, out)
        return local
    folder = read_in_parts(run)
    source = folder if folder is not None else parts.policy.model.state_dict()
    critic = (
        run.rl is not None and needs_of(run.rl.algorithm).values and run.rl.critic.model == "shared"
    )
    placed: dict[str, Any] = {} if hosts is None else {"hosts": hosts}
    if parts.policy.device.type == "meta":
        placed["device"] = device_of(run)
    sharded: TrainedModel = parts.kind(
        parts.policy,
        parts.compute,
        out,
        lora=adapters_of(run),
        source=source,
        critic=critic,
        **placed,
    )
    return sharded


def _backend(parts: RunParts, trained: TrainedModel, stage: TrainingStage) -> Backend:
    """The backend of ``stage``, with a critic if it trains one."""
    if not stage.critic:
        return trained.backend(stage.optim)
    assert parts.run.rl is not None
    spec = parts.run.rl.critic
    if spec.model == "shared":
        return trained.with_critic(stage.optim, None)
    critic_optim = (
        stage.optim
        if spec.optim is None or stage.optim.num_steps is None
        else scheduled("rl.critic", spec.optim, stage.optim.num_steps)
    )
    return trained.with_critic(stage.optim, critic_optim)


def _stages(
    parts: RunParts,
    rollouts: RolloutParts,
    out: Path,
    trained: TrainedModel,
    weights: PolicyWeights,
    opened: dict[str, Closable],
) -> list[TrainingStage]:
    stages, rl = list(parts.fixed), parts.run.rl
    if rl is not None:
        signals = None
        if isinstance(rl.algorithm, Hybrid):
            teachers = _teachers(parts, rollouts, out, trained, weights)
            if teachers is not None:
                opened["teachers"] = teachers
            signals = _signals(parts, rollouts, teachers)
        rollouter = Rollouter(
            rollouts.rlm,
            parts.task,
            rl.rollout,
            seed=parts.run.seed,
            greedy=needs_of(rl.algorithm).greedy,
            gauge=getattr(rollouts.client, "pressure", None),
            rollout_worker=rollouts.workers,
        )

        names = {POLICY: rollouts.client.name}
        names |= {name: client.name for name, (client, _) in rollouts.others.items()}

        temperature = temperatures(parts.run.depths, names, rl.rollout.temperature)

        def stage(own: RlSpec, model: str, **more: Any) -> RlStage:
            """The part of the policy that answers as ``model``."""
            algorithm = OwnCalls(own.algorithm, model) if parts.others else own.algorithm
            return RlStage(own, algorithm, parts.task, rollouter, temperature=temperature, **more)

        others = {
            name: stage(each.run.rl, names[name])
            for name, each in parts.others.items()
            if each.run.rl is not None
        }
        pool = None
        if rl.sample.settled_share is not None:
            pool = DifficultyPool(
                rl.sample.settled_share,
                out,
                seed=parts.run.seed,
                has_parts=isinstance(parts.task, MixtureTask),
            )
        stages.append(stage(rl, names[POLICY], signals=signals, others=others, pool=pool))
    return stages


def _teachers(
    parts: RunParts,
    rollouts: RolloutParts,
    out: Path,
    trained: TrainedModel,
    weights: PolicyWeights,
) -> RunTeachers | None:
    """The models that score for signals; None if no signal needs one."""
    from ramify.inference.local import connect
    from ramify.inference.local.local_client import LocalClient
    from ramify.train.backends.single import SingleBackend

    rl, client = parts.run.rl, rollouts.client
    assert rl is not None
    sources = needed(rl.signals)
    if "live" in sources and rl.sample.max_staleness:
        raise ConfigError(
            "a signal scores with the current policy (teacher source=live, "
            "student=recomputed, choose=overlap or support=student), which is trained at the "
            "same time if rl.sample.max_staleness is above 0: set it to 0"
        )
    if not sources:
        return None
    shares = isinstance(client, LocalClient) and parts.serving is parts.policy and trained.is_here
    return RunTeachers(
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


def _signals(parts: RunParts, rollouts: RolloutParts, teachers: RunTeachers | None) -> RunSignals:
    """The signals that are read from rollouts in addition to their reward."""
    rl = parts.run.rl
    assert rl is not None
    assert isinstance(rl.algorithm, Hybrid)
    return RunSignals(
        rl.signals,
        rl.algorithm,
        pool=rollouts.rlm.pool,
        budget=rl.judges,
        policy=rollouts.audited,
        teachers=teachers,
        cache=CallCache(Store(rl.judge_cache)) if rl.judge_cache else None,
        writing=parts.policy.renderer,
        weights=parts.task.weights,
        temperature=rl.rollout.temperature,
        wants_reference="ref_logprobs" in streams_of(rl.loss) | needs_of(rl.algorithm).streams,
    )


def _close(opened: Mapping[str, Closable], part: str) -> object:
    """Close a part if it was opened."""
    return opened[part].close() if part in opened else None
