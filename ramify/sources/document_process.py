"""Conversion of documents to text in a separate process that can be killed.

    convert_document("docx", "a Word document", file, loading)
        ──> idle process ── its converter ──> ConvertedDocument
        └── no answer within the limit, or out of memory: it is killed, and the next document starts
            another

A document is untrusted, and its parser may hang, use all memory or crash. The process knows no key,
can write no file and has a bounded memory. Its time limit begins once the converter has been
imported. Not here: the converters (``office_documents.py``, ``mail.py``, ``pdf.py``), and what
becomes of a document in a context (``documents.py``).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pkgutil
import resource
import signal
import sys
import warnings
from collections.abc import Callable

import msgspec

from ramify.actors.answering_process import answer_requests, ask, start
from ramify.actors.child_process import IdleProcesses
from ramify.actors.run_messages import decode, encode
from ramify.sources.base import SourceLoader, SourcePlace, UnreadableSource
from ramify.sources.file_kinds import SourceFile

MEMORY_BYTES = 4 << 30
"""Address space of a process that converts documents."""
_START_S = 120.0
"""Time limit for starting the process and importing a library."""
CONVERTERS = {
    "pdf": "ramify.sources.pdf:convert",
    "docx": "ramify.sources.office_documents:convert_docx",
    "pptx": "ramify.sources.office_documents:convert_pptx",
    "odt": "ramify.sources.office_documents:convert_odt",
    "epub": "ramify.sources.office_documents:convert_epub",
    "html": "ramify.sources.office_documents:convert_html",
    "eml": "ramify.sources.mail:convert_eml",
    "mbox": "ramify.sources.mail:convert_mbox",
    "msg": "ramify.sources.mail:convert_msg",
    "7z": "ramify.sources.seven_zip:convert",
}
"""Kind -> place of its converter."""


class ConvertedDocument(msgspec.Struct, frozen=True):
    """Text of a document."""

    text: str
    detail: str
    """Number of its parts, and notes: ``presentation: 3 slides``."""
    places: list[SourcePlace] = []
    members: list[tuple[str, bytes]] = []
    """Name and content of each attachment."""


Converter = Callable[[bytes], ConvertedDocument]


class ConversionRequest(msgspec.Struct, frozen=True):
    """A document, or without one, a request to import the converter."""

    kind: str
    max_bytes: int = 0
    """Limit on the text and the members together."""


class ConversionAnswer(msgspec.Struct, frozen=True):
    """A document, or why it cannot be read."""

    document: ConvertedDocument | None = None
    reason: str = ""
    """Empty if the converter does not know it."""
    remedy: str = ""


_processes = IdleProcesses(functools.partial(start, f"{__name__}:serve", is_bare=True))


def convert_document(
    kind: str, what: str, file: SourceFile, loading: SourceLoader
) -> ConvertedDocument:
    """Return the text of a document, which ``what`` describes: ``a PDF``. Raises
    UnreadableSource."""
    try:
        with _processes.one() as process:
            ask(process, [encode(ConversionRequest(kind))], _START_S)
            request = [encode(ConversionRequest(kind, max(0, loading.room))), file.data]
            (answered,) = ask(process, request, loading.max_file_s)
    except TimeoutError:
        raise UnreadableSource(
            f"is {what} that takes more than {loading.max_file_s:g} s to read",
            "convert it to text first",
        ) from None
    except (EOFError, OSError):
        raise UnreadableSource(
            f"is {what} that ends its reader, which may use {MEMORY_BYTES >> 30} GB of memory",
            "convert it to text first",
        ) from None
    answer: ConversionAnswer = decode(answered, ConversionAnswer)
    if answer.document is None:
        reason = answer.reason or f"is {what} that cannot be read"
        raise UnreadableSource(reason, answer.remedy)
    return answer.document


# --- in the process -------------------------------------------------------------------------------


def serve() -> None:
    """Answer requests from standard input until it is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    logging.disable()
    warnings.simplefilter("ignore")
    # Libraries may print to the standard output, which is for answers only.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    answer_requests(_answer)


def _answer(request: list[bytes]) -> list[bytes]:
    asked: ConversionRequest = decode(request[0], ConversionRequest)
    converter: Converter = pkgutil.resolve_name(CONVERTERS[asked.kind])
    if len(request) == 1:
        return [b""]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            document = converter(request[1])
        size = len(document.text) + sum(len(data) for _, data in document.members)
        if size > asked.max_bytes:
            raise UnreadableSource(
                f"has {size / 1e6:,.0f} MB of text, which is more than may still be read",
                "name fewer files",
            )
        return [encode(ConversionAnswer(document))]
    except MemoryError:
        raise
    except UnreadableSource as error:
        return [encode(ConversionAnswer(reason=error.reason, remedy=error.remedy))]
    except Exception as error:  # noqa: BLE001 -- a damaged document raises anything
        why = " ".join(str(error).split())[:200]
        return [encode(ConversionAnswer(remedy=f"{type(error).__name__}: {why}".rstrip(": ")))]
