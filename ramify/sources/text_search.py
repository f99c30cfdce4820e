"""The functions ``search`` and ``chunks`` that code in a session can call.

This module decides which contexts have them, and when a search index is built.

    build_context_search_tools(context) ──> {"search": TextSearchTool, "chunks": TextChunkingTool}
    TextSearchTool.prepare()  a session is being opened: soon the index is built in the background
    TextSearchTool(query, k)  waits for the index, then answers from it

Small contexts have neither function, as a model can read them or look through them at once. A build
stops when nothing uses its context any more, as when a run ends early. The indexes of this process
are in ``search_index.py``. The units of a search are defined in
``search_units.py``, and ``text_chunks.py`` divides texts into chunks.
"""

from __future__ import annotations

import bisect
import functools
import importlib.util
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ramify.sandbox.base import FileBackedText
from ramify.session_module_compiler import read_module_source
from ramify.sources.loaded_sources import MIN_SEARCHED_CHARS
from ramify.sources.search_units import (
    BLOCK_CHARS,
    MAX_HITS,
    Text,
    TextSegmentationMode,
    citation_place,
    detect_segmentation,
    replace_surrogates,
    unit_starting_at,
)
from ramify.sources.text_chunks import chunks

if TYPE_CHECKING:
    from ramify.sources.search_index import SearchIndexProcess
    from ramify.sources.search_index_process import IndexedTextBlock, SearchProcessRequest

MAX_CHARS = 8_000_000_000
"""Largest context in characters that has ``search``. Indexing a larger one would take half
an hour.
"""
WAIT_S = 60.0
"""Seconds that a search waits for its index to be built."""
DELAY_S = 0.5
"""Delay in seconds before an index is built in advance; a model usually thinks for longer. Building
takes two cores about a second per 20 MB, which is wasted if the run ends sooner."""
MAX_QUERY_CHARS = 10_000
_COUNTED_CHARS = 1 << 17
"""Distance in characters between the positions for which the line number is cached."""

SEARCH = (
    "Find the k lines or passages of the run's data that match the words of `query` best (BM25: "
    "rare words count most; whole words in any case, no operators), best first: dicts with "
    "'place', 'text', 'score', 'name' (key or index of the text, if there are several), 'start' "
    "and 'end' (characters of that text)."
)
"""Description of ``search`` for a model."""

T = TypeVar("T")


def build_context_search_tools(context: Any) -> dict[str, Any]:
    """Return the tools for searching ``context``, which is a text or a dict or list of texts.

    The result is empty if the context is too small or has another type.
    """
    chars = sum(map(len, _texts(context).values()))
    if chars < MIN_SEARCHED_CHARS:
        return {}
    tools: dict[str, Any] = {"chunks": TextChunkingTool()}
    if has_tantivy() and chars <= MAX_CHARS:
        tools = {"search": TextSearchTool(context), **tools}
    return tools


def context_search_tools_by_name(names: Collection[str], context: Any) -> dict[str, Any]:
    """Return the search functions called ``names``, for replaying a recorded run.

    If a library is missing, an error is raised only when a search must be run because its result
    was not recorded.
    """
    every: dict[str, Any] = {"search": TextSearchTool(context), "chunks": TextChunkingTool()}
    return {name: tool for name, tool in every.items() if name in names}


def has_tantivy() -> bool:
    return importlib.util.find_spec("tantivy") is not None


def _texts(context: Any) -> dict[Any, Text]:
    """Return the context's texts in a dict whose keys are their names or indices.

    A single text has the name "".
    """
    if isinstance(context, str | FileBackedText):
        return {"": context}
    named: Iterable[tuple[Any, Any]] = ()
    if isinstance(context, Mapping):
        named = context.items()
    elif isinstance(context, list | tuple):
        named = enumerate(context)
    return {name: text for name, text in named if isinstance(text, str | FileBackedText)}


