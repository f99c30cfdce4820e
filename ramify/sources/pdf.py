"""Text of a PDF, page by page, extracted by ``pypdf`` (extra ``pdf``). Not here: its pages as
pictures, and scans, which have no text (see ``pdf_pages.py``).

A malicious PDF can take hours, so it is parsed in a thread that is stopped at a time limit.
"""

from __future__ import annotations

import ctypes
import gc
import io
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ramify.sources.base import SourceLoader, UnreadableSource
from ramify.sources.file_kinds import SourceFile
from ramify.sources.pdf_pages import keep, read_scan

T = TypeVar("T")


def read(file: SourceFile, loading: SourceLoader) -> None:
    try:
        import pypdf
    except ImportError:
        raise UnreadableSource("is a PDF", "reading it needs pip install 'ramify[pdf]'") from None
    # pypdf warns of every irregularity in a file, but only the text matters here.
    logging.getLogger("pypdf").setLevel(logging.ERROR)
    try:
        pages = in_time(lambda: _pages(pypdf.PdfReader(io.BytesIO(file.data))), loading.max_file_s)
    except UnreadableSource:
        raise
    except TimeoutError:
        raise UnreadableSource(
            f"is a PDF that takes more than {loading.max_file_s:g} s to read",
            "convert it to text first",
        ) from None
    except Exception as error:  # noqa: BLE001 -- a damaged PDF raises anything
        raise UnreadableSource(
            "is a PDF that cannot be read",
            f"{type(error).__name__}: {' '.join(str(error).split())}",
        ) from None
    if not any(page.strip() for page in pages):
        read_scan(file, len(pages), loading)
        return
    text = "\n".join(f"--- page {number} ---\n{page}" for number, page in enumerate(pages, start=1))
    text = text.encode("utf-8", "replace").decode()  # broken font tables yield lone surrogates
    loading.spend(len(text), file.name)
    loading.add(file.name, text, "pdf", len(file.data), f"PDF: {len(pages):,} pages")
    keep(file, loading)


def _pages(reader: Any) -> list[str]:
    if reader.is_encrypted and not reader.decrypt(""):
        raise UnreadableSource("is an encrypted PDF", "save it without a password")
    return [page.extract_text() for page in reader.pages]


_TRIES, _TRY_S = 20, 0.05


class _TimeIsOver(SystemExit):
    """Stops the parsing thread. Not an Exception, because parsers catch those and continue."""


def in_time(work: Callable[[], T], limit_s: float) -> T:
    """Return ``work()``, which must be pure Python. After ``limit_s``, raise TimeoutError and stop
    its thread at the next bytecode instruction."""
    done: list[T] = []
    failed: list[BaseException] = []

    def target() -> None:
        try:
            done.append(work())
        except BaseException as error:  # noqa: BLE001 -- raised again in the waiting thread
            failed.append(error)

    thread = threading.Thread(target=target, daemon=True, name="ramify parse")
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        _stop(thread)
        raise TimeoutError
    if failed:
        raise failed[0]
    return done[0]


def _stop(thread: threading.Thread) -> None:
    """Raise ``_TimeIsOver`` in ``thread`` until it ends. One that arrives in a callback of the
    garbage collector is lost, so none is begun meanwhile."""
    assert thread.ident is not None
    was_enabled = gc.isenabled()
    gc.disable()
    for _ in range(_TRIES):
        thread.join(_TRY_S)  # also lets a callback in progress end
        if not thread.is_alive():
            break
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(_TimeIsOver)
        )
    if was_enabled:
        gc.enable()
