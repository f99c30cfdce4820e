"""Reserve slots on a Ray cluster, and start the processes of a run on them.

A slot is a reserved share of one machine.

    pool ── placement group: one bundle per node (PACK or SPREAD)
         ── slot ── node agent (a Ray actor) ── processes (rank 1, engine 1)

Ray decides where slots are and which GPUs they have, and reserves them. An actor on each slot
starts the processes, which then communicate as they do without Ray. So a rank is the same program
everywhere, an engine may be any server, and a process ends with its node agent, whatever ended the
agent. The run itself is the first rank, on the first slot, which is on the run's own node. A lost
agent is replaced when a process is next started on its slot: if its node is lost, too, Ray moves
the bundle to another node that has room.

Before resources are requested, the bundles are checked against the nodes of the cluster. All nodes
must see the run's files at the same paths. ``ray_cluster.py`` joins or starts a cluster.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ramify.actors.launcher import (
    HardwareResources,
    NodeAgent,
    NodeProcessHandle,
    NodeResourceSlot,
    RoleInstanceId,
    start_error,
)
from ramify.actors.ray_cluster import RayClusterConnection, import_ray
from ramify.errors import ConfigError, TrainError

_LOOPBACK = "127.0.0.1"
_ASK_S = 60.0
"""Seconds that a node agent may take to answer."""
_AGAIN_S = 1.0
_HERE = 0.001
"""Amount of this node's unique Ray resource that slot 0 requests, so that Ray places the slot on
this node."""


class RayLauncher:
    """Starts the processes of a run on the machines of a Ray cluster; implements ``Launcher``."""

    def __init__(
        self,
        placement_slots: Sequence[NodeResourceSlot],
        *,
        gpus: Mapping[str, float] | None = None,
        spread: Collection[str] = (),
        address: str = "",
        start_s: float = 120.0,
        num_gpus: int = 0,
    ) -> None:
        """Join the cluster at ``address``, or start one, and reserve the slots.

        ``gpus`` maps each role to the number of GPUs of one process. ``spread`` names the pools
        whose slots are placed on as many nodes as possible. ``start_s`` is the time limit in
        seconds for reserving the slots, and for replacing a lost one. ``num_gpus`` is this
        machine's number of GPUs, if a cluster is started here. Raises ConfigError if the slots are
        not available.
        """
        self._ray = import_ray()
        self._cluster = RayClusterConnection(address, start_s)
        self._gpus = gpus or {}
        self._spread = spread
        self.start_s = start_s
        self._placement_slots = list(placement_slots)
        self._groups: list[Any] = []
        self._places: dict[int, tuple[Any, int]] = {}
        """Slot -> its placement group, and the index of its bundle."""
        self._agents: list[Any] = []
        self._is_distributed = False
        """Whether a slot is, or ever was, on another machine."""
        self._renewing = threading.Lock()
        self._locations: list[dict[str, Any]] = []
        self._is_open = True
        if not self._cluster.address:
            check_bundles_fit(
                group_slots_by_node(self._placement_slots),
                [HardwareResources(num_gpus, os.cpu_count() or 1, float("inf"))],
                "this machine",
            )
        try:
            self._cluster.join_or_start(num_gpus)
            self._own = str(self._ray.util.get_node_ip_address())
            check_bundles_fit(
                group_slots_by_node(self._placement_slots), self._nodes(), "the cluster"
            )
            self._reserve()
        except BaseException:
            self.close()
            raise

    def start(
        self,
        member: RoleInstanceId,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        stdin: bytes = b"",
    ) -> NodeProcessHandle:
        """Start a process on the slot that is reserved for it.

        The node agent that controls the slot starts the command. Raises ConfigError if the process
        cannot be started.
        """
        index = self._slot_of(member)
        name = f"{member.role}-{member.number}"
        location = self._locations[index]
        ask = partial(self._ask_or_none, self._agents[index])
        share = self._placement_slots[index].gpus_for(
            member, self._gpus.get(member.role, 0.0), location["gpus"]
        )
        if share != location["gpus"]:
            environment = {"CUDA_VISIBLE_DEVICES": ",".join(share), **environment}
        arguments = name, list(command), dict(environment), str(log), sys.executable, os.getcwd()
        try:
            started = self._call_agent(index, "start", *arguments, stdin)
        except TrainError as error:
            raise start_error(member, "", str(error)) from None
        if isinstance(started, str):
            raise start_error(member, f" on {location['host']}", started)
        is_here = location["address"] == self._own
        return NodeProcessHandle(ask, name, started, location["host"], is_here=is_here)

    @property
    def address(self) -> str:
        """Return the address at which other processes can reach this one.

        As long as all slots are on this machine, it is the loopback address. From then on, it is
        the machine's network address.
        """
        return self._own if self._is_distributed else _LOOPBACK

    def address_of(self, member: RoleInstanceId) -> str:
        address = str(self._locations[self._slot_of(member)]["address"])
        return self.address if address == self._own else address

    def free_port(self, member: RoleInstanceId) -> int:
        return int(self._call_agent(self._slot_of(member), "free_port"))

    def ensure_slot(self, member: RoleInstanceId) -> None:
        """Ensure that a process still has a slot, which is its share of a machine.

        If the slot's node agent does not answer, kill the agent and start another one, perhaps on
        another machine. Raises ConfigError if no node has room.
        """
        index = self._slot_of(member)
        with self._renewing:
            if self._ask_or_none(self._agents[index], "describe_location") is not None:
                return
            # An agent that merely does not answer would keep the slot.
            with contextlib.suppress(Exception):
                self._ray.kill(self._agents[index])
            agent, location = self._replace_agent(index)
            self._agents[index], self._locations[index] = agent, location
            self._is_distributed = self._is_distributed or location["address"] != self._own

    def close(self) -> None:
        """End all processes that were started, release the slots, and leave the cluster.

        A cluster that was started here is shut down. Calling this again has no effect.
        """
        if not self._is_open:
            return
        self._is_open = False
        ray = self._ray
        if ray.is_initialized():
            for agent in self._agents:
                with contextlib.suppress(Exception):
                    ray.get(agent.end_all.remote(), timeout=10)
                with contextlib.suppress(Exception):
                    ray.kill(agent)
            for group in self._groups:
                with contextlib.suppress(Exception):
                    ray.util.remove_placement_group(group)
        self._cluster.leave()

    def _ask_or_none(self, agent: Any, method: str, *arguments: Any) -> Any:
        """Call a node agent's method, and return its result, or None if the agent does not
        answer."""
        if not self._is_open:
            return None
        try:
            return self._ray.get(getattr(agent, method).remote(*arguments), timeout=_ASK_S)
        except (self._ray.exceptions.RayError, TimeoutError):
            return None

    def _call_agent(self, index: int, method: str, *arguments: Any) -> Any:
        if not self._is_open:
            raise TrainError("this run has disconnected from its Ray cluster")
        try:
            return self._ray.get(
                getattr(self._agents[index], method).remote(*arguments), timeout=_ASK_S
            )
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            known = index < len(self._locations)
            host = self._locations[index]["host"] if known else "its node"
            first = str(error).strip().partition("\n")[0]
            raise TrainError(
                f"slot {index} on {host} does not answer ({type(error).__name__}: {first})"
            ) from None

    def _slot_of(self, member: RoleInstanceId) -> int:
        return next(
            index
            for index, placement_slot in enumerate(self._placement_slots)
            if member in placement_slot.members
        )

    # --- cluster and slots

    def _nodes(self) -> list[HardwareResources]:
        alive = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return [
            HardwareResources(
                node.get("GPU", 0.0), node.get("CPU", 0.0), node.get("memory", 0.0) / 1e9
            )
            for node in alive
        ]

    def _reserve(self) -> None:
        """Reserve all slots on the cluster, and start a node agent for each slot."""
        ray = self._ray
        from ray.util.placement_group import placement_group

        until = time.monotonic() + self.start_s
        for pool, nodes in group_slots_by_node(self._placement_slots).items():
            requested = [_resources(needs) for needs, _ in nodes]
            # This process is rank 0, so slot 0 must be on its own node.
            first = next((i for i, (_, members) in enumerate(nodes) if 0 in members), None)
            if first is not None:
                requested[first][f"node:{self._own}"] = _HERE
            strategy = "SPREAD" if pool in self._spread else "PACK"
            group = placement_group(requested, strategy=strategy)
            self._groups.append(group)
            if not group.wait(max(1.0, until - time.monotonic())):
                raise ConfigError(
                    f"the cluster did not provide the slots of pool '{pool or 'any'}' within "
                    f"{self.start_s:g} s: {requested} was requested, but only "
                    f"{ray.available_resources()} is available: free some, or raise "
                    "placement.start_s"
                )
            self._places |= {
                index: (group, bundle)
                for bundle, (_, members) in enumerate(nodes)
                for index in members
            }
        self._agents += [self._create_agent(index) for index in range(len(self._placement_slots))]
        try:
            self._locations = ray.get(
                [agent.describe_location.remote() for agent in self._agents], timeout=self.start_s
            )
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise ConfigError(
                "Ramify's agent process on a node did not start: "
                f"{str(error).strip().partition(chr(10))[0]}"
            ) from None
        self._is_distributed = any(location["address"] != self._own for location in self._locations)
        self._check_first()

    def _create_agent(self, index: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        (group, bundle), needs = self._places[index], self._placement_slots[index].needs
        at = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        make = self._ray.remote(NodeAgent).options(
            num_cpus=needs.cpus, num_gpus=needs.gpus, scheduling_strategy=at, max_restarts=0
        )
        return make.remote()

    def _replace_agent(self, index: int) -> tuple[Any, dict[str, Any]]:
        """Start a new node agent for a slot whose agent is gone.

        Returns the agent and its location. Raises ConfigError if no node has room within the time
        limit.
        """
        ray, until = self._ray, time.monotonic() + self.start_s
        lost = self._locations[index]
        where = f"slot {index}, which was on {lost['host']} ({lost['address']})"
        while self._is_open and time.monotonic() < until:
            agent = self._create_agent(index)
            try:
                return agent, ray.get(
                    agent.describe_location.remote(), timeout=max(0.0, until - time.monotonic())
                )
            except ray.exceptions.GetTimeoutError:
                ray.kill(agent)
            except ray.exceptions.RayError:
                # The cluster does not know yet that the node is gone, and used it again.
                time.sleep(_AGAIN_S)
        needs = self._placement_slots[index].needs
        raise ConfigError(
            f"{where}, was lost, and no node offered {needs.gpus:g} GPUs and {needs.cpus:g} CPUs "
            f"within {self.start_s:g} s: free some, or raise placement.start_s"
        )

    def _check_first(self) -> None:
        """Check that the cluster gave the first slot the GPU that this process (rank 0) uses.

        Raises ConfigError if the slot has another GPU.
        """
        if not self._placement_slots or not self._placement_slots[0].needs.gpus:
            return
        slot_gpus = self._placement_slots[0].gpus_for(
            RoleInstanceId("trainer", 0), self._gpus.get("trainer", 0.0), self._locations[0]["gpus"]
        )
        own_gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")
        if slot_gpus and slot_gpus[0] != own_gpus[0]:
            raise ConfigError(
                f"the cluster assigned GPU {slot_gpus[0]} to rank 0 (this process), but it uses "
                f"GPU {own_gpus[0]}: start it with CUDA_VISIBLE_DEVICES={','.join(slot_gpus)}"
            )


def group_slots_by_node(
    placement_slots: Sequence[NodeResourceSlot],
) -> dict[str, list[tuple[HardwareResources, list[int]]]]:
    """Group a run's slots by node, and sum the resources that each node must provide.

    The result is keyed by node pool. Returns the total resources to reserve on each node, and the
    indices of its slots. A slot without a pool counts as a separate node.
    """
    by_pool: dict[str, dict[int, tuple[HardwareResources, list[int]]]] = {}
    for index, placement_slot in enumerate(placement_slots):
        nodes = by_pool.setdefault(placement_slot.pool, {})
        node = placement_slot.node if placement_slot.pool else index
        needs, members = nodes.get(node, (HardwareResources(), []))
        nodes[node] = (needs + placement_slot.needs, [*members, index])
    return {pool: list(nodes.values()) for pool, nodes in by_pool.items()}


def check_bundles_fit(
    requested: Mapping[str, Sequence[tuple[HardwareResources, object]]],
    nodes: Sequence[HardwareResources],
    where: str,
) -> None:
    """Raise ConfigError if the requested resources do not fit on the given nodes.

    The error shows the totals.
    """
    all_needs = [(pool, needs) for pool, bundles in requested.items() for needs, _ in bundles]
    for field, unit in (("gpus", "GPUs"), ("cpus", "CPUs"), ("memory_gb", "GB")):
        available = [getattr(node, field) for node in nodes]
        needed = [getattr(needs, field) for _, needs in all_needs]
        if sum(needed) > sum(available) + 1e-9:
            terms = " + ".join(f"{value:g}" for value in needed if value)
            raise ConfigError(
                f"placement: the slots do not fit {where}: {terms} = {sum(needed):g} {unit}, but "
                f"it has {' + '.join(f'{value:g}' for value in available) or 0} = "
                f"{sum(available):g}: request less, or add nodes"
            )
    for pool, needs in all_needs:
        if not any(needs.fits_in(node) for node in nodes):
            raise ConfigError(
                f"placement: no node of {where} has room for a slot of pool '{pool or 'any'}', "
                f"which needs {needs.gpus:g} GPUs, {needs.cpus:g} CPUs and {needs.memory_gb:g} "
                f"GB; the largest has {max(nodes)}: request less, or add a larger node"
            )


def _resources(needs: HardwareResources) -> dict[str, float]:
    amounts = {"CPU": needs.cpus, "GPU": needs.gpus, "memory": needs.memory_gb * 1e9}
    return {name: value for name, value in amounts.items() if value} or {"CPU": 0.01}
