"""Apply a run's placement to its configuration before any process starts.

This module determines how many processes each role has, whether they fit, and whether the trainer
and the engines share GPUs.

    rollouts ── engines: weights, keys and values      the trainer keeps only weights and optimizer
    learning ── the trainer: gradients, activations    the engines sleep
    rollouts ── …

Whether GPUs are shared is decided from the recipe and from the GPUs that this process sees. It
cannot be known for engines that are already running (``urls``).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from ramify.actors.launcher import Launcher, NodeResourceSlot, RoleInstanceId
from ramify.errors import ConfigError, did_you_mean
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.train.placement.placement_slots import placement_slots, processes_per_role
from ramify.train.placement.placement_spec import KINDS, PlacementSpec

if TYPE_CHECKING:
    from ramify.train.config import Run


def num_processes_by_role(run: Run, spec: PlacementSpec) -> dict[str, int]:
    """Return the number of processes of each role, by name.

    The trainer has at least one, the run's own process. Raises ConfigError if the placement
    contradicts the rest of the run.
    """
    inference = run.inference
    by_run = {
        "trainer": (run.compute.shard.ranks or 0) if run.compute.backend == "fsdp" else 1,
        "inference": inference.num if inference is not None and not inference.urls else 0,
    }
    num = processes_per_role(spec, by_run)
    if num["inference"] and not by_run["inference"]:
        raise ConfigError(
            f"placement.inference.count={num['inference']}, but the run starts no engines: set "
            "inference (an InferenceSpec), or leave the count out to use the engine in the "
            "trainer's process"
        )
    if num["rollouts"]:
        _check_rollout_workers(run)
    return num | {"trainer": max(1, num["trainer"])}


def _check_rollout_workers(run: Run) -> None:
    if run.inference is None:
        raise ConfigError(
            "placement.rollouts: rollout workers call engines over HTTP: set inference (an "
            "InferenceSpec)"
        )
    staleness = run.rl.sample.max_staleness if run.rl is not None else 0
    if staleness and run.inference.engine != "ramify":
        raise ConfigError(
            f"placement.rollouts with rl.sample.max_staleness={staleness} needs "
            "inference.engine=ramify, which reports the version that sampled each token; "
            f"{run.inference.engine} does not: set max_staleness or placement.rollouts.count to 0"
        )


def plan_placement(run: Run) -> tuple[Run, list[NodeResourceSlot]]:
    """Plan how many processes each role gets and which placement slots they use.

    Returns a copy of ``run`` with these numbers, and the slots. Without a placement, the run is
    unchanged and there are no slots. Raises ConfigError if the roles do not fit their pools; the
    error shows the calculation.
    """
    spec = run.placement
    if spec is None:
        return run, []
    num = num_processes_by_role(run, spec)
    compute = run.compute
    if (
        compute.backend == "fsdp"
        and not compute.shard.ranks
        and (spec.trainer.count or spec.kind == "ray")
    ):
        if not spec.trainer.count:
            raise ConfigError(
                "--placement ray needs the number of ranks to place: set compute.shard.ranks"
            )
        shard = msgspec.structs.replace(compute.shard, ranks=num["trainer"])
        compute = msgspec.structs.replace(compute, shard=shard)
    return msgspec.structs.replace(run, compute=compute), placement_slots(spec, num)


def attached_inference_spec(spec: InferenceSpec, urls: tuple[str, ...]) -> InferenceSpec:
    """Return inference options for calling engines that already run at ``urls``.

    The process that gets these options starts no engines.
    """
    return InferenceSpec(
        engine=spec.engine,
        urls=urls,
        key_variable=spec.key_variable,
        request_s=spec.request_s,
        probe_s=spec.probe_s,
        sleep="never",
    )


def with_placement_kind(run: Run, kind: str) -> Run:
    """Return a copy of ``run`` whose processes are started directly on this machine
    (``kind="local"``) or by Ray (``kind="ray"``).

    Raises ConfigError for any other kind.
    """
    if kind not in KINDS:
        raise ConfigError(f"--placement {kind}: {did_you_mean(kind, KINDS)}")
    spec = run.placement
    if spec is None:
        return (
            run
            if kind == "local"
            else msgspec.structs.replace(run, placement=PlacementSpec(kind="ray"))
        )
    return msgspec.structs.replace(run, placement=msgspec.structs.replace(spec, kind=kind))


def check_weight_sync_reach(run: Run, hosts: Launcher, num: int) -> None:
    """Raise ConfigError if the configured weight sync cannot reach an engine.

    Some kinds of weight sync work only on this machine, while the placement may put engines on
    others.
    """
    spec = run.inference
    remote = [
        i for i in range(num) if hosts.address_of(RoleInstanceId("inference", i)) != hosts.address
    ]
    if spec is None or not remote:
        return
    host = hosts.address_of(RoleInstanceId("inference", remote[0]))
    weight_sync = (
        spec.weight_sync_name
        if spec.weight_sync_name != "delta"
        else spec.weight_sync_options.get("by", "shared")
    )
    if weight_sync in ("shared", "cuda_ipc"):
        raise ConfigError(
            f"inference.weight_sync={weight_sync} works on this machine only, but engine "
            f"{remote[0]} was placed on {host}: use 'nccl' or 'gloo', or 'file' on a file system "
            "that both can read"
        )
    if (
        weight_sync in ("gloo", "nccl")
        and spec.weight_sync_options.get("address", "127.0.0.1") == "127.0.0.1"
    ):
        raise ConfigError(
            f"inference.weight_sync={weight_sync} listens on the loopback, but engine {remote[0]} "
            f"was placed on {host}: set "
            f"inference.weight_sync_options.address={hosts.address}"
        )


def resolve_sleep_mode(run: Run, device: str) -> InferenceSpec | None:
    """Return ``run.inference`` with its ``sleep`` option resolved.

    It is "learn" (engines sleep while the trainer learns) if the recipe says so or if engines share
    the trainer's GPUs, and otherwise "never". ``device`` is ``cpu`` or ``cuda``. Raises ConfigError
    if engines would have to sleep and sample at the same time.
    """
    spec = run.inference
    if spec is None or spec.sleep == "never":
        return spec
    why = "inference.sleep=learn" if spec.sleep == "learn" else colocation_reason(run, device)
    staleness = run.rl.sample.max_staleness if run.rl is not None else 0
    if why and staleness:
        raise ConfigError(
            f"{why}, so engines sleep while the trainer learns, but with "
            f"rl.sample.max_staleness={staleness} they also sample meanwhile: set max_staleness "
            "to 0, give the engines separate GPUs, or, if both fit at once (`ramify cluster plan` "
            "has the sums), set inference.sleep=never"
        )
    return msgspec.structs.replace(spec, sleep="learn" if why else "never")


def resolved_inference(run: Run, device: str) -> InferenceSpec | None:
    """Return ``run.inference`` with the options that follow from the rest of the recipe filled in.

    These are whether engines sleep while the trainer learns, and whether they report to which
    experts a mixture-of-experts model routed each token.
    """
    spec = resolve_sleep_mode(run, device)
    if spec is None or run.rl is None or not run.rl.rollout.replay_routes:
        return spec
    return msgspec.structs.replace(spec, report_experts=True)


def colocation_reason(run: Run, device: str) -> str:
    """Return why the engines share the trainer's GPUs, as a clause for an error message.

    Returns an empty string if they do not.
    """
    inference, spec = run.inference, run.placement or PlacementSpec()
    if inference is None or inference.urls or device != "cuda":
        return ""
    trainer, engine = spec.trainer, spec.inference
    has_gpus = bool(trainer.gpus or engine.gpus)
    if has_gpus and any({"trainer", "inference"} <= set(group) for group in spec.colocate):
        return "placement.colocate has trainer and engines share GPUs"
    if spec.kind == "ray":
        one_pool = has_gpus and spec.pool_of("trainer") == spec.pool_of("inference")
        if one_pool and min(trainer.gpus, engine.gpus) > 0 and trainer.gpus + engine.gpus <= 1:
            return "placement gives trainer and engines parts of one GPU"
        return ""
    return _on_this_machine(run, inference)


def _on_this_machine(run: Run, inference: InferenceSpec) -> str:
    """Return why trainer and engines share a GPU of this machine, or an empty string if they do
    not.

    The reason is a clause for an error message. It applies to runs without Ray, whose processes
    select their GPUs themselves.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = (
        [gpu.strip() for gpu in visible.split(",") if gpu.strip()]
        if visible
        else [str(index) for index in range(64)]
    )
    first = int(run.policy.device.partition(":")[2] or 0)
    num = 1
    if run.compute.backend == "fsdp":
        num = run.compute.shard.ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or len(seen)
    trainer = set(seen[first : first + num])
    engines = {gpu.strip() for gpus in inference.gpus for gpu in gpus.split(",")} or set(seen[:1])
    both = sorted(trainer & engines)
    return f"trainer and engines share the GPU {both[0]} (inference.gpus)" if both else ""
