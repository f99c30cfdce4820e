"""Starts the ranks of a run, or joins those started by ``torchrun``, and connects them.

    ramify train R compute.backend=fsdp compute.shard.ranks=2
        this process is rank 0, and starts the others
    torchrun --nproc-per-node 2 -m ramify train R compute.backend=fsdp
        each process is a rank; all except rank 0 follow

Decides what must hold before any process starts (ranks that fit the mesh, GPUs, gloo and NCCL, a
port), and which process is which rank. Not here: what ranks do together (``rank_group.py``). Ranks
on several machines need ``torchrun`` there, and a shared file system for checkpoints.

The ranks of one attempt meet in a store that may still hold the state of an earlier attempt:

    rank r    join/r = token ──▶ wait for answer/TOKEN ───────────▶ name ── here/NAME/r ──▶
    rank 0    join/r with a new token ──▶ answer/TOKEN = name ────▶ wait for here/NAME/r

torchrun keeps one store for all attempts (``--max-restarts``), so an early rank could read the
addresses of dead ranks there. Therefore rank 0 gives each attempt a name, which prefixes all other
keys. A rank obtains the name with its own random token, and rank 0 continues after every rank has
obtained it. torchrun's restart count cannot identify an attempt: it differs between machines.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ramify.actors.child_process import ChildProcess, Process, import_path
from ramify.actors.connect_back import Listener, connect
from ramify.actors.launcher import STOPPED_S, Launcher, SlotMember
from ramify.errors import ConfigError, TrainError
from ramify.log_outputs import join_run
from ramify.logging import RoomLogger
from ramify.train.backends.base import ShardSpec
from ramify.train.backends.mesh import MeshSizes

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT, _DEVICE = "RAMIFY_RANK_TIMEOUT_S", "RAMIFY_RANK_DEVICE"
_AT = "ramify/attempt"
_POLL_S = 0.02
_START_S = 120.0
"""Time limit in seconds for a rank to start, including its imports."""
_log = RoomLogger("train")


class RankInfo(NamedTuple):
    """One process among the ranks."""

    rank: int
    size: int
    local_rank: int
    """Index among the ranks of its machine, which selects its GPU."""
    address: str
    port: int

    @classmethod
    def of_environment(cls) -> RankInfo | None:
        """As torchrun, or our own launcher, put it; None outside either."""
        if any(name not in os.environ for name in _TORCHRUN):
            return None
        rank, size, address, port = (os.environ[name] for name in _TORCHRUN)
        return cls(
            int(rank), int(size), int(os.environ.get("LOCAL_RANK", rank)), address, int(port)
        )


def follow_if_told() -> None:
    """If torchrun started this process as a rank other than 0, follow rank 0, and then exit."""
    world = RankInfo.of_environment()
    if world is not None and world.rank > 0:
        follow(world)


def is_restarted() -> bool:
    """Whether torchrun restarted this process after an attempt that passed its checks and began."""
    world = RankInfo.of_environment()
    if world is None or world.rank:
        return False
    if _is_agents():  # counts restarts caused by other machines too
        return began(_store(world))
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")


def num_ranks(shard: ShardSpec, device: str) -> int:
    """The number of ranks of a run on this machine."""
    import torch

    world = RankInfo.of_environment()
    num_gpus = torch.cuda.device_count() if device == "cuda" else 0
    return shard.ranks or (world.size if world is not None else max(1, num_gpus))


def check(shard: ShardSpec, device: str, *, elsewhere: bool = False) -> int:
    """The number of ranks. ``elsewhere``: not all ranks are on this machine, so its GPUs do not
    matter. Raises ConfigError, before anything is started, if that many ranks are not possible."""
    import torch
    import torch.distributed as dist

    world = RankInfo.of_environment()
    num_gpus = torch.cuda.device_count() if device == "cuda" else 0
    size = num_ranks(shard, device)
    if world is not None and elsewhere:
        raise ConfigError(
            "torchrun started this process, and the run's placement would start ranks too: "
            "remove one of them"
        )
    if world is not None and size != world.size:
        raise ConfigError(
            f"compute.shard.ranks={size}, but torchrun started {world.size}: leave ranks out"
        )
    shard.mesh(size)
    if shard.offload and device == "cpu":
        raise ConfigError(
            "compute.shard.offload moves weights from a GPU to main memory; this run has no GPU"
        )
    if not dist.is_available() or not dist.is_gloo_available():
        raise ConfigError(
            "the backend fsdp needs torch.distributed with gloo, which this build of torch does "
            "not have"
        )
    if device == "cuda" and not dist.is_nccl_available():
        raise ConfigError(
            "the backend fsdp on GPUs needs NCCL, which this build of torch does not have"
        )
    if device == "cuda" and world is None and not elsewhere and size > num_gpus:
        raise ConfigError(
            f"compute.shard.ranks={size} does not fit this machine, which has {num_gpus} GPUs"
        )
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is already in use in this process: only one run at a time can "
            "have ranks"
        )
    if world is None:
        _check_port(shard.port)
    return size


class JoinedRanks(NamedTuple):
    """This process as rank 0, connected to the other ranks."""

    rank_group: Any
    """``RankGroup``"""
    rank: Any
    """``RankModels``: this process's own."""


