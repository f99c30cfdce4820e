"""How weights get from a trainer to engines in other processes: one carrier, two halves, each
carrier in one small file.

    trainer   sources ── Carrier.chunks ──▶ Chunk.info  ── HTTP: update_weights ──▶ engine
                            │ bytes                                                   │
                            └──────── memory, a file, a broadcast, a GPU's handle ────┴─▶ Receiver.take ──▶ Piece, Piece, …

What goes over HTTP is names, shapes and where the bytes are, in the form of vLLM's weight transfer
(``names``, ``dtype_names``, ``shapes``). Tensors are streamed: a carrier holds two chunks at most,
whatever the model's size. Which bytes arrived is not believed but checked: every sync ends with the
fingerprint and the canary (``train/selfcheck.py``).

Leaves out who is told what and when (``inference/http``), and how a training layout becomes tensors
(``layout.py``). A carrier of one's own is named ``module:Class``; an engine takes it where it was
started with the same name.
"""

from __future__ import annotations

import errno
import importlib
import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from ramify.errors import ConfigError, nearest

WEIGHT_SYNCS = {
    "shared": "ramify.inference.weight_sync.shared_memory:SharedMemorySync",
    "file": "ramify.inference.weight_sync.file_sync:FileSync",
    "gloo": "ramify.inference.weight_sync.broadcast:GlooSync",
    "nccl": "ramify.inference.weight_sync.broadcast:NcclSync",
    "cuda_ipc": "ramify.inference.weight_sync.cuda_ipc:CudaIpcSync",
    "delta": "ramify.inference.weight_sync.delta:DeltaSync",
}
"""Name -> class."""
CHUNK_BYTES = 32 << 20
"""Of a chunk, at least one tensor: two of them are what a sync needs of memory."""
ALIGNMENT = 64
_ALLOCATE: Callable[[int, int, int], None] | None = getattr(os, "posix_fallocate", None)
"""The system's call; None on macOS, where it is looked whether there is room."""
Info = Mapping[str, Any]


class AdaptedMatrix(msgspec.Struct, frozen=True, eq=False):
    """A matrix with a low-rank adapter: base + scale * b @ a (LoRA, 2106.09685). Called, it is that
    sum."""

    base: Tensor
    """[rows, columns], held still."""
    pair: Callable[[], tuple[Tensor, Tensor]]
    """(a [rank, columns], b [rows, rank])"""
    scale: float

    def __call__(self) -> Tensor:
        return added(self.base, *self.pair(), self.scale)


