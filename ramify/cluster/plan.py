"""The plan of a recipe on a cluster: seats, memory of each kind of process, seconds of a step.
Nothing is started.

plan(run, options)  ->  Plan  ->  lines(plan), or msgspec.json.encode(plan)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from ramify.cluster import memory, steps
from ramify.cluster.devices import DeviceEfficiency, DeviceSpec, device_of
from ramify.cluster.memory import MemoryEstimate
from ramify.cluster.shape import ModelShape, config_of, shape_of
from ramify.cluster.steps import StepSeconds, StepTokens
from ramify.errors import ConfigError
from ramify.train.config import Run
from ramify.train.metrics import FILE
from ramify.train.placement.placement_slots import PlacementSlot, placement_slots
from ramify.train.placement.placement_spec import NodePool, PlacementSpec
from ramify.train.placement.resource_counts import counted
from ramify.train.placement.sharing import shared, sleeping

_MACHINES = "three quarters of the machine's"
_ROLES = {"rank 0": "trainer", "engine": "inference"}


class PlanOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a plan supposes of the machines."""

    device: str = ""
    """Of trainer ranks and engines: a name of ``DEVICES``; empty: h100 where roles ask for GPUs,
    else cpu."""
    nodes: int = 0
    """Of the only pool, in place of what the recipe says; 0: as it says."""
    shares: DeviceEfficiency = DeviceEfficiency()
    tokens: StepTokens | None = None
    """Of a step; None: measured, or assumed."""
    measured: Path | None = None
    """A run's folder, whose speeds and tokens are taken."""


class RoleProcesses(msgspec.Struct, frozen=True):
    """The processes of one role."""

    role: str
    count: int
    device: str
    memory: MemoryEstimate
    """Of each, the first of them where they differ."""
    limits: dict[str, int] = {}
    """What may not take more -> bytes; 0: three quarters of what the machine has. What is expected
    is in ``memory``."""


class ColocatedProcesses(msgspec.Struct, frozen=True):
    """Processes of trainer and engines on one device."""

    roles: tuple[str, ...]
    sleeps: bool
    """Whether engines give their memory back while the trainer learns."""
    bytes: dict[str, int]
    """While what goes on -> what all of them hold."""
    room: int

    @property
    def most(self) -> tuple[str, int]:
        """(while what goes on, bytes) where they hold most."""
        return max(self.bytes.items(), key=lambda each: each[1])


class ClusterPlan(msgspec.Struct, frozen=True):
    """Who goes where, what each holds, and how long a step takes."""

    name: str
    shape: ModelShape
    pools: dict[str, NodePool]
    placement_slots: list[PlacementSlot]
    parts: list[RoleProcesses]
    together: list[ColocatedProcesses]
    tokens: StepTokens
    seconds: StepSeconds | None
    """None without reinforcement learning."""
    too_large: list[str]
    """What does not fit its device, in sentences."""


