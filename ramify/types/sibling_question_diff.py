"""Find the words that distinguish the questions of sibling calls from each other.

Their common beginning and end are left out.

    "Sum the revenue column of sheet 7 of the workbook"  ──>  sheet 7
    "Sum the revenue column of sheet 8 of the workbook"  ──>  sheet 8

Questions arrive one after the other, and there may be thousands of long ones. Only the first is
stored completely. For each other question, only the part that its siblings do not share is stored.
sibling_outliers.py decides which calls are siblings.
"""

from __future__ import annotations

import re
from bisect import bisect_left

from ramify.lazy_pattern import lazy_pattern

_MAX_CHARS = 2_000
"""Number of characters at the start of a question that are compared."""
_MAX_PART = 120
"""Number of characters of a question's distinguishing part that are stored."""
_MIN_ELIDED = 12
"""Minimum length, in characters, of a shared beginning that is left out of a shown question."""
_MAX_NAME = 40
_MAX_BARE_WORDS = 4
"""Maximum number of words in a name that is shown without quotes."""
_START_OF_WORD = lazy_pattern(r"\S*$")
_REST_OF_WORD = lazy_pattern(r"\S*")
_LAST_WORD = lazy_pattern(r"[^\W\d_]+[ \t]+$")
_CLAUSE_END = lazy_pattern(r"[:;,.?!](?=\s|$)|\n|\s[(\[{]")


class SiblingQuestionStore:
    """The questions of sibling calls, in the order in which the calls were made.

    Siblings are calls that one code cell made. Only the parts in which the questions differ are
    stored.
    """

    def __init__(self) -> None:
        self._first = ""
        self._prefix = ""
        """The beginning that all questions share."""
        self._suffix = ""
        """The end that all questions share. It does not overlap with ``_prefix``."""
        self._parts: list[str] = []
        """The part of each question between ``_prefix`` and ``_suffix``."""
        self._sorted: list[str] | None = None
        """``_parts`` in sorted order. It is computed only when a name is needed, and only once,
        since a cell may have thousands of calls that need one.
        """

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, question: str) -> bool:
        """Add the question of one more sibling call.

        Returns True if it shortens the beginning or end that all questions share. The
        distinguishing part of each earlier question is then longer than before.
        """
        text, prefix, suffix = question[:_MAX_CHARS], self._prefix, self._suffix
        self._sorted = None
        if not self._parts:
            self._first = self._prefix = text
            # The end of a truncated question is unknown.
            self._suffix = text if len(question) == len(text) else ""
            self._parts.append("")
            return False
        if not text.startswith(prefix):
            prefix = prefix[: _num_shared(prefix, text)]
        if len(question) > len(text):
            suffix = ""
        elif not text.endswith(suffix):
            suffix = suffix[len(suffix) - _num_shared(suffix[::-1], text[::-1]) :]
        # The shared beginning and end must not overlap in the shorter question.
        if (room := min(len(text), len(self._first)) - len(prefix)) < len(suffix):
            suffix = suffix[len(suffix) - room :]
        has_grown = (prefix, suffix) != (self._prefix, self._suffix)
        if has_grown:
            self._shrink_shared_ends(prefix, suffix)
        self._parts.append(text[len(prefix) : len(text) - len(suffix)][:_MAX_PART])
        return has_grown

    def _shrink_shared_ends(self, prefix: str, suffix: str) -> None:
        """Shorten the shared beginning and end of the questions to ``prefix`` and ``suffix``.

        The distinguishing part of each earlier question grows by the text that is no longer shared.
        """
        if len(self._parts) == 1:
            end = len(self._first) - len(suffix)
            self._parts = [self._first[len(prefix) : end][:_MAX_PART]]
        else:
            before = self._prefix[len(prefix) :]
            after = self._suffix[: len(self._suffix) - len(suffix)]
            self._parts = [(before + part + after)[:_MAX_PART] for part in self._parts]
        self._prefix, self._suffix = prefix, suffix

    def distinguishing_text(self, index: int) -> str:
        """Return the part of the question at ``index`` that distinguishes it from the others.

        Empty if the beginning of the question is distinctive enough, or if all questions are the
        same.
        """
        start, text = self._distinct_part(index)
        return " ".join(text.split()).rstrip(",;:") if start >= _MIN_ELIDED else ""

    def call_name(self, index: int) -> str:
        """Return a short name for the call with the question at ``index``, such as ``sheet 7``.

        If no words distinguish the question from the others, the name is ``number 7 of 12``.
        """
        start, text = self._distinct_part(index)
        is_sentence = " " not in self._prefix  # they share no words at the beginning
        if is_sentence and text:
            text = self._prefix + self._parts[index] + self._suffix
        elif end := _CLAUSE_END.search(text):
            text = text[: end.start()]
        is_cut = len(text) > _MAX_NAME
        shown = text[: _MAX_NAME - 1] if is_cut else text
        if not shown.strip() or self._is_shared(index, len(shown) - (len(self._prefix) - start)):
            return f"number {index + 1:,} of {len(self):,}"
        words = " ".join(shown.split()) + ("…" if is_cut else "")
        is_quoted = is_sentence or is_cut or len(words.split()) > _MAX_BARE_WORDS
        return f"“{words}”" if is_quoted else words

    def _is_shared(self, index: int, chars: int) -> bool:
        """Return True if another question's distinguishing part begins with the same ``chars``
        characters.

        It is compared with the distinguishing part of the question at ``index``.
        """
        part = self._parts[index]
        piece = part[: max(chars, 0) + 1]
        if self._sorted is None:
            self._sorted = sorted(self._parts)
        first = bisect_left(self._sorted, piece)
        found = self._sorted[first : first + 2]
        if len(piece) == len(part):
            return found == [part, part]
        return len(found) == 2 and all(each.startswith(piece) for each in found)

    def _distinct_part(self, index: int) -> tuple[int, str]:
        """Return the part of a question that the others do not share, extended to whole words.

        The result is the part's start in the question and its text. If the part begins with a
        number, the word before the number is included.
        """
        prefix, part = self._prefix, self._parts[index]
        if len(self._parts) == 1 or not part.strip():
            return 0, ""
        start = len(prefix) - len(_first_match(_START_OF_WORD, prefix))
        if (prefix[start:] + part)[:1].isdigit():
            start -= len(_first_match(_LAST_WORD, prefix[:start]))
        rest = _first_match(_REST_OF_WORD, self._suffix) if len(part) < _MAX_PART else ""
        return start, prefix[start:] + part + rest


def _num_shared(one: str, other: str) -> int:
    """Return the length of the longest common prefix of two strings, in characters."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _first_match(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[0] if found else ""
