"""Where the processes of a run stand, as plain data: the part ``placement`` of a recipe.

    PlacementSpec(
        pools={"gpus": Pool(nodes=2, gpus=8, cpus=64), "cpus": Pool(nodes=1, cpus=32)},
        trainer=Role(pool="gpus", gpus=1),               compute.shard.ranks of them
        inference=Role(pool="gpus", gpus=1),             inference.num of them
        rollouts=Role(pool="cpus", count=4, cpus=4),     None: in the run's own process
        colocate=(("trainer", "inference"),),            rank 0 and engine 0 share a seat, and with it a GPU
    )

A *pool* is some nodes that are alike; a *role* is processes of one kind; a *seat* is what one
process, or several that share it, take of a node (``placement_slots.py``). Without ``--placement
ray`` all of them run on this machine, as ever; what is declared is checked all the same. Leaves out
what the processes do.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ramify.errors import ConfigError, nearest
from ramify.train.optional_fields import check_optional

ROLES = ("trainer", "inference", "rollouts")
KINDS = ("local", "ray")


class NodePool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Nodes that are alike."""

    nodes: int = 1
    gpus: float = 0
    """Of each node, as are ``cpus`` and ``memory_gb``."""
    cpus: float = 1
    memory_gb: float | None = None
    """10^9 bytes of main memory; None: not counted."""
    order: Literal["pack", "spread"] = "pack"
    """pack: as few nodes as possible. spread: each seat on the node that has most left."""

    def __post_init__(self) -> None:
        check_optional("placement.pools", "not counted", memory_gb=self.memory_gb)
        if self.nodes < 1 or min(self.gpus, self.cpus) < 0:
            raise ConfigError(
                f"placement.pools: nodes={self.nodes} must be at least 1; gpus={self.gpus:g}, "
                f"cpus={self.cpus:g} cannot be negative"
            )


class RoleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Processes of one kind."""

    pool: str = ""
    """Of ``pools``; may be left out where there is only one."""
    count: int | None = None
    """None: as many as the run says elsewhere (``compute.shard.ranks``, ``inference.num``); runners of
    rollouts: none, they are rolled out in the run's own process."""
    gpus: float = 0
    """Of each process, as are ``cpus`` and ``memory_gb``."""
    cpus: float = 1
    memory_gb: float = 0

    def __post_init__(self) -> None:
        check_optional("placement role", "as many as the run needs", count=self.count)
        if min(self.gpus, self.cpus, self.memory_gb) < 0:
            raise ConfigError(
                f"placement: gpus={self.gpus:g}, cpus={self.cpus:g} and "
                f"memory_gb={self.memory_gb:g} of "
                "a role cannot be negative"
            )


class ServiceSpec(RoleSpec, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A server that the run asks for judgements or rewards: one process, started before the
    engines."""

    command: tuple[str, ...]
    """What starts it; ``{host}`` and ``{port}`` in it are where it is to listen."""
    variable: str
    """Environment variable of the run that gets its address: ``VLLM_BASE_URL`` for a judge that is
    called vllm:NAME."""
    path: str = "/v1"
    """What is added to the address."""
    start_s: float = 600.0
    """How long it may take until it can be connected to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.command or not self.variable or (self.count or 1) > 1 or not self.start_s > 0:
            raise ConfigError(
                "placement.services: one process with a command and a variable each, and a "
                "positive start_s; got "
                f"command={self.command}, variable='{self.variable}', count={self.count}, "
                f"start_s={self.start_s}"
            )


class PlacementSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Pools, roles, and who shares a seat."""

    kind: Literal["local", "ray"] = "local"
    """Who starts processes: this machine, or Ray. ``ramify train --placement`` sets it."""
    pools: dict[str, NodePool] = {}
    """Empty: one, as large as the roles together, on any nodes."""
    trainer: RoleSpec = RoleSpec()
    inference: RoleSpec = RoleSpec()
    rollouts: RoleSpec = RoleSpec()
    services: dict[str, ServiceSpec] = {}
    """Name -> server, each a role of its own: judges, graders of rewards."""
    colocate: tuple[tuple[str, ...], ...] = ()
    """Groups of roles whose processes share seats, and with them GPUs: one after another's turn.
    With as many processes and GPUs each, the n-th of each share one; otherwise as
    ``placement_slots.py`` says. CPUs and memory add up."""
    address: str = ""
    """Of a cluster of Ray that runs already; empty: ``RAY_ADDRESS``, and where that is not set one
    is started here, and ended with the run."""
    start_s: float = 120.0
    """How long a cluster may take to give the seats, or another for one that is gone."""
    restarts: int = 3
    """How often a runner or a service that ended is started again without having done anything in
    between: a rollout, or ``start_s`` of service. 0: others go on without it. Engines have
    ``inference.restarts``."""

    def __post_init__(self) -> None:
        taken = next((name for name in self.services if name in ROLES), None)
        if taken is not None:
            raise ConfigError(
                f"placement.services: '{taken}' is a role already; give the service another name"
            )
        for role in (each for group in self.colocate for each in group):
            if role not in self.roles:
                raise ConfigError(
                    f"placement.colocate: there is no role '{role}': {nearest(role, self.roles)}"
                )
        grouped = [role for group in self.colocate for role in group]
        twice = next((role for role in grouped if grouped.count(role) > 1), None)
        if twice is not None:
            raise ConfigError(
                f"placement.colocate: '{twice}' is named twice; a role has one seat for each "
                "process"
            )
        for name in self.roles:
            wanted = self.role(name).pool
            if wanted and wanted not in self.pools:
                told = nearest(wanted, self.pools) if self.pools else "placement.pools is empty"
                raise ConfigError(f"placement.{name}.pool: there is no pool '{wanted}': {told}")
        if not self.start_s > 0 or self.restarts < 0:
            raise ConfigError(
                f"placement: start_s={self.start_s} must be positive, and restarts={self.restarts} "
                "not negative"
            )

    @property
    def roles(self) -> tuple[str, ...]:
        return *ROLES, *self.services

    def role(self, name: str) -> RoleSpec:
        found: RoleSpec = self.services[name] if name in self.services else getattr(self, name)
        return found

    def pool_of(self, name: str) -> str:
        """The name of the role's pool; empty where no pools are told. Raises ConfigError where it
        could be several."""
        wanted = self.role(name).pool
        if wanted or not self.pools:
            return wanted
        if len(self.pools) > 1:
            raise ConfigError(
                f"placement.{name} names no pool, and there are {len(self.pools)}: "
                f"{', '.join(self.pools)}"
            )
        return next(iter(self.pools))
