"""Seats on a cluster of Ray: one that runs already is joined, otherwise one is started here and
ended with the run.

    pool ── placement group, a bundle for each of its nodes (PACK or SPREAD) ── seat ── keeper ── process, process
                                                                                        (actor)   (rank 1, engine 1)

Ray says where seats are, which GPUs they have and that they stay; an actor on each starts the
processes, which speak to each other as they do without Ray. So a rank is the same program wherever
it stands, an engine may be any server, and a process ends with its keeper, whatever ended that. The
run itself is the first rank, on the first seat, which is on its own node. A keeper that is gone is
replaced once somebody wants to start something on its seat: where its node is gone, too, Ray moves
the bundle to another one that has room.

Before anything is asked for, versions of Ray and Python are compared and bundles are held against
the nodes that there are. What a run writes must be seen by all nodes at the same path. Ray is
imported here and nowhere else, when it is asked for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ramify.errors import ConfigError, TrainError
from ramify.train.placement.launcher import PlacedProcess
from ramify.train.placement.node_agent import NodeAgent
from ramify.train.placement.placement_slots import PlacementSlot, SlotMember, SlotResources
from ramify.train.placement.placement_spec import PlacementSpec

ADDRESS = "RAY_ADDRESS"
_LOOPBACK = "127.0.0.1"
_ASK_S = 60.0
"""How long a keeper may take to say something."""
_AGAIN_S = 1.0
_HERE = 0.001
"""Of the resource that each node has of its own, which holds the first seat on this one."""


class RayLauncher:
    """Implements ``Launcher``."""

    def __init__(
        self, spec: PlacementSpec, placement_slots: Sequence[PlacementSlot], *, num_gpus: int = 0
    ) -> None:
        """Joins or starts the cluster and takes the seats; ``num_gpus``: of this machine, where a
        cluster is started. Raises ConfigError where they cannot be had."""
        self._ray = imported()
        self._spec, self._placement_slots = spec, list(placement_slots)
        self._address = spec.address or os.environ.get(ADDRESS, "")
        self._folder = ""
        self._groups: list[Any] = []
        self._places: dict[int, tuple[Any, int]] = {}
        """Seat -> its placement group, and which bundle of it."""
        self._keepers: list[Any] = []
        self._is_apart = False
        """Whether a seat is, or was, on another machine."""
        self._renewing = threading.Lock()
        self._about: list[dict[str, Any]] = []
        self._is_open = True
        if not self._address:
            check_bundles(
                bundles(self._placement_slots),
                [SlotResources(num_gpus, os.cpu_count() or 1, float("inf"))],
                "this machine",
            )
        try:
            self._join(num_gpus)
            self._own = str(self._ray.util.get_node_ip_address())
            check_bundles(bundles(self._placement_slots), self._nodes(), "the cluster")
            self._take()
        except BaseException:
            self.close()
            raise

    def start(
        self, member: SlotMember, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> PlacedProcess:
        """As ``Launcher.start``."""
        index = self._seat_of(member)
        name = f"{member.role}-{member.number}"
        about, ask = self._about[index], partial(self._asked, self._keepers[index])
        share = self._placement_slots[index].share(
            member, self._spec.role(member.role).gpus, about["gpus"]
        )
        if share != about["gpus"]:
            environment = {"CUDA_VISIBLE_DEVICES": ",".join(share), **environment}
        arguments = name, list(command), dict(environment), str(log), sys.executable, os.getcwd()
        try:
            told = self._ask(index, "start", *arguments)
        except TrainError as error:
            raise ConfigError(f"{member.role} {member.number} cannot be started: {error}") from None
        if isinstance(told, str):
            raise ConfigError(
                f"{member.role} {member.number} cannot be started on {about['host']}: {told}"
            )
        is_here = about["address"] == self._own
        return PlacedProcess(ask, name, told, about["host"], log, is_here=is_here)

    @property
    def address(self) -> str:
        """The loopback's, where all seats are on this machine and always were."""
        return self._own if self._is_apart else _LOOPBACK

    def address_of(self, member: SlotMember) -> str:
        found = str(self._about[self._seat_of(member)]["address"])
        return self.address if found == self._own else found

    def free_port(self, member: SlotMember) -> int:
        return int(self._ask(self._seat_of(member), "free_port"))

    def renew(self, member: SlotMember) -> None:
        """As ``Launcher.renew``."""
        index = self._seat_of(member)
        with self._renewing:
            if self._asked(self._keepers[index], "about") is not None:
                return
            with contextlib.suppress(Exception):
                self._ray.kill(
                    self._keepers[index]
                )  # one that only does not answer would keep the seat
            keeper, about = self._kept_again(index)
            self._keepers[index], self._about[index] = keeper, about
            self._is_apart = self._is_apart or about["address"] != self._own

    def close(self) -> None:
        """End what was started, give the seats back, and leave the cluster or end it.
        Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        ray = self._ray
        if ray.is_initialized():
            for keeper in self._keepers:
                with contextlib.suppress(Exception):
                    ray.get(keeper.end_all.remote(), timeout=10)
                with contextlib.suppress(Exception):
                    ray.kill(keeper)
            for group in self._groups:
                with contextlib.suppress(Exception):
                    ray.util.remove_placement_group(group)
            ray.shutdown()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _asked(self, keeper: Any, verb: str, *arguments: Any) -> Any:
        """A keeper's answer; None where it is gone."""
        if not self._is_open:
            return None
        try:
            return self._ray.get(getattr(keeper, verb).remote(*arguments), timeout=_ASK_S)
        except (self._ray.exceptions.RayError, TimeoutError):
            return None

    def _ask(self, index: int, verb: str, *arguments: Any) -> Any:
        if not self._is_open:
            raise TrainError("the cluster was left")
        try:
            return self._ray.get(
                getattr(self._keepers[index], verb).remote(*arguments), timeout=_ASK_S
            )
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            about = self._about[index] if index < len(self._about) else {"host": "its node"}
            first = str(error).strip().partition("\n")[0]
            raise TrainError(
                f"seat {index} on {about['host']} does not answer ({type(error).__name__}: {first})"
            ) from None

    def _seat_of(self, member: SlotMember) -> int:
        return next(
            index
            for index, placement_slot in enumerate(self._placement_slots)
            if member in placement_slot.members
        )

    # --- cluster and seats
    # -------------------------------------------------------------------------------------------

    def _join(self, num_gpus: int) -> None:
        ray = self._ray
        if ray.is_initialized():
            raise ConfigError(
                "this process is in a cluster of Ray already: one run at a time can be"
            )
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        logging.getLogger("ray").setLevel(logging.ERROR)
        options: dict[str, Any] = {
            "log_to_driver": False,
            "configure_logging": False,
            "namespace": "ramify",
        }
        if self._address:
            options |= {"address": self._address}
        else:
            # Sockets lie in there, whose paths are short: the system's folder for temporary files
            # may be too deep.
            root = tempfile.gettempdir() if len(tempfile.gettempdir()) < 20 else "/tmp"
            self._folder = tempfile.mkdtemp(prefix="ray", dir=root)
            os.environ.setdefault(
                "RAY_AUTH_TOKEN", secrets.token_hex(32)
            )  # or Ray writes one into the home folder
            options |= {
                "address": "local",
                "num_cpus": os.cpu_count(),
                "num_gpus": num_gpus,
                "include_dashboard": False,
                "_temp_dir": self._folder,
                "_node_ip_address": "127.0.0.1",
                "object_store_memory": 80 << 20,
                "_system_config": {"prestart_worker_first_driver": False},
            }
        self._began = time.monotonic()
        until = self._began + self._spec.start_s
        with _own_handlers():
            while True:
                try:
                    ray.init(**options)
                    return
                except Exception as error:  # noqa: BLE001 (Ray raises this class itself)
                    is_slow = "timed out during startup" in str(
                        error
                    )  # after 30 s, which a busy machine may take
                    if not is_slow or time.monotonic() > until:
                        raise ConfigError(self._refusal(str(error))) from None

    def _refusal(self, said: str) -> str:
        where = (
            f"the cluster of Ray at {self._address}"
            if self._address
            else "a cluster of Ray on this machine"
        )
        told = " ".join(said.split())[:300]
        if "ersion mismatch" in said:
            return (
                f"{where} runs other versions than this process ({told}): install the same "
                "versions of Ray and Python on all "
                f"nodes; here are ray {self._ray.__version__} and Python {sys.version.split()[0]}"
            )
        if "timed out during startup" in said:
            tried_s = time.monotonic() - self._began
            told += f"; it was tried for {tried_s:.0f} s: give it longer (placement.start_s), or this machine less to do"
        return f"{where} cannot be {'joined' if self._address else 'started'}: {told}"

    def _nodes(self) -> list[SlotResources]:
        alive = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return [
            SlotResources(each.get("GPU", 0.0), each.get("CPU", 0.0), each.get("memory", 0.0) / 1e9)
            for each in alive
        ]

    def _take(self) -> None:
        """Reserve the seats, and put a keeper on each."""
        ray = self._ray
        from ray.util.placement_group import placement_group

        until = time.monotonic() + self._spec.start_s
        for pool, nodes in bundles(self._placement_slots).items():
            asked = [_resources(needs) for needs, _ in nodes]
            first = next((i for i, (_, members) in enumerate(nodes) if 0 in members), None)
            if first is not None:
                asked[first][f"node:{self._own}"] = _HERE
            spread = pool in self._spec.pools and self._spec.pools[pool].order == "spread"
            group = placement_group(asked, strategy="SPREAD" if spread else "PACK")
            self._groups.append(group)
            if not group.wait(max(1.0, until - time.monotonic())):
                raise ConfigError(
                    f"the cluster has not given the seats of pool '{pool or 'any'}' within "
                    f"{self._spec.start_s:g} s: it was "
                    f"asked for {asked} and has {ray.available_resources()} left; others may hold "
                    "the rest"
                )
            self._places |= {
                index: (group, bundle)
                for bundle, (_, members) in enumerate(nodes)
                for index in members
            }
        self._keepers += [self._keeper(index) for index in range(len(self._placement_slots))]
        try:
            self._about = ray.get(
                [keeper.about.remote() for keeper in self._keepers], timeout=self._spec.start_s
            )
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise ConfigError(
                f"a seat's process did not start: {str(error).strip().partition(chr(10))[0]}"
            ) from None
        self._is_apart = any(each["address"] != self._own for each in self._about)
        self._check_first()

    def _keeper(self, index: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        (group, bundle), needs = self._places[index], self._placement_slots[index].needs
        at = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        make = self._ray.remote(NodeAgent).options(
            num_cpus=needs.cpus, num_gpus=needs.gpus, scheduling_strategy=at, max_restarts=0
        )
        return make.remote()

    def _kept_again(self, index: int) -> tuple[Any, dict[str, Any]]:
        """Another keeper for a seat whose own is gone, and what it says of its place. Raises
        ConfigError."""
        ray, until = self._ray, time.monotonic() + self._spec.start_s
        where = f"seat {index}, which was on {self._about[index]['host']} ({self._about[index]['address']})"
        while self._is_open and time.monotonic() < until:
            keeper = self._keeper(index)
            try:
                return keeper, ray.get(
                    keeper.about.remote(), timeout=max(0.0, until - time.monotonic())
                )
            except ray.exceptions.GetTimeoutError:
                ray.kill(keeper)
            except (
                ray.exceptions.RayError
            ):  # put where the cluster does not know yet that the node is gone
                time.sleep(_AGAIN_S)
        needs = self._placement_slots[index].needs
        raise ConfigError(
            f"{where}, is gone, and no node of the cluster gave its {needs.gpus:g} GPUs and "
            f"{needs.cpus:g} CPUs within "
            f"{self._spec.start_s:g} s (placement.start_s)"
        )

    def _check_first(self) -> None:
        """The run is the first rank: the first seat's GPUs must be those that it computes on."""
        if not self._placement_slots or not self._placement_slots[0].needs.gpus:
            return
        given = self._placement_slots[0].share(
            SlotMember("trainer", 0), self._spec.trainer.gpus, self._about[0]["gpus"]
        )
        mine = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")
        if given and given[0] != mine[0]:
            raise ConfigError(
                f"the cluster gave GPU {given[0]} of this node to the first rank, which is this "
                "process and computes on GPU "
                f"{mine[0]}: start it with CUDA_VISIBLE_DEVICES={','.join(given)}"
            )


def imported() -> Any:
    """The module ``ray``. Raises ConfigError where the extra is not installed."""
    try:
        import ray
        import ray.util
    except ImportError:
        raise ConfigError("--placement ray needs Ray: pip install 'ramify[ray]'") from None
    return ray


def bundles(
    placement_slots: Sequence[PlacementSlot],
) -> dict[str, list[tuple[SlotResources, list[int]]]]:
    """Pool -> for each of its nodes what its seats take together, and which they are. Seats of no
    pool stand alone."""
    found: dict[str, dict[int, tuple[SlotResources, list[int]]]] = {}
    for index, placement_slot in enumerate(placement_slots):
        nodes = found.setdefault(placement_slot.pool, {})
        node = placement_slot.node if placement_slot.pool else index
        needs, members = nodes.get(node, (SlotResources(), []))
        nodes[node] = (needs + placement_slot.needs, [*members, index])
    return {pool: list(nodes.values()) for pool, nodes in found.items()}


def check_bundles(
    asked: Mapping[str, Sequence[tuple[SlotResources, object]]],
    nodes: Sequence[SlotResources],
    where: str,
) -> None:
    """Raises ConfigError, with the sums, where they cannot all stand on ``nodes``."""
    each = [(pool, needs) for pool, found in asked.items() for needs, _ in found]
    for field, unit in (("gpus", "GPUs"), ("cpus", "CPUs"), ("memory_gb", "GB")):
        has = [getattr(node, field) for node in nodes]
        wants = [getattr(needs, field) for _, needs in each]
        if sum(wants) > sum(has) + 1e-9:
            terms = " + ".join(f"{value:g}" for value in wants if value)
            raise ConfigError(
                f"placement: the seats do not fit {where}: {terms} = {sum(wants):g} {unit}, and it "
                "has "
                f"{' + '.join(f'{value:g}' for value in has) or 0} = {sum(has):g}"
            )
    for pool, needs in each:
        if not any(needs.fits(node) for node in nodes):
            raise ConfigError(
                f"placement: no node of {where} has room for one of pool '{pool or 'any'}', which "
                f"takes {needs.gpus:g} GPUs, "
                f"{needs.cpus:g} CPUs and {needs.memory_gb:g} GB; the largest has {max(nodes)}"
            )


def _resources(needs: SlotResources) -> dict[str, float]:
    found = {"CPU": needs.cpus, "GPU": needs.gpus, "memory": needs.memory_gb * 1e9}
    return {name: value for name, value in found.items() if value} or {"CPU": 0.01}


@contextlib.contextmanager
def _own_handlers() -> Any:
    """What SIGTERM does stays ours: Ray would end the process where it stands."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)
