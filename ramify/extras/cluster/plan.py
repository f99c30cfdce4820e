"""Plan how a recipe runs on a cluster: which node each process runs on, how much memory each
process needs, and how long a training step takes.

    plan(run, options)  ->  ClusterResourcePlan  ->  lines(plan), or msgspec.json.encode(plan)

Making a plan starts no process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ramify.actors.launcher import NodeResourceSlot
from ramify.errors import ConfigError
from ramify.extras.cluster import memory_estimates, step_time_estimate
from ramify.extras.cluster.memory_estimates import MemoryEstimate
from ramify.extras.cluster.model_and_device_specs import (
    DeviceEfficiency,
    DeviceHardwareSpec,
    ModelParameterCounts,
    device_of,
    model_shape_from_config,
    policy_config,
)
from ramify.extras.cluster.step_compute_work import StepTokenCounts
from ramify.extras.cluster.step_time_estimate import StepSeconds
from ramify.extras.cluster.trainer_mesh_estimates import TrainerMeshEstimate, estimate_meshes
from ramify.train.config import Run
from ramify.train.metrics import FILE
from ramify.train.placement.placement_slots import placement_slots
from ramify.train.placement.placement_spec import NodePoolSpec, PlacementSpec
from ramify.train.placement_plan import colocation_reason, num_processes_by_role, resolve_sleep_mode

_THREE_QUARTERS = "three quarters of the machine's"
_SHOWN = 6
"""Number of device meshes that are printed. The plan's JSON contains all of them."""
_NODES = 4
"""Maximum number of nodes for which a pool is described node by node. A larger pool takes one line.
"""
_ROLES = {"rank 0": "trainer", "engine": "inference"}
"""Role of a process in the plan -> name of that role in a run's placement, if the two differ."""


class ClusterPlanOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The assumptions of a cluster plan, such as the device and the number of nodes."""

    device: str = ""
    """Device of trainer ranks and engines, a name in ``DEVICES``. If it is empty: h100 if the roles
    request GPUs, otherwise cpu."""
    nodes: int | None = None
    """Number of nodes, if there is only one pool; None means as many as in the recipe."""
    shares: DeviceEfficiency = DeviceEfficiency()
    tokens: StepTokenCounts | None = None
    """Tokens in one step. If None, they are measured or assumed."""
    measured: Path | None = None
    """Folder of an earlier run whose measured speeds and token counts are used."""


class RoleProcesses(msgspec.Struct, frozen=True):
    """All processes with the same role in a training run, such as trainer ranks or engines.

    The memory of each process is given, too.
    """

    role: str
    count: int
    device: str
    memory: MemoryEstimate
    """Memory of each process. If they differ, that of the first."""
    limits: dict[str, int] = {}
    """Name of a memory limit -> bytes, where 0 means three quarters of the machine's memory.
    Expected use is in ``memory``."""


class ColocatedProcesses(msgspec.Struct, frozen=True):
    """Trainer and engine processes that share one device."""

    roles: tuple[str, ...]
    sleeps: bool
    """True if engines release their memory while the trainer learns."""
    bytes: dict[str, int]
    """Phase -> bytes that all processes hold during it."""
    room: int

    @property
    def peak_memory_phase(self) -> tuple[str, int]:
        """The phase of a training step with the highest memory use, and the bytes used in it."""
        return max(self.bytes.items(), key=lambda phase: phase[1])


class ClusterResourcePlan(msgspec.Struct, frozen=True):
    """A plan of how a run uses the machines of a cluster.

    It says where each process runs, how much memory it needs, and how long a step takes.
    """

    name: str
    shape: ModelParameterCounts
    pools: dict[str, NodePoolSpec]
    placement_slots: list[NodeResourceSlot]
    parts: list[RoleProcesses]
    together: list[ColocatedProcesses]
    tokens: StepTokenCounts
    seconds: StepSeconds | None
    """Time of a step; None without reinforcement learning."""
    too_large: list[str]
    """One sentence for each process that does not fit in its device's memory."""
    meshes: list[TrainerMeshEstimate] = []
    """Every possible mesh of the trainer's ranks. Meshes that fit come first, the fastest at the
    top."""


