"""One safetensors file of weights: written sequentially, read from one mapping, with a checksum
that detects a torn file.

    8 bytes: header length │ header: JSON, name -> dtype, shape, offsets │ the tensors in order

It is written by calls and not through a mapping: touching a page of a newly mapped file costs more
than copying it. For the same reason a file that no process has open is overwritten (``is_free``).

Not here: folders and versions (see ``file_sync.py``).
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ramify.inference.weight_sync.base import WeightPiece, WeightSource

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Type -> its name in safetensors."""
_KINDS = {name: dtype for dtype, name in _DTYPES.items()}
_WORD = 8
"""Bytes."""
_BLOCK = 1 << 20
"""Bytes that are summed and written while they are in the CPU cache."""
_HEADER_STEP = 64
"""The tensors begin at a multiple of this."""
_AGAIN = "let the trainer write it again"


def write(path: Path, sources: list[WeightSource]) -> tuple[int, int]:
    """Write ``sources`` in order, over an existing file: (bytes, their checksum). Raises
    OSError."""
    with path.open("r+b" if path.exists() else "xb") as file:
        header = _header(sources)
        at, total = len(header), _sum(torch.frombuffer(bytearray(header), dtype=torch.uint8), 0)
        file.write(header)
        for source in sources:
            data = source.full().cpu().contiguous().view(-1).view(torch.uint8)
            total += _append(file, data, at)
            at += len(data)
        file.truncate(at)
    return at, _short(total)


def read(path: Path, expected: tuple[int, int]) -> Iterator[WeightPiece]:
    """The tensors of a file for which ``write`` returned ``expected``. Raises ValueError before the
    first tensor if the file differs."""
    try:
        if (length := path.stat().st_size) != expected[0]:
            raise ValueError(
                f"{path} is torn: it has {length} bytes instead of {expected[0]}; {_AGAIN}"
            )
        with path.open("r+b") as file:
            # Opened for writing, since torch only accepts writable memory.
            whole = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if _short(_sum(whole, 0)) != expected[1]:
        raise ValueError(f"{path} is torn: its bytes differ; {_AGAIN}")
    yield from _tensors(whole, path)


def is_free(path: Path) -> bool:
    """Whether no process has the file open or mapped, as far as this machine's kernel knows: only
    then does it grant a lease. False if leases are not supported, as on a network file system."""
    try:
        with path.open("r+b") as file:
            # The signal for a holder whose lease is broken; this one is ignored by default.
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except (OSError, AttributeError):  # not Linux
        return False
    return True


def _header(sources: list[WeightSource]) -> bytes:
    about: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for source in sources:
        about[source.name] = {
            "dtype": _DTYPES[source.dtype],
            "shape": list(source.shape),
            "data_offsets": [at, at + source.num_bytes],
        }
        at += source.num_bytes
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _WORD) % _HEADER_STEP)
    return len(text).to_bytes(_WORD, "little") + text


def _append(file: BinaryIO, data_N: Tensor, at: int) -> int:
    """Append bytes at offset ``at``; returns their checksum."""
    total = 0
    for start in range(0, len(data_N), _BLOCK):
        block = data_N[start : start + _BLOCK]
        total += _sum(block, at + start)
        file.write(block.numpy().data)
    return total


def _sum(data_N: Tensor, at: int) -> int:
    """Share of some bytes at offset ``at`` in the checksum of a file, which is the sum of its
    64-bit words. It runs at the speed of memory and detects torn files, not attackers."""
    before, after = at % _WORD, -(at + len(data_N)) % _WORD
    words = data_N[: len(data_N) - (_WORD - after) % _WORD] if not before else data_N[:0]
    if words.storage_offset() % _WORD:
        words = words.clone()
    total = int(words.view(torch.int64).sum())
    if rest := len(data_N) - len(words):
        padded = torch.zeros(before + rest + after, dtype=torch.uint8)
        padded[before : before + rest] = data_N[len(words) :]
        total += int(padded.view(torch.int64).sum())
    return total


def _short(total: int) -> int:
    """Reduce a sum of words: sums overflow in the same way, whatever the order of addition."""
    return total % (1 << 63)


def _tensors(whole_N: Tensor, path: Path) -> Iterator[WeightPiece]:
    try:
        start = _WORD + int.from_bytes(bytes(whole_N[:_WORD].tolist()), "little")
        about = json.loads(bytes(whole_N[_WORD:start].numpy()))
        about.pop("__metadata__", None)
        for name, about_tensor in about.items():
            begin, end = (start + place for place in about_tensor["data_offsets"])
            data, kind = whole_N[begin:end], _KINDS[about_tensor["dtype"]]
            if len(data) != math.prod(about_tensor["shape"]) * kind.itemsize:
                raise ValueError(f"'{name}' has {len(data)} bytes")
            if begin % kind.itemsize:  # unaligned after a tensor of odd length
                data = data.clone()
            yield WeightPiece(name, data.view(kind).view(about_tensor["shape"]))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from None
