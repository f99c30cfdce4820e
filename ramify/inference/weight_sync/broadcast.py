"""Broadcast in buckets, from the trainer to all engines at once: gloo between CPUs, NCCL between
GPUs.

The process group is separate from any group among the trainer's ranks: trainer and engines meet at
a store that the trainer opens. Rank 0 is the trainer. Every wait is bounded by ``timeout_s``, so an
engine that dies in the middle fails the sync instead of blocking it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from ramify.errors import ConfigError
from ramify.inference.weight_sync.base import (
    CHUNK_BYTES,
    Info,
    WeightChunk,
    WeightPiece,
    WeightSource,
    described,
    fill,
    in_chunks,
    offsets,
    pieces_of,
)


class GlooSync:
    """Weight sync by broadcast between CPUs. Implements ``WeightSync``."""

    backend: ClassVar[str] = "gloo"

    def __init__(
        self,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        chunk_bytes: int = CHUNK_BYTES,
        timeout_s: float = 120,
    ) -> None:
        """``address`` is this machine's address as the engines reach it; ``port`` 0 takes a free
        port."""
        self._address = address
        self._port = port
        self._chunk_bytes = chunk_bytes
        self._timeout_s = timeout_s
        self._store: Any = None
        self._group: Any = None
        self._size = 0
        self._name = secrets.token_hex(4)
        self._buffer = _Buffer(self.backend)

    def open(self, num_engines: int) -> list[dict[str, Any]]:
        _need(self.backend)
        self._size = num_engines + 1
        try:
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                self._address,
                self._port,
                None,
                True,
                timeout=timedelta(seconds=self._timeout_s),
                wait_for_workers=False,
            )
        except (RuntimeError, dist.DistError) as error:
            raise ConfigError(
                f"the port {self._address}:{self._port} for weights cannot be opened "
                f"({_first(error)}): choose another, or 0"
            ) from None
        about = {
            "weight_sync": self.backend,
            "master_address": self._address,
            "master_port": self._store.port,
            "world_size": self._size,
            "group": self._name,
            "timeout_s": self._timeout_s,
        }
        return [{**about, "rank_offset": index + 1} for index in range(num_engines)]

    def join(self) -> None:
        self._group = _group(self.backend, self._store, self._name, 0, self._size, self._timeout_s)

    def chunks(
        self, sources: Iterable[WeightSource], version: int, *, whole: bool
    ) -> Iterator[WeightChunk]:
        for part, is_last in in_chunks(sources, self._chunk_bytes):
            _, length = offsets(source.num_bytes for source in part)
            buffer = self._buffer.of(length)
            fill(buffer, part)
            about = {**described(part, version), "length": length}
            yield WeightChunk(about, is_last, partial(self._send, buffer))

    def _send(self, buffer: Tensor) -> None:
        """Raises RuntimeError if an engine is gone. The group is closed then; otherwise engines
        that have not begun to receive would wait until the timeout."""
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
        self._group = self._store = None
        self._buffer = _Buffer(self.backend)

    @staticmethod
    def receiver(info: Info) -> BroadcastReceiver:
        return BroadcastReceiver(info, "gloo")


class NcclSync(GlooSync):
    """Weight sync by broadcast between GPUs."""

    backend: ClassVar[str] = "nccl"

    @staticmethod
    def receiver(info: Info) -> BroadcastReceiver:
        return BroadcastReceiver(info, "nccl")


class BroadcastReceiver:
    """Receiver of ``GlooSync`` and ``NcclSync``, made while the trainer is in ``join``. Implements
    ``WeightReceiver``."""

    def __init__(self, info: Info, backend: str) -> None:
        _need(backend)
        timeout_s = float(info["timeout_s"])
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                str(info["master_address"]),
                int(info["master_port"]),
                None,
                False,
                timeout=timedelta(seconds=timeout_s),
            )
            self._group = _group(
                backend,
                store,
                str(info["group"]),
                int(info["rank_offset"]),
                int(info["world_size"]),
                timeout_s,
            )
        except (RuntimeError, dist.DistError) as error:
            raise ValueError(
                f"the trainer's group at {info['master_address']}:{info['master_port']} could not "
                f"be joined: {_first(error)}"
            ) from None
        self._store: Any = store
        self._backend, self._buffer = backend, _Buffer(backend)

    def take(self, info: Info) -> Iterator[WeightPiece]:
        buffer = self._buffer.of(int(info["length"]))
        try:
            _broadcast(self._group, buffer)
        except (RuntimeError, dist.DistError) as error:
            raise ValueError(
                f"a broadcast of {buffer.numel()} bytes did not arrive: {_first(error)}"
            ) from None
        yield from pieces_of(info, buffer)

    def finished(self, version: str) -> None: ...

    def close(self) -> None:
        self._group = self._store = None
        self._buffer = _Buffer(self._backend)


class _Buffer:
    """One buffer for all chunks, since each has arrived before the next begins: allocating memory
    costs more than a copy."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._bytes: Tensor | None = None

    def of(self, length: int) -> Tensor:
        if self._bytes is None or len(self._bytes) < length:
            self._bytes = torch.empty(length, dtype=torch.uint8, device=_device(self._backend))
        return self._bytes[:length]


def _need(backend: str) -> None:
    available = dist.is_available() and (
        dist.is_gloo_available() if backend == "gloo" else dist.is_nccl_available()
    )
    if not available or (backend == "nccl" and not torch.cuda.is_available()):
        raise ConfigError(
            f"the weight sync '{backend}' needs a torch with {backend}"
            + (" and a GPU" if backend == "nccl" else "")
        )


def _group(backend: str, store: Any, name: str, rank: int, size: int, timeout_s: float) -> Any:
    prefixed, timeout = c10d.PrefixStore(name, store), timedelta(seconds=timeout_s)
    if backend == "gloo":
        return dist.ProcessGroupGloo(prefixed, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(prefixed, rank, size, options)


def _broadcast(group: Any, bytes: Tensor) -> None:
    group.broadcast(bytes, 0).wait()
    if bytes.is_cuda:
        torch.cuda.synchronize(bytes.device)


def _device(backend: str) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if backend == "nccl"
        else torch.device("cpu")
    )


def _first(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
