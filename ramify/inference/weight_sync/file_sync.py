"""Weight sync through safetensors files, for engines that can read the trainer's disk.

A small file that is replaced atomically points to the newest weights.

    FOLDER/v000012/model-00001.safetensors …      the weights of one version, never changed
    FOLDER/v000012/model.safetensors.index.json   in Hugging Face's layout, so that any engine can
                                                  load the folder
    FOLDER/current.json                           the newest complete version: written to another
                                                  file and renamed, last of all

The pointer contains the length and a checksum of each file: a file that was cut off by a full disk
or a kill is rejected by name before any of its tensors is used. The last two versions stay. The
older one makes room for the next version; in memory it is overwritten if no process has it open.
Other files in FOLDER are not touched. A temporary folder, used if none is given, is removed when
the weight sync is closed; that of a trainer that was killed is removed by the next one
(``base.py``).

A file is written sequentially and read through a memory mapping:

    8 bytes: header length │ header: JSON, name -> dtype, shape, offsets │ the tensors in order

It is written by system calls and not through a mapping: touching a page of a newly mapped file
costs more than copying it. For the same reason a file that no process has open is overwritten
(``is_file_unused``).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import mmap
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from torch import Tensor

from ramify.errors import ConfigError, StoreError
from ramify.inference.weight_sync.base import (
    MEMORY,
    Info,
    LazyExportWeight,
    WeightChunk,
    WeightUpdateTensor,
    create_locked_folder,
    in_chunks,
    remove_stale_files,
)

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
"""PyTorch type -> name of the type in safetensors."""
_KINDS = {name: dtype for dtype, name in _DTYPES.items()}
_WORD = 8
"""Size of a word of the checksum, in bytes."""
_BLOCK = 1 << 20
"""Number of bytes that are summed and written together, so that they stay in the CPU cache."""
_HEADER_STEP = 64
"""The first tensor begins at a multiple of this number of bytes."""
_AGAIN = "let the trainer write it again"


def write_tensors(path: Path, sources: list[LazyExportWeight]) -> tuple[int, int]:
    """Write tensors in the given order to a safetensors file.

    Returns the length of the file in bytes and its checksum. An existing file is overwritten.
    Raises OSError if the file cannot be written.
    """
    with path.open("r+b" if path.exists() else "xb") as file:
        header = _header(sources)
        at, total = (
            len(header),
            _partial_checksum(torch.frombuffer(bytearray(header), dtype=torch.uint8), 0),
        )
        file.write(header)
        for source in sources:
            data = source.full().cpu().contiguous().view(-1).view(torch.uint8)
            total += _append(file, data, at)
            at += len(data)
        file.truncate(at)
    return at, _to_63_bits(total)


def read_tensors(path: Path, expected: tuple[int, int]) -> Iterator[WeightUpdateTensor]:
    """Yield the tensors of a safetensors file.

    ``expected`` is the length and checksum that ``write_tensors`` returned. Raises ValueError
    before the first tensor if the file differs.
    """
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
    if _to_63_bits(_partial_checksum(whole, 0)) != expected[1]:
        raise ValueError(f"{path} is corrupt: its checksum does not match; {_AGAIN}")
    yield from _tensors(whole, path)


def is_file_unused(path: Path) -> bool:
    """Return True if no process has the file open or mapped.

    The check asks the kernel for a lease, which it grants only for unused files. Returns False if
    leases are not supported, as on a network file system.
    """
    try:
        with path.open("r+b") as file:
            # The signal for a holder whose lease is broken; this one is ignored by default.
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except (OSError, AttributeError):  # not Linux
        return False
    return True


def _header(sources: list[LazyExportWeight]) -> bytes:
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
    """Append a tensor's bytes to a file, and return their contribution to its checksum.

    The end of the file is at offset ``at``.
    """
    total = 0
    for start in range(0, len(data_N), _BLOCK):
        block = data_N[start : start + _BLOCK]
        total += _partial_checksum(block, at + start)
        file.write(block.numpy().data)
    return total


def _partial_checksum(data_N: Tensor, at: int) -> int:
    """Return how much the bytes at offset ``at`` contribute to the checksum of their file.

    The checksum is the sum of the file's 64-bit words. The sum runs at memory speed. It detects
    incomplete files, not attackers.
    """
    before, after = at % _WORD, -(at + len(data_N)) % _WORD
    words = data_N[: len(data_N) - (_WORD - after) % _WORD] if not before else data_N[:0]
    # A view as 64-bit integers needs an aligned start in memory as well.
    if words.storage_offset() % _WORD:
        words = words.clone()
    total = int(words.view(torch.int64).sum())
    if rest := len(data_N) - len(words):
        padded = torch.zeros(before + rest + after, dtype=torch.uint8)
        padded[before : before + rest] = data_N[len(words) :]
        total += int(padded.view(torch.int64).sum())
    return total


def _to_63_bits(total: int) -> int:
    """Reduce a checksum of file contents to 63 bits.

    The result does not depend on the order in which words were added.
    """
    # torch's sums wrap around at 2**64, which 2**63 divides.
    return total % (1 << 63)


def _tensors(whole_N: Tensor, path: Path) -> Iterator[WeightUpdateTensor]:
    try:
        start = _WORD + int.from_bytes(bytes(whole_N[:_WORD].tolist()), "little")
        about = json.loads(bytes(whole_N[_WORD:start].numpy()))
        about.pop("__metadata__", None)
        for name, about_tensor in about.items():
            begin, end = (start + place for place in about_tensor["data_offsets"])
            data, kind = whole_N[begin:end], _KINDS[about_tensor["dtype"]]
            if len(data) != math.prod(about_tensor["shape"]) * kind.itemsize:
                raise ValueError(
                    f"'{name}' has {len(data)} bytes, which do not match its type and shape"
                )
            if begin % kind.itemsize:  # unaligned after a tensor of odd length
                data = data.clone()
            yield WeightUpdateTensor(name, data.view(kind).view(about_tensor["shape"]))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from None


POINTER = "current.json"
_FILE_BYTES = 1 << 30
_VERSION = re.compile(r"v\d{6,}")
_WRITTEN = re.compile(
    r"model-\d{5,}\.safetensors|model\.safetensors\.index\.json|(generation_)?config\.json"
)
"""Pattern for the names of the files in one version of the weights."""


class CurrentWeightsFile(msgspec.Struct):
    """The contents of ``current.json``, which points to the newest weights."""

    version: int
    folder: str
    """Name of the folder with the weights, next to ``current.json``."""
    files: dict[str, tuple[int, int]]
    """File name -> (length in bytes, sum of the file's 64-bit words)."""


class FileWeightSync:
    """A weight sync through files in a folder that the engines can read."""

    def __init__(
        self, *, folder: str = "", file_bytes: int = _FILE_BYTES, configuration: str = ""
    ) -> None:
        """Create the trainer's half of a weight sync through files.

        ``folder`` is created if needed. The default is a temporary folder, which ``close`` removes.
        The config.json of the checkpoint ``configuration`` is copied next to the weights, for
        engines that read one.
        """
        self._is_own = not folder
        self._folder, self._lock = (
            (Path(folder), -1) if folder else create_locked_folder(Path(tempfile.gettempdir()))
        )
        self._file_bytes = file_bytes
        self._configuration = configuration
        self._last = self._before = ""
        """Name of the folder with the newest complete version of the weights. ``_before`` names the
        folder of the previous version."""

    def open(self, num_engines: int) -> list[dict[str, Any]]:
        if self._is_own:
            remove_stale_files(self._folder.parent)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"weights cannot be written to {self._folder} ({error.strerror}): give another "
                "folder"
            ) from None
        if (self._folder / POINTER).exists():
            try:
                read_pointer(self._folder)
            except ValueError as error:
                raise ConfigError(
                    f"weights cannot be written to {self._folder}: {error}; give a separate folder"
                ) from None
        return [{"weight_sync": "file", "folder": str(self._folder.resolve())}] * num_engines

    def join(self) -> None:
        """Do nothing, because trainer and engines need no connection."""

    def chunks(
        self, sources: Iterable[LazyExportWeight], version: int, *, whole: bool
    ) -> Iterator[WeightChunk]:
        """Write the weights to files, then yield a single chunk that contains the path of their
        folder."""
        try:
            self._write(sources, version)
        except OSError as error:
            raise StoreError(
                f"the weights of version {version} cannot be written to {self._folder}: {error}"
            ) from error
        yield WeightChunk(
            {"version": version, "path": str(self._folder.resolve() / _version_name(version))}, True
        )

    def close(self) -> None:
        if self._is_own:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _write(self, sources: Iterable[LazyExportWeight], version: int) -> None:
        final = self._folder / _version_name(version)
        fresh = self._folder / f".{final.name}.tmp"
        if final.exists() and not _is_version(final):
            raise FileExistsError(
                f"{final} holds other files: give the weight sync a separate folder"
            )
        for old in (fresh, final):
            shutil.rmtree(old, ignore_errors=True)
        if not self._reuse_old_version(fresh):
            fresh.mkdir()
        files: dict[str, tuple[int, int]] = {}
        places: dict[str, str] = {}
        total = 0
        for number, (part, _) in enumerate(in_chunks(sources, self._file_bytes), 1):
            name = f"model-{number:05d}.safetensors"
            files[name] = write_tensors(fresh / name, part)
            places |= dict.fromkeys((source.name for source in part), name)
            total += sum(source.num_bytes for source in part)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        for leftover in fresh.glob("model-*.safetensors"):  # left over from the overwritten version
            if leftover.name not in files:
                leftover.unlink()
        (fresh / "model.safetensors.index.json").write_text(json.dumps(index))
        for name in ("config.json", "generation_config.json"):
            if self._configuration and (Path(self._configuration) / name).is_file():
                shutil.copyfile(Path(self._configuration) / name, fresh / name)
        fresh.rename(final)
        _replace(
            self._folder / POINTER,
            msgspec.json.encode(CurrentWeightsFile(version, final.name, files)),
        )
        self._before, self._last = self._last, final.name
        # This includes versions of an earlier run, whose numbers may be higher.
        for old in self._folder.glob("v*"):
            if old.name not in (self._before, self._last) and _is_version(old):
                shutil.rmtree(old, ignore_errors=True)

    def _reuse_old_version(self, fresh: Path) -> bool:
        """Reuse the folder of an old version of the weights for the next version.

        The second-to-last version's folder is renamed to ``fresh``, and its files are then
        overwritten. Returns False if that is not possible. Engines no longer need that version, and
        reusing its memory is much cheaper than allocating new pages.
        """
        old = self._folder / self._before
        if (
            not self._before
            # The same version was written twice, so its folder is the current one.
            or self._before == self._last
            or not _is_version(old)
            or not _is_in_memory(old)
        ):
            return False
        if not all(is_file_unused(path) for path in old.glob("model-*.safetensors")):
            return False
        old.rename(fresh)
        return True

    @staticmethod
    def receiver(info: Info) -> FileWeightReceiver:
        return FileWeightReceiver(info)