class TextSearchTool:
    """The function ``search`` of a session, for full-text search in the texts of one context."""

    __name__ = "search"
    is_optional = True
    """True: this function is mentioned only in prompts that list tools by name; see
    ``RlmSetup.tools_at``."""
    is_replaceable = True
    """True: a variable of the session may replace this function."""

    def __init__(self, context: Any) -> None:
        self.__doc__ = SEARCH
        self._is_single = isinstance(context, str | FileBackedText)
        self._texts = _texts(context)
        self._names = list(self._texts)
        self._starts = [0]
        for text in self._texts.values():
            self._starts.append(self._starts[-1] + len(text))
        self._layouts: dict[Any, TextSegmentationMode] = {}
        self._lines: dict[Any, list[int]] = {}
        """Name of a text -> number of lines before each multiple of ``_COUNTED_CHARS`` characters.
        The lists grow as lines are counted."""
        self._lock = threading.Lock()
        self._built: Future[SearchIndexProcess] | None = None
        self.is_asked = threading.Event()
        """Set at the first query, so that the index is built at once and not after ``DELAY_S``."""

    @property
    def num_chars(self) -> int:
        """Total number of characters of all texts."""
        return self._starts[-1]

    def prepare(self) -> None:
        """Start building the search index in the background, after a short delay."""
        self._index_future()

    def __call__(self, query: str, k: int = 10) -> list[dict[str, Any]]:
        """Search for ``query`` and return the ``k`` best hits.

        Raises TypeError, ValueError or TimeoutError with a message for the model. The description
        that the model reads is ``SEARCH``.
        """
        if not isinstance(query, str):
            raise TypeError(f"the query is a {type(query).__name__}: give words as one text")
        if type(k) is not int or not 1 <= k <= MAX_HITS:
            raise ValueError(f"k={k!r}: give a number from 1 to {MAX_HITS}")
        if not query.strip():
            raise ValueError("the query is empty: give one or more words")
        if len(query) > MAX_QUERY_CHARS:
            raise ValueError(
                f"the query has {len(query):,} characters: give a few words, at most "
                f"{MAX_QUERY_CHARS:,} characters"
            )
        self.is_asked.set()
        future = self._index_future()
        try:
            index = future.result(WAIT_S)
        except TimeoutError:
            raise TimeoutError(
                "the index is still being built: run other code first and search again later"
            ) from None
        except (ValueError, OSError) as error:
            raise ValueError(
                f"the index is missing: {error}; look through the data instead"
            ) from None
        return [self._hit(score, at) for score, at in index.ask(query, k)]

    def _hit(self, score: float, at: int) -> dict[str, Any]:
        number = bisect.bisect_right(self._starts, at) - 1
        name = self._names[number]
        text = self._texts[name]
        layout = self._layout(name)
        start, end = unit_starting_at(text, at - self._starts[number], layout.shape)
        shown = name if isinstance(name, str) else f"[{name!r}]"
        place = citation_place(shown, text, start, self._line_number(name, start), layout)
        hit = {"place": place, "text": text[start:end].strip("\r\n"), "score": score}
        return {**hit, "start": start, "end": end, **({} if self._is_single else {"name": name})}

    def _layout(self, name: Any) -> TextSegmentationMode:
        layout = self._layouts.get(name)
        if layout is None:
            layout = self._layouts[name] = detect_segmentation(self._texts[name])
        return layout

    def _line_number(self, name: Any, start: int) -> int:
        """Return the line number, counted from 1, of the character at ``start`` in the named
        text."""
        text, step = self._texts[name], _COUNTED_CHARS
        with self._lock:
            before = self._lines.setdefault(name, [0])
            for low in range(step * (len(before) - 1), start - step + 1, step):
                before.append(before[-1] + text.count("\n", low, low + step))
        number = start // step
        return before[number] + text.count("\n", number * step, start) + 1

    # --- the index

    def _index_future(self) -> Future[SearchIndexProcess]:
        with self._lock:
            # If the index's process has ended, it is built again.
            built = self._built
            if built is None or (built.done() and _has_ended(built)):
                built = self._built = _in_thread(_UsedSearch(self).get_or_build_index)
            return built

    def block_starts(self) -> list[tuple[int, int]]:
        """Return the start of each text block in the context: the index of its text and a
        position."""
        return [
            (number, at)
            for number, text in enumerate(self._texts.values())
            for at in range(0, len(text), BLOCK_CHARS)
        ]

    def block_hash_input(self, number: int, at: int) -> bytes:
        """Return the bytes that one block of text adds to the hash of the context.

        Contexts with equal hashes share a search index.
        """
        text, name = self._texts[self._names[number]], self._names[number]
        head = b"" if at else f"{len(text)},{self._layout(name).shape};".encode()
        if isinstance(text, FileBackedText) and text.file.digest:
            return head + (b"" if at else text.file.digest.encode())
        return head + text[at : at + BLOCK_CHARS].encode("utf-8", "replace")

    def block_at(self, number: int, at: int) -> IndexedTextBlock:
        from ramify.sources.search_index_process import IndexedTextBlock

        name = self._names[number]
        text, shape = self._texts[name], self._layout(name).shape
        block = replace_surrogates(text[at : at + BLOCK_CHARS])
        return IndexedTextBlock(
            block, self._starts[number] + at, shape, at + len(block) == len(text)
        )


