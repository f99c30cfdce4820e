"""The pictures of a run: which there are, and where their bytes are.

    picture of the context, bytes from a session or a tool ──> Picture, in a message and the journal
    Picture.digest ──> the file, or a blob of the store ──> bytes, when a request is sent

A picture is stored as a blob before an event refers to it, so that a resumed run still has it.
Bytes are read only when a request is sent, so a replay reads none. A session names a picture by its
digest. It cannot guess a digest, so it cannot use a picture that it was not given.

Not here: which bytes are a picture (see ``types/picture.py``), and what a request may cost.
"""

from __future__ import annotations

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
"""The bytes of a picture, the file that has them, or None if the store has them."""


class RunPictures:
    """The pictures of one run, and where their bytes are."""

    def __init__(self, blobs: RunBlobs | None, given: Mapping[str, PictureSource]) -> None:
        """``given`` maps the digest of each picture in the context to the place of its bytes."""
        self._blobs = blobs
        self._sources: dict[str, PictureSource] = dict(given)
        self._known: dict[str, Picture] = {}
        self.has_any = bool(given)
        """True if the run has a picture so far."""

    def read(self, digest: str) -> bytes:
        """Return the bytes of a picture. Raises Refused if they are missing or have changed."""
        try:
            return self._read(digest)
        except (OSError, StoreError, LookupError) as error:
            raise Refused(
                f"a picture of the prompt is not there any more ({error}): give it again, in a "
                "new run"
            ) from None

    def add(self, data: bytes, name: str = "") -> Picture:
        """Add a picture that a session or a tool made. Raises NotAPicture."""
        picture = picture_of(data, name)
        self.has_any = True
        if self._blobs is None:
            self._sources.setdefault(picture.digest, data)
        elif picture.digest not in self._known:
            self._blobs.put(data, picture.digest)
        return self._known.setdefault(picture.digest, picture)

    def find(self, value: Any, at: str) -> Picture:
        """Return the picture for ``value``, which a session sent: a picture's dict, or bytes.
        ``at`` names the argument in errors. Raises HostCallError."""
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
        """Return the pictures for the argument ``images`` of one request. Raises HostCallError."""
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
        if why := picture_size_error(pictures):
            raise HostCallError("ValueError", f"{at}: {why}")
        return pictures

    def in_context(self, value: Any) -> tuple[Picture, ...]:
        """Return the pictures of a context, to be shown by a plain call. Raises HostCallError if
        one request cannot hold them."""
        return self.of_request(pictures_in(value), "the pictures of the context")

    def returned(self, result: Any) -> Any:
        """Return the result of a tool, with each ``PictureBytes`` replaced by the dict that stands
        for it. Raises NotAPicture."""
        if isinstance(result, PictureBytes):
            return self.add(result.data, result.name).value()
        if isinstance(result, list | tuple) and any(isinstance(i, PictureBytes) for i in result):
            return [self.returned(item) for item in result]
        return result

    def store(self) -> None:
        """Store the pictures of the context. Raises ConfigError if a picture has changed since it
        was read."""
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
        import hashlib

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


def picture_size_error(pictures: Sequence[Picture]) -> str:
    """Return why the pictures exceed the size of one request, or an empty text if they do not."""
    num_bytes = sum(picture.num_bytes for picture in pictures)
    if num_bytes <= MAX_REQUEST_BYTES:
        return ""
    return (
        f"the pictures have {num_bytes:,} bytes, and one request takes at most "
        f"{MAX_REQUEST_BYTES:,}: ask about fewer at once"
    )
