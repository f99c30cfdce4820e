"""Define a recipe's ``placement`` section, which says where a run's processes are placed.

The section is plain data.

    PlacementSpec(
        pools={"gpus": NodePoolSpec(nodes=2, gpus=8, cpus=64), "cpus": NodePoolSpec(nodes=1,
        cpus=32)},
        trainer=RoleSpec(pool="gpus", gpus=1),              compute.shard.ranks processes
        inference=RoleSpec(pool="gpus", gpus=1),            inference.num processes
        rollouts=RoleSpec(pool="cpus", count=4, cpus=4),    None: the run's own process
        colocate=(("trainer", "inference"),),               rank 0 and engine 0 share a slot and GPU
    )

A *pool* is a set of identical nodes. A *role* is all processes of one kind. A *slot* is the share
of a node that one process takes, or several that are colocated (``placement_slots.py``). Without
``--placement ray`` all processes run on this machine, but the declared resources are still checked.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ramify.errors import ConfigError, did_you_mean
from ramify.train.config_redaction import check_field_bounds, check_none_or_positive

ROLES = ("trainer", "inference", "rollouts")
KINDS = ("local", "ray")


class NodePoolSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A pool of identical machines, on which processes can be placed."""

    nodes: int = 1
    gpus: float = 0
    """GPUs per node; ``cpus`` and ``memory_gb`` are also per node."""
    cpus: float = 1
    memory_gb: float | None = None
    """Main memory in units of 10^9 bytes; None: not limited."""
    order: Literal["pack", "spread"] = "pack"
    """pack: use as few nodes as possible. spread: place each slot on the node with the most free
    resources.
    """

    def __post_init__(self) -> None:
        check_none_or_positive("placement.pools", "not counted", memory_gb=self.memory_gb)
        check_field_bounds("placement.pools", least=1, nodes=self.nodes)
        check_field_bounds("placement.pools", least=0, gpus=self.gpus, cpus=self.cpus)


class RoleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The placement of one role: its pool, process count and resources per process.

    A role is one kind of process.
    """

    pool: str = ""
    """Name of a pool in ``pools``; optional if there is only one."""
    count: int | None = None
    """Number of processes. None: ``compute.shard.ranks`` for the trainer and ``inference.num`` for
    inference; no workers for rollouts, so that the run's own process samples them.
    """
    gpus: float = 0
    """GPUs per process; ``cpus`` and ``memory_gb`` are also per process."""
    cpus: float = 1
    """CPU cores that each process reserves."""
    memory_gb: float = 0
    """Main memory that each process reserves, in units of 10^9 bytes."""

    def __post_init__(self) -> None:
        check_none_or_positive("placement role", "as many as the run needs", count=self.count)
        if min(self.gpus, self.cpus, self.memory_gb) < 0:
            raise ConfigError(
                f"placement: gpus={self.gpus:g}, cpus={self.cpus:g} and "
                f"memory_gb={self.memory_gb:g} of a role cannot be negative"
            )


class RewardServiceSpec(RoleSpec, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A server that provides judgements or rewards.

    It is a single process, which starts before the engines.
    """

    command: tuple[str, ...]
    """Command that starts the service; ``{host}`` and ``{port}`` are replaced by the address that
    it must listen on."""
    variable: str
    """Environment variable that the run sets to the service's address, such as ``VLLM_BASE_URL``
    for a judge named vllm:NAME."""
    path: str = "/v1"
    """URL path that is appended to the service's address."""
    start_s: float = 600.0
    """Startup timeout: how many seconds may pass until the service accepts connections."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.command or not self.variable or (self.count or 1) > 1 or not self.start_s > 0:
            raise ConfigError(
                "placement.services: a service is one process with a command, a variable and a "
                f"positive start_s; got command={self.command}, variable='{self.variable}', "
                f"count={self.count}, start_s={self.start_s}"
            )


class PlacementSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The placement of a run: its pools of machines, its roles, and which roles share GPUs.

    A role is one kind of process, such as the trainer.
    """

    kind: Literal["local", "ray"] = "local"
    """What starts the processes: this machine, or Ray. ``ramify train --placement`` sets it."""
    pools: dict[str, NodePoolSpec] = {}
    """Pool name -> nodes. Empty: a single pool that is as large as needed."""
    trainer: RoleSpec = RoleSpec()
    inference: RoleSpec = RoleSpec()
    rollouts: RoleSpec = RoleSpec()
    services: dict[str, RewardServiceSpec] = {}
    """Service name -> judge or reward server. Each service is a separate role."""
    colocate: tuple[tuple[str, ...], ...] = ()
    """Groups of roles whose processes share slots, and with them GPUs, which they use in turn. If
    the roles have equally many processes and GPUs, the n-th processes of each share a slot;
    otherwise see ``docs/scale.md``. CPUs and memory add up."""
    address: str = ""
    """Address of a running Ray cluster; empty: ``RAY_ADDRESS``, or, if that is not set, a cluster
    that is started here and ends with the run."""
    start_s: float = 120.0
    """Time limit in seconds for a cluster to provide the slots (machines and devices), or to
    replace a lost one."""
    restarts: int = 3
    """How many times in a row a rollout worker or service that ended is restarted. A completed
    rollout, or a service's ``start_s`` seconds of uptime, resets the count. 0: the run continues
    without it. Engines have ``inference.restarts``.
    """

    def __post_init__(self) -> None:
        reserved = next((name for name in self.services if name in ROLES), None)
        if reserved is not None:
            raise ConfigError(
                f"placement.services: '{reserved}' is a role already; give the service another name"
            )
        for role in (role for group in self.colocate for role in group):
            if role not in self.roles:
                raise ConfigError(
                    f"placement.colocate: unknown role '{role}': {did_you_mean(role, self.roles)}"
                )
        grouped = [role for group in self.colocate for role in group]
        twice = next((role for role in grouped if grouped.count(role) > 1), None)
        if twice is not None:
            raise ConfigError(
                f"placement.colocate: '{twice}' is named twice; each process of a role has one slot"
            )
        for name in self.roles:
            pool = self.role(name).pool
            if pool and pool not in self.pools:
                hint = did_you_mean(pool, self.pools) if self.pools else "placement.pools is empty"
                raise ConfigError(f"placement.{name}.pool: unknown pool '{pool}': {hint}")
        check_field_bounds("placement", above=0, start_s=self.start_s)
        check_field_bounds("placement", least=0, restarts=self.restarts)

    @property
    def roles(self) -> tuple[str, ...]:
        """The names of all roles, i.e. kinds of processes, including services."""
        return *ROLES, *self.services

    def role(self, name: str) -> RoleSpec:
        """Return the specification of the role called ``name``.

        Each service is also a role.
        """
        spec: RoleSpec = self.services[name] if name in self.services else getattr(self, name)
        return spec

    def pool_of(self, name: str) -> str:
        """Return the name of a role's pool, or an empty string if no pools are declared.

        Raises ConfigError if there are several pools and the role names none.
        """
        pool = self.role(name).pool
        if pool or not self.pools:
            return pool
        if len(self.pools) > 1:
            raise ConfigError(
                f"placement.{name} names no pool, but there are {len(self.pools)}: "
                f"{', '.join(self.pools)}"
            )
        return next(iter(self.pools))
