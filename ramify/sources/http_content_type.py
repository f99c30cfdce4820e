"""Names and decodes downloads by the media type and charset that the web server reports.

The readers of files look only at names and first bytes, so this module adapts both.

    file_name("https://host/view?id=3", head, b"<!doctype …")     view.html
    to_utf8(path, "text/html; charset=shift_jis")                 rewrites the file

The media type is used only if the name has no better suffix. A file is treated as an HTML page if
its type says so and it begins with markup. The kinds of files and their readers are defined in
``file_kinds.py``.
"""

from __future__ import annotations

import codecs
import mimetypes
import os
import re
from email.message import Message
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ramify.sources.url_recognition import RemoteFileInfo

_MAX_NAME = 120
_PAGES = ("text/html", "application/xhtml+xml")
_PAGE_SUFFIXES = (".html", ".htm", ".xhtml")
_SUFFIXES = {
    "text/csv": ".csv",
    "text/tab-separated-values": ".tsv",
    "text/markdown": ".md",
    "application/json": ".json",
    "application/jsonl": ".jsonl",
    "application/x-ndjson": ".jsonl",
    "application/vnd.apache.parquet": ".parquet",
    "application/vnd.apache.arrow.file": ".arrow",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": ".xlsx",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": ".docx",
    "application/vnd.openxmlformats-officedocument.presentationml.presentation": ".pptx",
    "application/vnd.oasis.opendocument.text": ".odt",
    "application/epub+zip": ".epub",
    "application/x-ipynb+json": ".ipynb",
    "message/rfc822": ".eml",
    "application/pdf": ".pdf",
    "image/png": ".png",
    "image/jpeg": ".jpg",
    "image/webp": ".webp",
}
_OWN_SUFFIXES = frozenset({*_SUFFIXES.values(), *_PAGE_SUFFIXES, ".ndjson", ".parquet", ".db"})
_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_BYTEWISE = re.compile(r"(iso-?8859|cp125|windows-125|latin)", re.IGNORECASE)
"""Charsets in which any byte sequence is valid. Servers often report one of them by default, even
for UTF-8."""


def file_name(url: str, head: RemoteFileInfo, begin: bytes) -> str:
    """Return a file name for a download, with a suffix that matches the file's type.

    ``begin`` has the first bytes of its contents.
    """
    paths = [head.file_name, *(unquote(urlsplit(each).path) for each in (url, head.final_url))]
    names = [_safe_file_name(each) for each in paths]
    name = next(
        (each for each in names if _has_known_suffix(each)),
        next(filter(None, names), "") or _safe_file_name(urlsplit(url).hostname or "page"),
    )
    kind = _parse_content_type(head.content_type).get_content_type() if head.content_type else ""
    if kind in _PAGES and begin.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"<":
        is_page = name.lower().endswith(_PAGE_SUFFIXES)
        return name if is_page else f"{name}.html"
    return name if _has_known_suffix(name) else name + _SUFFIXES.get(kind, "")


def _safe_file_name(path: str) -> str:
    """Return a safe file name made from the last part of a path."""
    last = path.replace("\\", "/").rstrip("/").rpartition("/")[2].lstrip(".")
    plain = "".join(char if char.isprintable() else "_" for char in last).strip()
    stem, suffix = os.path.splitext(plain)
    return stem[: _MAX_NAME - len(suffix)] + suffix[:_MAX_NAME]


def _has_known_suffix(name: str) -> bool:
    suffix = os.path.splitext(name)[1].lower()
    return suffix in _OWN_SUFFIXES or mimetypes.guess_type(name, strict=False)[0] is not None


def _parse_content_type(content_type: str) -> Message:
    message = Message()
    message["Content-Type"] = "".join(filter(str.isprintable, content_type))
    return message


def to_utf8(path: Path, content_type: str) -> None:
    """Convert a downloaded text file to UTF-8 from the charset that the web server reported.

    A file that is not valid in that charset stays unchanged.

    The result begins with a byte order mark. Readers trust it more than a charset that an HTML page
    declares in its own markup.
    """
    about = _parse_content_type(content_type)
    charset = str(about.get_content_charset() or "")
    try:
        known = codecs.lookup(charset).name if charset else "utf-8"
    except LookupError:
        return
    is_text = about.get_content_maintype() == "text" or re.search(
        r"json|xml|javascript", about.get_content_subtype()
    )
    if known in ("utf-8", "ascii") or not is_text:
        return
    data = path.read_bytes()
    if data.startswith(_MARKS) or (_BYTEWISE.match(known) and _is_utf8(data)):
        return
    try:
        text = codecs.decode(data, known)
    except (UnicodeError, LookupError):
        return
    if isinstance(text, str):  # some codecs do not decode to text
        path.write_bytes(codecs.BOM_UTF8 + text.encode("utf-8", "replace"))


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