def plan(run: Run, options: ClusterPlanOptions | None = None) -> ClusterResourcePlan:
    """Plan how a run uses a cluster: on which nodes, with how much memory, and at what step time.

    Nothing is started.

    Raises ConfigError if the roles do not fit their pools of nodes, and if the run lacks required
    settings.
    """
    options = options or ClusterPlanOptions()
    spec = _on_nodes(run.placement or PlacementSpec(), options.nodes)
    num = num_processes_by_role(run, spec)
    assigned = placement_slots(spec, num)
    config = policy_config(run)
    shape = model_shape_from_config(config, run.policy.lora)
    devices = (
        _device(spec, options, "trainer"),
        _device(spec, options, "inference" if num["inference"] else "trainer"),
    )
    parts = list(_parts(run, shape, num, devices))
    together = list(
        _colocated_processes(msgspec.structs.replace(run, placement=spec), parts, num, devices)
    )
    from_run = _from_run(options.measured)
    tokens = options.tokens or (
        from_run.tokens if from_run else StepTokenCounts.assumed(run, shape.window)
    )
    engines = max(
        1, num["inference"] or len(run.inference.urls if run.inference is not None else ())
    )
    step_seconds = (
        step_time_estimate.estimate_step_seconds(
            run,
            shape,
            num["trainer"],
            engines,
            devices,
            tokens,
            shares=options.shares,
            from_run=from_run,
        )
        if run.rl is not None
        else None
    )
    too_large = list(_too_large(parts, together))
    every_mesh = (
        estimate_meshes(run, shape, config, num["trainer"], devices[0], tokens, options.shares)
        if run.compute.backend == "fsdp" and num["trainer"] > 1
        else []
    )
    return ClusterResourcePlan(
        run.name,
        shape,
        spec.pools,
        assigned,
        parts,
        together,
        tokens,
        step_seconds,
        too_large,
        every_mesh,
    )


def format_plan_lines(plan: ClusterResourcePlan) -> Iterator[str]:
    """Yield the lines of a cluster plan, formatted for the terminal."""
    shape = plan.shape
    yield (
        f"{plan.name}: {shape.parameters:,} parameters, {shape.layers} layers of width "
        f"{shape.width}, window {shape.window}"
    )
    yield from _describe_placement(plan)
    yield ""
    yield "memory of a process"
    for part in plan.parts:
        room = f" of {_size(part.memory.room)}" if part.memory.room else ""
        yield f"  {part.role} x {part.count} ({part.device}): {_size(part.memory.total)}{room}"
        for name, num_bytes in part.memory.parts.items():
            yield f"    {name:<21} {_size(num_bytes):>10}"
        if part.limits:
            limits = [
                f"{name} {_size(limit) if limit else _THREE_QUARTERS}"
                for name, limit in part.limits.items()
            ]
            yield f"    contents of sessions are extra; limits: {', '.join(limits)}"
    for group in plan.together:
        phases = ", ".join(
            f"{_size(num_bytes)} while {name}" for name, num_bytes in group.bytes.items()
        )
        yield f"  {' and '.join(group.roles)} on one device: {phases}, of {_size(group.room)}"
    if plan.seconds is not None:
        yield ""
        yield f"seconds of a step ({plan.tokens.why})"
        for name in ("sampling", "learning", "sync", "step"):
            yield f"  {name:<9} {getattr(plan.seconds, name):>9.3g}  {plan.seconds.why[name]}"
    yield from _meshes(plan)
    yield from (f"too large: {sentence}" for sentence in plan.too_large)


def _meshes(plan: ClusterResourcePlan) -> Iterator[str]:
    """Yield the lines of a table that compares the fastest device meshes for the trainer.

    It ends with the settings that select the best one.
    """
    if len(plan.meshes) < 2:
        return
    first, fitting = plan.meshes[0], sum(each.fits for each in plan.meshes)
    yield ""
    yield f"meshes of the ranks: {len(plan.meshes)}, of which {fitting} fit; the fastest"
    yield "  replicas  tensor  experts   learning s   memory   sent per step  idle"
    for each in plan.meshes[:_SHOWN]:
        yield (
            f"  {each.fields['replicas']:>8}  {each.fields['tensor']:>6}  "
            f"{each.fields.get('experts', 1):>7}  {each.seconds:>11.3g}  {_size(each.memory):>7}"
            f"  {_size(int(each.sent.total)):>14}  {each.idle:>4.0%}"
            f"{'' if each.fits else '  too large'}"
        )
    if first.fits:
        fields = " ".join(f"compute.shard.{name}={size}" for name, size in first.fields.items())
        yield f"  fastest that fits: {fields}"