@contextlib.contextmanager
def _unfinished(processes: Sequence[Process]) -> Iterator[None]:
    """Kill all started ranks if the start fails."""
    import torch.distributed as dist

    try:
        yield
    except BaseException:
        for process in processes:
            process.end(0.0)
        if dist.is_initialized():
            dist.destroy_process_group()
        raise


def join(shard: ShardSpec, device: str, stacks: Path, hosts: Launcher | None = None) -> JoinedRanks:
    """Start the other ranks, on ``hosts`` if given, or connect to those that torchrun started.
    Raises ConfigError like ``check``, and TrainError if a rank does not start."""
    from torch._C._distributed_c10d import TCPStore

    from ramify.actors.rank_group import RankGroup
    from ramify.actors.rank_watch import RankConnection, RankHeartbeat
    from ramify.train.backends.rank import RankModels

    size = check(shard, device, elsewhere=hosts is not None)
    world = RankInfo.of_environment()
    pulse = RankHeartbeat()
    processes: list[Process] = []
    with _unfinished(processes):
        if world is None:
            address = "127.0.0.1" if hosts is None else hosts.address
            store = TCPStore(
                address,
                shard.port or 0,
                size,
                True,
                timedelta(seconds=_START_S),
                wait_for_workers=False,
            )
            world = RankInfo(0, size, 0, address, store.port)
            for other in range(1, size):
                environment = _environment(other, world, shard.timeout_s, device)
                log = stacks.resolve() / "ranks" / f"rank-{other}.log"
                processes.append(
                    ChildProcess(_COMMAND, environment=environment, log=log, stopped_s=STOPPED_S)
                    if hosts is None
                    else _placed(hosts, environment, other, log)
                )
        else:
            store = _store(world)
        name = gather(store, size, _START_S, lambda other: _check_alive(processes, other))
        _enter(store, name, world, device, shard.timeout_s)
        rank = RankModels(0, size, _device(device, world), shard.timeout_s, pulse)
        connections = _accept_ranks(world, shard.mesh(size), RankConnection)
    return JoinedRanks(
        RankGroup(rank, pulse, connections, processes, shard.timeout_s, stacks), rank
    )


