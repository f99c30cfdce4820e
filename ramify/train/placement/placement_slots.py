"""Who sits where: the seats of a placement, and whether they fit its pools.

    pool gpus, 2 nodes of 2 GPUs         node 0   seat 0  trainer 0, inference 0      seat 1  trainer 1, inference 1
                                         node 1   seat 2  trainer 2, inference 2      seat 3  trainer 3, inference 3

Roles that share seats need not be as many. A seat is as large as the process with most GPUs, and
processes of other roles stand side by side on it; where there are fewer of a role than seats, the
first ones have one:

    8 ranks of 1 GPU, 4 engines of 2     seat 0  trainer 0, trainer 1, inference 0      … seat 3  trainer 6, 7, inference 3
    2 ranks of 1 GPU, 1 engine of 1      seat 0  trainer 0, inference 0                   seat 1  trainer 1

Decided by arithmetic alone, before any process starts: ``ramify cluster plan`` prints it, and Ray
is asked for just that. Processes that share a seat share its GPUs, and their CPUs and memory add
up. Leaves out what a machine really has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from ramify.errors import ConfigError
from ramify.train.placement.placement_spec import ROLES, NodePool, PlacementSpec

_ALMOST = 1e-9
"""A third of a GPU, three times, is one."""


class SlotResources(NamedTuple):
    """What is taken of a node, or what one has."""

    gpus: float = 0.0
    cpus: float = 0.0
    memory_gb: float = 0.0

    def __add__(self, other: object) -> SlotResources:
        assert isinstance(other, SlotResources)
        return SlotResources(*(a + b for a, b in zip(self, other, strict=True)))

    def without(self, other: SlotResources) -> SlotResources:
        return SlotResources(*(a - b for a, b in zip(self, other, strict=True)))

    def fits(self, room: SlotResources) -> bool:
        return all(a <= b + _ALMOST for a, b in zip(self, room, strict=True))


class SlotMember(NamedTuple):
    """One process."""

    role: str
    number: int


class PlacementSlot(msgspec.Struct, frozen=True):
    """What processes that sit together take of one node."""

    pool: str
    """Empty where the placement tells no pools."""
    node: int
    """Of the pool."""
    needs: SlotResources
    members: tuple[SlotMember, ...]
    offsets: tuple[float, ...] = ()
    """Which of the seat's GPUs is the first of each member; empty: all members have all of them."""

    def share(self, member: SlotMember, gpus: float, given: Sequence[str]) -> list[str]:
        """Of the GPUs that the seat was ``given``, those of a member that takes ``gpus``."""
        if not self.offsets or not gpus:
            return list(given)
        first = int(self.offsets[self.members.index(member)] + _ALMOST)
        return list(given[first : first + max(1, int(gpus + _ALMOST))])


def counts(spec: PlacementSpec, said: Mapping[str, int]) -> dict[str, int]:
    """Role -> how many processes it has. ``said``: what the run says elsewhere, 0 where it does
    not. Raises ConfigError where the two differ."""
    found = dict.fromkeys(spec.services, 1)
    for name in ROLES:
        here, there = spec.role(name).count or 0, said.get(name, 0)
        if here and there and here != there:
            raise ConfigError(
                f"placement.{name}.count={here}, but the run has {there} ({_SAID[name]}): make "
                "them the same"
            )
        found[name] = here or there
    return found


_SAID = {"trainer": "compute.shard.ranks, of the backend fsdp", "inference": "inference.num"}
"""Where the run says it; runners are said by the placement alone."""


def placement_slots(spec: PlacementSpec, num: Mapping[str, int]) -> list[PlacementSlot]:
    """The seats of ``num`` processes of each role, the first rank's first. Raises ConfigError, with
    the sums, where they do not fit."""
    wanted = _wanted(spec, num)
    if not spec.pools:
        return [PlacementSlot("", 0, each.needs, each.members, each.offsets) for each in wanted]
    found: dict[int, PlacementSlot] = {}
    for name, pool in spec.pools.items():
        inside = [(index, each) for index, each in enumerate(wanted) if each.pool == name]
        _check_sums(name, pool, [each for _, each in inside])
        found |= _seated(name, pool, inside)
    return [found[index] for index in range(len(wanted))]


class _UnplacedSlot(NamedTuple):
    """A seat that has no node yet."""

    pool: str
    needs: SlotResources
    members: tuple[SlotMember, ...]
    offsets: tuple[float, ...]


def _wanted(spec: PlacementSpec, num: Mapping[str, int]) -> list[_UnplacedSlot]:
    grouped = {role: group for group in spec.colocate for role in group}
    found = []
    for name in spec.roles:
        group = tuple(each for each in grouped.get(name, (name,)) if num.get(each, 0))
        if num.get(name, 0) and group[0] == name:
            _check_group(spec, group)
            found += _shared(spec, group, num)
    return found


