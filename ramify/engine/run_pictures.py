"""Keep track of a run's images and of where their bytes are stored.

    picture of the context, bytes from a session or a tool ──> Picture, in a message and the journal
    Picture.digest ──> the file, or a blob of the store ──> bytes, when a request is sent

A picture is stored as a blob before an event refers to it, so that a resumed run still has it.
Bytes are read only when a request is sent, so a replay reads none. A session names a picture by its
digest. It cannot guess a digest, so it cannot use a picture that it was not given.

Which bytes count as a picture is decided in ``types/picture.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramify.errors import ConfigError, HostCallError, RequestRefusedError, StoreError
from ramify.types.picture import (
    MAX_PICTURES,
    MAX_REQUEST_BYTES,
    InvalidPictureError,
    Picture,
    PictureBytes,
    picture_from_bytes,
    picture_reference_digest,
    pictures_in,
)

if TYPE_CHECKING:
    from ramify.store.base import RunBlobs

PictureSource = bytes | Path | None
"""Bytes of a picture, the file that contains them, or None if they are in the store."""


class RunPictures:
    """The pictures of one run, each with the location of its bytes."""

    def __init__(self, blobs: RunBlobs | None, given: Mapping[str, PictureSource]) -> None:
        """Create the collection with the pictures of the question's context.

        ``given`` maps the digest of each picture to its bytes or to the file that contains them.
        """
        self._blobs = blobs
        self._sources: dict[str, PictureSource] = dict(given)
        self._known: dict[str, Picture] = {}
        self.has_any = bool(given)
        """True if any picture has occurred in the run so far."""

    def read(self, digest: str) -> bytes:
        """Return the bytes of the picture with this digest.

        Raises RequestRefusedError if the bytes are missing or have changed.
        """
        try:
            return self._read(digest)
        except (OSError, StoreError, LookupError) as error:
            raise RequestRefusedError(
                f"a picture of the prompt is no longer available ({error}): give it again, in a "
                "new run"
            ) from None

    def add(self, data: bytes, name: str = "") -> Picture:
        """Add a picture that a session or a tool has produced.

        Raises InvalidPictureError if the bytes are not a supported picture.
        """
        picture = picture_from_bytes(data, name)
        self.has_any = True
        if self._blobs is None:
            self._sources.setdefault(picture.digest, data)
        elif picture.digest not in self._known:
            self._blobs.put(data, picture.digest)
        return self._known.setdefault(picture.digest, picture)

    def resolve_picture(self, value: Any, at: str) -> Picture:
        """Return the picture that a session refers to with ``value`` or sends as its bytes.

        The value is a dict that refers to a picture of the context, or the bytes of a picture.
        ``at`` names the argument in error messages. Raises HostCallError if the value is neither.
        """
        digest = picture_reference_digest(value)
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
                known = picture_from_bytes(data, name[:1000] if isinstance(name, str) else "")
                self._known[digest] = known
            return known
        except InvalidPictureError as error:
            raise HostCallError("ValueError", f"{at} {error}") from None
        except (OSError, StoreError, LookupError) as error:
            raise HostCallError(
                "ValueError", f"{at} is not a picture of this run: {error}"
            ) from None

    def resolve_images(self, values: Any, at: str) -> tuple[Picture, ...]:
        """Return the pictures for the ``images`` argument of one request.

        Raises HostCallError if a value is not a picture, or if the pictures are too many or too
        large for one request.
        """
        if isinstance(values, bytes) or picture_reference_digest(values) is not None:
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
        pictures = tuple(
            self.resolve_picture(value, f"{at}[{i}]") for i, value in enumerate(values)
        )
        if why := request_size_error(pictures):
            raise HostCallError("ValueError", f"{at}: {why}")
        return pictures

    def context_pictures(self, value: Any) -> tuple[Picture, ...]:
        """Return all pictures in a context, in order to attach them to a plain model call.

        Raises HostCallError if they do not fit into one request.
        """
        return self.resolve_images(pictures_in(value), "the pictures of the context")

    def replace_tool_pictures(self, result: Any) -> Any:
        """Replace each picture in a tool result with a dict that refers to it in a session.

        A picture in a tool result is a ``PictureBytes``. Raises InvalidPictureError if the bytes
        are not a supported picture.
        """
        if isinstance(result, PictureBytes):
            return self.add(result.data, result.name).as_reference()
        if isinstance(result, list | tuple) and any(isinstance(i, PictureBytes) for i in result):
            return [self.replace_tool_pictures(item) for item in result]
        return result

    def store_all(self) -> None:
        """Write the pictures of the context to the store.

        Raises ConfigError if a picture has changed since it was first read.
        """
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


def request_size_error(pictures: Sequence[Picture]) -> str:
    """Return an error message if ``pictures`` are too large for one request, and otherwise
    ``""``."""
    num_bytes = sum(picture.num_bytes for picture in pictures)
    if num_bytes <= MAX_REQUEST_BYTES:
        return ""
    return (
        f"the pictures have {num_bytes:,} bytes, and one request takes at most "
        f"{MAX_REQUEST_BYTES:,}: ask about fewer at once"
    )
