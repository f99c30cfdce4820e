"""Recognise pictures, refer to them in messages and represent them in sessions.

    bytes ── picture_from_bytes ──> Picture(digest, kind, …)              in messages, the journal
    Picture.as_reference() ──> {"picture": digest, "name": …, "kind": …}  in a context, a session

A picture may be sent if it is PNG, JPEG or WebP and no larger than the strictest API accepts. Only
the header is read, so a small file that claims to have billions of pixels costs nothing.
``engine/run_pictures.py`` keeps the bytes, and ``clients/picture_token_costs.py`` estimates how
many tokens a picture costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

PictureKind = Literal["png", "jpeg", "webp"]

MAX_PICTURE_BYTES = 3_932_160
"""Maximum size of one picture in bytes. Anthropic's API accepts 5 MiB of base64."""
MAX_SIDE = 8000
"""Maximum width and height in pixels, according to Anthropic's API."""
MAX_PICTURES = 20
"""Maximum number of pictures in one request. Above this, Anthropic's API accepts only smaller
pictures."""
MAX_REQUEST_BYTES = 20_000_000
"""Maximum total size of all pictures in a request, in bytes. Anthropic's API accepts 32 MB with
base64."""
_KEYS = {"picture", "name", "kind", "width", "height", "bytes"}
"""Keys of the dict that represents a picture."""
_NUM_CHECKED = 1000
_MAX_DEPTH = 8
"""Pictures nested deeper than this in a context are not found."""
_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""JPEG markers of a frame header, which contains the picture's size."""
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD9)})
_MAX_SEGMENTS = 10_000


class InvalidPictureError(ValueError):
    """Raised if bytes are not a picture, or if the picture is damaged.

    The message is the end of a sentence that the caller begins with the picture's name, such as "is
    a damaged WebP picture".
    """


class PictureTooLarge(InvalidPictureError):
    """Raised if a picture exceeds ``MAX_SIDE`` or ``MAX_PICTURE_BYTES``.

    The caller may scale it down and try again.
    """


class PictureBytes(msgspec.Struct, frozen=True):
    """A picture that a user's tool returns.

    The session receives a dict that represents the picture, and can show the picture to models.

    Example:
        return ramify.PictureBytes(open("camera.jpg", "rb").read(), "camera.jpg")
    """

    data: bytes
    """Contents of a PNG, JPEG or WebP file."""
    name: str = ""
    """The picture's name in the session."""


class PictureSize(msgspec.Struct, frozen=True):
    """A picture's format, width and height, read from its file header."""

    kind: PictureKind
    width: int
    """Width in pixels."""
    height: int
    """Height in pixels."""


class Picture(msgspec.Struct, frozen=True, omit_defaults=True):
    """A reference to a picture by the hash of its bytes, with its format and size.

    >>> ramify.Picture("9f86…", "png", 640, 480, 20_113, "chart.png").media_type
    'image/png'
    """

    digest: str
    """SHA-256 of the bytes in hexadecimal digits. The picture's blob in a store has the same
    name."""
    kind: PictureKind
    width: int
    """Width in pixels."""
    height: int
    """Height in pixels."""
    num_bytes: int
    name: str = ""
    """Name of the picture's file or page. Empty for a picture that a session created."""

    @property
    def media_type(self) -> str:
        return f"image/{self.kind}"

    def as_reference(self) -> dict[str, Any]:
        """Return the dict that represents the picture in a session.

        The dict does not contain the bytes.
        """
        return {
            "picture": self.digest,
            "name": self.name,
            "kind": self.kind,
            "width": self.width,
            "height": self.height,
            "bytes": self.num_bytes,
        }

    def __str__(self) -> str:
        return f"{self.kind.upper()} picture, {self.width:,} × {self.height:,} pixels"


def picture_from_bytes(data: bytes, name: str = "") -> Picture:
    """Return a reference to the picture whose file contents are ``data``.

    Raises InvalidPictureError if ``data`` is not a picture, and PictureTooLarge if it is too large.
    """
    import hashlib

    size = size_of(data)
    if size.width > MAX_SIDE or size.height > MAX_SIDE:
        raise PictureTooLarge(
            f"has {size.width:,} × {size.height:,} pixels, and at most {MAX_SIDE:,} × "
            f"{MAX_SIDE:,} are sent"
        )
    if len(data) > MAX_PICTURE_BYTES:
        raise PictureTooLarge(
            f"has {len(data):,} bytes, and at most {MAX_PICTURE_BYTES:,} are sent"
        )
    digest = hashlib.sha256(data).hexdigest()
    return Picture(digest, size.kind, size.width, size.height, len(data), name)