class FileWeightReceiver:
    """The engine's side of the file-based weight sync.

    Implements ``WeightReceiver``.
    """

    def __init__(self, info: Info) -> None:
        self._folder = Path(str(info["folder"]))

    def unpack_chunk(self, info: Info) -> Iterator[WeightUpdateTensor]:
        folder, pointer = read_pointer(self._folder)
        if pointer.version != info["version"]:
            raise ValueError(
                f"{self._folder / POINTER} points to version {pointer.version}, not to the "
                f"requested {info['version']}: another trainer writes to this folder, or its file "
                "system shows old files; give each trainer its own folder"
            )
        for name, expected in pointer.files.items():
            yield from read_tensors(folder / name, expected)

    def finished(self, version: str) -> None: ...

    def close(self) -> None: ...


def read_pointer(folder: Path) -> tuple[Path, CurrentWeightsFile]:
    """Read ``current.json``, which points to the newest weights in a weight sync's folder.

    Returns the folder of the current version and the contents of the file. Raises ValueError if the
    file cannot be read or points outside the folder.
    """
    try:
        pointer = msgspec.json.decode((folder / POINTER).read_bytes(), type=CurrentWeightsFile)
    except OSError as error:
        raise ValueError(
            f"{folder / POINTER} cannot be read ({error.strerror}): the engine needs to see the "
            "trainer's folder"
        ) from None
    except msgspec.DecodeError as error:
        raise ValueError(f"{folder / POINTER} is not a pointer to weights: {error}") from None
    if "/" in pointer.folder or any("/" in name for name in pointer.files):
        raise ValueError(f"{folder / POINTER} points outside its folder")
    return folder / pointer.folder, pointer


def _replace(path: Path, data: bytes) -> None:
    """Replace the contents of a file atomically.

    Readers see either all of ``data`` or the previous contents.
    """
    aside = path.with_name(f".{path.name}.tmp")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        # Only the pointer is synced: a file of weights that was cut off fails its checksum.
        with contextlib.suppress(OSError):
            os.fsync(file.fileno())
    aside.replace(path)


def _is_version(path: Path) -> bool:
    """Return True if the folder holds a version of the weights that this weight sync wrote.

    Users may keep folders with similar names next to it.
    """
    if not _VERSION.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    try:
        return all(_WRITTEN.fullmatch(entry.name) for entry in path.iterdir())
    except OSError:  # another user's
        return False


def _is_in_memory(path: Path) -> bool:
    return MEMORY.is_dir() and path.stat().st_dev == MEMORY.stat().st_dev


def _version_name(version: int) -> str:
    return f"v{version:06d}"
