"""Who sits where: the seats of a placement, and whether they fit its pools.

    pool gpus, 2 nodes of 2 GPUs         node 0   seat 0  trainer 0, inference 0      seat 1  trainer 1, inference 1
                                         node 1   seat 2  trainer 2, inference 2      seat 3  trainer 3, inference 3

Decided by arithmetic alone, before any process starts: ``ramify cluster plan`` prints it, and Ray is asked for just that.
Processes that share a seat share its GPUs, and their CPUs and memory add up. Leaves out what a machine really has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from ramify.errors import ConfigError
from ramify.train.placement.spec import ROLES, PlacementSpec, Pool

_ALMOST = 1e-9
"""A third of a GPU, three times, is one."""


class Needs(NamedTuple):
    """What is taken of a node, or what one has."""

    gpus: float = 0.0
    cpus: float = 0.0
    memory_gb: float = 0.0

    def __add__(self, other: object) -> Needs:
        assert isinstance(other, Needs)
        return Needs(*(a + b for a, b in zip(self, other, strict=True)))

    def without(self, other: Needs) -> Needs:
        return Needs(*(a - b for a, b in zip(self, other, strict=True)))

    def fits(self, room: Needs) -> bool:
        return all(a <= b + _ALMOST for a, b in zip(self, room, strict=True))


class Member(NamedTuple):
    """One process."""

    role: str
    number: int


class Seat(msgspec.Struct, frozen=True):
    """What processes that sit together take of one node."""

    pool: str
    """Empty where the placement tells no pools."""
    node: int
    """Of the pool."""
    needs: Needs
    members: tuple[Member, ...]


def counts(spec: PlacementSpec, said: Mapping[str, int]) -> dict[str, int]:
    """Role -> how many processes it has. ``said``: what the run says elsewhere, 0 where it does not. Raises ConfigError
    where the two differ."""
    found = dict.fromkeys(spec.services, 1)
    for name in ROLES:
        here, there = spec.role(name).count, said.get(name, 0)
        if here and there and here != there:
            raise ConfigError(
                f"placement.{name}.count={here}, but the run has {there} ({_SAID[name]}): make them the same"
            )
        found[name] = here or there
    return found


_SAID = {"trainer": "compute.shard.ranks, of the backend fsdp", "inference": "inference.num"}
"""Where the run says it; runners are said by the placement alone."""


def seats(spec: PlacementSpec, num: Mapping[str, int]) -> list[Seat]:
    """The seats of ``num`` processes of each role, the first rank's first. Raises ConfigError, with the sums, where they do
    not fit."""
    wanted = _wanted(spec, num)
    if not spec.pools:
        return [Seat("", 0, needs, members) for _, needs, members in wanted]
    found: dict[int, Seat] = {}
    for name, pool in spec.pools.items():
        inside = [(index, needs, members) for index, (where, needs, members) in enumerate(wanted) if where == name]
        _check_sums(name, pool, [(needs, members) for _, needs, members in inside])
        found |= _seated(name, pool, inside)
    return [found[index] for index in range(len(wanted))]


def _wanted(spec: PlacementSpec, num: Mapping[str, int]) -> list[tuple[str, Needs, tuple[Member, ...]]]:
    """(pool, what a seat takes, who sits there)"""
    grouped = {role: group for group in spec.colocate for role in group}
    found = []
    for name in spec.roles:
        group = tuple(each for each in grouped.get(name, (name,)) if num.get(each, 0))
        if not num.get(name, 0) or group[0] != name:
            continue
        _check_group(spec, group, num)
        each = [spec.role(role) for role in group]
        needs = Needs(max(r.gpus for r in each), sum(r.cpus for r in each), sum(r.memory_gb for r in each))
        pool = spec.pool_of(name)
        found += [(pool, needs, tuple(Member(role, index) for role in group)) for index in range(num[name])]
    return found


def _check_group(spec: PlacementSpec, group: Sequence[str], num: Mapping[str, int]) -> None:
    if len({num[role] for role in group}) > 1:
        told = ", ".join(f"{role} {num[role]}" for role in group)
        raise ConfigError(f"placement.colocate: roles that share seats need as many processes each, and have {told}")
    pools = {role: spec.pool_of(role) for role in group}
    if len(set(pools.values())) > 1:
        told = ", ".join(f"{role} in '{pool}'" for role, pool in pools.items())
        raise ConfigError(f"placement.colocate: roles that share seats need one pool, and are {told}")


def _check_sums(name: str, pool: Pool, inside: Sequence[tuple[Needs, tuple[Member, ...]]]) -> None:
    whole = _of(pool)
    for field, unit in (("gpus", "GPUs"), ("cpus", "CPUs"), ("memory_gb", "GB")):
        has = pool.nodes * getattr(whole, field)
        asked: dict[tuple[str, float], int] = {}
        for needs, members in inside:
            key = " and ".join(member.role for member in members), getattr(needs, field)
            asked[key] = asked.get(key, 0) + 1
        total = sum(num * each for (_, each), num in asked.items())
        if total > has + _ALMOST:
            terms = " + ".join(f"{role} {num} x {each:g}" for (role, each), num in asked.items() if each)
            raise ConfigError(
                f"placement: the roles do not fit the pool '{name}': {terms} = {total:g} {unit}, and it has {pool.nodes} "
                f"x {getattr(whole, field):g} = {has:g}"
            )


def _seated(name: str, pool: Pool, inside: list[tuple[int, Needs, tuple[Member, ...]]]) -> dict[int, Seat]:
    """Index -> seat: the largest first, each on the first node that has room, or with ``spread`` on that with most."""
    rooms = [_of(pool)] * pool.nodes
    found = {}
    for index, needs, members in sorted(inside, key=lambda each: (tuple(-value for value in each[1]), each[0])):
        fitting = [node for node, room in enumerate(rooms) if needs.fits(room)]
        if not fitting:
            most = max(rooms)
            who = " and ".join(f"{role} {number}" for role, number in members)
            raise ConfigError(
                f"placement: the roles fit the pool '{name}' in sum, but not node by node: {who} needs {_told(needs)} on one "
                f"node, and of its {pool.nodes} nodes the emptiest has {_told(most)} left"
            )
        node = fitting[0] if pool.order == "pack" else max(fitting, key=lambda node: (rooms[node], -node))
        rooms[node] = rooms[node].without(needs)
        found[index] = Seat(name, node, needs, members)
    return found


def _of(pool: Pool) -> Needs:
    return Needs(pool.gpus, pool.cpus, pool.memory_gb or float("inf"))


def _told(needs: Needs) -> str:
    parts = [f"{needs.gpus:g} GPUs", f"{needs.cpus:g} CPUs"]
    return ", ".join([*parts, *([f"{needs.memory_gb:g} GB"] if 0 < needs.memory_gb < float("inf") else [])])