def size_of(data: bytes) -> PictureSize:
    """Read a picture's format and size from its header, and check that the picture is not
    truncated.

    Raises InvalidPictureError if ``data`` is not a complete picture.
    """
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        size = _png_size(data)
    elif data.startswith(b"\xff\xd8\xff"):
        size = _jpeg_size(data)
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        size = _webp_size(data)
    else:
        raise InvalidPictureError("is not a PNG, JPEG or WebP picture")
    if not (size.width and size.height):
        raise InvalidPictureError(f"is a damaged {size.kind.upper()} picture: it has no pixels")
    return size


def _png_size(data: bytes) -> PictureSize:
    if data[8:16] != b"\0\0\0\rIHDR" or data.rfind(b"IEND") < 0:
        raise InvalidPictureError("is a damaged or cut PNG picture")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    return PictureSize("png", width, height)


def _jpeg_size(data: bytes) -> PictureSize:
    at = 2
    for _ in range(_MAX_SEGMENTS):
        while data[at : at + 2] == b"\xff\xff":  # fill bytes
            at += 1
        if at + 9 > len(data) or data[at] != 0xFF:
            break
        marker = data[at + 1]
        if marker in _FRAMES:
            if data.rfind(b"\xff\xd9") < at:
                break
            height, width = (int.from_bytes(data[at + i : at + i + 2], "big") for i in (5, 7))
            return PictureSize("jpeg", width, height)
        at += 2 if marker in _WITHOUT_LENGTH else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    raise InvalidPictureError("is a damaged or cut JPEG picture")


def _webp_size(data: bytes) -> PictureSize:
    if len(data) < 30 or int.from_bytes(data[4:8], "little") + 8 > len(data) + 1:
        raise InvalidPictureError("is a damaged or cut WebP picture")
    match data[12:16]:
        case b"VP8X":
            width, height = (1 + int.from_bytes(data[i : i + 3], "little") for i in (24, 27))
        # VP8L packs width - 1 and height - 1 into 14 bits each.
        case b"VP8L" if data[20] == 0x2F:
            bits = int.from_bytes(data[21:25], "little")
            width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case b"VP8 " if data[23:26] == b"\x9d\x01\x2a":
            width, height = (int.from_bytes(data[i : i + 2], "little") & 0x3FFF for i in (26, 28))
        case _:
            raise InvalidPictureError("is a damaged WebP picture")
    return PictureSize("webp", width, height)


def picture_reference_digest(value: Any) -> str | None:
    """Return the hash of the picture that the dict ``value`` represents.

    Returns None for any other value. The value may come from a hostile session, so it is checked.
    """
    if not isinstance(value, dict) or value.keys() != _KEYS:
        return None
    digest = value["picture"]
    return digest if isinstance(digest, str) and len(digest) == 64 else None


def has_pictures(context: Any) -> bool:
    """Return True if ``context`` is a picture, or if one of its first 1000 items is one."""
    if picture_reference_digest(context) is not None:
        return True
    if not isinstance(context, dict | list | tuple):
        return False
    items = context.values() if isinstance(context, dict) else context
    return any(
        picture_reference_digest(item) is not None for item in itertools.islice(items, _NUM_CHECKED)
    )


def pictures_in(value: Any) -> list[dict[str, Any]]:
    """Return the dicts in a context that represent pictures.

    Each picture occurs once, in order of appearance.
    """
    return list({value["picture"]: value for value in _values_in(value, 0)}.values())


def _values_in(value: Any, depth: int) -> Iterator[dict[str, Any]]:
    if picture_reference_digest(value) is not None:
        yield value
    elif depth < _MAX_DEPTH and isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, dict | list | tuple):
                yield from _values_in(item, depth + 1)


def picture_placeholder(value: Any) -> str:
    """Return the line of text that stands for a picture in a prompt.

    The picture itself is attached to the prompt.
    """
    size = f"{value.get('width')} × {value.get('height')} pixels"
    return f"[the picture {value.get('name')!s:.200}, {value.get('kind')!s:.10}, {size}]"