def _describe_placement(plan: ClusterResourcePlan) -> Iterator[str]:
    """Yield the lines of a cluster plan that say which processes run on each node."""
    places: dict[tuple[str, int], list[tuple[int, NodeResourceSlot]]] = {}
    for index, placement_slot in enumerate(plan.placement_slots):
        places.setdefault((placement_slot.pool, placement_slot.node), []).append(
            (index, placement_slot)
        )
    nodes = Counter(name for name, _ in places)
    for name, count in sorted(nodes.items()):
        if count > _NODES:
            yield _pool_line(name, count, plan)
    for (name, node), slots in sorted(places.items()):
        if nodes[name] > _NODES:
            continue
        pool = plan.pools.get(name)
        size = f" ({pool.gpus:g} GPUs, {pool.cpus:g} CPUs)" if pool else " (wherever there is room)"
        yield f"pool {name} node {node}{size}" if name else f"any node{size}"
        for index, slot in slots:
            members = ", ".join(f"{role} {number}" for role, number in slot.members)
            yield (
                f"  placement slot {index}: {slot.needs.gpus:g} GPUs, {slot.needs.cpus:g} CPUs: "
                f"{members}"
            )


def _pool_line(name: str, nodes: int, plan: ClusterResourcePlan) -> str:
    """Describe a pool of many nodes in one line that counts the pool's processes by role."""
    pool = plan.pools.get(name)
    size = f" of {pool.gpus:g} GPUs and {pool.cpus:g} CPUs" if pool else ""
    slots = [slot for slot in plan.placement_slots if slot.pool == name]
    roles = Counter(role for slot in slots for role, _ in slot.members)
    counts = ", ".join(f"{count} x {role}" for role, count in sorted(roles.items()))
    return f"pool {name}: {nodes} nodes{size}, {len(slots)} placement slots: {counts}"


def _parts(
    run: Run,
    shape: ModelParameterCounts,
    num: dict[str, int],
    devices: tuple[DeviceHardwareSpec, DeviceHardwareSpec],
) -> Iterator[RoleProcesses]:
    trainer, engine = devices
    ranks = num["trainer"]
    yield RoleProcesses(
        "rank 0" if ranks > 1 else "trainer",
        1,
        trainer.name,
        memory_estimates.estimate_rank_memory(run, shape, trainer, ranks),
    )
    if ranks > 1:
        yield RoleProcesses(
            "other ranks",
            ranks - 1,
            trainer.name,
            memory_estimates.estimate_rank_memory(run, shape, trainer, ranks, 1),
        )
    if num["inference"]:
        gpus = run.placement.inference.gpus if run.placement is not None else 0.0
        # An engine is spread over all of its GPUs.
        combined = msgspec.structs.replace(engine, memory_gb=engine.memory_gb * max(1.0, gpus))
        yield RoleProcesses(
            "engine",
            num["inference"],
            engine.name,
            memory_estimates.estimate_engine_memory(run, shape, combined),
        )
    if run.rl is not None:
        room = run.placement.rollouts.memory_gb if run.placement is not None else 0.0
        rollout_workers = max(1, num["rollouts"])
        limits = dict(memory_estimates.sandbox_memory_limits(run, rollout_workers))
        yield RoleProcesses(
            "sessions",
            rollout_workers,
            "cpu",
            memory_estimates.estimate_sessions_memory(run, rollout_workers, room),
            limits,
        )