def leave(joined: JoinedRanks) -> None:
    """Shut down all ranks."""
    import torch.distributed as dist

    joined.rank_group.close()
    if dist.is_initialized():
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Clear what torch has worked out for tensors of these ranks: later ranks of this process may
    form an equal mesh, for which it would take the groups that were just destroyed."""
    from torch.distributed.tensor import debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


def follow(world: RankInfo) -> NoReturn:
    """Run as rank ``world.rank`` until rank 0 ends, and then exit."""
    import torch.distributed as dist

    from ramify.actors.rank_group import follow
    from ramify.actors.rank_watch import RankHeartbeat
    from ramify.train.backends.rank import RankModels

    join_run(f"rank {world.rank}")
    device, timeout_s = (
        os.environ.get(_DEVICE, ""),
        float(os.environ.get(_TIMEOUT, ShardSpec().timeout_s)),
    )
    store = _store(world)
    name = come(store, world.rank, _torch_timeout(timeout_s))
    if not device:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    _enter(store, name, world, device, timeout_s)
    pulse = RankHeartbeat()
    rank = RankModels(world.rank, world.size, _device(device, world), timeout_s, pulse)
    talk, watch = _connect_back(world)
    _log.info("rank_ready", f"rank {world.rank} of {world.size} is ready", rank=world.rank)
    follow(rank, pulse, talk, watch, world.rank, timeout_s)
    rank.wait()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # regular cleanup takes longer than some runs


# --- how ranks connect


def _environment(rank: int, world: RankInfo, timeout_s: float, device: str) -> dict[str, str]:
    """Additional environment variables of a rank."""
    import torch

    return {
        "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // world.size)),
        "RANK": str(rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": world.address,
        "MASTER_PORT": str(world.port),
        _TIMEOUT: str(timeout_s),
        _DEVICE: device,
        **import_path(),
    }


_COMMAND = (sys.executable, "-m", "ramify.train.backends.launch")


def _placed(hosts: Launcher, environment: Mapping[str, str], rank: int, log: Path) -> Process:
    """Start a rank in its placement slot, which exposes only its own GPUs."""
    return hosts.start(
        SlotMember("trainer", rank), _COMMAND, {**environment, "LOCAL_RANK": "0"}, log
    )


def _check_alive(processes: Sequence[Process], rank: int) -> None:
    """Raise TrainError if a rank that was started here has exited."""
    if processes and processes[rank - 1].poll() is not None:
        raise TrainError(f"rank {rank} did not start: it {processes[rank - 1].exit_reason()}")


def _is_agents() -> bool:
    """Whether the store belongs to torchrun's agent, and lives as long as it does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(world: RankInfo) -> Any:
    """The store through which ranks connect: torchrun's, or rank 0's."""
    from torch._C._distributed_c10d import TCPStore

    is_host = world.rank == 0 and not _is_agents()
    try:
        return TCPStore(
            world.address,
            world.port,
            world.size,
            is_host,
            timedelta(seconds=_START_S),
            wait_for_workers=False,
        )
    except Exception as error:
        raise TrainError(
            f"rank {world.rank} cannot reach {world.address}:{world.port}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _torch_timeout(timeout_s: float) -> float:
    """Timeout for torch, longer than ours, whose error says which rank is stuck."""
    return 2 * timeout_s + 30


def _enter(store: Any, name: str, world: RankInfo, device: str, timeout_s: float) -> None:
    """Join the process group of the rendezvous attempt ``name``."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(world.local_rank)
    with _on_this_machine(world):
        dist.init_process_group(
            backend,
            store=PrefixStore(f"ramify/{name}", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=_torch_timeout(timeout_s)),
        )


@contextlib.contextmanager
def _on_this_machine(world: RankInfo) -> Iterator[None]:
    """Use the loopback interface for ranks of one machine: gloo would use this host's name, which
    may not resolve."""
    name = "GLOO_SOCKET_IFNAME"
    if name in os.environ or world.address != "127.0.0.1" or not sys.platform.startswith("linux"):
        yield
        return
    os.environ[name] = "lo"
    try:
        yield
    finally:
        del os.environ[name]


def _accept_ranks(world: RankInfo, mesh: MeshSizes, connection_type: Any) -> list[Any]:
    """Rank 0's connections to the other ranks, which errors name by their place in ``mesh``. The
    address and key for connecting back are broadcast over the process group."""
    import torch.distributed as dist

    size = world.size
    if size == 1:
        return []
    host = "127.0.0.1" if world.address == "127.0.0.1" else socket.gethostbyname(world.address)
    with Listener(host, 2 * size) as listener:
        dist.broadcast_object_list([listener.address, listener.key], 0)
        connections: dict[tuple[int, str], Connection] = {}
        hosts: dict[int, str] = {}
        until = time.monotonic() + _START_S
        while len(connections) < 2 * (size - 1):
            try:
                joined = listener.accept(until - time.monotonic())
            except TimeoutError:
                raise TrainError(
                    f"a rank did not come back to rank 0 within {_START_S:g} s"
                ) from None
            connection, (rank, kind, place) = joined
            connections[rank, kind], hosts[rank] = connection, place
    return [
        connection_type(
            rank,
            connections[rank, "talk"],
            connections[rank, "watch"],
            f"{mesh.place(rank)}, {hosts[rank]}",
        )
        for rank in range(1, size)
    ]


def _connect_back(world: RankInfo) -> tuple[Connection, Connection]:
    import torch.distributed as dist

    address_and_key: list[Any] = [None, None]
    dist.broadcast_object_list(address_and_key, 0)
    address, key = address_and_key
    place = f"process {os.getpid()} on {socket.gethostname()}"
    talk, watch = (connect(address, key, (world.rank, kind, place)) for kind in ("talk", "watch"))
    return talk, watch


def _device(device: str, world: RankInfo) -> Any:
    import torch

    return torch.device("cuda", world.local_rank) if device == "cuda" else torch.device("cpu")


def _check_port(port: int | None) -> None:
    if port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"compute.shard.port={port} is not available ({error.strerror}): another run may "
                "use it; leave it out to use a free port"
            ) from None


def gather(
    store: Any, size: int, wait_s: float, look: Callable[[int], None] = lambda _: None
) -> str:
    """As rank 0: the attempt's name, once every other rank has it. ``look`` is called with each
    missing rank, and raises if it has exited. Raises TrainError if a rank does not join within
    ``wait_s``."""
    name, answered = secrets.token_hex(8), set()
    store.set(_AT, name)
    until = time.monotonic() + wait_s
    missing = list(range(1, size))
    while missing:
        for rank in missing:
            if store.check([f"{_AT}/join/{rank}"]):
                token = store.get(f"{_AT}/join/{rank}").decode()
                if token not in answered:  # it may be a dead rank's; then a new token follows
                    store.set(f"{_AT}/answer/{token}", name)
                    answered.add(token)
        missing = [rank for rank in missing if not store.check([f"{_AT}/here/{name}/{rank}"])]
        for rank in missing:
            look(rank)
            if time.monotonic() > until:
                raise TrainError(f"rank {rank} did not start within {wait_s:g} s")
        if missing:
            time.sleep(_POLL_S)
    return name


def come(store: Any, rank: int, wait_s: float) -> str:
    """As another rank: the attempt's name. Raises TrainError if rank 0 does not answer within
    ``wait_s``."""
    token = secrets.token_hex(8)
    store.set(f"{_AT}/join/{rank}", token)
    try:
        store.wait([f"{_AT}/answer/{token}"], timedelta(seconds=wait_s))
    except Exception as error:  # torch raises different types for a lost connection and a timeout
        raise TrainError(
            f"rank {rank} got no answer from rank 0 within {wait_s:g} s, or the store is gone"
        ) from error
    name = str(store.get(f"{_AT}/answer/{token}").decode())
    store.set(f"{_AT}/here/{name}/{rank}", "")
    return name


def began(store: Any) -> bool:
    """Whether an earlier attempt in this store passed rank 0's checks and waited for other
    ranks."""
    return bool(store.check([_AT]))


if __name__ == "__main__":
    found = RankInfo.of_environment()
    if found is None or found.rank == 0:
        sys.exit("ramify.train.backends.launch is started by rank 0 of a run, or by torchrun")
    follow(found)
