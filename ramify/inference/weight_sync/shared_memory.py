"""Weight sync through shared memory, for engines on the trainer's machine.

It alternates between two buffers: one is written while engines read the other.

    in_place     each buffer holds all weights, and engines compute with them in place: an update
                 is one copy in all and one request per engine, which has either the old weights
                 or the new, never a mix
    otherwise    each buffer holds a chunk, which engines copy: for engines on GPUs, and if memory
                 is short

The buffers are files in memory (``/dev/shm``; elsewhere a temporary folder), mapped by both sides
and readable by this user alone. If trainer and engine are one process, no weight sync is needed:
the engine uses the trainer's own weights.

Buffers of a trainer that was killed are removed by the next one that opens this weight sync in the
same folder (``base.py``).
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ramify.errors import ConfigError
from ramify.inference.weight_sync.base import (
    CHUNK_BYTES,
    MEMORY,
    PREFIX,
    Info,
    LazyExportWeight,
    WeightChunk,
    WeightUpdateTensor,
    create_locked_file,
    in_chunks,
    new_temporary_name,
    offsets,
    pack_into_buffer,
    remove_stale_files,
    reserve_file_space,
    tensor_views,
    weight_update_info,
)


class SharedMemoryWeightSync:
    """A weight sync through memory that the trainer shares with engines on the same machine."""

    def __init__(
        self, *, chunk_bytes: int = CHUNK_BYTES, folder: str = "", in_place: bool = False
    ) -> None:
        """Create the trainer's half of a weight sync through shared memory.

        The buffers are files in ``folder``, by default files in memory. With ``in_place``, each
        buffer holds all weights, and engines compute with them directly. This is ignored if both
        buffers would take more than half of the free space.
        """
        self._chunk_bytes = chunk_bytes
        self._in_place = in_place
        self._next = 0
        """Number of the shared buffer from which no engine computes at the moment."""
        self._folder = (
            Path(folder) if folder else MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
        )
        self._name = new_temporary_name()
        self._locks: dict[int, int] = {}
        """Buffer -> file descriptor that holds the buffer's lock."""
        self._buffers: list[_MappedFile | None] = [None, None]

    def open(self, num_engines: int) -> list[dict[str, Any]]:
        remove_stale_files(self._folder)
        return [
            {"weight_sync": "shared", "folder": str(self._folder), "name": self._name}
        ] * num_engines

    def join(self) -> None:
        """Do nothing, because trainer and engines need no connection."""

    def chunks(
        self, sources: Iterable[LazyExportWeight], version: int, *, whole: bool
    ) -> Iterator[WeightChunk]:
        if self._in_place:
            sources = list(sources)
            # Later updates reuse the buffers, whose space no longer counts as free.
            if any(self._buffers) or self._has_room_for(sources):
                yield self._all_at_once(sources, version)
                return
            self._in_place = False
        for number, (part, is_last) in enumerate(in_chunks(sources, self._chunk_bytes)):
            _, length = offsets(source.num_bytes for source in part)
            # At least a full chunk, so that later chunks need no other mapping.
            buffer = self._buffer(number % 2, max(length, self._chunk_bytes))
            pack_into_buffer(buffer.bytes, part)
            about = {
                **weight_update_info(part, version),
                "buffer": number % 2,
                "length": len(buffer.bytes),
            }
            yield WeightChunk(about, is_last)

    def _all_at_once(self, sources: list[LazyExportWeight], version: int) -> WeightChunk:
        _, length = offsets(source.num_bytes for source in sources)
        which, self._next = self._next, 1 - self._next
        buffer = self._buffer(which, length)
        pack_into_buffer(buffer.bytes, sources)
        about = {"buffer": which, "length": len(buffer.bytes), "stays": True}
        return WeightChunk({**weight_update_info(sources, version), **about}, True)

    def _has_room_for(self, sources: Sequence[LazyExportWeight]) -> bool:
        both = 2 * sum(source.num_bytes for source in sources)
        return 2 * both <= shutil.disk_usage(self._folder).free

    def close(self) -> None:
        for buffer in self._buffers:
            if buffer is not None:
                buffer.close()
        self._buffers, self._next = [None, None], 0
        for which, handle in self._locks.items():
            self._path(which).unlink(missing_ok=True)
            os.close(handle)
        self._locks.clear()

    def _path(self, which: int) -> Path:
        return self._folder / f"{self._name}-{which}"

    def _buffer(self, which: int, length: int) -> _MappedFile:
        """Return one of the two shared buffers, enlarged to at least ``length`` bytes if necessary.

        Engines see the new length and map the buffer again.
        """
        mapped = self._buffers[which]
        if mapped is not None and len(mapped.bytes) >= length:
            return mapped
        try:
            if which not in self._locks:
                self._locks[which] = create_locked_file(self._path(which))
            reserve_file_space(self._locks[which], length)
        except OSError as error:
            raise ConfigError(
                f"{self._folder} has no room for a buffer of {length >> 20} MiB for weights "
                f"({error.strerror}): give the weight sync smaller chunk_bytes or another folder, "
                "or the container more shared memory (--shm-size)"
            ) from None
        self._buffers[which] = mapped = _MappedFile(self._path(which))
        return mapped

    @staticmethod
    def receiver(info: Info) -> SharedMemoryWeightReceiver:
        return SharedMemoryWeightReceiver(info)


class SharedMemoryWeightReceiver:
    """The engine's side of the shared-memory weight sync.

    It returns tensors that are views of the shared buffers. Implements ``WeightReceiver``.
    """

    def __init__(self, info: Info) -> None:
        folder, name = Path(str(info["folder"])), str(info["name"])
        if not name.startswith(PREFIX) or "/" in name:
            raise ValueError(f"'{name[:80]}' is not the name of a weights buffer")
        self._paths = [folder / f"{name}-{which}" for which in (0, 1)]
        self._buffers: list[_MappedFile | None] = [None, None]

    def unpack_chunk(self, info: Info) -> Iterator[WeightUpdateTensor]:
        which, length = int(info["buffer"]), int(info["length"])
        mapped = self._buffers[which]
        if mapped is None or len(mapped.bytes) != length:
            try:
                mapped = self._buffers[which] = _MappedFile(self._paths[which])
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"the buffer {self._paths[which]} cannot be read ({error}): shared memory is "
                    "for engines on the trainer's machine and of the same user; use the weight "
                    "sync 'file' or 'gloo'"
                ) from None
        yield from tensor_views(info, mapped.bytes, stays=bool(info.get("stays")))

    def finished(self, version: str) -> None: ...

    def close(self) -> None:
        for buffer in self._buffers:
            if buffer is not None:
                buffer.close()
        self._buffers = [None, None]


class _MappedFile:
    """A memory-mapped file, presented as a tensor of bytes."""

    def __init__(self, path: Path) -> None:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            self._map = mmap.mmap(handle, 0)  # torch only accepts writable memory
        finally:
            os.close(handle)
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def close(self) -> None:
        """Close the mapping of the file into memory.

        The memory itself is freed when the last view of it is gone.
        """
        self.bytes = torch.empty(0, dtype=torch.uint8)
