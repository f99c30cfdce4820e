"""Divides a text into search units: the lines or passages that a search returns as hits.

    detect_segmentation(text)             "lines" or "passages", and whether it has pages
    units(block, shape, is_last=…)        (start, end) of each unit, in order
    citation_place(name, text, start, …)  "report.pdf:812 (page 14)"
    searchable(text)                      the text with the words of scripts without spaces apart

In a text without blank lines (a log, a table, JSONL), each line is a unit. In other texts, a unit
is a passage: a paragraph, or several lines of code. It ends at a blank line, before a heading and
before a page. A unit depends only on where it begins and on what follows, so a hit is found again
from its beginning. Chinese, Japanese, Thai, Lao, Khmer and Burmese have no spaces between words:
their words are all pairs of neighbouring characters. The index is in
``search_index_process.py``.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterator
from typing import Literal

import msgspec

from ramify.lazy_pattern import lazy_pattern
from ramify.sandbox.base import FileBackedText

Shape = Literal["lines", "passages"]
Text = str | FileBackedText

MAX_HITS = 100
"""Maximum number of hits of one search."""
BLOCK_CHARS = 1 << 22
"""Length in characters of the blocks in which a text is read for indexing."""
MAX_CHARS = 1500
"""Maximum length of a unit in characters. A longer line is cut, at a space near the limit if there
is one.
"""
LOOK_AHEAD = MAX_CHARS + 200
"""Number of characters after the beginning of a unit that can affect where it ends."""
_GOOD_CHARS = 300
"""A passage of at least this many characters ends at the next blank line."""
_HEAD_CHARS = 1 << 16
_BLANK_SHARE = 0.02
_NEAR_CHARS = 20_000
"""Number of characters before a hit that are searched for its heading."""
_PAGE_CHARS = 200_000
_BREAK = lazy_pattern(r"\n(?=#{1,6} |--- page \d+ ---$|<!-- Slide number: \d+ -->)", re.MULTILINE)
"""Matches the position before a heading or a page."""
_BLANK = lazy_pattern(r"\n[ \t\r]*\n")
_PAGE = lazy_pattern(r"^(?:---|<!--) ((?:page|Slide number:) \d+) (?:---|-->)$", re.MULTILINE)
_HEADING = lazy_pattern(r"^#{1,6} +(.+)$", re.MULTILINE)
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003134f"
)
_RUN = lazy_pattern(f"[{_UNSPACED}]+")


class TextSegmentationMode(msgspec.Struct, frozen=True):
    """How a text is divided into search units: by line or by passage.

    This is inferred from the beginning of the text.
    """

    shape: Shape
    has_pages: bool


def replace_surrogates(text: str) -> str:
    """Replace characters that UTF-8 cannot encode (lone surrogates) in ``text``.

    The length of the text does not change.
    """
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def detect_segmentation(text: Text) -> TextSegmentationMode:
    head = text[:_HEAD_CHARS]
    lines = head.split("\n")
    num_blank = sum(1 for line in lines[:-1] if not line.strip())
    is_prose = num_blank > _BLANK_SHARE * len(lines)
    return TextSegmentationMode("passages" if is_prose else "lines", _PAGE.search(head) is not None)


def iter_search_units(block: str, shape: Shape, *, is_last: bool) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each search unit that begins in a block of text.

    A unit is a line or a passage, depending on ``shape``. Blank units are skipped.

    Units at the end of the block are skipped too, if text after the block may affect where they
    end.
    """
    most = len(block) if is_last else len(block) - LOOK_AHEAD
    start = 0
    end_of = _end_of_line if shape == "lines" else _end_of_passage
    while start < most:
        end = end_of(block, start)
        if not block[start:end].isspace():
            yield start, end
        start = end


def _end_of_line(text: str, start: int) -> int:
    end = text.find("\n", start, start + MAX_CHARS)
    return end + 1 if end >= 0 else _cut_position(text, start)


def _end_of_passage(text: str, start: int) -> int:
    window = text[start : start + MAX_CHARS]
    first = len(window) - len(window.lstrip())
    found = _BREAK.search(window, first)
    if found is not None:
        window = window[: found.end()]
    blank = _BLANK.search(window, max(first, _GOOD_CHARS))
    if blank is not None:
        return start + blank.end()
    if found is not None or start + len(window) == len(text):
        return start + len(window)
    end = window.rfind("\n", first)
    return start + end + 1 if end >= 0 else _cut_position(text, start)


def _cut_position(text: str, start: int) -> int:
    """Return the position at which to cut a line that is longer than a search hit may be."""
    end = start + MAX_CHARS
    if end >= len(text):
        return len(text)
    space = text.rfind(" ", start + MAX_CHARS // 2, end)
    return space + 1 if space >= 0 else end


def unit_starting_at(text: Text, start: int, shape: Shape) -> tuple[int, int]:
    """Return the start and end of the search unit that begins at the given position."""
    window = text[start : start + LOOK_AHEAD + 1]
    is_last = start + len(window) >= len(text)
    begin, end = next(iter(iter_search_units(window, shape, is_last=is_last)), (0, len(window)))
    return start + begin, start + end


def citation_place(
    name: str, text: Text, start: int, line: int, layout: TextSegmentationMode
) -> str:
    """Describe where a search unit is, for citations: text name, line and, if known, page or
    heading."""
    inside = ""
    if layout.has_pages:
        inside = _last_match(_PAGE, text, start, _PAGE_CHARS).lower()
    elif layout.shape == "passages":
        inside = _last_match(_HEADING, text, start, _NEAR_CHARS)[:80]
    where = f"{name}:{line}" if name else f"line {line}"
    return f"{where} ({inside})" if inside else where


def _last_match(mark: re.Pattern[str], text: Text, start: int, most: int) -> str:
    """Return the last page mark or heading before a position in the text, for a citation.

    Matches that begin more than ``most`` characters earlier are ignored.
    """
    low = max(0, start - most)
    last = ""
    for found in mark.finditer(text[low : start + 200]):
        if low + found.start() > start:
            break
        last = found[1]
    return last.strip()


def normalize_for_search(text: str) -> str:
    """Normalise ``text`` for indexing and searching, so that words are separated by spaces."""
    if text.isascii():
        return text
    return _RUN.sub(_spaced_bigrams, unicodedata.normalize("NFKC", text))


def _spaced_bigrams(run: re.Match[str]) -> str:
    chars = run[0]
    if len(chars) == 1:
        return f" {chars} "
    return f" {' '.join(map(''.join, itertools.pairwise(chars)))} "
