"""Weight sync that broadcasts the trainer's weights to all inference engines at once, in large
buffers.

It uses gloo between CPUs and NCCL between GPUs.

The process group is separate from any group among the trainer's ranks. Rank 0 is the trainer: it
opens a listener, and the information that engines get first contains a ticket with which they
connect. The members of the group prove that they have the ticket's key before the first tensor is
sent. Every wait is limited by ``timeout_s``, so an engine that dies in the middle fails the update
instead of blocking it.
"""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from ramify.actors.connect_back import ConnectBackListener, WorkerConnectInfo
from ramify.actors.message_encoding import decode
from ramify.actors.rank_group_authentication import verify_members
from ramify.actors.rank_key_value_store import KeyValueStoreClient, KeyValueStoreServer
from ramify.actors.run_channel import LOOPBACK, AuthenticatedChannel, connect
from ramify.errors import ConfigError, TrainError
from ramify.inference.weight_sync.base import (
    CHUNK_BYTES,
    Info,
    LazyExportWeight,
    WeightChunk,
    WeightUpdateTensor,
    in_chunks,
    offsets,
    pack_into_buffer,
    tensor_views,
    weight_update_info,
)


class GlooWeightSync:
    """A weight sync that broadcasts weights from the trainer's CPU to the CPUs of all engines."""

    backend: ClassVar[str] = "gloo"

    def __init__(
        self,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        chunk_bytes: int = CHUNK_BYTES,
        timeout_s: float = 120,
    ) -> None:
        """Create the trainer's half of a broadcast weight sync.

        Engines reach the trainer at ``address``. If ``port`` is 0, a free port is used.
        """
        self._address = address
        self._port = port
        self._chunk_bytes = chunk_bytes
        self._timeout_s = timeout_s
        self._listener: ConnectBackListener | None = None
        self._store: KeyValueStoreServer | None = None
        self._group: Any = None
        self._size = 0
        self._buffer = _Buffer(self.backend)

    def open(self, num_engines: int) -> list[dict[str, Any]]:
        _require_backend(self.backend)
        self._size = num_engines + 1
        try:
            self._listener = ConnectBackListener(self._address, self._port)
        except OSError as error:
            raise ConfigError(
                f"the port {self._address}:{self._port} for weights cannot be opened "
                f"({error.strerror}): choose another, or 0"
            ) from None
        about = {
            "weight_sync": self.backend,
            "ticket": base64.b64encode(self._listener.create_ticket("engine")).decode(),
            "world_size": self._size,
            "timeout_s": self._timeout_s,
        }
        return [{**about, "rank_offset": index + 1} for index in range(num_engines)]

    def join(self) -> None:
        assert self._listener is not None
        listener, self._listener = self._listener, None
        channels: list[AuthenticatedChannel] = []
        until = time.monotonic() + self._timeout_s
        with listener:
            try:
                while len(channels) < self._size - 1:
                    channels.append(listener.accept(str, until - time.monotonic())[0])
            except TimeoutError as error:
                raise RuntimeError(f"an engine did not join the group: {error}") from None
            finally:
                # Also after a failure, so that ``close`` disconnects the engines that did join.
                self._store = KeyValueStoreServer(channels)
        group = _GroupSpec(self.backend, 0, self._size, self._timeout_s, self._address == LOOPBACK)
        try:
            self._group = _form_group(group, self._store.store, listener.key)
        except TrainError as error:
            # The caller ignores a RuntimeError here, because the engines' replies tell the reason.
            raise RuntimeError(str(error)) from None

    def chunks(
        self, sources: Iterable[LazyExportWeight], version: int, *, whole: bool
    ) -> Iterator[WeightChunk]:
        for part, is_last in in_chunks(sources, self._chunk_bytes):
            _, length = offsets(source.num_bytes for source in part)
            buffer = self._buffer.of(length)
            pack_into_buffer(buffer, part)
            about = {**weight_update_info(part, version), "length": length}
            yield WeightChunk(about, is_last, partial(self._send, buffer))

    def _send(self, buffer: Tensor) -> None:
        """Broadcast a buffer of weights to all engines.

        If an engine is gone, close the group and raise RuntimeError. The engines that have not
        begun to receive would otherwise wait until the timeout.
        """
        try:
            _broadcast(self._group, buffer)
            return
        except RuntimeError as error:
            why = str(error)
        # Outside the except block, neither a frame nor a traceback refers to the group, so its
        # connections close.
        self._group = None
        raise RuntimeError(why)

    def close(self) -> None:
        self._group = None
        if self._listener is not None:
            self._listener.close()
        if self._store is not None:
            self._store.close()
        self._listener = self._store = None
        self._buffer = _Buffer(self.backend)

    @staticmethod
    def receiver(info: Info) -> BroadcastWeightReceiver:
        return BroadcastWeightReceiver(info, "gloo")


