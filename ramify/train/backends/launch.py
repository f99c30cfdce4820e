"""Start the processes (ranks) of a training run, or join the ones that ``torchrun`` started, and
connect them to rank 0.

    ramify train R compute.backend=fsdp compute.shard.ranks=2
        this process is rank 0, and starts the others
    torchrun --nproc-per-node 2 -m ramify train R compute.backend=fsdp
        each process is a rank; all except rank 0 follow

Before any process starts, this module checks that the ranks fit the mesh and that GPUs, gloo, NCCL
and the port are available. What ranks do together is in ``rank_group.py``, and how ranks of
torchrun find each other is in ``torchrun_rendezvous.py``. Ranks on several machines need a shared
file system for checkpoints.

Every rank opens three channels to rank 0, which prove that it belongs to the run:

    talk     RankSettings, then the verbs of ``rank_group.py``
    watch    heartbeats (``rank_monitor.py``)
    store    addresses of the connections that gloo or NCCL open (``rank_key_value_store.py``);
             each group proves these, too, before it is used (``rank_group_authentication.py``)
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import msgspec

from ramify.actors.child_process import ChildProcess, ProcessHandle, pythonpath_environment
from ramify.actors.connect_back import ConnectBackListener, WorkerConnectInfo, read_ticket
from ramify.actors.launcher import STOPPED_S, Launcher, RoleInstanceId
from ramify.actors.rank_group_authentication import AuthenticatedGroupFactory
from ramify.actors.run_channel import LOOPBACK, AuthenticatedChannel, connect
from ramify.errors import ConfigError, TrainError
from ramify.logging import ComponentLogger, join_parent_run_log
from ramify.train.backends.base import FsdpSpec
from ramify.train.backends.torchrun_rendezvous import RankInfo, TorchrunAddressExchange

_POLL_S = 0.05
_START_S = 120.0
"""Time limit in seconds for the start of a rank, including its imports."""
_log = ComponentLogger("train")


class RankHello(msgspec.Struct, frozen=True):
    """The first message that a rank sends on each of its connections to rank 0."""

    rank: int
    kind: Literal["talk", "watch", "store"]
    place: str
    """Process id and host of the rank, for error messages."""


class RankSettings(msgspec.Struct, frozen=True):
    """The first message from rank 0 to another rank, with the settings of the whole group."""

    size: int
    """Number of ranks."""
    local_rank: int
    """Index of the GPU that the rank uses, unless torchrun sets it."""
    device: str
    """``cpu`` or ``cuda``."""
    timeout_s: float
    is_local: bool
    """True if all ranks are on one machine."""


def run_follower_rank() -> None:
    """Follow rank 0 until the run ends and then exit, if torchrun started this process as another
    rank.

    Otherwise do nothing.
    """
    world = RankInfo.of_environment()
    if world is not None and world.rank > 0:
        serve_follower_rank(world)


def is_restarted() -> bool:
    """Return True if torchrun restarted this process, rank 0, after an attempt that passed its
    checks."""
    world = RankInfo.of_environment()
    if world is None or world.rank:
        return False
    return TorchrunAddressExchange(world).has_earlier_attempt()


def num_ranks(shard: FsdpSpec, device: str) -> int:
    """Return the number of ranks of a run on this machine.

    It is the configured number, or else the size of the torchrun group, or else one per GPU, or one
    on a CPU.
    """
    import torch

    world = RankInfo.of_environment()
    num_gpus = torch.cuda.device_count() if device == "cuda" else 0
    return shard.ranks or (world.size if world is not None else max(1, num_gpus))


def check_ranks(shard: FsdpSpec, device: str, *, elsewhere: bool = False) -> int:
    """Check that the configured ranks can be started, and count them.

    Returns the number of ranks. ``elsewhere`` means that some ranks run on other machines, so that
    the number of local GPUs does not matter. Raises ConfigError if the ranks cannot be started.
    """
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
    else:
        TorchrunAddressExchange(world)
    return size


class JoinedRanks(NamedTuple):
    """What rank 0 needs once all ranks have joined: the group of ranks, its own worker and a
    clean-up function."""

    rank_group: Any
    """A ``RankGroup``, through which rank 0 calls the other ranks."""
    rank: Any
    """The ``RankModelWorker`` of this process, rank 0."""
    close: Callable[[], None]
    """Free the resources of the ranks' rendezvous: the key-value store and, with torchrun, the
    published address.
    """


@contextlib.contextmanager
def _kill_on_failure(processes: Sequence[ProcessHandle]) -> Iterator[None]:
    """Kill all started ranks if the ``with`` block raises an exception, so that no processes are
    left behind."""
    import torch.distributed as dist

    try:
        yield
    except BaseException:
        for process in processes:
            process.end(0.0)
        if dist.is_initialized():
            dist.destroy_process_group()
        raise


def start_ranks(
    shard: FsdpSpec, device: str, stacks: Path, hosts: Launcher | None = None
) -> JoinedRanks:
    """Start the other ranks on ``hosts`` or on this machine, or connect to the ones that torchrun
    started.

    Raises ConfigError if the configuration does not allow that, and TrainError if a rank does not
    start.
    """
    from ramify.actors.rank_group import RankGroup
    from ramify.actors.rank_key_value_store import KeyValueStoreServer
    from ramify.actors.rank_monitor import RankConnection, RankProgress
    from ramify.train.backends.rank import RankModelWorker

    size = check_ranks(shard, device, elsewhere=hosts is not None)
    world = RankInfo.of_environment()
    pulse = RankProgress()
    processes: list[ProcessHandle] = []
    meeting: TorchrunAddressExchange | None = None
    with _kill_on_failure(processes):
        if world is None:
            address = LOOPBACK if hosts is None else hosts.address
            is_local = address == LOOPBACK
            listener = ConnectBackListener(address, shard.port or 0)
        else:
            meeting = TorchrunAddressExchange(world)
            is_local, listener = world.is_local, meeting.listen()
        with listener:
            for other in range(1, size) if world is None else ():
                processes.append(_start_rank(hosts, other, size, listener, stacks))
            channels = _accept_ranks(listener, size, lambda rank: _check_alive(processes, rank))
        settings = RankSettings(size, 0, device, shard.timeout_s, is_local)
        for rank in range(1, size):
            local_rank = rank if hosts is None else 0
            channels[rank, "talk"].channel.send(
                msgspec.structs.replace(settings, local_rank=local_rank)
            )
        store = KeyValueStoreServer(
            [channels[rank, "store"].channel for rank in range(1, size)],
            lambda: _check_all_alive(processes),
        )
        members = AuthenticatedGroupFactory(listener.key, is_local)
        local_rank = 0 if world is None else world.local_rank
        _join_process_group(store.store, 0, settings, members, local_rank)
        own = RankModelWorker(0, size, _device(device, local_rank), shard.timeout_s, pulse, members)
    mesh = shard.mesh(size)
    connections = [
        RankConnection(
            rank,
            channels[rank, "talk"].channel,
            channels[rank, "watch"].channel,
            f"{mesh.rank_coordinates(rank)}, {channels[rank, 'talk'].place}",
        )
        for rank in range(1, size)
    ]
    group = RankGroup(own, pulse, connections, processes, shard.timeout_s, stacks)

    def close() -> None:
        store.close()
        if meeting is not None:
            meeting.withdraw_address()

    return JoinedRanks(group, own, close)


def stop_ranks(joined: JoinedRanks) -> None:
    """Shut down all ranks."""
    import torch.distributed as dist

    joined.rank_group.close()
    if dist.is_initialized():
        dist.destroy_process_group()
        _forget_meshes()
    joined.close()


def _forget_meshes() -> None:
    """Make torch forget the meshes in its cache of sharding decisions.

    If this process later forms a mesh of the same shape, torch would otherwise use process groups
    that no longer exist.
    """
    from torch.distributed.tensor import debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


def serve_follower_rank(world: RankInfo) -> NoReturn:
    """Run this process as a torchrun rank other than 0.

    It executes the commands of rank 0 until rank 0 ends, and then exits. Raises TrainError if rank
    0 cannot be reached in time.
    """
    meeting = TorchrunAddressExchange(world)
    until = time.monotonic() + _torch_timeout(FsdpSpec().timeout_s)
    while True:
        ticket = meeting.find_rank_zero_address()
        try:
            if ticket is not None:
                _run_follower(world.rank, world.local_rank, _open_channels(ticket, world.rank))
        except (OSError, EOFError):  # rank 0 of an earlier attempt, which is gone
            pass
        if time.monotonic() > until:
            raise TrainError(f"rank {world.rank} got no answer from rank 0: see rank 0's output")
        time.sleep(_POLL_S)


def _run_follower(
    rank: int, local_rank: int | None, channels: Mapping[str, AuthenticatedChannel]
) -> NoReturn:
    """Join the process group, execute the commands of rank 0 until rank 0 ends, and exit.

    Raises EOFError or OSError if rank 0 ends before the group is complete.
    """
    import torch.distributed as dist

    from ramify.actors.rank_group import serve_rank_zero
    from ramify.actors.rank_key_value_store import KeyValueStoreClient
    from ramify.actors.rank_monitor import RankProgress
    from ramify.train.backends.rank import RankModelWorker

    settings: RankSettings = channels["talk"].receive(RankSettings)
    local_rank = settings.local_rank if local_rank is None else local_rank
    join_parent_run_log(f"rank {rank}")
    members = AuthenticatedGroupFactory(channels["store"].key, settings.is_local)
    store = KeyValueStoreClient(channels["store"])  # torch does not keep it alive
    _join_process_group(store, rank, settings, members, local_rank)
    pulse = RankProgress()
    device, timeout_s = _device(settings.device, local_rank), settings.timeout_s
    own = RankModelWorker(rank, settings.size, device, timeout_s, pulse, members)
    _log.info("rank_ready", f"rank {rank} of {settings.size} is ready", rank=rank)
    serve_rank_zero(own, pulse, channels["talk"], channels["watch"], rank, timeout_s)
    own.wait()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # regular cleanup takes longer than some runs


# --- how ranks connect

_COMMAND = (sys.executable, "-m", "ramify.train.backends.launch")


def _start_rank(
    hosts: Launcher | None, rank: int, size: int, listener: ConnectBackListener, stacks: Path
) -> ProcessHandle:
    """Start the process of one rank and return its handle.

    It runs on this machine, or where the launcher ``hosts`` places it. That machine then exposes
    only the GPUs assigned to the rank.
    """
    import torch

    threads = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // size))}
    environment = {**threads, **pythonpath_environment()}
    log = stacks.resolve() / "ranks" / f"rank-{rank}.log"
    ticket = listener.create_ticket(str(rank))
    if hosts is not None:
        return hosts.start(RoleInstanceId("trainer", rank), _COMMAND, environment, log, ticket)
    return ChildProcess(
        _COMMAND, environment=environment, log=log, stdin=ticket, stopped_s=STOPPED_S
    )


def _check_alive(processes: Sequence[ProcessHandle], rank: int) -> None:
    """Raise TrainError if this process started the process of ``rank`` and it has exited."""
    if processes and processes[rank - 1].poll() is not None:
        raise TrainError(f"rank {rank} did not start: it {processes[rank - 1].exit_reason()}")


def _check_all_alive(processes: Sequence[ProcessHandle]) -> None:
    for rank in range(1, 1 + len(processes)):
        _check_alive(processes, rank)


class _RankChannel(NamedTuple):
    channel: AuthenticatedChannel
    place: str


def _accept_ranks(
    listener: ConnectBackListener, size: int, look: Callable[[int], None]
) -> dict[tuple[int, str], _RankChannel]:
    """Accept connections until every other rank has joined.

    Returns the channels, keyed by rank and kind of channel. While it waits, it calls ``look`` with
    each rank that is still missing, and ``look`` raises an exception if that rank has exited.
    Raises TrainError if a rank does not join in time.
    """
    joined: dict[tuple[int, str], _RankChannel] = {}
    wanted = [(rank, kind) for rank in range(1, size) for kind in ("talk", "watch", "store")]
    until = time.monotonic() + _START_S

    def missing() -> list[int]:
        ended = [key for key, each in joined.items() if each.channel.is_ended]
        for key in ended:  # of an earlier attempt
            joined.pop(key).channel.close()
        return sorted({rank for rank, kind in wanted if (rank, kind) not in joined})

    def look_at_missing() -> None:
        for rank in missing():
            look(rank)

    first: RankHello
    while ranks := missing():
        try:
            left_s = max(0.0, until - time.monotonic())
            channel, first = listener.accept(RankHello, left_s, look_at_missing)
        except TimeoutError:
            raise TrainError(f"rank {ranks[0]} did not start within {_START_S:g} s") from None
        key = first.rank, first.kind
        if key in joined or key not in wanted:
            joined.pop(key, _RankChannel(channel, "")).channel.close()
        if key in wanted:
            joined[key] = _RankChannel(channel, first.place)
    return joined


def _open_channels(ticket: WorkerConnectInfo, rank: int) -> dict[str, AuthenticatedChannel]:
    """Open this rank's three connections to rank 0, and return them by kind."""
    place = f"process {os.getpid()} on {socket.gethostname()}"
    kinds: tuple[Literal["talk", "watch", "store"], ...] = ("talk", "watch", "store")
    return {
        kind: connect(ticket.address, ticket.key, RankHello(rank, kind, place)) for kind in kinds
    }


