"""The text of a PDF, page by page, by ``pypdf`` (the extra ``pdf``). Leaves out pictures, so also scanned pages."""

from __future__ import annotations

import io
import logging

from ramify.sources.base import Loading, Unreadable
from ramify.sources.kinds import File


def read(file: File, loading: Loading) -> None:
    try:
        import pypdf
    except ImportError:
        raise Unreadable("is a PDF", "reading it needs pip install 'ramify[pdf]'") from None
    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it warns of every slip in a file; the text is what counts
    try:
        reader = pypdf.PdfReader(io.BytesIO(file.data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise Unreadable("is an encrypted PDF", "save it without a password")
        pages = [page.extract_text() for page in reader.pages]
    except Unreadable:
        raise
    except Exception as error:  # noqa: BLE001  a damaged PDF raises anything: KeyError, RecursionError …
        raise Unreadable(
            "is a PDF that cannot be read", f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from None
    if not any(page.strip() for page in pages):
        raise Unreadable("is a PDF without text, perhaps a scan", "run OCR on it first")
    text = "\n".join(f"--- page {number} ---\n{page}" for number, page in enumerate(pages, start=1))
    text = text.encode("utf-8", "replace").decode()  # broken font tables yield lone surrogates
    loading.spend(len(text), file.name)
    loading.add(file.name, text, "pdf", len(file.data), f"PDF: {len(pages):,} pages")