def _colocated_processes(
    run: Run,
    parts: list[RoleProcesses],
    num: dict[str, int],
    devices: tuple[DeviceHardwareSpec, DeviceHardwareSpec],
) -> Iterator[ColocatedProcesses]:
    """Yield the combined memory of trainer and engine processes that share a device.

    If engines sleep while the trainer learns, the two never hold memory at the same time.

    Raises ConfigError if engines would have to sleep and answer requests at the same time.
    """
    kind = "cpu" if devices[0].is_cpu else "cuda"
    engines = resolve_sleep_mode(run, kind)
    colocated = any(
        {"trainer", "inference"} <= set(group)
        for group in (run.placement or PlacementSpec()).colocate
    )
    if engines is None or not num["inference"] or not (colocated or colocation_reason(run, kind)):
        return
    by_role: dict[str, RoleProcesses] = {}
    for part in parts:
        by_role.setdefault(_ROLES.get(part.role, part.role), part)
    spec = run.placement or PlacementSpec()
    # Number of GPUs over which one process of the role is spread.
    trainer_gpus = max(1.0, spec.role("trainer").gpus)
    engine_gpus = max(1.0, spec.role("inference").gpus)
    trainer, engine = by_role["trainer"].memory, by_role["inference"].memory
    learning, between = int(trainer.total / trainer_gpus), int(trainer.idle_bytes / trainer_gpus)
    num_engines = 1 if colocated or engines.gpus else num["inference"]
    awake = int(engine.total / engine_gpus) * num_engines
    phases = {"engines answer": between + awake, "the trainer learns": learning}
    if not engines.effective_sleep_level:
        phases = {"both run": learning + awake}
    elif (
        engines.effective_sleep_level == 1 and kind == "cpu"
    ):  # sleeping weights stay in main memory
        phases["the trainer learns"] += engine.parts["weights"]
    room = min(int(trainer.room / trainer_gpus), int(engine.room / engine_gpus))
    yield ColocatedProcesses(
        ("trainer", "inference"), bool(engines.effective_sleep_level), phases, room
    )


def _too_large(parts: list[RoleProcesses], together: list[ColocatedProcesses]) -> Iterator[str]:
    """Yield one sentence for each process that does not fit into its device's memory.

    Processes that share a device are checked together.
    """
    for part in parts:
        if not part.memory.fits:
            yield (
                f"{part.role} holds {_size(part.memory.total)} and a {part.device} has "
                f"{_size(part.memory.room)}"
            )
    for group in together:
        phase, total = group.peak_memory_phase
        if group.room and total > group.room:
            advice = (
                "give engines less (inference.args)"
                if group.sleeps
                else "let engines sleep (inference.sleep=learn)"
            )
            yield (
                f"{' and '.join(group.roles)} share a device of {_size(group.room)} and hold "
                f"{_size(total)} together while {phase}: {advice}, or give them separate devices"
            )


def _on_nodes(spec: PlacementSpec, nodes: int | None) -> PlacementSpec:
    if nodes is None:
        return spec
    if len(spec.pools) != 1:
        raise ConfigError(
            f"--nodes needs a placement with one pool, and the recipe's has {len(spec.pools)}: set "
            "the nodes of each pool in the recipe"
        )
    pools = {name: msgspec.structs.replace(pool, nodes=nodes) for name, pool in spec.pools.items()}
    return msgspec.structs.replace(spec, pools=pools)


def _device(spec: PlacementSpec, options: ClusterPlanOptions, role: str) -> DeviceHardwareSpec:
    return device_of(
        (options.device or "h100")
        if spec.role(role).gpus
        else "cpu"
        if spec.pools
        else options.device or "cpu"
    )


def _from_run(folder: Path | None) -> step_time_estimate.MeasuredThroughput | None:
    if folder is None:
        return None
    from ramify.train.recipe import load_stored_run

    if not (folder / FILE).is_file():
        raise ConfigError(f"--measured {folder} is not a run's folder: it has no {FILE}")
    run = load_stored_run(folder)
    num = num_processes_by_role(run, run.placement or PlacementSpec())
    return step_time_estimate.read_measured_speeds(folder, num["trainer"], max(1, num["inference"]))


def _size(num_bytes: int) -> str:
    """Format a size in bytes with decimal units such as GB, as GPU memory is advertised."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} B"
