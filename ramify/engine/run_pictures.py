"""The pictures of a run: those of its context, those that its sessions and tools make, and their
bytes.

    context, bytes of a session, a tool's PictureBytes ──> Picture, in a message and the journal
    its digest ──> a file that was loaded, or the blob of the store ──> bytes, when it is sent

A picture is stored as a blob before an event refers to it, so that a resumed run still has it.
Bytes are read only when a request is sent: a repeated run reads none. A session names a picture by
its digest, which it cannot guess, so it reaches no picture that it was not given.

Not here: which bytes are a picture (see ``types/picture.py``), and what a request may cost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramify.errors import ConfigError, HostCallError, Refused, StoreError
from ramify.types.picture import (
    MAX_PICTURES,
    MAX_REQUEST_BYTES,
    NotAPicture,
    Picture,
    PictureBytes,
    digest_in,
    picture_of,
    pictures_in,
)

if TYPE_CHECKING:
    from ramify.store.base import RunBlobs

PictureSource = bytes | Path | None
"""Bytes of a picture, its file, or None if the store has it."""


class RunPictures:
    """The pictures of one run."""

    def __init__(self, blobs: RunBlobs | None, given: Mapping[str, PictureSource]) -> None:
        """``given``: digest -> bytes of a picture of the context, or their place."""
        self._blobs = blobs
        self._sources: dict[str, PictureSource] = dict(given)
        self._known: dict[str, Picture] = {}
        self.has_any = bool(given)
        """True if the run has pictures so far."""

    def read(self, digest: str) -> bytes:
        """Return the bytes of a picture. Raises Refused if they are gone or have changed."""
        try:
            return self._read(digest)
        except (OSError, StoreError, LookupError) as error:
            raise Refused(
                f"a picture of the prompt is not there any more ({error}): give it again, in a "
                "new run"
            ) from None

    def add(self, data: bytes, name: str = "") -> Picture:
        """Take a picture from a session or a tool. Raises NotAPicture."""
        picture = picture_of(data, name)
        self.has_any = True
        if self._blobs is None:
            self._sources.setdefault(picture.digest, data)
        elif picture.digest not in self._known:
            self._blobs.put(data, picture.digest)
        return self._known.setdefault(picture.digest, picture)

    def find(self, value: Any, at: str) -> Picture:
        """Return the picture that a session means by ``value``: the value of a picture, or bytes.
        ``at`` names its place in errors. Raises HostCallError."""
        digest = digest_in(value)
        if digest is None and not isinstance(value, bytes):
            raise HostCallError(
                "TypeError",
                f"{at} is a {type(value).__name__}: give a picture of the context as it is "
                "there, with all its keys, or the bytes of a PNG, JPEG or WebP file",
            )
        try:
            if digest is None:
                return self.add(value)
            known = self._known.get(digest)
            if known is None:
                name = value.get("name")
                data = self._read(digest)
                known = picture_of(data, name[:1000] if isinstance(name, str) else "")
                self._known[digest] = known
            return known
        except NotAPicture as error:
            raise HostCallError("ValueError", f"{at} {error}") from None
        except (OSError, StoreError, LookupError) as error:
            raise HostCallError(
                "ValueError", f"{at} is not a picture of this run: {error}"
            ) from None

    def of_request(self, values: Any, at: str) -> tuple[Picture, ...]:
        """Return the pictures of one request. Raises HostCallError."""
        if isinstance(values, bytes) or digest_in(values) is not None:
            values = [values]
        if not isinstance(values, list | tuple):
            raise HostCallError(
                "TypeError", f"{at} must be a list of pictures, not {type(values).__name__}"
            )
        if len(values) > MAX_PICTURES:
            raise HostCallError(
                "ValueError",
                f"{at}: {len(values):,} pictures, and one request takes at most {MAX_PICTURES}: "
                "ask about parts of them",
            )
        pictures = tuple(self.find(value, f"{at}[{i}]") for i, value in enumerate(values))
        if why := too_many_bytes(pictures):
            raise HostCallError("ValueError", f"{at}: {why}")
        return pictures

    def in_context(self, value: Any) -> tuple[Picture, ...]:
        """Return the pictures of a context that a plain call gets. Raises HostCallError if they do
        not fit one request."""
        return self.of_request(pictures_in(value), "the pictures of the context")

    def returned(self, result: Any) -> Any:
        """Return the result of a tool with the value of a picture in place of its bytes. Raises
        NotAPicture."""
        if isinstance(result, PictureBytes):
            return self.add(result.data, result.name).value()
        if isinstance(result, list | tuple) and any(isinstance(i, PictureBytes) for i in result):
            return [self.returned(item) for item in result]
        return result

    def store(self) -> None:
        """Store the pictures of the context. Raises ConfigError if one has changed since it was
        read."""
        if self._blobs is None:
            return
        for digest, source in self._sources.items():
            if source is not None:
                try:
                    self._blobs.put(self._read(digest), digest)
                except OSError as error:
                    raise ConfigError(
                        f"a picture of the context cannot be read again: {error}"
                    ) from None
                self._sources[digest] = None

    def _read(self, digest: str) -> bytes:
        source = self._sources.get(digest)
        if isinstance(source, bytes):
            return source
        if isinstance(source, Path):
            data = source.read_bytes()
            if hashlib.sha256(data).hexdigest() != digest:
                raise OSError(f"{source} has changed since it was read")
            return data
        if self._blobs is None:
            raise LookupError(f"no picture has the hash {digest[:12]}…")
        return self._blobs.get(digest)


def too_many_bytes(pictures: Sequence[Picture]) -> str:
    """Return why the pictures do not fit one request; empty if they do."""
    num_bytes = sum(picture.num_bytes for picture in pictures)
    if num_bytes <= MAX_REQUEST_BYTES:
        return ""
    return (
        f"the pictures have {num_bytes:,} bytes, and one request takes at most "
        f"{MAX_REQUEST_BYTES:,}: ask about fewer at once"
    )
