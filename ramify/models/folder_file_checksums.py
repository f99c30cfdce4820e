"""Checksums of the files in a folder.

They detect damage on disk before a file is loaded.

    FOLDER/checksums.json
        {"files": {"policy/model.safetensors": {"bytes": 2031616, "sha256": "9f2c…"}, …}}

The checksum of a file of at most ``CHUNK`` bytes is what ``sha256sum`` prints. A larger file is
read in chunks by several threads, and its checksum is that of the chunks' concatenated checksums.
Folders without checksums.json are not checked: they are older, or were made by another program.

The code that saves and loads checkpoints decides when checksums are written, and what happens if a
file is damaged.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from ramify.errors import StoreError

FILE = "checksums.json"
CHUNK = 64 << 20
"""Bytes that one thread reads at a time."""
_BLOCK = 1 << 20
_THREADS = 8
_COPY = "restore the folder from an intact copy"


class FileChecksum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The size and checksum of a file at the time it was written."""

    bytes: int
    """Size of the file in bytes."""
    sha256: str


class _Checksums(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    files: dict[str, FileChecksum]
    """Path within the folder -> its checksum."""


def write(folder: Path) -> None:
    """Write ``checksums.json`` with the checksums of all files in a folder and its subfolders.

    Does nothing if the folder does not exist.
    """
    if not folder.is_dir():
        return
    names = [str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if file.is_file()]
    checksums = _compute_checksums(folder, [name for name in names if name != FILE])
    path = folder / FILE
    aside = path.with_name(f".{FILE}.tmp")
    aside.write_bytes(msgspec.json.format(msgspec.json.encode(_Checksums(checksums))))
    aside.replace(path)


def drop(folder: Path) -> None:
    """Delete a folder's ``checksums.json``, because its files are about to change."""
    (folder / FILE).unlink(missing_ok=True)


def check(folder: Path, under: str = "", advice: Callable[[], str] | None = None) -> None:
    """Verify a folder's files under the path prefix ``under`` against recorded checksums.

    Does nothing if no checksums were recorded.

    Raises StoreError with the first file that is missing or has changed. The message ends with the
    text that ``advice`` returns.
    """
    path = folder / FILE
    if not path.is_file():
        return
    what_to_do = advice or (lambda: f"{_COPY}, or delete {path} if the change was meant")
    try:
        known = msgspec.json.decode(path.read_bytes(), type=_Checksums).files
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} is damaged: {error}; {what_to_do()}") from None
    expected = {name: checksum for name, checksum in known.items() if name.startswith(under)}
    for name, problem in _problems(folder, expected):
        raise StoreError(f"{folder / name} is damaged: {problem}; {what_to_do()}")


def check_model(folder: Path) -> None:
    """Verify the files of a model's folder against their recorded checksums.

    The ``policy`` folder of a training checkpoint also counts as a model's folder. Raises
    StoreError if a file is missing or has changed.
    """
    if (folder / FILE).is_file():
        check(folder)
    elif (folder.parent / "state.json").is_file():
        check(folder.parent, f"{folder.name}/")


def _problems(folder: Path, expected: Mapping[str, FileChecksum]) -> Iterable[tuple[str, str]]:
    """Yield each file that is missing or has changed, with a description of the problem.

    All sizes are compared first, because this does not require reading the files.
    """
    for name, checksum in expected.items():
        path = folder / name
        if not path.is_file():
            yield name, "it is missing"
        elif path.stat().st_size != checksum.bytes:
            yield (
                name,
                f"it has {path.stat().st_size:,} bytes, but had {checksum.bytes:,} when written",
            )
    current = _compute_checksums(folder, expected)
    for name, checksum in expected.items():
        if current[name] != checksum:
            yield (
                name,
                f"its sha256 begins with {current[name].sha256[:12]}, but was "
                f"{checksum.sha256[:12]}… when written",
            )


def _compute_checksums(folder: Path, names: Iterable[str]) -> dict[str, FileChecksum]:
    """Return the current checksums of some files in a folder, by file name.

    Raises StoreError if a file cannot be read.
    """
    sizes = {name: (folder / name).stat().st_size for name in names}
    parts = [
        (name, start) for name, size in sizes.items() for start in range(0, max(size, 1), CHUNK)
    ]
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(lambda part: _hash_chunk(folder / part[0], part[1]), parts))
    chunks: dict[str, list[bytes]] = {name: [] for name in sizes}
    for (name, _), digest in zip(parts, digests, strict=True):
        chunks[name].append(digest)
    return {name: FileChecksum(size, _join_digests(chunks[name])) for name, size in sizes.items()}


def _join_digests(digests: list[bytes]) -> str:
    return digests[0].hex() if len(digests) == 1 else hashlib.sha256(b"".join(digests)).hexdigest()


def _hash_chunk(path: Path, start: int) -> bytes:
    """Return the SHA-256 digest of the chunk of a file that begins at byte ``start``."""
    digest, left = hashlib.sha256(), CHUNK
    buffer = memoryview(bytearray(_BLOCK))
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            while left and (num := file.readinto(buffer[: min(left, _BLOCK)])):
                digest.update(buffer[:num])
                left -= num
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    return digest.digest()