class _UsedSearch:
    """Gives an index builder access to a context's texts, without keeping the context in memory.

    Building an index takes a minute per gigabyte, and must not keep the context of a finished run
    in memory.
    """

    def __init__(self, search: TextSearchTool) -> None:
        self._search = weakref.ref(search)
        self._is_asked = search.is_asked
        self._places = search.block_starts()
        self._num_chars = search.num_chars

    def get_or_build_index(self) -> SearchIndexProcess:
        """Return the search index of the context, and build it first if necessary.

        Raises ValueError if it cannot be built or the context is no longer used.
        """
        self._is_asked.wait(DELAY_S)
        # Few runs come so far, so this is imported only now.
        import hashlib

        from ramify.sources.search_index import get_or_build_index

        digest = hashlib.sha256()
        for number, at in self._places:
            digest.update(self._require_search().block_hash_input(number, at))
        return get_or_build_index(digest.hexdigest(), self._num_chars, self._indexing_requests)

    def _indexing_requests(self) -> Iterator[SearchProcessRequest]:
        """Yield the requests that send all texts of the context to the index process.

        Each request except the last has at least ``BLOCK_CHARS`` characters.
        """
        from ramify.sources.search_index_process import SearchProcessRequest

        blocks: list[IndexedTextBlock] = []
        num_chars = 0
        for number, at in self._places:
            blocks.append(self._require_search().block_at(number, at))
            num_chars += len(blocks[-1].text)
            if num_chars >= BLOCK_CHARS:
                yield SearchProcessRequest("add", tuple(blocks))
                blocks, num_chars = [], 0
        yield SearchProcessRequest("add", tuple(blocks))

    def _require_search(self) -> TextSearchTool:
        search = self._search()
        if search is None:
            raise ValueError("nothing uses its context any more")
        return search


def _has_ended(built: Future[SearchIndexProcess]) -> bool:
    return built.exception() is None and built.result().has_ended


def _in_thread(call: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    threading.Thread(
        target=_run_into_future, args=(future, call), daemon=True, name="ramify search index"
    ).start()
    return future


def _run_into_future(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 -- raised where the result is asked for
        future.set_exception(error)
    finally:
        del future, call  # the error refers to this frame, which must not refer to the error


# --- chunks


class TextChunkingTool:
    """The function ``chunks`` of a session, which splits a text into parts.

    Unlike other tools, it runs inside the session.
    """

    __name__ = "chunks"
    __doc__ = chunks.__doc__
    is_optional = True
    is_replaceable = True

    def __call__(self, tokens: int = 4000, text: Any = None) -> list[dict[str, str]]:
        raise RuntimeError("chunks works only inside a session")

    @property
    def session_source(self) -> str:
        """Return the source code of the module that defines ``chunks`` in a session."""
        return _chunks_source()


@functools.cache
def _chunks_source() -> str:
    return read_module_source(Path(__file__).with_name("text_chunks.py"))