def plan(run: Run, options: PlanOptions | None = None) -> ClusterPlan:
    """Raises ConfigError for roles that do not fit their pools, with the sums, and for what the run
    lacks."""
    options = options or PlanOptions()
    spec = _on_nodes(run.placement or PlacementSpec(), options.nodes)
    num = counted(run, spec)
    found = placement_slots(spec, num)
    shape = shape_of(config_of(run), run.policy.lora)
    devices = (
        _device(spec, options, "trainer"),
        _device(spec, options, "inference" if num["inference"] else "trainer"),
    )
    parts = list(_parts(run, shape, num, devices))
    together = list(_together(msgspec.structs.replace(run, placement=spec), parts, num, devices))
    from_run = _from_run(options.measured)
    tokens = options.tokens or (
        from_run.tokens if from_run else StepTokens.assumed(run, shape.window)
    )
    engines = max(
        1, num["inference"] or len(run.inference.urls if run.inference is not None else ())
    )
    took = (
        steps.seconds(
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
    return ClusterPlan(run.name, shape, spec.pools, found, parts, together, tokens, took, too_large)


def lines(plan: ClusterPlan) -> Iterator[str]:
    """For people."""
    shape = plan.shape
    yield (
        f"{plan.name}: {shape.parameters:,} parameters, {shape.layers} layers of width "
        f"{shape.width}, window {shape.window}"
    )
    yield from _where(plan)
    yield ""
    yield "memory of a process"
    for part in plan.parts:
        room = f" of {_size(part.memory.room)}" if part.memory.room else ""
        yield f"  {part.role} x {part.count} ({part.device}): {_size(part.memory.total)}{room}"
        for name, num_bytes in part.memory.parts.items():
            yield f"    {name:<21} {_size(num_bytes):>10}"
        if part.limits:
            limits = [
                f"{what} {_size(most) if most else _MACHINES}" for what, most in part.limits.items()
            ]
            yield f"    what they hold comes on top; limits: {', '.join(limits)}"
    for each in plan.together:
        told = ", ".join(
            f"{_size(num_bytes)} while {name}" for name, num_bytes in each.bytes.items()
        )
        yield f"  {' and '.join(each.roles)} on one device: {told}, of {_size(each.room)}"
    if plan.seconds is not None:
        yield ""
        yield f"seconds of a step ({plan.tokens.why})"
        for name in ("sampling", "learning", "sync", "step"):
            yield f"  {name:<9} {getattr(plan.seconds, name):>9.3g}  {plan.seconds.why[name]}"
    yield from (f"too large: {each}" for each in plan.too_large)


def _where(plan: ClusterPlan) -> Iterator[str]:
    places: dict[tuple[str, int], list[tuple[int, PlacementSlot]]] = {}
    for index, placement_slot in enumerate(plan.placement_slots):
        places.setdefault((placement_slot.pool, placement_slot.node), []).append(
            (index, placement_slot)
        )
    for (name, node), found in sorted(places.items()):
        pool = plan.pools.get(name)
        has = f" ({pool.gpus:g} GPUs, {pool.cpus:g} CPUs)" if pool else " (wherever there is room)"
        yield f"pool {name} node {node}{has}" if name else f"any node{has}"
        for index, placement_slot in found:
            who = ", ".join(f"{role} {number}" for role, number in placement_slot.members)
            yield f"  seat {index}: {placement_slot.needs.gpus:g} GPUs, {placement_slot.needs.cpus:g} CPUs: {who}"


def _parts(
    run: Run, shape: ModelShape, num: dict[str, int], devices: tuple[DeviceSpec, DeviceSpec]
) -> Iterator[RoleProcesses]:
    trainer, engine = devices
    ranks = num["trainer"]
    yield RoleProcesses(
        "rank 0" if ranks > 1 else "trainer",
        1,
        trainer.name,
        memory.of_rank(run, shape, trainer, ranks),
    )
    if ranks > 1:
        yield RoleProcesses(
            "other ranks", ranks - 1, trainer.name, memory.of_rank(run, shape, trainer, ranks, 1)
        )
    if num["inference"]:
        gpus = run.placement.inference.gpus if run.placement is not None else 0.0
        over = msgspec.structs.replace(
            engine, memory_gb=engine.memory_gb * max(1.0, gpus)
        )  # it lies over its GPUs
        yield RoleProcesses(
            "engine", num["inference"], engine.name, memory.of_engine(run, shape, over)
        )
    if run.rl is not None:
        room = run.placement.rollouts.memory_gb if run.placement is not None else 0.0
        rollout_workers = max(1, num["rollouts"])
        limits = dict(memory.limits_of_sessions(run, rollout_workers))
        yield RoleProcesses(
            "sessions",
            rollout_workers,
            "cpu",
            memory.of_sessions(run, rollout_workers, room),
            limits,
        )


def _together(
    run: Run,
    parts: list[RoleProcesses],
    num: dict[str, int],
    devices: tuple[DeviceSpec, DeviceSpec],
) -> Iterator[ColocatedProcesses]:
    """What trainer and engines that share a device hold: where engines sleep, never both at once.
    Raises ConfigError where engines would have to sleep and to answer at the same time."""
    kind = "cpu" if devices[0].is_cpu else "cuda"
    engines = sleeping(run, kind)
    colocated = any(
        {"trainer", "inference"} <= set(group)
        for group in (run.placement or PlacementSpec()).colocate
    )
    if engines is None or not num["inference"] or not (colocated or shared(run, kind)):
        return
    by_role: dict[str, RoleProcesses] = {}
    for part in parts:
        by_role.setdefault(_ROLES.get(part.role, part.role), part)
    spec = run.placement or PlacementSpec()
    over, under = (
        max(1.0, spec.role(role).gpus) for role in ("trainer", "inference")
    )  # GPUs that each lies over
    trainer, engine = by_role["trainer"].memory, by_role["inference"].memory
    learning, between = int(trainer.total / over), int(trainer.between / over)
    awake = int(engine.total / under) * (1 if colocated or engines.gpus else num["inference"])
    held = {"engines answer": between + awake, "the trainer learns": learning}
    if not engines.level:
        held = {"both go on": learning + awake}
    elif engines.level == 1 and kind == "cpu":  # main memory is where they would go
        held["the trainer learns"] += engine.parts["weights"]
    room = min(int(trainer.room / over), int(engine.room / under))
    yield ColocatedProcesses(("trainer", "inference"), bool(engines.level), held, room)


def _too_large(parts: list[RoleProcesses], together: list[ColocatedProcesses]) -> Iterator[str]:
    for part in parts:
        if not part.memory.fits:
            yield f"{part.role} holds {_size(part.memory.total)} and a {part.device} has {_size(part.memory.room)}"
    for each in together:
        when, total = each.most
        if each.room and total > each.room:
            advice = (
                "give engines less (inference.args)"
                if each.sleeps
                else "let engines sleep (inference.sleep=learn)"
            )
            yield (
                f"{' and '.join(each.roles)} share a device of {_size(each.room)} and hold "
                f"{_size(total)} together while "
                f"{when}: {advice}, or devices of their own"
            )


def _on_nodes(spec: PlacementSpec, nodes: int) -> PlacementSpec:
    if not nodes:
        return spec
    if len(spec.pools) != 1:
        raise ConfigError(
            f"--nodes is for a placement of one pool, and the recipe's has {len(spec.pools)}: set "
            "their nodes"
        )
    pools = {name: msgspec.structs.replace(pool, nodes=nodes) for name, pool in spec.pools.items()}
    return msgspec.structs.replace(spec, pools=pools)


def _device(spec: PlacementSpec, options: PlanOptions, role: str) -> DeviceSpec:
    return device_of(
        (options.device or "h100")
        if spec.role(role).gpus
        else "cpu"
        if spec.pools
        else options.device or "cpu"
    )


def _from_run(folder: Path | None) -> steps.MeasuredSpeeds | None:
    if folder is None:
        return None
    from ramify.build.recipe import stored

    if not (folder / FILE).is_file():
        raise ConfigError(f"--measured {folder} is no run's folder: it has no {FILE}")
    run = stored(folder)
    num = counted(run, run.placement or PlacementSpec())
    return steps.measured(folder, num["trainer"], max(1, num["inference"]))


def _size(num_bytes: int) -> str:
    """Powers of ten, as GPUs are sold."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} B"
