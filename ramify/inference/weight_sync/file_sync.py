"""Weight sync by safetensors files with an atomic pointer, for engines that see the trainer's disk.

    FOLDER/v000012/model-00001.safetensors …      the weights of one version, never changed
    FOLDER/v000012/model.safetensors.index.json   in Hugging Face's layout, so that any engine can
                                                  load the folder
    FOLDER/current.json                           the newest complete version: written to another
                                                  file and renamed, last of all

The pointer holds each file's length and a checksum: a file that was torn by a full disk or a kill
is rejected by name before any of its tensors is used. The last two versions stay. The older one
makes room for the next version; in memory it is overwritten if no process has it open. Other files
in FOLDER are not touched. A temporary folder, used if none is given, is removed when the weight
sync is closed; that of a trainer that was killed is removed by the next one (``held_weights.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import ConfigError, StoreError
from ramify.inference.weight_sync import tensor_file
from ramify.inference.weight_sync.base import (
    Info,
    WeightChunk,
    WeightPiece,
    WeightSource,
    in_chunks,
)
from ramify.inference.weight_sync.held_weights import MEMORY, hold_folder, sweep

POINTER = "current.json"
_FILE_BYTES = 1 << 30
_VERSION = re.compile(r"v\d{6,}")
_WRITTEN = re.compile(
    r"model-\d{5,}\.safetensors|model\.safetensors\.index\.json|(generation_)?config\.json"
)
"""The files of one version."""


class CurrentWeightsFile(msgspec.Struct):
    """Contents of ``current.json``."""

    version: int
    folder: str
    """Its name, next to the pointer."""
    files: dict[str, tuple[int, int]]
    """Name -> (bytes, sum of its 64-bit words)."""


class FileSync:
    """Weight sync by files. Implements ``WeightSync``."""

    def __init__(
        self, *, folder: str = "", file_bytes: int = _FILE_BYTES, configuration: str = ""
    ) -> None:
        """``folder`` is created; by default it is a temporary folder, which ``close`` removes.
        ``configuration`` is a checkpoint whose config.json is copied next to the weights, for
        engines that read one."""
        self._is_own = not folder
        self._folder, self._lock = (
            (Path(folder), -1) if folder else hold_folder(Path(tempfile.gettempdir()))
        )
        self._file_bytes = file_bytes
        self._configuration = configuration
        self._last = self._before = ""
        """The newest complete version; ``_before`` is the one before it."""

    def open(self, num_engines: int) -> list[dict[str, Any]]:
        if self._is_own:
            sweep(self._folder.parent)
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
        """Nothing to do: the sides need not meet."""

    def chunks(
        self, sources: Iterable[WeightSource], version: int, *, whole: bool
    ) -> Iterator[WeightChunk]:
        """One chunk: the pointer, once everything is written."""
        try:
            self._write(sources, version)
        except OSError as error:
            raise StoreError(
                f"the weights of version {version} cannot be written to {self._folder}: {error}"
            ) from error
        yield WeightChunk(
            {"version": version, "path": str(self._folder.resolve() / _named(version))}, True
        )

    def close(self) -> None:
        if self._is_own:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _write(self, sources: Iterable[WeightSource], version: int) -> None:
        final = self._folder / _named(version)
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
            files[name] = tensor_file.write(fresh / name, part)
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
        """Turn the version before the last into ``fresh``, to overwrite it; returns whether this is
        possible. New memory pages cost as much as several copies. No engine needs that version,
        since all have taken the last one."""
        old = self._folder / self._before
        if (
            not self._before
            or self._before == self._last
            or not _is_version(old)
            or not _is_in_memory(old)
        ):
            return False
        if not all(tensor_file.is_free(path) for path in old.glob("model-*.safetensors")):
            return False
        old.rename(fresh)
        return True

    @staticmethod
    def receiver(info: Info) -> FileReceiver:
        return FileReceiver(info)


class FileReceiver:
    """Receiver of ``FileSync``. Implements ``WeightReceiver``."""

    def __init__(self, info: Info) -> None:
        self._folder = Path(str(info["folder"]))

    def take(self, info: Info) -> Iterator[WeightPiece]:
        folder, pointer = read_pointer(self._folder)
        if pointer.version != info["version"]:
            raise ValueError(
                f"{self._folder / POINTER} points to version {pointer.version}, but version "
                f"{info['version']} was requested: another trainer writes to this folder, or its "
                "disk shows old files"
            )
        for name, expected in pointer.files.items():
            yield from tensor_file.read(folder / name, expected)

    def finished(self, version: str) -> None: ...

    def close(self) -> None: ...


def read_pointer(folder: Path) -> tuple[Path, CurrentWeightsFile]:
    """(folder of the current version, contents of the pointer). Raises ValueError."""
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
    """Write ``data`` to ``path`` atomically: readers see all of it, or the previous contents."""
    aside = path.with_name(f".{path.name}.tmp")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        with contextlib.suppress(OSError):
            os.fsync(file.fileno())
    aside.replace(path)


def _is_version(path: Path) -> bool:
    """Whether this file wrote the folder: the user may keep folders with similar names next to
    it."""
    if not _VERSION.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    try:
        return all(_WRITTEN.fullmatch(entry.name) for entry in path.iterdir())
    except OSError:  # another user's
        return False


def _is_in_memory(path: Path) -> bool:
    return MEMORY.is_dir() and path.stat().st_dev == MEMORY.stat().st_dev


def _named(version: int) -> str:
    return f"v{version:06d}"
