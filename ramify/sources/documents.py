"""Read documents in the formats PDF, docx, pptx, odt, EPUB, HTML and e-mail.

Each document becomes one text, with the places of its pages, slides or headings.

    file ──convert_document──> text, places, attachments ──> SourceCollector
           (document_process.py)                └── each is read as a file of its kind

The conversion itself is done in ``pdf.py``, ``office_documents.py`` and ``email_conversion.py``.
Scans are read by ``pdf_page_pictures.py``, workbooks by ``table_files.py`` and notebooks by
``notebook.py``.
"""

from __future__ import annotations

import functools
import importlib.util

import msgspec

from ramify.sources.archives import (
    MACROS,
    check_count,
    checked_member_names,
    has_macros,
    load_member,
    member_name,
)
from ramify.sources.document_process import ConvertedDocument, convert_document
from ramify.sources.file_kinds import InputFile, decode
from ramify.sources.loaded_sources import (
    OversizedSourceError,
    SourceCollector,
    UnreadableSourceError,
    missing_library_advice,
)
from ramify.sources.pdf_page_pictures import keep, register_pdf

MAX_DEPTH = 3
"""Maximum number of email messages around an attachment. Attachments that are nested more deeply
are not read."""
_WHAT = {
    "pdf": ("a PDF", "pypdf"),
    "docx": ("a Word document", "markitdown"),
    "pptx": ("a presentation", "markitdown"),
    "odt": ("an OpenDocument text", "odfdo"),
    "epub": ("an EPUB book", "markitdown"),
    "html": ("a page", "markitdown"),
    "eml": ("a message", "email"),
    "mbox": ("a mailbox", "mailbox"),
    "msg": ("an Outlook message", "oxmsg"),
}
"""Kind of document -> its name in error messages, and the module that must be installed to read
it."""
_ZIPPED = ("docx", "pptx", "odt", "epub")


def _convert_document(kind: str, file: InputFile, loading: SourceCollector) -> ConvertedDocument:
    what, module = _WHAT[kind]
    if importlib.util.find_spec(module) is None:
        raise UnreadableSourceError(f"is {what}", missing_library_advice())
    parts = checked_member_names(file, what.partition(" ")[2], loading) if kind in _ZIPPED else []
    found = convert_document(kind, what, file, loading)
    if has_macros(parts):
        return msgspec.structs.replace(found, detail=f"{found.detail}; {MACROS}")
    return found


def _add(kind: str, file: InputFile, found: ConvertedDocument, loading: SourceCollector) -> None:
    """Add a converted document and its attachments to the context that is being loaded."""
    # Broken font tables and headers yield lone surrogates, which no store can hold.
    text = found.text.encode("utf-8", "replace").decode()
    loading.count_bytes(len(text), file.name)
    loading.add(file.name, text, kind, len(file.data), found.detail, found.places)
    check_count(len(found.members))
    for member, data in found.members:
        name = member_name(file.name, member)
        loading.count_bytes(len(data), name)
        if file.depth >= MAX_DEPTH:
            loading.report_problem(
                name, f"is attached below {MAX_DEPTH} messages: save it and name it"
            )
        else:
            load_member(name, data, loading, file.depth + 1)


def _read(kind: str, file: InputFile, loading: SourceCollector) -> None:
    found = _convert_document(kind, file, loading)
    if not found.text.strip() and not found.members:
        raise UnreadableSourceError(f"is {_WHAT[kind][0]} without text", "name one that has some")
    _add(kind, file, found, loading)


def read_pdf(file: InputFile, loading: SourceCollector) -> None:
    found = _convert_document("pdf", file, loading)
    if found.text:
        _add("pdf", file, found, loading)
        keep(file, loading)
    else:
        register_pdf(file, len(found.places), loading)


def read_html(file: InputFile, loading: SourceCollector) -> None:
    """Read an HTML page and add its text as Markdown.

    If the page cannot be converted, its HTML source is added.
    """
    text, _ = decode(file.data)
    try:
        _read("html", file, loading)
    except OversizedSourceError:
        raise
    except UnreadableSourceError as error:
        why = error.remedy if error.remedy == missing_library_advice() else error.reason
        loading.add(file.name, text, "html", len(file.data), f"markup of a page, because it {why}")


read_docx = functools.partial(_read, "docx")
read_pptx = functools.partial(_read, "pptx")
read_odt = functools.partial(_read, "odt")
read_epub = functools.partial(_read, "epub")
read_eml = functools.partial(_read, "eml")
read_mbox = functools.partial(_read, "mbox")
read_msg = functools.partial(_read, "msg")
