"""Assign a run's processes to placement slots, which are reserved shares of a machine.

This module also checks that the slots fit the pools of machines.

    pool gpus, 2 nodes of 2 GPUs
        node 0   slot 0  trainer 0, inference 0      slot 1  trainer 1, inference 1
        node 1   slot 2  trainer 2, inference 2      slot 3  trainer 3, inference 3

Colocated roles may have different numbers of processes. A slot is as large as the process with the
most GPUs, and processes of other roles are placed side by side on it. A role with fewer processes
than slots uses the first slots:

    8 ranks of 1 GPU, 4 engines of 2     slot 0  trainer 0, trainer 1, inference 0
                                         …       slot 3  trainer 6, trainer 7, inference 3
    2 ranks of 1 GPU, 1 engine of 1      slot 0  trainer 0, inference 0      slot 1  trainer 1

Slots are computed by arithmetic alone, before any process starts. ``ramify cluster plan`` prints
them, and Ray is asked for exactly these slots. Processes that share a slot share its GPUs; their
CPUs and memory add up. The actual resources of a machine are checked in ``ray_launcher.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ramify.actors.launcher import ALMOST, HardwareResources, NodeResourceSlot, RoleInstanceId
from ramify.errors import ConfigError
from ramify.train.placement.placement_spec import ROLES, NodePoolSpec, PlacementSpec


def processes_per_role(spec: PlacementSpec, by_run: Mapping[str, int]) -> dict[str, int]:
    """Count the processes of each role, such as trainer or inference, and of each service, by name.

    ``by_run`` has the number of processes that the run's other options, such as ``inference.num``,
    set for a role, or 0. Raises ConfigError if such a number differs from the placement's.
    """
    num = dict.fromkeys(spec.services, 1)
    for name in ROLES:
        by_placement, elsewhere = spec.role(name).count or 0, by_run.get(name, 0)
        if by_placement and elsewhere and by_placement != elsewhere:
            raise ConfigError(
                f"placement.{name}.count={by_placement}, but the run has {elsewhere} "
                f"({_FIELDS[name]}): set both to the same number"
            )
        num[name] = by_placement or elsewhere
    return num


_FIELDS = {"trainer": "compute.shard.ranks, of the backend fsdp", "inference": "inference.num"}
"""Map each role to the field of the run that sets its number of processes. Only the placement sets
the number for rollouts."""


def placement_slots(spec: PlacementSpec, num: Mapping[str, int]) -> list[NodeResourceSlot]:
    """Divide the machines into slots for the given number of processes of each role.

    The slot of the first trainer process comes first. Raises ConfigError, which shows the sums, if
    the slots do not fit the pools of machines.
    """
    unplaced = _unplaced_slots(spec, num)
    if not spec.pools:
        return [
            NodeResourceSlot("", 0, slot.needs, slot.members, slot.offsets) for slot in unplaced
        ]
    placed: dict[int, NodeResourceSlot] = {}
    for name, pool in spec.pools.items():
        inside = [(index, slot) for index, slot in enumerate(unplaced) if slot.pool == name]
        _check_sums(name, pool, [slot for _, slot in inside])
        placed |= _place_slots(name, pool, inside)
    return [placed[index] for index in range(len(unplaced))]


class _UnplacedSlot(NamedTuple):
    """A placement slot, i.e. a share of a machine, that is not assigned to a machine yet."""

    pool: str
    needs: HardwareResources
    members: tuple[RoleInstanceId, ...]
    offsets: tuple[float, ...]


def _unplaced_slots(spec: PlacementSpec, num: Mapping[str, int]) -> list[_UnplacedSlot]:
    grouped = {role: group for group in spec.colocate for role in group}
    slots = []
    for name in spec.roles:
        group = tuple(role for role in grouped.get(name, (name,)) if num.get(role, 0))
        if num.get(name, 0) and group[0] == name:
            _check_group(spec, group)
            slots += _group_slots(spec, group, num)
    return slots


def _group_slots(
    spec: PlacementSpec, group: Sequence[str], num: Mapping[str, int]
) -> list[_UnplacedSlot]:
    """Return the placement slots that a group of colocated roles needs.

    There are as few slots as can hold all processes, and the processes of each role are divided
    evenly among them.
    """
    largest = max(spec.role(role).gpus for role in group)
    num_slots = max(
        -(-num[role] // _side_by_side(spec.role(role).gpus, largest, num[role])) for role in group
    )
    pool, slots = spec.pool_of(group[0]), []
    for slot in range(num_slots):
        members, offsets, needs = [], [], HardwareResources()
        for role in group:
            role_spec, per_slot = spec.role(role), -(-num[role] // num_slots)
            inside = range(slot * per_slot, min(num[role], (slot + 1) * per_slot))
            members += [RoleInstanceId(role, index) for index in inside]
            offsets += [role_spec.gpus * place for place in range(len(inside))]
            gpus = len(inside) * role_spec.gpus
            more = HardwareResources(
                0, len(inside) * role_spec.cpus, len(inside) * role_spec.memory_gb
            )
            needs = HardwareResources(max(needs.gpus, gpus), needs.cpus, needs.memory_gb) + more
        slots.append(
            _UnplacedSlot(pool, needs, tuple(members), tuple(offsets) if any(offsets) else ())
        )
    return slots


def _side_by_side(gpus: float, largest: float, num: int) -> int:
    """Return how many processes with ``gpus`` GPUs each run side by side in a slot of ``largest``
    GPUs.

    There are ``num`` such processes.
    """
    if not largest:
        return 1
    return max(1, int(largest / gpus + ALMOST)) if gpus else num


def _check_group(spec: PlacementSpec, group: Sequence[str]) -> None:
    pools = {role: spec.pool_of(role) for role in group}
    if len(set(pools.values())) > 1:
        names = ", ".join(f"{role} in '{pool}'" for role, pool in pools.items())
        raise ConfigError(
            "placement.colocate: roles that share slots must be in one pool, but these are in "
            f"{names}"
        )
    gpus = {role: spec.role(role).gpus for role in group}
    for role, num_gpus in gpus.items():
        times = max(gpus.values()) / num_gpus if num_gpus else 1.0
        if abs(times - round(times)) > ALMOST:
            listed = ", ".join(f"{name} {value:g}" for name, value in gpus.items())
            raise ConfigError(
                f"placement.colocate: GPUs per process are {listed}: a slot of "
                f"{max(gpus.values()):g} is not a multiple of {role}'s; give each process 1 GPU, "
                "or all the same number"
            )


def _check_sums(name: str, pool: NodePoolSpec, inside: Sequence[_UnplacedSlot]) -> None:
    node = _resources(pool)
    for field, unit in (("gpus", "GPUs"), ("cpus", "CPUs"), ("memory_gb", "GB")):
        available = pool.nodes * getattr(node, field)
        num_slots: dict[tuple[str, float], int] = {}
        for slot in inside:
            key = _roles_of(slot.members), getattr(slot.needs, field)
            num_slots[key] = num_slots.get(key, 0) + 1
        total = sum(num * amount for (_, amount), num in num_slots.items())
        if total > available + ALMOST:
            terms = " + ".join(
                f"{role} {num} x {amount:g}" for (role, amount), num in num_slots.items() if amount
            )
            raise ConfigError(
                f"placement: the roles do not fit the pool '{name}': {terms} = {total:g} {unit}, "
                f"but it has {pool.nodes} x {getattr(node, field):g} = {available:g}: request "
                "less, or add nodes"
            )


def _place_slots(
    name: str, pool: NodePoolSpec, inside: Sequence[tuple[int, _UnplacedSlot]]
) -> dict[int, NodeResourceSlot]:
    """Assign the slots of one pool to its machines, and return the placed slots by index.

    The largest slots are placed first. If the pool's order is ``pack``, each goes to the first
    machine with enough room; if it is ``spread``, to the one with the most room. Raises ConfigError
    if a slot fits on no machine.
    """
    free = [_resources(pool)] * pool.nodes
    slots = {}
    for index, slot in sorted(
        inside, key=lambda pair: (tuple(-value for value in pair[1].needs), pair[0])
    ):
        needs = slot.needs
        fitting = [node for node, resources in enumerate(free) if needs.fits_in(resources)]
        if not fitting:
            members = " and ".join(f"{role} {number}" for role, number in slot.members)
            raise ConfigError(
                f"placement: the roles fit the pool '{name}' in total, but not node by node: "
                f"{members} needs {_describe_resources(needs)} on one node, and of its "
                f"{pool.nodes} nodes "
                f"the emptiest has {_describe_resources(max(free))} left"
            )
        node = (
            fitting[0]
            if pool.order == "pack"
            else max(fitting, key=lambda node: (free[node], -node))
        )
        free[node] = free[node].subtract(needs)
        slots[index] = NodeResourceSlot(name, node, needs, slot.members, slot.offsets)
    return slots


def _roles_of(members: Sequence[RoleInstanceId]) -> str:
    """Describe the roles in a placement slot and their counts, as in ``2 trainer and
    inference``."""
    num = Counter(member.role for member in members)
    return " and ".join(f"{count} {role}" if count > 1 else role for role, count in num.items())


def _resources(pool: NodePoolSpec) -> HardwareResources:
    memory_gb = float("inf") if pool.memory_gb is None else pool.memory_gb
    return HardwareResources(pool.gpus, pool.cpus, memory_gb)


def _describe_resources(needs: HardwareResources) -> str:
    parts = [f"{needs.gpus:g} GPUs", f"{needs.cpus:g} CPUs"]
    return ", ".join(
        [*parts, *([f"{needs.memory_gb:g} GB"] if 0 < needs.memory_gb < float("inf") else [])]
    )
