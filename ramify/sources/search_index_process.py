"""Builds and queries the search index of one context in a separate process.

Passages are ranked by BM25, using the library ``tantivy``.

    SearchProcessRequest("open")                ──> the process knows its folder
    SearchProcessRequest("add", blocks=blocks)  ──> the units of the blocks are indexed
    SearchProcessRequest("commit")              ──> the index can be asked
    SearchProcessRequest("ask", query=query)    ──> [(score, position), …]                best first

A unit is a line or a passage. A position is the number of characters before a unit, counted over
all texts of the context. The index keeps only the position and the words of a unit. Units with
equal scores are returned in order of position, whichever thread indexed them. A query consists of
words and has no syntax.

A query scores at most about ``MAX_POSTINGS`` occurrences of words, so that it takes milliseconds in
a context of any size. Beyond that, its most common words, which are the least informative, are left
out. If each word of the query is more common than that, up to four of them are searched in the
first ``MAX_POSTINGS`` units, divided by their number.

The process deletes its folder when its input is closed, which also happens if the host is killed.
Units are defined in ``search_units.py``, and ``text_search.py`` decides when an index is built.
"""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.actors.helper_process import answer_requests
from ramify.actors.message_encoding import decode
from ramify.sources.query_process import encode_outcome
from ramify.sources.search_units import Shape, iter_search_units, normalize_for_search

MAX_POSTINGS = 1 << 20
MAX_WORDS = 64
"""Maximum number of distinct words in a query. Further words are ignored."""
MAX_WORD_BYTES = 128
"""Words longer than this many bytes are not indexed."""
_HEAP_BYTES = 256 << 20
_NUM_THREADS = 2
_ADDRESS_BYTES = 16 << 30
"""Limit in bytes on the address space of the process, including mapped files."""
_TIED = 400
"""Number of hits to fetch beyond those requested, so that hits with equal scores can be sorted."""
_PART, _REGION = 256, 1 << 18
"""Number of consecutive passages in a part and in a region, two groups to which a search can be
limited."""


class IndexedTextBlock(msgspec.Struct, frozen=True):
    """A block of text to add to a search index."""

    text: str
    at: int
    """Start of the block, as a character offset in all texts of the context joined together."""
    shape: Shape
    is_last: bool
    """True for the last block of its text."""


class SearchProcessRequest(msgspec.Struct, frozen=True):
    """A request to the process that holds a search index."""

    kind: str
    """One of ``open``, ``add``, ``commit`` and ``ask``."""
    blocks: tuple[IndexedTextBlock, ...] = ()
    query: str = ""
    k: int = 10
    folder: str = ""
    """Folder of the index."""
    max_bytes: int = 0
    """Limit on the size of the index on disk, in bytes."""


