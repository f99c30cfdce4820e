"""Decodes pictures and renders PDF pages in a separate process.

The host can kill that process if a malicious file makes it hang or use too much memory.

An untrusted picture may claim a size of gigabytes, or make a decoder hang. The process has limits
on its memory and its CPU time, gets no environment variables with keys, and is killed at a time
limit. Pillow decodes pictures, and pypdfium2 renders pages (both in the extra ``inputs``); the host
process imports neither of them. Which pictures need this is decided in ``pictures.py`` and
``pdf_page_pictures.py``.
"""

from __future__ import annotations

import functools
import io
import resource

import msgspec

from ramify.actors.child_process import HelperProcessPool
from ramify.actors.helper_process import answer_requests, ask, start_python_process
from ramify.actors.message_encoding import decode, encode

MAX_PIXELS = 150_000_000
"""Maximum number of pixels of a picture that is decoded for scaling down."""
MAX_SOURCE_BYTES = 200_000_000
_MEMORY_BYTES = 3 << 30
_CPU_S = 120
"""CPU time limit in seconds for one request. It also ends a process whose host has died."""
_START_S = 20.0
"""Extra seconds to start the process and import its library."""


class PictureProcessingError(Exception):
    """Raised if a picture cannot be scaled down or a page cannot be rendered.

    The message is a clause for use in another error message, such as ``it takes more than 5 s``.
    """


class ImageDownscaleRequest(msgspec.Struct, frozen=True, tag=True):
    """A request to scale a picture down."""

    max_side: int
    max_bytes: int


class PdfPageRenderRequest(msgspec.Struct, frozen=True, tag=True):
    """A request to render a page of a PDF as a picture."""

    page: int
    """Number of the page; the first is 1."""
    width: int
    """Width of the picture in pixels."""
    max_bytes: int


class _Answer(msgspec.Struct, frozen=True):
    error: str = ""


_processes = HelperProcessPool(
    functools.partial(start_python_process, f"{__name__}:serve", is_bare=True)
)


def scaled(data: bytes, max_side: int, max_bytes: int, limit_s: float) -> bytes:
    """Scale a picture down to at most ``max_side`` pixels per side and ``max_bytes`` bytes.

    Returns PNG data, or JPEG data if that is smaller. Raises PictureProcessingError if the picture
    cannot be decoded.
    """
    return _ask_process(ImageDownscaleRequest(max_side, max_bytes), data, limit_s)


def rendered_page(pdf: bytes, page: int, width: int, max_bytes: int, limit_s: float) -> bytes:
    """Render one page of a PDF as a picture that is ``width`` pixels wide.

    Raises PictureProcessingError on failure.
    """
    return _ask_process(PdfPageRenderRequest(page, width, max_bytes), pdf, limit_s)


def _ask_process(
    request: ImageDownscaleRequest | PdfPageRenderRequest, data: bytes, limit_s: float
) -> bytes:
    try:
        with _processes.lend_process() as process:
            head, made = ask(process, [encode(request), data], limit_s + _START_S)
            answer: _Answer = decode(head, _Answer)
    except TimeoutError:
        raise PictureProcessingError(f"it takes more than {limit_s:g} s") from None
    except (EOFError, OSError, ValueError):
        raise PictureProcessingError(
            "it takes too much memory, or crashes the process that decodes it"
        ) from None
    if answer.error:
        raise PictureProcessingError(answer.error)
    return made


def serve() -> None:
    """Serve requests for pictures in a child process, until standard input is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    answer_requests(_answer)


def _answer(parts: list[bytes]) -> list[bytes]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    until_s = int(used.ru_utime + used.ru_stime) + _CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (until_s, resource.RLIM_INFINITY))
    request: ImageDownscaleRequest | PdfPageRenderRequest = decode(
        parts[0], ImageDownscaleRequest | PdfPageRenderRequest
    )
    try:
        made = (
            _scale(parts[1], request)
            if isinstance(request, ImageDownscaleRequest)
            else _render(parts[1], request)
        )
        return [encode(_Answer()), made]
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 -- a damaged file raises anything
        text = " ".join(str(error).split())[:300] or type(error).__name__
        return [encode(_Answer(text)), b""]


def _scale(data: bytes, request: ImageDownscaleRequest) -> bytes:
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    with Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP")) as image:
        # A JPEG is decoded at a smaller size. Other formats ignore this.
        image.draft("RGB", (request.max_side, request.max_side))
        image.thumbnail((request.max_side, request.max_side))
        return _encode_within_limit(image, request.max_bytes)


def _encode_within_limit(image: object, max_bytes: int) -> bytes:
    """Encode an image as PNG, or as JPEG if the PNG data would exceed the byte limit.

    If neither fits, halve the width and height until the JPEG data fits.
    """
    from PIL import Image

    assert isinstance(image, Image.Image)
    plain = image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGBA")
    file = io.BytesIO()
    plain.save(file, "PNG")
    while file.tell() > max_bytes:
        background = Image.new("RGB", plain.size, "white")
        background.paste(plain, mask=plain.getchannel("A") if plain.mode == "RGBA" else None)
        file = io.BytesIO()
        background.save(file, "JPEG", quality=85)
        plain = background.resize((max(1, plain.width // 2), max(1, plain.height // 2)))
    return file.getvalue()


def _render(pdf: bytes, request: PdfPageRenderRequest) -> bytes:
    import pypdfium2

    document = pypdfium2.PdfDocument(pdf)
    try:
        if not 1 <= request.page <= len(document):
            raise ValueError(
                f"page {request.page:,} does not exist: it has pages 1 to {len(document):,}"
            )
        page = document[request.page - 1]
        width, height = page.get_size()
        scale = request.width / max(width, 1.0)
        # A page may be a strip of any length, so the height needs a limit too.
        scale = min(
            scale, (MAX_PIXELS / 10 / max(width * height, 1.0)) ** 0.5, 7900 / max(height, 1)
        )
        return _encode_within_limit(page.render(scale=scale).to_pil(), request.max_bytes)
    finally:
        document.close()
