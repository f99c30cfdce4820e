"""The interface of weight syncs, and the code that they share.

A weight sync sends weights from a trainer to inference engines in other processes. It has one half
in the trainer and one in the engine.

    trainer   sources ── WeightSync.chunks ──▶ WeightChunk.info ── HTTP ──▶ engine
                             │ bytes                                          │
                             └── memory, a file, a broadcast, a GPU handle ───┴─▶
                                 WeightReceiver.unpack_chunk ──▶ WeightUpdateTensor, …

HTTP requests contain names, shapes and the location of the bytes, in the form of vLLM's weight
transfer (``names``, ``dtype_names``, ``shapes``). Tensors are streamed: a weight sync holds at most
two chunks, whatever the model's size. Every update is verified: it ends with a comparison of
fingerprints and a test of the replies (``train/engine_consistency_checks.py``).

A custom method is named ``module:Class``; an engine accepts it if it was started with the same
name.

The function ``sources`` converts the layout used in training into what an engine needs: adapters
added, shards gathered, precision changed.

    sources(module, dtype)      one tensor at a time, computed when the weight sync asks for it

Names and shapes are those of a checkpoint in Hugging Face's layout. Engines load it into their own
compute layout (fused, split over GPUs, packed). An output matrix that shares its weights with the
embeddings is one tensor; each engine shares its own, and the test of the replies detects an engine
that did not.

Files and folders that hold weights exist as long as the process that made them, which holds a lock
on each. An unlocked one belongs to a trainer that was killed, and the next trainer that opens a
weight sync removes it (``remove_stale_files``). Locks are used instead of process ids, because
process ids are reused.

Which requests are sent when is decided in ``inference/http``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import secrets
import shutil
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor, nn

CHUNK_BYTES = 32 << 20
"""Bytes per chunk, unless a single tensor is larger. A sync needs memory for two chunks."""
# Bytes can be viewed as another type only from a multiple of its item size on.
ALIGNMENT = 64
_ALLOCATE: Callable[[int, int, int], None] | None = getattr(os, "posix_fallocate", None)
"""The system call that reserves file space. None on macOS, where free space is checked instead."""
Info = Mapping[str, Any]


class LoraAdaptedMatrix(msgspec.Struct, frozen=True, eq=False):
    """A matrix with a low-rank adapter (LoRA, arXiv:2106.09685): base + scale * b @ a.

    Calling it computes that sum.
    """

    base: Callable[[], Tensor]
    """Returns the frozen base matrix [rows, columns]."""
    pair: Callable[[], tuple[Tensor, Tensor]]
    """Returns the adapter's matrices: a [rank, columns] and b [rows, rank]."""
    scale: float
    dtype: torch.dtype
    """Precision of the base matrix and of the sum."""

    def __call__(self) -> Tensor:
        return merge_adapter(self.base(), *self.pair(), self.scale)


class LazyFrozenWeight(msgspec.Struct, frozen=True, eq=False):
    """A frozen weight that is gathered only when it is needed, for example from shards.

    Calling it gathers the whole tensor.
    """

    gather: Callable[[], Tensor]
    stamp: Hashable
    """Value that changes whenever the tensor changes, as in ``LazyExportWeight.stamp``."""

    def __call__(self) -> Tensor:
        return self.gather()


