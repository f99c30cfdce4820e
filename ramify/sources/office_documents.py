"""Converts office documents, books and web pages to Markdown, in the process of
``document_process.py``.

    docx   HTML from mammoth                   places: headings
    pptx   markitdown                          places: slides and headings
    odt    odfdo                               places: headings
    epub   each chapter of the spine as HTML   places: chapters and headings
    html   markitdown                          places: headings

markitdown loses the boundaries between the chapters of a book. It also does not escape a ``|`` in
the cell of a table, which shifts the columns. Both are corrected here. Macros are not run, nothing
is fetched, and pictures are left out, except for their descriptions.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import posixpath
import re
import sys
import zipfile
from typing import Any
from urllib.parse import unquote

from ramify.sources.document_parts import DocumentPart, assemble
from ramify.sources.document_process import ConvertedDocument
from ramify.sources.loaded_sources import UnreadableSourceError

_STYLES = """p[style-name='Title'] => h1:fresh
p[style-name='Subtitle'] => h2:fresh
comment-reference => sup"""
"""Rules for Word styles that mammoth does not convert by default. Comments go to the end of the
text.
"""
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_OF_OTHER_FORMATS = ("azure", "pandas", "pdfminer", "pydub", "speech_recognition")
"""Optional libraries that markitdown would import for formats that Ramify does not convert with
it."""


@functools.cache
def _import_markitdown() -> Any:
    """Import markitdown's converters without the slow imports that its package makes.

    On import, markitdown loads the libraries of all its formats (such as onnxruntime), which takes
    a second of CPU time in each process. To avoid this, its package is registered without running
    its ``__init__.py``, and those libraries appear to it as not installed.
    """
    spec = importlib.util.find_spec("markitdown")
    assert spec is not None
    sys.modules.setdefault("markitdown", importlib.util.module_from_spec(spec))
    hidden: dict[str, Any] = {n: None for n in _OF_OTHER_FORMATS if n not in sys.modules}
    sys.modules.update(hidden)
    try:
        return importlib.import_module("markitdown.converters")
    finally:
        for name in hidden:
            del sys.modules[name]


def convert_docx(data: bytes) -> ConvertedDocument:
    import mammoth

    _import_markitdown()
    from markitdown.converter_utils.docx.pre_process import pre_process_docx

    # Equations become LaTeX before mammoth, which has no element for them.
    html = mammoth.convert_to_html(pre_process_docx(io.BytesIO(data)), style_map=_STYLES).value
    parts = [DocumentPart("", _markdown(html.encode(), "utf-8")[0])]
    if margins := _margins_of_docx(data):
        parts.append(DocumentPart("headers and footers of pages", margins))
    return _document(parts, "Word document")


def _margins_of_docx(data: bytes) -> str:
    """Return the text of a docx file's headers and footers, which the library mammoth omits.

    A header or footer that several sections repeat is returned once.
    """
    from defusedxml import ElementTree

    lines: dict[str, None] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = filter(re.compile(r"word/(header|footer)\d*\.xml").fullmatch, archive.namelist())
        for name in sorted(names, reverse=True):  # headers first
            for paragraph in ElementTree.fromstring(archive.read(name)).iter(f"{_WORD}p"):
                texts = (each.text or "" for each in paragraph.iter(f"{_WORD}t"))
                lines.setdefault("".join(texts).strip())
    return "\n".join(filter(None, lines))


def convert_pptx(data: bytes) -> ConvertedDocument:
    converter = _import_markitdown().PptxConverter()
    found = converter.convert(io.BytesIO(data), None).markdown
    slides: list[list[str]] = []
    for line in found.split("\n"):
        # The text of a slide may contain such a comment, but hardly with the next number.
        if line == f"<!-- Slide number: {len(slides) + 1} -->":
            slides.append([])
        elif slides:
            slides[-1].append(line)
    parts = [
        DocumentPart(f"slide {number}", "\n".join(lines).strip())
        for number, lines in enumerate(slides, 1)
    ]
    return _document(parts, f"presentation: {_format_count(len(parts), 'slide')}")


def convert_odt(data: bytes) -> ConvertedDocument:
    import odfdo

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if b"encryption-data" in archive.read("META-INF/manifest.xml"):
            raise UnreadableSourceError("is an encrypted document", "save it without a password")
    text = str(odfdo.Document(io.BytesIO(data)).to_markdown())
    return _document([DocumentPart("", text.strip())], "OpenDocument text")


def convert_epub(data: bytes) -> ConvertedDocument:
    from defusedxml import ElementTree

    with zipfile.ZipFile(io.BytesIO(data)) as book:
        names = set(book.namelist())
        container = ElementTree.fromstring(book.read("META-INF/container.xml"))
        root = next(each for each in container.iter() if _tag(each) == "rootfile")
        package_name = root.attrib["full-path"]
        package = ElementTree.fromstring(book.read(package_name))
        folder = posixpath.dirname(package_name)
        places = {
            each.attrib["id"]: posixpath.normpath(
                posixpath.join(folder, unquote(each.attrib["href"]))
            )
            for each in package.iter()
            if _tag(each) == "item" and "nav" not in each.attrib.get("properties", "").split()
        }
        spine = [
            places[each.attrib["idref"]]
            for each in package.iter()
            if _tag(each) == "itemref" and each.attrib.get("idref") in places
        ]
        locked = _encrypted_parts(ElementTree, book, names)
        if locked.intersection(spine):
            raise UnreadableSourceError("is an encrypted book", "only its own reader can open it")
        chapters: list[DocumentPart] = []
        for name in spine:
            if name in names and name.lower().endswith((".xhtml", ".html", ".htm", ".xml")):
                text, title = _markdown(book.read(name))
                if text:
                    is_titled = text.lstrip().startswith("#")
                    place = f"chapter {len(chapters) + 1}"
                    chapters.append(DocumentPart(place, text, "" if is_titled else title))
    titles = [each.text for each in package.iter() if _tag(each) == "title" and each.text]
    named = f" {titles[0]!r}" if titles else ""
    return _document(chapters, f"book{named}: {_format_count(len(chapters), 'chapter')}")


def convert_html(data: bytes) -> ConvertedDocument:
    text, title = _markdown(data)
    return _document([DocumentPart("", text)], f"page {title!r}" if title else "page")


def html_to_markdown(html: str) -> str:
    """Convert the HTML part of an e-mail message to Markdown."""
    return _markdown(html.encode("utf-8", "replace"), "utf-8")[0]


def _markdown(data: bytes, encoding: str | None = None) -> tuple[str, str]:
    """Convert an HTML page to Markdown, and return the text and the title.

    Without ``encoding``, a page that is valid UTF-8 is read as UTF-8, and for any other page the
    encoding is detected.
    """
    from bs4 import BeautifulSoup

    if encoding is None:
        try:
            data.decode("utf-8")
            encoding = "utf-8"
        except UnicodeDecodeError:
            pass
    soup = BeautifulSoup(data, "html.parser", from_encoding=encoding)
    for cell in soup.find_all(["td", "th"]):
        for text in cell.find_all(string=True, recursive=True):
            if "|" in text and cell in (text.find_parent(["td", "th"]),):
                text.replace_with(text.replace("|", r"\|"))
    title = soup.title.get_text() if soup.title else ""
    found = _import_markitdown().HtmlConverter().convert_string(str(soup)).markdown
    return found.strip(), " ".join(title.split())[:200]


def _encrypted_parts(tree: Any, book: zipfile.ZipFile, names: set[str]) -> set[str]:
    """Return the names of the files in an EPUB book that are encrypted."""
    if "META-INF/encryption.xml" not in names:
        return set()
    listed = tree.fromstring(book.read("META-INF/encryption.xml"))
    return {
        unquote(each.attrib.get("URI", ""))
        for each in listed.iter()
        if _tag(each) == "CipherReference"
    }


def _document(parts: list[DocumentPart], detail: str) -> ConvertedDocument:
    text, places = assemble(parts, has_headings=True)
    return ConvertedDocument(text, detail, places)


def _tag(element: Any) -> str:
    return str(element.tag).rpartition("}")[2]


def _format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
