"""Convert documents to text in a separate process, which can be killed if a document is harmful.

    convert_document("docx", "a Word document", file, loading)
        ──> idle process ── its converter ──> ConvertedDocument
        └── too slow, or out of memory: the process is killed, and the next document starts another

A document is untrusted, and its parser may hang, use all memory or crash. The process has no keys
in its environment, cannot write files, and has limited memory. The time limit begins once the
converter has been imported. The converters are in ``office_documents.py``, ``email_conversion.py``
and ``pdf.py``; ``documents.py`` adds their result to a context.
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

from ramify.actors.child_process import HelperProcessPool
from ramify.actors.helper_process import answer_requests, ask, start_python_process
from ramify.actors.message_encoding import decode, encode
from ramify.sources.file_kinds import InputFile
from ramify.sources.loaded_sources import (
    DocumentPartLocation,
    SourceCollector,
    UnreadableSourceError,
)

MEMORY_BYTES = 4 << 30
"""Limit on the address space of a conversion process, in bytes."""
_START_S = 120.0
"""Time limit for starting the process and importing a library, in seconds."""
CONVERTERS = {
    "pdf": "ramify.sources.pdf:convert",
    "docx": "ramify.sources.office_documents:convert_docx",
    "pptx": "ramify.sources.office_documents:convert_pptx",
    "odt": "ramify.sources.office_documents:convert_odt",
    "epub": "ramify.sources.office_documents:convert_epub",
    "html": "ramify.sources.office_documents:convert_html",
    "eml": "ramify.sources.email_conversion:convert_eml",
    "mbox": "ramify.sources.email_conversion:convert_mbox",
    "msg": "ramify.sources.email_conversion:convert_msg",
    "7z": "ramify.sources.seven_zip:convert",
}
"""Kind of document -> module and function that converts it."""


class ConvertedDocument(msgspec.Struct, frozen=True):
    """A document converted to text, with its named places (such as pages) and its attachments."""

    text: str
    detail: str
    """Number of parts and notes on the contents, such as ``presentation: 3 slides``."""
    places: list[DocumentPartLocation] = []
    members: list[tuple[str, bytes]] = []
    """Name and content of each attachment or archive member."""


Converter = Callable[[bytes], ConvertedDocument]


class DocumentConversionRequest(msgspec.Struct, frozen=True):
    """A request to convert a document.

    A request that comes without a document makes the process import the converter in advance.
    """

    kind: str
    max_bytes: int = 0
    """Limit on the total size of the text and the members, in bytes."""


class DocumentConversionResult(msgspec.Struct, frozen=True):
    """The result of a conversion: the converted document, or the reason why it cannot be read."""

    document: ConvertedDocument | None = None
    reason: str = ""
    """Reason why the document cannot be read; empty if the converter gives none."""
    remedy: str = ""


_processes = HelperProcessPool(
    functools.partial(start_python_process, f"{__name__}:serve", is_bare=True)
)


def convert_document(
    kind: str, what: str, file: InputFile, loading: SourceCollector
) -> ConvertedDocument:
    """Convert a document to text in a separate process, and return the result.

    ``what`` describes the document in errors, such as ``a PDF``. Raises UnreadableSourceError if
    the conversion fails.
    """
    try:
        with _processes.lend_process() as process:
            ask(process, [encode(DocumentConversionRequest(kind))], _START_S)
            request = [
                encode(DocumentConversionRequest(kind, max(0, loading.remaining_bytes))),
                file.data,
            ]
            (answered,) = ask(process, request, loading.max_file_s)
    except TimeoutError:
        raise UnreadableSourceError(
            f"is {what} that takes more than {loading.max_file_s:g} s to read",
            "convert it to text first",
        ) from None
    except (EOFError, OSError):
        raise UnreadableSourceError(
            f"is {what} that crashes its reader (memory limit: {MEMORY_BYTES >> 30} GB)",
            "convert it to text first",
        ) from None
    answer: DocumentConversionResult = decode(answered, DocumentConversionResult)
    if answer.document is None:
        reason = answer.reason or f"is {what} that cannot be read"
        raise UnreadableSourceError(reason, answer.remedy)
    return answer.document


# --- in the process -------------------------------------------------------------------------------


def serve() -> None:
    """Answer conversion requests from standard input until it is closed.

    This is the main function of the child process.
    """
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
    asked: DocumentConversionRequest = decode(request[0], DocumentConversionRequest)
    converter: Converter = pkgutil.resolve_name(CONVERTERS[asked.kind])
    if len(request) == 1:
        return [b""]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            document = converter(request[1])
        size = len(document.text) + sum(len(data) for _, data in document.members)
        if size > asked.max_bytes:
            raise UnreadableSourceError(
                f"has {size / 1e6:,.0f} MB of text, more than is left of the limit",
                "name fewer files",
            )
        return [encode(DocumentConversionResult(document))]
    except MemoryError:
        raise
    except UnreadableSourceError as error:
        return [encode(DocumentConversionResult(reason=error.reason, remedy=error.remedy))]
    except Exception as error:  # noqa: BLE001 -- a damaged document raises anything
        why = " ".join(str(error).split())[:200]
        return [
            encode(DocumentConversionResult(remedy=f"{type(error).__name__}: {why}".rstrip(": ")))
        ]
