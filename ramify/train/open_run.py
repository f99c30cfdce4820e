"""Opening a run: its processes and engines, and the trainer over them, closed again in order.

    RunParts ── placed machines ─ services ─ engines ─ rollout workers ─ trained model ──> Trainer

Decides what starts when, what each part is given, and that callers end before the parts they call.
Not here: checks (``assemble.py``) and the order of a run's steps (``trainer.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ramify.actors.launcher import Launcher, LocalLauncher, closing
from ramify.engine.rlm import RLM
from ramify.errors import ConfigError
from ramify.inference.base import AuditedClient
from ramify.logging import RoomLogger
from ramify.progress import report_progress
from ramify.store.call_cache import CallCache
from ramify.store.store import Store
from ramify.tasks.base import items_of
from ramify.train.advantages.base import needs_of
from ramify.train.assemble import RunParts, adapters_of, device_of, read_in_parts
from ramify.train.config import plain
from ramify.train.demonstrations import num_demonstrated
from ramify.train.depth_models import DepthModels, temperatures
from ramify.train.evaluation_metrics import evaluate
from ramify.train.metrics import CpuMeter, StepMetrics, latest_values
from ramify.train.placement.rollout_worker import RolloutWorkerSpec
from ramify.train.placement.rollout_workers import RolloutWorkers
from ramify.train.placement.services import RunServices
from ramify.train.preflight import first_prompt
from ramify.train.publisher import PolicyWeights, Publisher
from ramify.train.resource_counts import attached, check_reach
from ramify.train.rollouts.rollouter import Rollouter
from ramify.train.run_record import RunRecord
from ramify.train.selfcheck import SelfCheck
from ramify.train.signals.compose import Hybrid
from ramify.train.signals.scorer import RunTeachers
from ramify.train.signals.signal_reader import RunSignals
from ramify.train.signals.teacher import needed
from ramify.train.stages import RlStage, TrainingStage, scheduled, streams_of
from ramify.train.trainer import SplitEvaluator, Trainer
from ramify.train.watchdog import RunWatchdog, WatchedThread

if TYPE_CHECKING:
    from ramify.inference.http.http_engines import HttpEngines
    from ramify.inference.local.local_client import LocalClient
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


class Closable(Protocol):
    """A part that was opened."""

    def close(self) -> object: ...


@dataclasses.dataclass(frozen=True)
class RolloutParts:
    """What rollouts run with."""

    client: LocalClient | HttpEngines
    audited: AuditedClient
    rlm: RLM
    workers: RolloutWorkers | None
    """Processes that run rollouts; None: this process does."""
    depths: DepthModels
    """The models by depth."""


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
    async with closing({part: partial(_close, opened, part) for part in _CLOSED_IN_ORDER}):
        sys.setswitchinterval(_SWITCH_S)
        gc.collect()
        # Demonstrations and their rows stay in memory: scanning them in every garbage collection
        # would cost a tenth of a step.
        gc.freeze()
        try:
            with report_progress("preparing", note="engine and sandbox"):
                rollouts = await _start(parts, out, opened)
            async with rollouts.rlm:
                yield trainer_of(parts, rollouts, out, opened, listener, on_stall)
        finally:
            gc.unfreeze()
            sys.setswitchinterval(interval)


# --- processes


async def _start(parts: RunParts, out: Path, opened: dict[str, Closable]) -> RolloutParts:
    """Acquire the placement slots, and start the processes other than the trainer's."""
    from ramify.inference.local.local_client import LocalClient

    client = opened["client"] = client_of(parts)
    hosts = _placed(parts)
    if hosts is not None:
        opened["hosts"] = hosts
    placement = parts.run.placement
    if placement is not None and placement.services:
        services = opened["services"] = RunServices(
            hosts or LocalLauncher(), placement.services, out, restarts=placement.restarts
        )
        await services.start()
    rl = parts.run.rl
    audited = AuditedClient(client, rl.sample.max_token_staleness if rl is not None else 0)
    workers = None
    if not isinstance(client, LocalClient):
        await client.start(out / "inference", parts.save_policy, hosts)
        workers = _workers(parts, client, audited, out, hosts)
    if workers is not None:
        opened["rollout_workers"] = workers
        await workers.start()
    run = parts.run
    depths = opened["depths"] = DepthModels(run.depths, run.frozen, audited, latest_values(out))
    rlm = RLM(depths.clients, limits=run.limits, scaffold=parts.scaffold, sandbox=run.sandbox)
    return RolloutParts(client, audited, rlm, workers, depths)