class NcclWeightSync(GlooWeightSync):
    """A weight sync that broadcasts weights from the trainer's GPU to the GPUs of all engines."""

    backend: ClassVar[str] = "nccl"

    @staticmethod
    def receiver(info: Info) -> BroadcastWeightReceiver:
        return BroadcastWeightReceiver(info, "nccl")


class BroadcastWeightReceiver:
    """The engine's side of the gloo and NCCL weight syncs.

    Its constructor joins the trainer's process group, so the trainer must be waiting in ``join``.
    Implements ``WeightReceiver``.
    """

    def __init__(self, info: Info, backend: str) -> None:
        _require_backend(backend)
        ticket: WorkerConnectInfo = decode(base64.b64decode(info["ticket"]), WorkerConnectInfo)
        group = _GroupSpec(
            backend,
            int(info["rank_offset"]),
            int(info["world_size"]),
            float(info["timeout_s"]),
            # On the loopback, the trainer listens on a Unix socket, whose address is a path.
            ticket.address.startswith("/"),
        )
        self._channel: AuthenticatedChannel | None = None
        try:
            self._channel = connect(ticket.address, ticket.key, ticket.name)
            self._store = KeyValueStoreClient(self._channel)
            self._group: Any = _form_group(group, self._store, ticket.key)
        except (OSError, RuntimeError, TrainError) as error:
            self._close_channel()
            raise ValueError(
                f"the trainer's group at {ticket.address} could not be joined: "
                f"{_first_error_line(error)}"
            ) from None
        self._backend, self._buffer = backend, _Buffer(backend)

    def unpack_chunk(self, info: Info) -> Iterator[WeightUpdateTensor]:
        buffer = self._buffer.of(int(info["length"]))
        try:
            _broadcast(self._group, buffer)
        except (RuntimeError, dist.DistError) as error:
            raise ValueError(
                f"a broadcast of {buffer.numel()} bytes did not arrive: {_first_error_line(error)}"
            ) from None
        yield from tensor_views(info, buffer)

    def finished(self, version: str) -> None: ...

    def close(self) -> None:
        self._group = None
        self._close_channel()
        self._buffer = _Buffer(self._backend)

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()


class _Buffer:
    """A reusable buffer in which chunks of weights are broadcast, one after another.

    One buffer is enough because each chunk has arrived before the next one begins, and allocating
    memory costs more than a copy.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._bytes: Tensor | None = None

    def of(self, length: int) -> Tensor:
        if self._bytes is None or len(self._bytes) < length:
            self._bytes = torch.empty(length, dtype=torch.uint8, device=_device(self._backend))
        return self._bytes[:length]


def _require_backend(backend: str) -> None:
    available = dist.is_available() and (
        dist.is_gloo_available() if backend == "gloo" else dist.is_nccl_available()
    )
    if not available or (backend == "nccl" and not torch.cuda.is_available()):
        raise ConfigError(
            f"the weight sync '{backend}' needs a torch with {backend}"
            + (" and a GPU" if backend == "nccl" else "")
        )


class _GroupSpec(NamedTuple):
    """The settings with which the trainer or an engine joins the broadcast process group."""

    backend: str
    rank: int
    size: int
    timeout_s: float
    is_local: bool
    """True if all members are on one machine."""


def _form_group(spec: _GroupSpec, store: Any, key: bytes) -> Any:
    """Form the process group in which the trainer broadcasts weights to the engines.

    Raises TrainError if a member does not have the secret key.
    """
    # Not ``init_process_group``: a process has one default group, which the trainer's ranks use.
    timeout = timedelta(seconds=spec.timeout_s)
    if spec.backend == "gloo":
        gloo: Any = dist.ProcessGroupGloo
        options: Any = gloo._Options()
        options._timeout = timeout
        is_linux = sys.platform.startswith("linux")
        # By default gloo listens on the host's name, which may not resolve, or may be reachable
        # from other machines.
        device = {"interface": "lo"} if spec.is_local and is_linux else {}
        options._devices = [gloo.create_device(**device)]
        group: Any = gloo(store, spec.rank, spec.size, options)
    else:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = dist.ProcessGroupNCCL(store, spec.rank, spec.size, options)
    verify_members(group, key, _device(spec.backend))
    return group


def _broadcast(group: Any, bytes: Tensor) -> None:
    group.broadcast(bytes, 0).wait()
    # NCCL's ``wait`` only orders GPU streams; callers need to know that the bytes have arrived.
    if bytes.is_cuda:
        torch.cuda.synchronize(bytes.device)


def _device(backend: str) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if backend == "nccl"
        else torch.device("cpu")
    )


def _first_error_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