def added(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """base + scale * b @ a, rounded in one way wherever it is computed."""
    return base + (scale * b @ a).to(base.dtype)


class WeightSource(NamedTuple):
    """One tensor of the trained policy as an engine is to have it. Nothing is gathered or cast
    until ``full`` is called."""

    name: str
    """As in a checkpoint in Hugging Face's layout."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    stamp: Hashable
    """Equal stamps of two syncs say that the tensor has not changed between them; None where nobody
    knows."""
    full: Callable[[], Tensor]
    """The whole tensor, contiguous, detached."""
    adapted: AdaptedMatrix | None = None
    """What ``full`` adds up, for a carrier whose engines can do that."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightPiece(NamedTuple):
    """What an engine is to take: a whole tensor, or values for some places of one."""

    name: str
    tensor: Tensor
    places: Tensor | None = None
    """Places of ``tensor``'s values in the flattened parameter; None: the tensor is whole."""
    stays: bool = False
    """Its memory stays as it is until another sync was taken: an engine may compute with it, and
    needs no copy."""
    holds: bool = False
    """It stays at least until the chunk was taken: an engine may copy it together with others."""


class WeightChunk(msgspec.Struct, eq=False):
    """A part of one sync."""

    info: dict[str, Any]
    """What engines are told: plain data."""
    is_last: bool
    """It ends the sync."""
    send: Callable[[], None] | None = None
    """What the trainer does meanwhile, in a thread; a broadcast needs both sides at once."""


class WeightSync(Protocol):
    """The trainer's half. Belongs to one trainer; ``open`` comes first."""

    def open(self, num_engines: int) -> list[dict[str, Any]]:
        """For each engine what it is told once. Raises ConfigError where this machine does not have
        what it takes."""
        ...

    def join(self) -> None:
        """Done in a thread while the engines are told; waits for them where both sides have to
        meet."""
        ...

    def chunks(
        self, sources: Iterable[WeightSource], version: int, *, whole: bool
    ) -> Iterator[WeightChunk]:
        """The weights of ``version``, in order. A chunk's bytes stay until the one after the next
        is asked for. ``whole``: as if no engine had anything yet."""
        ...

    def close(self) -> None:
        """Free what is held. Idempotent."""
        ...


class WeightReceiver(Protocol):
    """The engine's half; made of what ``open`` said, by ``WeightSync.receiver``."""

    def take(self, info: Info) -> Iterator[WeightPiece]:
        """What one chunk brings; a tensor holds until the next one is asked for. Raises ValueError
        for a chunk that is not whole, and Stale where it builds on weights that this engine does
        not have."""
        ...

    def finished(self, version: str) -> None:
        """All chunks of a sync were taken."""
        ...

    def close(self) -> None: ...


def weight_sync_class(name: str) -> Any:
    """The carrier of ``CARRIERS``, or at ``module:Class``. Raises ConfigError."""
    path = WEIGHT_SYNCS.get(name, name)
    module, sign, attribute = path.partition(":")
    if not sign:
        raise ConfigError(
            f"unknown carrier '{name}': {nearest(name, WEIGHT_SYNCS)}; or module:Class of one of "
            "your own"
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the carrier '{name}' cannot be imported: {error}") from error


class StaleWeights(ValueError):
    """A chunk builds on weights that the engine does not have; everything has to be sent."""


def in_chunks(
    sources: Iterable[WeightSource], chunk_bytes: int
) -> Iterator[tuple[list[WeightSource], bool]]:
    """``sources`` in order, together until they have ``chunk_bytes``, and whether these are the
    last; a larger tensor is alone."""
    gathered: list[WeightSource] = []
    room = chunk_bytes
    for source in sources:
        if gathered and source.num_bytes > room:
            yield gathered, False
            gathered, room = [], chunk_bytes
        gathered.append(source)
        room -= source.num_bytes
    if gathered:
        yield gathered, True


def described(sources: Sequence[WeightSource], version: int) -> dict[str, Any]:
    """What vLLM's update says of tensors, and the version."""
    return {
        "names": [source.name for source in sources],
        "dtype_names": [str(source.dtype).removeprefix("torch.") for source in sources],
        "shapes": [list(source.shape) for source in sources],
        "version": version,
    }


def offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """(where each of some parts begins in a buffer, aligned; the buffer's length)."""
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, at


def pieces_of(info: Info, buffer: Tensor, *, stays: bool = False) -> Iterator[WeightPiece]:
    """Views of the tensors that ``info`` describes in a buffer of bytes [N]. Raises ValueError
    where they do not fit."""
    try:
        described = list(zip(info["names"], info["dtype_names"], info["shapes"], strict=True))
        kinds = [getattr(torch, dtype) for _, dtype, _ in described]
        sizes = [
            math.prod(shape) * kind.itemsize
            for (_, _, shape), kind in zip(described, kinds, strict=True)
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"names, dtype_names and shapes do not describe tensors: {error!r}"
        ) from None
    starts, length = offsets(sizes)
    if length > buffer.numel():
        raise ValueError(f"the tensors have {length} bytes, and {buffer.numel()} were carried")
    for (name, _, shape), kind, start, size in zip(described, kinds, starts, sizes, strict=True):
        yield WeightPiece(name, buffer[start : start + size].view(kind).view(shape), stays=stays)


def reserve(
    handle: int, length: int, allocate: Callable[[int, int, int], None] | None = _ALLOCATE
) -> None:
    """Make the file of ``handle`` at least ``length`` bytes long. Raises OSError where there is no
    room: now, and not by a signal while it is written through a mapping."""
    if allocate is not None:
        allocate(handle, 0, length)
        return
    missing = length - os.fstat(handle).st_size
    if missing <= 0:
        return
    disk = os.fstatvfs(handle)
    if missing > disk.f_bavail * disk.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(handle, length)


def fill(buffer: Tensor, sources: Sequence[WeightSource]) -> int:
    """Copy ``sources`` into a buffer of bytes [N], one after the other; the length used."""
    sizes = [source.num_bytes for source in sources]
    starts, length = offsets(sizes)
    for source, start, size in zip(sources, starts, sizes, strict=True):
        buffer[start : start + size].view(source.dtype).view(source.shape).copy_(source.full())
    return length