def _torch_timeout(timeout_s: float) -> float:
    """Return the timeout in seconds for torch's collective operations.

    It is longer than Ramify's own timeout, so that the user sees Ramify's error, which names the
    stuck rank.
    """
    return 2 * timeout_s + 30


def _join_process_group(
    store: Any,
    rank: int,
    settings: RankSettings,
    members: AuthenticatedGroupFactory,
    local_rank: int,
) -> None:
    """Join torch's process group of all ranks.

    Raises TrainError if that fails.
    """
    import torch
    import torch.distributed as dist

    from ramify.train.backends.activation_memory import disable_malloc_retention

    is_cuda = settings.device == "cuda"
    if is_cuda:
        torch.cuda.set_device(local_rank)
    else:  # before gloo's threads run: glibc allows mallopt only while no other thread allocates
        disable_malloc_retention()

    def group() -> Any:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=settings.size,
            timeout=timedelta(seconds=_torch_timeout(settings.timeout_s)),
        )
        return dist.group.WORLD

    try:
        members.create_group(group, *(("cpu", "cuda") if is_cuda else ("cpu",)))
    except dist.DistError as error:
        raise TrainError(str(error).partition("\n")[0]) from None


def _device(device: str, local_rank: int) -> Any:
    import torch

    return torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")


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


if __name__ == "__main__":
    own_ticket = read_ticket()
    number = int(own_ticket.name)
    _run_follower(number, None, _open_channels(own_ticket, number))