def client_of(parts: RunParts) -> LocalClient | HttpEngines:
    """The client of the engine in this process, or of the engines outside, which are not started
    yet."""
    if parts.engines is not None:
        from ramify.inference.http.http_engines import HttpEngines

        if not parts.engines.urls:  # started engines only answer requests with this key
            os.environ.setdefault(parts.engines.key_variable, secrets.token_urlsafe(24))
        name = f"{parts.engines.engine}:{parts.run.name}"
        return HttpEngines(parts.serving, parts.engines, name=name)
    import torch

    from ramify.inference.local.local_client import LocalClient

    spec = parts.run.policy
    products = getattr(torch, parts.precision.engine) if parts.run.deterministic else None
    client = LocalClient(
        parts.serving,
        name=f"local:{parts.run.name}",
        slots=spec.slots,
        cache_bytes=spec.cache_bytes,
        fixed_shapes=products,
    )
    if parts.run.rl is not None and parts.run.rl.rollout.replay_routes:
        client.report_routes()
    return client


def _placed(parts: RunParts) -> Launcher | None:
    """The launcher of processes on other machines; None if there are none. Raises ConfigError
    if the placement slots are not available."""
    import torch

    from ramify.actors.ray_launcher import RayLauncher

    if not parts.is_placed:
        return None
    spec = parts.run.placement
    assert spec is not None
    hosts = RayLauncher(
        parts.placement_slots,
        gpus={name: spec.role(name).gpus for name in spec.roles},
        spread=[name for name, pool in spec.pools.items() if pool.order == "spread"],
        address=spec.address,
        start_s=spec.start_s,
        num_gpus=torch.cuda.device_count(),
    )
    try:
        check_reach(parts.run, hosts, parts.num_members("inference"))
    except BaseException:
        hosts.close()
        raise
    return hosts


def _workers(
    parts: RunParts,
    client: HttpEngines,
    audited: AuditedClient,
    out: Path,
    hosts: Launcher | None,
) -> RolloutWorkers | None:
    """The rollout workers, not started yet, if the placement has any."""

    run, num = parts.run, parts.num_members("rollouts")
    if not num or run.rl is None:
        return None
    assert run.inference is not None
    checkpoint = out / "inference" / "checkpoint"
    if run.inference.urls:
        parts.save_policy(checkpoint)
    return RolloutWorkers(
        hosts or LocalLauncher(),
        num,
        _worker_spec(parts, client, checkpoint),
        out,
        client,
        seen=audited.note,
        restarts=run.placement.restarts if run.placement is not None else 0,
    )


def _worker_spec(parts: RunParts, client: HttpEngines, checkpoint: Path) -> RolloutWorkerSpec:
    """The part of the run's configuration that rollout workers need."""
    run = parts.run
    assert run.inference is not None
    assert run.rl is not None
    return RolloutWorkerSpec(
        name=client.name,
        task=run.task.name,
        options=run.task.options,
        scaffold=run.scaffold,
        limits=run.limits,
        sandbox=run.sandbox,
        inference=attached(run.inference, client.answering),
        checkpoint=str(checkpoint.resolve()),
        dtype=parts.dtype,
        grace_s=run.rl.rollout.grace_s,
        direct=run.rl.rollout.direct,
        thinking=run.policy.thinking,
        variables=tuple(each.variable for each in run.placement.services.values())
        if run.placement
        else (),
    )


# --- the trainer


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
    measures: Callable[[], Mapping[str, float]] = dict
    meter = None
    if not isinstance(client, LocalClient):
        measures = client.metrics
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
        measures=lambda: {**measures(), **rollouts.depths.step_metrics()},
        meter=meter,
    )
    limits = parts.precision.canary_limits(run)
    check = SelfCheck(rollouts.audited, weights.weights, prompt, *limits)
    publisher = Publisher(weights, record, WatchedThread(watch), check)
    if not isinstance(client, LocalClient):
        client.membership.on_return = partial(publisher.rejoin, weights.rejoin)
    evaluating = partial(evaluate, run, parts.task, rollouts.rlm, rollouts.workers)
    starts_at_base = run.warmup is None and run.sft is None
    return Trainer(
        record,
        publisher,
        stages,
        partial(_backend, parts, trained),
        SplitEvaluator(evaluating, run.evaluate.first, run.evaluate.final, run.evaluate.keep),
        guard=run.guard,
        reference_of=lambda folder: trained.reference(folder, starts_at_base),
    )


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
        stages.append(
            RlStage(
                rl.steps,
                rl.optim,
                rl.loss,
                task=parts.task,
                items=items_of(parts.task, "train"),
                rollouts=Rollouter(
                    rollouts.rlm,
                    parts.task,
                    rl.rollout,
                    seed=parts.run.seed,
                    greedy=needs_of(rl.algorithm).greedy,
                    gauge=getattr(rollouts.client, "pressure", None),
                    rollout_worker=rollouts.workers,
                ),
                algorithm=rl.algorithm,
                sample=rl.sample,
                temperature=temperatures(parts.run.depths, rl.rollout.temperature),
                signals=signals,
            )
        )
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