def merge_adapter(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return a base matrix with a low-rank adapter merged into it: base + scale * b @ a.

    Trainer and engine share this function so that they round in the same way.
    """
    return base + (scale * b @ a).to(base.dtype)


class LazyExportWeight(NamedTuple):
    """A weight of the trained policy that is converted for the engines only when it is sent.

    It is gathered and converted only when ``full`` is called.

    Example:
        LazyExportWeight("norm.weight", (128,), torch.float32, stamp=3, full=lambda: tensor)
    """

    name: str
    """Name of the tensor in a checkpoint in Hugging Face's layout."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    stamp: Hashable
    """Value that changes whenever the tensor changes: if it is the same in two syncs, the tensor
    has not changed between them. None if it is unknown whether the tensor changes."""
    full: Callable[[], Tensor]
    """Returns the whole tensor, contiguous and detached."""
    adapted: LoraAdaptedMatrix | None = None
    """The base matrix and the adapter whose sum ``full`` returns, for weight syncs whose engines
    can compute the sum themselves. None for a matrix without an adapter."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightUpdateTensor(NamedTuple):
    """A tensor in a weight update, as the engine receives it.

    It is a whole tensor, or new values for some of its positions.

    Example:
        WeightUpdateTensor("norm.weight", tensor)                  # a whole tensor, [hidden size]
        WeightUpdateTensor("norm.weight", tensor[places], places)  # new values at some positions
    """

    name: str
    tensor: Tensor
    places: Tensor | None = None
    """Positions of the values in the flattened parameter. None if ``tensor`` is whole."""
    stays: bool = False
    """True if the memory stays unchanged until the engine has received the next sync. The engine
    may then compute with it without a copy."""
    holds: bool = False
    """True if the memory stays unchanged until the engine has received the whole chunk. The engine
    may then copy several tensors together."""


class WeightChunk(msgspec.Struct, eq=False):
    """One chunk of a weight update, and its description for the engines.

    The description is sent over HTTP.

    Example:
        WeightChunk(info={"names": ["embed"]}, is_last=False)    # what every engine receives
    """

    info: dict[str, Any]
    """Description sent to the engines, as plain data."""
    is_last: bool
    """True for the last chunk of an update."""
    send: Callable[[], None] | None = None
    """Work that the trainer does in a thread at the same time, such as its side of a broadcast."""


class WeightSync(Protocol):
    """A method of sending the trainer's weights to engines, from the trainer's side.

    It belongs to one trainer. Call ``open`` first.
    """

    def open(self, num_engines: int) -> list[dict[str, Any]]:
        """Prepare to send weights to the given number of engines.

        Returns the information that each engine needs to receive them. Raises ConfigError if this
        machine does not support the method.
        """
        ...

    def join(self) -> None:
        """Wait until the engines have connected to the trainer, if this method needs connections.

        Called in a thread while engines get the information from ``open``.
        """
        ...

    def chunks(
        self, sources: Iterable[LazyExportWeight], version: int, *, whole: bool
    ) -> Iterator[WeightChunk]:
        """Yield the chunks in which the weights of the given version are sent, in order.

        A chunk's bytes stay valid until the second chunk after it is requested. With ``whole``, all
        weights are sent, as if engines had none.
        """
        ...

    def close(self) -> None:
        """Free all resources that the weight sync holds.

        A second call has no effect.
        """
        ...


class WeightReceiver(Protocol):
    """The part of a weight sync that receives weights in an engine.

    ``WeightSync.receiver`` creates it from the setup message that the trainer sends first.

    Example:
        for piece in receiver.unpack_chunk(chunk.info):
            parameters[piece.name].copy_(piece.tensor)
    """

    def unpack_chunk(self, info: Info) -> Iterator[WeightUpdateTensor]:
        """Yield the tensors that one chunk of a weight update contains.

        Each is valid until the next one is requested. Raises ValueError for an incomplete chunk,
        and MissingDeltaBaseError if it holds differences from weights that this engine does not
        have.
        """
        ...

    def finished(self, version: str) -> None:
        """Complete a weight update in the engine after its last chunk."""
        ...

    def close(self) -> None: ...


class MissingDeltaBaseError(ValueError):
    """Raised when a chunk is a delta against weights that the engine does not have.

    All weights must then be sent.
    """


def in_chunks(
    sources: Iterable[LazyExportWeight], chunk_bytes: int
) -> Iterator[tuple[list[LazyExportWeight], bool]]:
    """Divide a sequence of weights into chunks of at most ``chunk_bytes`` bytes.

    Yields each chunk with a flag that is True for the last. A larger tensor is a chunk by itself.
    """
    chunk: list[LazyExportWeight] = []
    room = chunk_bytes
    for source in sources:
        if chunk and source.num_bytes > room:
            yield chunk, False
            chunk, room = [], chunk_bytes
        chunk.append(source)
        room -= source.num_bytes
    if chunk:
        yield chunk, True


def weight_update_info(sources: Sequence[LazyExportWeight], version: int) -> dict[str, Any]:
    """Return the description of tensors in a weight update, in the format of vLLM's request.

    It has names, dtypes and shapes, and the version of the weights.
    """
    return {
        "names": [source.name for source in sources],
        "dtype_names": [str(source.dtype).removeprefix("torch.") for source in sources],
        "shapes": [list(source.shape) for source in sources],
        "version": version,
    }


def offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return the offset of each part in a buffer that holds parts of the given sizes.

    Returns each part's aligned start and the buffer's length, all in bytes.
    """
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, at


def tensor_views(
    info: Info, buffer: Tensor, *, stays: bool = False
) -> Iterator[WeightUpdateTensor]:
    """Yield the tensors in a byte buffer [N] as views of it.

    ``info`` has their names, precisions and shapes. Raises ValueError if they do not fit in the
    buffer.
    """
    try:
        weight_update_info = list(
            zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
        )
        kinds = [getattr(torch, dtype) for _, dtype, _ in weight_update_info]
        sizes = [
            math.prod(shape) * kind.itemsize
            for (_, _, shape), kind in zip(weight_update_info, kinds, strict=True)
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"names, dtype_names and shapes do not describe tensors: {error!r}"
        ) from None
    starts, length = offsets(sizes)
    if length > buffer.numel():
        raise ValueError(f"the tensors have {length} bytes, but {buffer.numel()} arrived")
    for (name, _, shape), kind, start, size in zip(
        weight_update_info, kinds, starts, sizes, strict=True
    ):
        yield WeightUpdateTensor(
            name, buffer[start : start + size].view(kind).view(shape), stays=stays
        )


def reserve_file_space(
    handle: int, length: int, allocate: Callable[[int, int, int], None] | None = _ALLOCATE
) -> None:
    """Reserve space for an open file, so that it is at least ``length`` bytes long.

    ``handle`` is its descriptor.

    Raises OSError if there is not enough space. Without this reservation, a later write through a
    memory mapping would kill the process with a signal.
    """
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


def pack_into_buffer(buffer: Tensor, sources: Sequence[LazyExportWeight]) -> int:
    """Copy weights into a byte buffer [N], one after another.

    Returns the number of bytes used.
    """
    sizes = [source.num_bytes for source in sources]
    starts, length = offsets(sizes)
    for source, start, size in zip(sources, starts, sizes, strict=True):
        buffer[start : start + size].view(source.dtype).view(source.shape).copy_(source.full())
    return length


Lazy = Callable[[], Tensor]
"""Computes and returns a tensor when called."""
_WHOLE = (Tensor, nn.Parameter)
"""Types of tensors that are not sharded across ranks."""


def to_lazy_weights(
    named: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> list[LazyExportWeight]:
    """Convert named parameters to the lazy form in which they are sent to engines.

    Their precision is ``dtype``. Sharded parameters (DTensor) are gathered on demand, so all ranks
    must request tensors in the same order.
    """
    return [to_lazy_weight(name, tensor, dtype) for name, tensor in named]


def to_lazy_weight(
    name: str, tensor: Tensor, dtype: torch.dtype, make: Lazy | None = None
) -> LazyExportWeight:
    """Convert one parameter to the lazy form in which it is sent to engines.

    If ``make`` is given, the tensor that it returns is sent instead of the parameter. An example is
    the sum of the parameter and its adapter.
    """
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    stamp = frozen_param_version(tensor) if make is None else getattr(make, "stamp", None)
    adapted = make if isinstance(make, LoraAdaptedMatrix) else None
    return LazyExportWeight(
        name,
        tuple(tensor.shape),
        kind,
        stamp,
        partial(_full_tensor, tensor if make is None else make, kind),
        adapted,
    )


def frozen_param_version(tensor: Tensor) -> Hashable:
    """Return the version marker of a frozen parameter, or None for any other tensor.

    The marker changes whenever the parameter is written to. Trained parameters have no such value:
    the fused AdamW of PyTorch 2.13 writes them without increasing their version counter.
    """
    if tensor.requires_grad or not isinstance(tensor, nn.Parameter):
        return None
    local = tensor if type(tensor) in _WHOLE else getattr(tensor, "_local_tensor", tensor)
    return (id(tensor), local.data_ptr(), local._version)


def _full_tensor(tensor_or_lazy: Tensor | Lazy, dtype: torch.dtype) -> Tensor:
    tensor = tensor_or_lazy if isinstance(tensor_or_lazy, Tensor) else tensor_or_lazy()
    gather = None if type(tensor) in _WHOLE else getattr(tensor, "full_tensor", None)
    whole: Tensor = (gather() if callable(gather) else tensor).detach()
    return whole if whole.dtype == dtype else whole.to(dtype)


def to_checkpoint_names(
    model: Any, given: Iterable[LazyExportWeight]
) -> Iterator[LazyExportWeight]:
    """Rename weights to a transformers model's checkpoint names, for engines that load those.

    A tensor with all experts of a layer is split into one tensor per expert.
    """
    from ramify.models.stored_weights import to_checkpoint_tensors

    for each in given:
        blank = torch.empty(each.shape, dtype=each.dtype, device="meta")
        parts = list(to_checkpoint_tensors(model, each.name, blank))
        if [part.shape for _, part in parts] == [blank.shape]:
            yield each._replace(name=parts[0][0])
            continue
        split = _SplitSource(model, each, len(parts))
        for index, (name, part) in enumerate(parts):
            full = partial(split.part, index)
            yield LazyExportWeight(name, tuple(part.shape), each.dtype, each.stamp, full)


class _SplitSource:
    """A weight that is sent to engines as several tensors, one after another.

    It stays in memory from the first part to the last.
    """

    def __init__(self, model: Any, whole: LazyExportWeight, num_parts: int) -> None:
        self._model = model
        self._whole = whole
        self._num_parts = num_parts
        self._parts: list[Tensor] = []

    def part(self, index: int) -> Tensor:
        """Return part number ``index`` of the split weight as a contiguous tensor."""
        from ramify.models.stored_weights import to_checkpoint_tensors

        if not self._parts:
            found = to_checkpoint_tensors(self._model, self._whole.name, self._whole.full())
            self._parts = [tensor for _, tensor in found]
        part = self._parts[index].contiguous()
        if index + 1 == self._num_parts:
            self._parts = []
        return part


PREFIX = "ramify-weights-"
MEMORY = Path("/dev/shm")
"""Folder whose files are kept in memory on Linux."""
_HELD = "held-"
"""Part of the name of each locked file or folder. If its lock is free, the process that created it
has exited, and ``sweep`` removes it."""


def new_temporary_name() -> str:
    """Return a unique name for a weight sync's file or folder.

    ``remove_stale_files`` recognizes such names and removes what crashed processes left behind.
    """
    return f"{PREFIX}{_HELD}{secrets.token_hex(8)}"


def create_locked_file(path: Path) -> int:
    """Create a file and hold an exclusive lock on it.

    Returns the descriptor that holds the lock.
    """
    while True:
        # O_NOFOLLOW, since every user may write to /dev/shm and put a link there.
        handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle
        os.close(handle)  # removed by another process before it was locked


def create_locked_folder(below: Path) -> tuple[Path, int]:
    """Create a locked folder that only this user can access.

    Returns the folder and the descriptor that holds its lock.
    """
    while True:
        path = below / new_temporary_name()
        path.mkdir(0o700)
        with contextlib.suppress(FileNotFoundError):  # removed before it was locked
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(handle, fcntl.LOCK_EX)
            if path.is_dir():
                return path, handle
            os.close(handle)


def remove_stale_files(folder: Path) -> None:
    """Remove weight sync files and folders in ``folder`` that exited processes left behind."""
    for path in folder.glob(f"{PREFIX}{_HELD}*"):
        with contextlib.suppress(OSError):  # another user's, or removed meanwhile
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # While locked, so that a process that waits for the lock sees the removal.
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
            finally:
                os.close(handle)
