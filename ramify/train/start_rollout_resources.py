"""Start the resources that rollouts need: processes on other machines, services, engines and
rollout workers.

    PreparedTrainingRun ─ placed machines ─ services ─ engines ─ rollout workers ─> RolloutResources

This module decides the order in which these parts start, and what each process receives. All of
them are closed by the caller's exit stack. The trainer is started in ``build_trainer.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ramify.actors.launcher import Launcher, LocalLauncher, add_to_exit_stack
from ramify.engine.rlm import RLM
from ramify.train.call_depth_models import ModelsByCallDepth
from ramify.train.engine_consistency_checks import TokenIdHashingClient
from ramify.train.load_run_parts import PreparedTrainingRun
from ramify.train.metrics import last_step_metrics
from ramify.train.placement.reward_services import RewardServiceManager
from ramify.train.placement.rollout_worker import RolloutWorkerSpec
from ramify.train.placement.rollout_workers import RolloutWorkers
from ramify.train.placement_plan import attached_inference_spec, check_weight_sync_reach

if TYPE_CHECKING:
    from ramify.inference.http.http_engines import HttpEngineClient
    from ramify.inference.local.local_client import LocalClient


@dataclasses.dataclass(frozen=True)
class RolloutResources:
    """Resources for a run's rollouts: engines, ``RLM``, workers and the models for each depth.

    The ``RLM`` runs recursive calls, and the workers are processes.
    """

    client: LocalClient | HttpEngineClient
    audited: TokenIdHashingClient
    rlm: RLM
    workers: RolloutWorkers | None
    """The processes that run rollouts. None: this process runs them."""
    depths: ModelsByCallDepth
    """The models that answer calls, by depth."""
    others: Mapping[str, tuple[LocalClient | HttpEngineClient, TokenIdHashingClient]] = (
        dataclasses.field(default_factory=dict)
    )
    """The engines of each additional policy, by its name."""


async def reserve_machines(
    parts: PreparedTrainingRun, out: Path, stack: contextlib.AsyncExitStack
) -> Launcher | None:
    """Reserve machines for the run's processes, and start the run's services.

    Returns the launcher of processes on other machines, or None if there are none.
    """
    for each in (parts, *parts.others.values()):
        _choose_key(each)
    hosts = _make_launcher(parts)
    if hosts is not None:
        add_to_exit_stack(stack, "hosts", hosts.close)
    placement = parts.run.placement
    if placement is not None and placement.services:
        services = RewardServiceManager(
            hosts or LocalLauncher(), placement.services, out, restarts=placement.restarts
        )
        add_to_exit_stack(stack, "services", services.close)
        await services.start()
    return hosts


async def open_rollouts(
    parts: PreparedTrainingRun, out: Path, hosts: Launcher | None, stack: contextlib.AsyncExitStack
) -> RolloutResources:
    """Start the engines and the rollout workers, and return the resources that rollouts need.

    ``stack`` closes them all.
    """
    client, audited = await _start_engines(parts, out / "inference", hosts, stack)
    others = {
        name: await _start_engines(each, out / f"inference-{name}", None, stack, f".{name}")
        for name, each in parts.others.items()
    }
    run = parts.run
    depths = ModelsByCallDepth(
        run.depths,
        run.frozen,
        audited,
        last_step_metrics(out),
        others={name: seen for name, (_, seen) in others.items()},
    )
    add_to_exit_stack(stack, "depths", depths.close)
    workers = _make_rollout_workers(parts, client, audited, out, hosts)
    if workers is not None:
        add_to_exit_stack(stack, "rollout_workers", workers.close)
        await workers.start()
    rlm = RLM(
        depths.clients,
        limits=run.limits,
        scaffold=parts.scaffold,
        sandbox=run.sandbox,
        depths=[each.options() for each in run.depths],
    )
    return RolloutResources(client, audited, rlm, workers, depths, others)


async def _start_engines(
    parts: PreparedTrainingRun,
    folder: Path,
    hosts: Launcher | None,
    stack: contextlib.AsyncExitStack,
    suffix: str = "",
) -> tuple[LocalClient | HttpEngineClient, TokenIdHashingClient]:
    """Start the engines of one policy, and return their client.

    ``folder`` is for files that the engines read and write.
    """
    from ramify.inference.local.local_client import LocalClient

    client = client_of(parts)
    add_to_exit_stack(stack, f"client{suffix}", client.close)
    if not isinstance(client, LocalClient):
        await client.start(folder, parts.export_initial_policy, hosts)
    rl = parts.run.rl
    return client, TokenIdHashingClient(
        client, rl.sample.max_token_staleness if rl is not None else 0
    )


def _choose_key(parts: PreparedTrainingRun) -> None:
    """Create a random API key for the engines that the run starts, unless the user has set one.

    It is set in the environment before other processes start, so that they inherit it.
    """
    if parts.engines is not None and not parts.engines.urls:
        os.environ.setdefault(parts.engines.key_variable, secrets.token_urlsafe(24))


def client_of(parts: PreparedTrainingRun) -> LocalClient | HttpEngineClient:
    """Return the client for the in-process engine, or for engines in other processes.

    Engines in other processes are not started here.
    """
    if parts.engines is not None:
        from ramify.inference.http.http_engines import HttpEngineClient

        name = f"{parts.engines.engine}:{parts.run.name}"
        return HttpEngineClient(parts.serving, parts.engines, name=name)
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


def _make_launcher(parts: PreparedTrainingRun) -> Launcher | None:
    """Return the launcher for processes on other machines, or None if the run has none.

    Raises ConfigError if the requested machines are not available.
    """
    import torch

    from ramify.actors.ray_launcher import RayLauncher

    if not parts.is_placed_by_ray:
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
        check_weight_sync_reach(parts.run, hosts, parts.num_placed_processes("inference"))
    except BaseException:
        hosts.close()
        raise
    return hosts


def _make_rollout_workers(
    parts: PreparedTrainingRun,
    client: LocalClient | HttpEngineClient,
    audited: TokenIdHashingClient,
    out: Path,
    hosts: Launcher | None,
) -> RolloutWorkers | None:
    """Create the rollout workers without starting them.

    Returns None if the placement has none.
    """
    from ramify.inference.local.local_client import LocalClient

    run, num = parts.run, parts.num_placed_processes("rollouts")
    if not num or run.rl is None or isinstance(client, LocalClient):
        return None
    assert run.inference is not None
    checkpoint = out / "inference" / "checkpoint"
    if run.inference.urls:
        parts.export_initial_policy(checkpoint)
    return RolloutWorkers(
        hosts or LocalLauncher(),
        num,
        _worker_spec(parts, client, checkpoint),
        out,
        client,
        seen=audited.merge_hashes,
        restarts=run.placement.restarts if run.placement is not None else 0,
    )


def _worker_spec(
    parts: PreparedTrainingRun, client: HttpEngineClient, checkpoint: Path
) -> RolloutWorkerSpec:
    """Return the part of the run's configuration that rollout workers need."""
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
        inference=attached_inference_spec(run.inference, client.up_to_date_urls),
        checkpoint=str(checkpoint.resolve()),
        dtype=parts.serving_dtype,
        grace_s=run.rl.rollout.grace_s,
        direct=run.rl.rollout.direct,
        thinking=run.policy.thinking,
        depths=run.depths,
        variables=tuple(each.variable for each in run.placement.services.values())
        if run.placement
        else (),
    )