def _shared(
    spec: PlacementSpec, group: Sequence[str], num: Mapping[str, int]
) -> list[_UnplacedSlot]:
    """The seats of roles that share them: as few as hold all of each role, with as many of it on
    each."""
    largest = max(spec.role(role).gpus for role in group)
    num_seats = max(
        -(-num[role] // _side_by_side(spec.role(role).gpus, largest, num[role])) for role in group
    )
    pool, found = spec.pool_of(group[0]), []
    for placement_slot in range(num_seats):
        members, offsets, needs = [], [], SlotResources()
        for role in group:
            each, per_seat = spec.role(role), -(-num[role] // num_seats)
            here = range(placement_slot * per_seat, min(num[role], (placement_slot + 1) * per_seat))
            members += [SlotMember(role, index) for index in here]
            offsets += [each.gpus * place for place in range(len(here))]
            gpus, more = (
                len(here) * each.gpus,
                SlotResources(0, len(here) * each.cpus, len(here) * each.memory_gb),
            )
            needs = SlotResources(max(needs.gpus, gpus), needs.cpus, needs.memory_gb) + more
        found.append(
            _UnplacedSlot(pool, needs, tuple(members), tuple(offsets) if any(offsets) else ())
        )
    return found


def _side_by_side(gpus: float, largest: float, num: int) -> int:
    """How many of ``num`` processes with so many GPUs each a seat of the largest one's holds."""
    if not largest:
        return 1
    return max(1, int(largest / gpus + _ALMOST)) if gpus else num


def _check_group(spec: PlacementSpec, group: Sequence[str]) -> None:
    pools = {role: spec.pool_of(role) for role in group}
    if len(set(pools.values())) > 1:
        told = ", ".join(f"{role} in '{pool}'" for role, pool in pools.items())
        raise ConfigError(
            f"placement.colocate: roles that share seats need one pool, and are {told}"
        )
    gpus = {role: spec.role(role).gpus for role in group}
    for role, each in gpus.items():
        times = max(gpus.values()) / each if each else 1.0
        if abs(times - round(times)) > _ALMOST:
            told = ", ".join(f"{name} {value:g}" for name, value in gpus.items())
            raise ConfigError(
                f"placement.colocate: GPUs of a process are {told}: those of {role} do not divide "
                "a seat of "
                f"{max(gpus.values()):g} without remainder; make them 1, or as many"
            )


def _check_sums(name: str, pool: NodePool, inside: Sequence[_UnplacedSlot]) -> None:
    whole = _of(pool)
    for field, unit in (("gpus", "GPUs"), ("cpus", "CPUs"), ("memory_gb", "GB")):
        has = pool.nodes * getattr(whole, field)
        asked: dict[tuple[str, float], int] = {}
        for each in inside:
            key = _who(each.members), getattr(each.needs, field)
            asked[key] = asked.get(key, 0) + 1
        total = sum(num * each for (_, each), num in asked.items())
        if total > has + _ALMOST:
            terms = " + ".join(
                f"{role} {num} x {each:g}" for (role, each), num in asked.items() if each
            )
            raise ConfigError(
                f"placement: the roles do not fit the pool '{name}': {terms} = {total:g} {unit}, "
                f"and it has {pool.nodes} "
                f"x {getattr(whole, field):g} = {has:g}"
            )


def _seated(
    name: str, pool: NodePool, inside: Sequence[tuple[int, _UnplacedSlot]]
) -> dict[int, PlacementSlot]:
    """Index -> seat: the largest first, each on the first node that has room, or with ``spread`` on
    that with most."""
    rooms = [_of(pool)] * pool.nodes
    found = {}
    for index, each in sorted(
        inside, key=lambda pair: (tuple(-value for value in pair[1].needs), pair[0])
    ):
        needs = each.needs
        fitting = [node for node, room in enumerate(rooms) if needs.fits(room)]
        if not fitting:
            most = max(rooms)
            who = " and ".join(f"{role} {number}" for role, number in each.members)
            raise ConfigError(
                f"placement: the roles fit the pool '{name}' in sum, but not node by node: {who} "
                f"needs {_told(needs)} on one "
                f"node, and of its {pool.nodes} nodes the emptiest has {_told(most)} left"
            )
        node = (
            fitting[0]
            if pool.order == "pack"
            else max(fitting, key=lambda node: (rooms[node], -node))
        )
        rooms[node] = rooms[node].without(needs)
        found[index] = PlacementSlot(name, node, needs, each.members, each.offsets)
    return found


def _who(members: Sequence[SlotMember]) -> str:
    """``trainer and inference``, ``2 trainer and inference``"""
    num = Counter(member.role for member in members)
    return " and ".join(f"{count} {role}" if count > 1 else role for role, count in num.items())


def _of(pool: NodePool) -> SlotResources:
    memory_gb = float("inf") if pool.memory_gb is None else pool.memory_gb
    return SlotResources(pool.gpus, pool.cpus, memory_gb)


def _told(needs: SlotResources) -> str:
    parts = [f"{needs.gpus:g} GPUs", f"{needs.cpus:g} CPUs"]
    return ", ".join(
        [*parts, *([f"{needs.memory_gb:g} GB"] if 0 < needs.memory_gb < float("inf") else [])]
    )
