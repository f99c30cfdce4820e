"""Converts PDFs to text, page by page, with ``pypdf``.

The columns of tables stay side by side.

This runs in the process of ``document_process.py``. Pages as pictures, and scans without text, are
handled by ``pdf_page_pictures.py``.

Plain extraction gives the cells of many tables one per line, and the rows are lost. The layout mode
keeps them, with spaces between the cells. It drops what a page draws by reference (form
XObjects), so such a page is extracted plainly if that gives more characters.
"""

from __future__ import annotations

import io
import textwrap
from typing import Any

from ramify.sources.document_parts import DocumentPart, assemble
from ramify.sources.document_process import ConvertedDocument
from ramify.sources.loaded_sources import UnreadableSourceError


def convert(data: bytes) -> ConvertedDocument:
    import pypdf

    reader = pypdf.PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        raise UnreadableSourceError("is an encrypted PDF", "save it without a password")
    pages = [_text(page) for page in reader.pages]
    parts = [DocumentPart(f"page {number}", text) for number, text in enumerate(pages, 1)]
    text, places = assemble(parts, has_headings=False)
    # A scan has pages without text.
    text = text if any(page.strip() for page in pages) else ""
    return ConvertedDocument(text, f"PDF: {len(pages):,} page{'s' * (len(pages) != 1)}", places)


def _text(page: Any) -> str:
    try:
        layout = str(page.extract_text(extraction_mode="layout", layout_mode_strip_rotated=False))
    except Exception:  # noqa: BLE001 -- the layout mode raises anything for unusual fonts
        return str(page.extract_text())
    if not layout.strip() or _has_forms(page):
        plain = str(page.extract_text())
        if _num_visible(layout) < _num_visible(plain):
            return plain
    lines = [line.rstrip() for line in layout.split("\n")]
    return textwrap.dedent("\n".join(lines)).strip("\n")


def _has_forms(page: Any) -> bool:
    # Unlike [], get() does not follow references.
    resources = page["/Resources"] if "/Resources" in page else {}  # noqa: SIM401
    drawn = resources["/XObject"] if "/XObject" in resources else {}  # noqa: SIM401
    return any(drawn[name].get("/Subtype") == "/Form" for name in drawn)


def _num_visible(text: str) -> int:
    return sum(map(len, text.split()))
