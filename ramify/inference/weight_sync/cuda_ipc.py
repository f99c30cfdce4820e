"""Weight sync over CUDA IPC, for engines on the trainer's own GPU.

The trainer sends memory handles over HTTP, and engines use them to open its GPU memory.

A handle consists of bytes and numbers, sent as base64 and JSON, so nothing is unpickled. The
trainer holds each chunk's memory until the second chunk after it is requested. No test covers this
module, because it needs a GPU that two processes share.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ramify.errors import ConfigError
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


class CudaIpcWeightSync:
    """A weight sync in which engines read the trainer's GPU memory directly, because they run on
    the same GPU."""

    def __init__(self, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._held: list[Tensor] = []

    def open(self, num_engines: int) -> list[dict[str, Any]]:
        _require_cuda()
        return [{"weight_sync": "cuda_ipc"}] * num_engines

    def join(self) -> None:
        """Do nothing, because trainer and engines need no connection."""

    def chunks(
        self, sources: Iterable[LazyExportWeight], version: int, *, whole: bool
    ) -> Iterator[WeightChunk]:
        for part, is_last in in_chunks(sources, self._chunk_bytes):
            _, length = offsets(source.num_bytes for source in part)
            buffer = torch.empty(length, dtype=torch.uint8, device="cuda")
            pack_into_buffer(buffer, part)
            # An engine does not wait for the GPU stream of this process.
            torch.cuda.synchronize()
            self._held = [*self._held[-1:], buffer]
            yield WeightChunk(
                {
                    **weight_update_info(part, version),
                    "handle": _export_handle(buffer),
                    "length": length,
                },
                is_last,
            )

    def close(self) -> None:
        self._held = []

    @staticmethod
    def receiver(info: Info) -> CudaIpcWeightReceiver:
        _require_cuda()
        return CudaIpcWeightReceiver()


class CudaIpcWeightReceiver:
    """The engine's half of the weight sync over CUDA IPC.

    Implements ``WeightReceiver``.
    """

    def unpack_chunk(self, info: Info) -> Iterator[WeightUpdateTensor]:
        arguments = [
            base64.b64decode(part["bytes"]) if isinstance(part, dict) else part
            for part in info["handle"]
        ]
        storage = torch.UntypedStorage._new_shared_cuda(*arguments)
        buffer = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)[
            : int(info["length"])
        ]
        yield from tensor_views(info, buffer)
        # The engine's reply allows the trainer to free the memory, so all copies must be done then.
        torch.cuda.synchronize()

    def finished(self, version: str) -> None: ...

    def close(self) -> None: ...


def _export_handle(buffer: Tensor) -> list[Any]:
    """Return a handle that lets another process open a tensor's GPU memory.

    It contains the device, memory handle, sizes, reference counter and event, as PyTorch exports
    them, with bytes in base64.
    """
    shared = buffer.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return [
        {"bytes": base64.b64encode(each).decode()} if isinstance(each, bytes) else each
        for each in shared
    ]


def _require_cuda() -> None:
    if not torch.cuda.is_available():
        raise ConfigError(
            "the weight sync 'cuda_ipc' needs a GPU that trainer and engine share; use 'shared' "
            "or 'gloo'"
        )