def serve() -> None:
    """Serve search requests in a child process, until standard input is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_BYTES, _ADDRESS_BYTES))
    # Only answers go to the standard output.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    index: list[_Index] = []

    def answer(request: list[bytes]) -> list[bytes]:
        asked: SearchProcessRequest = decode(request[0], SearchProcessRequest)

        def call() -> Any:
            if not index:
                index.append(_Index(asked.folder, asked.max_bytes))
            return index[0].answer(asked)

        return encode_outcome(call)

    try:
        answer_requests(answer)
    finally:
        if index:
            shutil.rmtree(index[0].folder, ignore_errors=True)


class _Index:
    def __init__(self, folder: str, max_bytes: int) -> None:
        import tantivy

        self.folder = folder
        self._max_bytes = max_bytes
        self._tantivy = tantivy
        self._words = (
            tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
            .filter(tantivy.Filter.remove_long(MAX_WORD_BYTES))
            .filter(tantivy.Filter.lowercase())
            .filter(tantivy.Filter.ascii_fold())
            .build()
        )
        fields = tantivy.SchemaBuilder()
        fields.add_text_field("text", stored=False, tokenizer_name="words", index_option="freq")
        fields.add_unsigned_field("at", stored=False, fast=True)
        fields.add_unsigned_field("part", stored=False, indexed=True)
        fields.add_unsigned_field("region", stored=False, indexed=True)
        self._schema = fields.build()
        self._index = tantivy.Index(self._schema, path=folder)
        self._index.register_tokenizer("words", self._words)
        self._writer: Any = self._index.writer(heap_size=_HEAP_BYTES, num_threads=_NUM_THREADS)
        self._searcher: Any = None
        self._rest = ""
        """End of the last block, which is held back because its division into units may depend on
        the text that follows."""
        self._num_requests = self._num_units = 0

    def answer(self, asked: SearchProcessRequest) -> Any:
        if asked.kind == "open":
            return None
        if asked.kind == "add":
            for block in asked.blocks:
                self._add(block)
            self._num_requests += 1
            if self._num_requests % 16 == 0:
                self._check_size()
            return None
        if asked.kind == "commit":
            self._writer.commit()
            self._writer.wait_merging_threads()
            self._writer = None
            self._check_size()
            self._index.reload()
            self._searcher = self._index.searcher()
            return self._searcher.num_docs
        return self._ask(asked.query, asked.k)

    def _add(self, added: IndexedTextBlock) -> None:
        block = self._rest + added.text
        at = added.at - len(self._rest)
        document, add = self._tantivy.Document, self._writer.add_document
        end = 0
        for start, end in iter_search_units(block, added.shape, is_last=added.is_last):
            unit = document()
            unit.add_text("text", normalize_for_search(block[start:end]))
            unit.add_unsigned("at", at + start)
            unit.add_unsigned("part", self._num_units // _PART)
            unit.add_unsigned("region", self._num_units // _REGION)
            add(unit)
            self._num_units += 1
        self._rest = "" if added.is_last else block[end:]

    def _check_size(self) -> None:
        size = sum(entry.stat().st_size for entry in os.scandir(self.folder))
        if size > self._max_bytes:
            raise ValueError(
                f"the index is larger than {self._max_bytes / 1e6:,.0f} MB, so it was not built"
            )

    def _ask(self, query: str, k: int) -> list[tuple[float, int]]:
        words = list(dict.fromkeys(self._words.analyze(normalize_for_search(query))))[:MAX_WORDS]
        counts = [(self._searcher.doc_freq("text", word), word) for word in words]
        rarest = sorted(each for each in counts if each[0])
        if not rarest:
            return []
        totals = itertools.accumulate(count for count, _ in rarest)
        num = sum(total <= MAX_POSTINGS for total in totals)
        # Rare words are searched everywhere, up to a cost limit. If even the rarest word exceeds
        # it, the search covers only the first regions of the text, at about the same cost.
        asked = rarest[: num or MAX_POSTINGS // _REGION]
        matches = self._any_of([("text", word) for _, word in asked])
        if not num:
            first = range(MAX_POSTINGS // _REGION // len(asked))
            matches = self._restrict_to_terms(matches, [("region", number) for number in first])
        best = self._hits(matches, k + _TIED)
        # More passages share the last score than were fetched: take the first ones in the text.
        if len(best) == k + _TIED and best[k - 1][0] == best[-1][0]:
            score = best[-1][0]
            best = [each for each in best if each[0] > score]
            best += self._first_with(score, matches, k - len(best))
        return best[:k]

    def _first_with(self, score: float, matches: Any, num: int) -> list[tuple[float, int]]:
        """Return the first ``num`` passages that match a query with exactly this score.

        They are in the order of the text. Used if more passages share a score than one query
        fetches.
        """
        found: list[tuple[float, int]] = []
        for part in range(self._num_units // _PART + 1):
            hits = self._hits(self._restrict_to_terms(matches, [("part", part)]), _PART)
            found += [hit for hit in hits if hit[0] == score]
            if len(found) >= num:
                break
        return found[:num]

    def _any_of(self, terms: Sequence[tuple[str, Any]]) -> Any:
        query, should = self._tantivy.Query, self._tantivy.Occur.Should
        return query.boolean_query(
            [(should, query.term_query(self._schema, field, value)) for field, value in terms]
        )

    def _restrict_to_terms(self, matches: Any, terms: Sequence[tuple[str, Any]]) -> Any:
        """Restrict a query to passages that contain one of the given terms, without changing their
        scores."""
        query, must = self._tantivy.Query, self._tantivy.Occur.Must
        inside = query.const_score_query(self._any_of(terms), 0.0)
        return query.boolean_query([(must, matches), (must, inside)])

    def _hits(self, query: Any, limit: int) -> list[tuple[float, int]]:
        found = self._searcher.search(query, limit, count=False).hits
        positions = self._searcher.fast_field_values("at", [address for _, address in found])
        # The order of the words changes the last digits of a sum, so scores are rounded.
        hits = [
            (float(f"{score:.4g}"), at) for (score, _), at in zip(found, positions, strict=True)
        ]
        return sorted(hits, key=lambda hit: (-hit[0], hit[1]))
