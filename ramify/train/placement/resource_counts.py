"""A run and its placement as one: how many processes each role has, and that they fit, before any
of them is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ramify.errors import ConfigError, nearest
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.train.placement.launcher import Launcher
from ramify.train.placement.placement_slots import (
    PlacementSlot,
    SlotMember,
    counts,
    placement_slots,
)
from ramify.train.placement.placement_spec import KINDS, PlacementSpec

if TYPE_CHECKING:
    from ramify.train.config import Run


def counted(run: Run, spec: PlacementSpec) -> dict[str, int]:
    """Role -> processes; the trainer has at least the run's own. Raises ConfigError where placement
    and run differ."""
    inference = run.inference
    said = {
        "trainer": (run.compute.shard.ranks or 0) if run.compute.backend == "fsdp" else 1,
        "inference": inference.num if inference is not None and not inference.urls else 0,
    }
    found = counts(spec, said)
    if found["inference"] and not said["inference"]:
        raise ConfigError(
            f"placement.inference.count={found['inference']}, but the run starts no engines: give "
            "inference (an "
            "InferenceSpec), or leave the count out for the engine in the trainer's process"
        )
    if found["rollouts"]:
        _check_runners(run)
    return found | {"trainer": max(1, found["trainer"])}


def _check_runners(run: Run) -> None:
    if run.inference is None:
        raise ConfigError(
            "placement.rollouts: runners ask engines over HTTP: give inference (an InferenceSpec)"
        )
    staleness = run.rl.sample.max_staleness if run.rl is not None else 0
    if staleness and run.inference.engine != "ramify":
        raise ConfigError(
            f"placement.rollouts with rl.sample.max_staleness={staleness} needs "
            "inference.engine=ramify, which says what "
            f"version sampled each token; {run.inference.engine} does not: set one of them to 0"
        )


def settled(run: Run) -> tuple[Run, list[PlacementSlot]]:
    """``run`` with the numbers of processes that its placement says, and their seats; without one
    as it is. Raises ConfigError for roles that do not fit their pools, with the sums."""
    spec = run.placement
    if spec is None:
        return run, []
    num = counted(run, spec)
    compute = run.compute
    if (
        compute.backend == "fsdp"
        and not compute.shard.ranks
        and (spec.trainer.count or spec.kind == "ray")
    ):
        if not spec.trainer.count:
            raise ConfigError(
                "--placement ray needs to know how many ranks to place: set compute.shard.ranks"
            )
        shard = msgspec.structs.replace(compute.shard, ranks=num["trainer"])
        compute = msgspec.structs.replace(compute, shard=shard)
    return msgspec.structs.replace(run, compute=compute), placement_slots(spec, num)


def attached(spec: InferenceSpec, urls: tuple[str, ...]) -> InferenceSpec:
    """For who asks the engines that run at ``urls``, and decides nothing about them."""
    return InferenceSpec(
        engine=spec.engine,
        urls=urls,
        key_variable=spec.key_variable,
        request_s=spec.request_s,
        probe_s=spec.probe_s,
        sleep="never",
    )


def by(run: Run, kind: str) -> Run:
    """``run`` with its processes started by ``kind``. Raises ConfigError for one that is not
    known."""
    if kind not in KINDS:
        raise ConfigError(f"--placement {kind}: {nearest(kind, KINDS)}")
    spec = run.placement
    if spec is None:
        return (
            run
            if kind == "local"
            else msgspec.structs.replace(run, placement=PlacementSpec(kind="ray"))
        )
    return msgspec.structs.replace(run, placement=msgspec.structs.replace(spec, kind=kind))


def check_reach(run: Run, hosts: Launcher, num: int) -> None:
    """Weights get to ``num`` engines where they were placed. Raises ConfigError for a carrier that
    ends at this machine."""
    spec = run.inference
    away = [i for i in range(num) if hosts.address_of(SlotMember("inference", i)) != hosts.address]
    if spec is None or not away:
        return
    where = hosts.address_of(SlotMember("inference", away[0]))
    weight_sync = (
        spec.carried_by
        if spec.carried_by != "delta"
        else spec.weight_sync_options.get("by", "shared")
    )
    if weight_sync in ("shared", "cuda_ipc"):
        raise ConfigError(
            f"inference.weight_sync={weight_sync} ends at this machine, and engine {away[0]} was "
            f"placed on {where}: use 'nccl' or "
            "'gloo', or 'file' on a file system that both see"
        )
    if (
        weight_sync in ("gloo", "nccl")
        and spec.weight_sync_options.get("address", "127.0.0.1") == "127.0.0.1"
    ):
        raise ConfigError(
            f"inference.weight_sync={weight_sync} waits at the loopback, and engine {away[0]} was "
            f"placed on {where}: set "
            f"inference.weight_sync_options.address={hosts.address}"
        )
