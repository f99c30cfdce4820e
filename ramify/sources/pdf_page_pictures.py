"""Shows pages of PDFs to a model as pictures.

The host renders a page when a session asks for it, using pypdfium2 and Pillow (extra ``inputs``).

    page_picture(3)                  the third page of the only PDF, as a session asks for it
    page_picture(3, "report.pdf")    of one of several

If the user named a short scan, which has no text, the context gets pictures of its pages, so that
one direct call can answer a question about it. For a longer scan, or one in a folder, the context
gets a text that says how to look at its pages. The text of PDFs is extracted by ``pdf.py``, and
rendering is done by ``picture_process.py``.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ramify.format_quantities import pluralize
from ramify.nearest_name import nearest_name
from ramify.pip_install_command import install_command
from ramify.sources.file_kinds import InputFile
from ramify.sources.loaded_sources import SourceCollector, UnreadableSourceError
from ramify.sources.picture_process import PictureProcessingError, rendered_page
from ramify.types.picture import MAX_PICTURE_BYTES, MAX_PICTURES, PictureBytes, picture_from_bytes

PAGE_WIDTH = 1600
"""Default width in pixels. Small print on an A4 page is still readable, and most models scale
larger pictures down.
"""
_WIDTHS = range(100, 4001)


class RenderablePdf(msgspec.Struct, frozen=True):
    """A PDF in the context whose pages can be rendered on request."""

    source: Path | bytes
    digest: str
    """SHA-256 hash that the file had when it was read."""


class PdfPagePictures:
    """Lets sessions view the pages of a context's PDFs as pictures."""

    def __init__(self, files: Mapping[str, RenderablePdf], limit_s: float) -> None:
        """Make the pages of the PDFs in a context available to its session as pictures.

        ``files`` maps the name of each PDF to its file. ``limit_s`` is the time limit in seconds
        for rendering one page.
        """
        self._files = files
        self._limit_s = limit_s

    def page_picture(
        self, page: int, file: str | None = None, width: int = PAGE_WIDTH
    ) -> PictureBytes:
        """The picture of a page of a PDF, for llm_query(…, images=[…]); the first page is 1."""
        name = self._resolve_file_name(file)
        for what, value in (("page", page), ("width", width)):
            if type(value) is not int:
                raise TypeError(f"page_picture: {what} is a {type(value).__name__}: give an int")
        if width not in _WIDTHS:
            raise ValueError(f"page_picture: width is {width:,}: give 100 to 4,000 pixels")
        try:
            data = self._read_file(name)
            made = rendered_page(data, page, width, MAX_PICTURE_BYTES, self._limit_s)
        except PictureProcessingError as error:
            raise ValueError(f"page_picture: {name}: {error}") from None
        return PictureBytes(made, f"{name}, page {page}")

    def _resolve_file_name(self, file: str | None) -> str:
        if file is None and len(self._files) == 1:
            return next(iter(self._files))
        if file is None or file not in self._files:
            close = nearest_name(str(file), self._files)
            near = list(self._files)[:6] if close is None else [close]
            raise ValueError(f"page_picture: name one of the PDFs, such as {', '.join(near)}")
        return file

    def _read_file(self, name: str) -> bytes:
        found = self._files[name]
        if isinstance(found.source, bytes):
            return found.source
        try:
            data = found.source.read_bytes()
        except OSError as error:
            raise PictureProcessingError(f"it cannot be read again: {error.strerror}") from None
        if hashlib.sha256(data).hexdigest() != found.digest:
            raise PictureProcessingError("it has changed since it was read")
        return data


def can_render() -> bool:
    """Return True if the libraries for rendering PDF pages are installed."""
    return all(importlib.util.find_spec(name) for name in ("pypdfium2", "PIL"))


def keep(file: InputFile, loading: SourceCollector) -> None:
    """Remember a PDF, so that sessions can view its pages as pictures.

    Does nothing if the rendering libraries are not installed.
    """
    if can_render() and file.name not in loading.pdfs:
        digest = hashlib.sha256(file.data).hexdigest()
        loading.pdfs[file.name] = RenderablePdf(file.path or file.data, digest)


def register_pdf(file: InputFile, num_pages: int, loading: SourceCollector) -> None:
    """Add a scanned PDF, whose pages exist only as pictures, to the context.

    Raises UnreadableSourceError if its pages cannot be rendered on this machine.
    """
    if not (can_render() and loading.has_tools):
        raise UnreadableSourceError(
            "is a PDF without text, perhaps a scan",
            "run OCR on it first, or ask a model that reads pictures, after "
            + install_command("inputs"),
        )
    detail = f"PDF: {num_pages:,} page{'s' * (num_pages != 1)} without text, perhaps a scan"
    if num_pages > MAX_PICTURES or not file.is_named:
        keep(file, loading)
        loading.needs_session = True
        text = f"{file.name!r} has {pluralize(num_pages, 'page')} and no text: it may be a scan. "
        text += f"page_picture(number, {file.name!r}) returns the picture of a page."
        loading.add(file.name, text, "pdf", len(file.data), detail)
        return
    for page in range(1, num_pages + 1):
        name = f"{file.name}, page {page:0{len(str(num_pages))}}"
        try:
            made = rendered_page(file.data, page, PAGE_WIDTH, MAX_PICTURE_BYTES, loading.max_file_s)
        except PictureProcessingError as error:
            raise UnreadableSourceError(
                f"is a PDF whose page {page} cannot be shown", str(error)
            ) from None
        picture = picture_from_bytes(made, name)
        about = f"page of a PDF without text, {picture}"
        loading.add_picture(name, picture, made, about, len(file.data))
