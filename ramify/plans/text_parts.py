"""Cuts a context into parts that never exceed a given size.

The cuts are at the boundaries of lines, records, sentences, words or list items.

    texts ──> units (lines, …) ──> as many as fit the bound ──> Part, Part, …

A token counts as three bytes of UTF-8, as in a session's function ``chunks``, so a part has at most
``3 * tokens`` bytes, including the headers that name its texts. A part ends at the last unit that
fits. Every character is in exactly one part, except those that an overlap repeats, which are
counted. A unit that is larger than the bound is an error, or is cut at a space if ``cut`` allows
it.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from ramify.errors import ConfigError
from ramify.sandbox.base import FileBackedText
from ramify.sources.convert_to_context import as_context
from ramify.types.picture import has_pictures

BYTES_PER_TOKEN = 3
"""Number of UTF-8 bytes that count as one token."""
By = Literal["lines", "records", "sentences", "tokens", "items"]
"""Unit of text at whose boundaries a text is split, such as a line or a sentence. With ``items``,
each text of a list or dict, or each row of a table, is one record."""
_UNITS = {
    "lines": r"\n",
    "records": r"\n(?:[ \t\r]*\n)+",
    "sentences": r"[.!?…。！？]+[\"'”’)\]]*\s+|\n+",
    "tokens": r"\s+",
}
"""Kind of unit -> regular expression that matches the end of such a unit."""


class TextSpan(msgspec.Struct, frozen=True):
    """A range of characters in one text of a context."""

    name: str
    """Name of the text. Empty if the context is a single text."""
    start: int
    end: int


class ContextPart(msgspec.Struct, frozen=True):
    """A part of a context, with its text, its location in the context, and its records."""

    text: str
    """Text that a model reads: headers if the context has several texts, the overlap with the
    previous part, and the characters of ``spans``."""
    place: str
    """Location of this part in the context, such as ``lines 1-120`` or ``a.txt:1-120``."""
    spans: tuple[TextSpan, ...]
    """Character ranges of the context that belong to this part alone."""
    lead: int = 0
    """Number of characters at the beginning of ``text`` that overlap with the previous part."""
    records: tuple[tuple[int, int], ...] = ()
    """Start and end, in ``text``, of each record that is not blank."""
    preview: str = ""
    """Short text that the filter of a plan reads instead of ``text``. If empty, the filter reads
    ``text``."""
    columns: str = ""
    """First line of a table, which names its columns. Empty if the part is not from a table."""

    def numbered(self) -> str:
        """Return the records of this part as numbered lines.

        For a part of a table, the line with the column names comes first.
        """
        return f"{self.columns}\n" * bool(self.columns) + "\n".join(
            f"{number}: {self.text[start:end]}"
            for number, (start, end) in enumerate(self.records, 1)
        )


class ContextSplitRule(msgspec.Struct, frozen=True):
    """A rule for cutting a context into parts.

    It gives the boundaries at which to cut, and the maximum size of a part.
    """

    by: By
    tokens: int
    """Maximum size of a part in tokens."""
    overlap: int = 0
    """Maximum number of tokens that a part repeats from the end of the previous one."""
    separator: str = ""
    """Regular expression that matches the beginning of a record. By default, blank lines separate
    records."""
    max_records: int = 0
    """Maximum number of records in a part. 0 means no limit."""
    cut: bool = False
    """If True, cut a unit that exceeds the maximum size. If False, such a unit is an error."""
    header: bool = False
    """True if the first line of each text names the columns of a table. This line is not a record,
    and is repeated at the start of each part."""


def num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def items_of(context: Any) -> list[tuple[str, str]]:
    """Return a list of the context's items, each paired with its name.

    Items are the texts of a list or dict, or the rows of a table as JSON. Raises ConfigError if the
    context has no text.
    """
    texts = named_texts(context)
    if len(texts) != 1 or texts[0][0]:
        return texts
    rows = (
        [] if isinstance(context, str | FileBackedText | ContextPart) else texts[0][1].splitlines()
    )
    return [("", row) for row in rows] or texts


def named_texts(context: Any) -> list[tuple[str, str]]:
    """Return a list of the context's strings, each paired with its name.

    A single text has an empty name, and values other than texts become lines of JSON. Raises
    ConfigError if the context cannot be read as text.
    """
    if isinstance(context, ContextPart):
        return [("", context.text)]
    if context is None:
        raise ConfigError("a plan needs a context: give a text, files, or a list of texts")
    if isinstance(context, str | FileBackedText):
        return [("", str(context))]
    if has_pictures(context):
        raise ConfigError("a plan needs text, but the context has pictures: leave them out")
    if isinstance(getattr(context, "context", None), str | dict | list | FileBackedText):
        return named_texts(context.context)  # what ``load`` returns
    if not isinstance(context, Mapping | list | tuple):
        context = as_context(context)
    named = context.items() if isinstance(context, Mapping) else enumerate(context)
    pairs = [(str(name), value) for name, value in named]
    if all(isinstance(value, str | FileBackedText) for _, value in pairs):
        return [(name, str(value)) for name, value in pairs]
    try:
        values = context if isinstance(context, list | tuple) else [context]
        lines = [msgspec.json.encode(msgspec.to_builtins(value, str_keys=True)) for value in values]
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"a plan needs text, but the context is a {type(context).__name__} ({error}): give a "
            "text, or a list or dict of texts"
        ) from None
    return [("", b"\n".join(lines).decode() + "\n")]


def split_texts_into_parts(
    texts: list[tuple[str, str]], rule: ContextSplitRule
) -> list[ContextPart]:
    """Cut named texts into parts according to a rule.

    Raises ConfigError if a unit, such as a line, exceeds the maximum size and must not be cut.
    """
    if rule.by == "items":
        return _split_items(texts, rule)
    parts = _OpenPart(rule)
    is_named = len(texts) > 1 or bool(texts and texts[0][0])
    for name, text in texts:
        _add_text(parts, name if is_named else "", text, rule)
    parts.close()
    return parts.closed


def _split_items(texts: list[tuple[str, str]], rule: ContextSplitRule) -> list[ContextPart]:
    """Group the strings of a list or dict into parts, and keep each string whole.

    Each text counts as one record, even if it is blank.
    """
    parts = _OpenPart(rule)
    for number, (name, text) in enumerate(texts, 1):
        line = text if text.endswith("\n") else f"{text}\n"
        size = num_bytes(line)
        is_full = 0 < rule.max_records <= parts.num_records
        if not parts.is_empty and (is_full or size > parts.room):
            parts.close()
        if size > parts.room:
            raise ConfigError(
                f"item {number} ({' '.join(text[:40].split())!r}…) has {size:,} bytes, but a part "
                f"holds at most {parts.room:,} ({rule.tokens:,} tokens): raise tokens "
                "(--part-tokens), or split by lines"
            )
        inner = text.strip()
        start = text.index(inner)
        span = TextSpan(name, 0, len(text))
        parts.add("", line, 0, span, f"item {number}", [(start, start + len(inner))])
    parts.close()
    return parts.closed


def truncate_to_bytes(text: str, most: int) -> str:
    """Return the longest prefix of ``text`` that has at most ``most`` bytes in UTF-8."""
    head = text[:most]
    if head.isascii():
        return head
    data = head.encode("utf-8", "surrogatepass")
    end = min(most, len(data))
    while 0 < end < len(data) and data[end] & 0xC0 == 0x80:  # within a character
        end -= 1
    return data[:end].decode("utf-8", "surrogatepass")


def shortened(text: str, most: int) -> str:
    """Truncate ``text`` to at most ``most`` bytes in UTF-8, if possible at a line end or a space.

    An ellipsis marks the cut.
    """
    if num_bytes(text) <= most:
        return text
    head = truncate_to_bytes(text, max(1, most - 3))
    at = max(head.rfind("\n", len(head) // 2), head.rfind(" ", len(head) // 2))
    return (head[:at] if at > 0 else head) + "…"


class _Units:
    """The lines, sentences or other units at whose boundaries one text can be cut."""

    def __init__(self, text: str, rule: ContextSplitRule) -> None:
        self.text = text
        self.ends = list(_unit_ends(text, rule))
        self._is_ascii = text.isascii()
        starts = [0, *self.ends[:-1]]
        spans = list(zip(starts, self.ends, strict=False))  # none, for an empty text
        sizes = (
            (end - start for start, end in spans)
            if self._is_ascii
            else (num_bytes(text[start:end]) for start, end in spans)
        )
        self.bytes = [0, *itertools.accumulate(sizes)]
        self.has_records = rule.by != "tokens"
        filled = (
            (bool(text[start:end].strip()) for start, end in spans)
            if self.has_records
            else (False for _ in spans)
        )
        self.filled = [0, *itertools.accumulate(filled)]

    def bytes_before(self, at: int) -> int:
        """Return the number of UTF-8 bytes before the character at index ``at``."""
        if self._is_ascii:
            return at
        unit = bisect.bisect_right(self.ends, at)
        start = self.ends[unit - 1] if unit else 0
        return self.bytes[unit] + num_bytes(self.text[start:at])

    def last_fitting(self, at: int, room: int, max_records: int | None) -> int:
        """Return the furthest index at which a part that begins at ``at`` can end.

        The part has at most ``room`` bytes and ``max_records`` records. The part ends at a unit
        boundary. Returns ``at`` if not even one unit fits.
        """
        if room < 1:
            return at
        most = bisect.bisect_right(self.bytes, self.bytes_before(at) + room) - 1
        if max_records is not None:
            first = bisect.bisect_right(self.ends, at)
            allowed = bisect.bisect_right(self.filled, self.filled[first] + max_records) - 1
            most = min(most, allowed)
        return max(at, self.ends[most - 1] if most else 0)

    def lead(self, at: int, most: int) -> int:
        """Return the index at which a part must begin so that it repeats the end of the previous
        part.

        The previous part ends at index ``at``. It is the first unit boundary for which the overlap
        has at most ``most`` bytes.
        """
        first = bisect.bisect_left(self.bytes, self.bytes_before(at) - most)
        start = self.ends[first - 1] if first else 0
        return min(at, start)

    def records(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each non-blank record in a range of the text."""
        if not self.has_records:
            return
        unit = bisect.bisect_right(self.ends, start)
        while start < end:
            stop = min(self.ends[unit], end)
            text = self.text[start:stop]
            if inner := text.strip():
                begin = start + text.index(inner[0])
                yield begin, begin + len(inner)
            start, unit = stop, unit + 1


def _unit_ends(text: str, rule: ContextSplitRule) -> Iterator[int]:
    if rule.by == "records" and rule.separator:
        begins = [match.start() for match in compile_regex(rule.separator).finditer(text)]
        yield from (at for at in dict.fromkeys(begins) if 0 < at < len(text))
    else:
        ends = (match.end() for match in re.finditer(_UNITS[rule.by], text))
        yield from (end for end in ends if end < len(text))
    if text:
        yield len(text)


def compile_regex(pattern: str) -> Any:
    """Compile a regular expression with RE2, which searches in linear time.

    Raises ConfigError if the expression is invalid.
    """
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(f"(?m){pattern}", options)
    except (re2.error, UnicodeEncodeError) as error:
        why = error.args[0] if isinstance(error, re2.error) else str(error)
        why = why.decode() if isinstance(why, bytes) else why
        raise ConfigError(f"the pattern {pattern!r:.80} is not understood ({why})") from None


class _OpenPart:
    """A builder that packs pieces of text into parts, filling one part at a time."""

    def __init__(self, rule: ContextSplitRule) -> None:
        self.closed: list[ContextPart] = []
        self.room = 0
        """Number of bytes that still fit into the current part."""
        self.num_records = 0
        self._most = BYTES_PER_TOKEN * rule.tokens
        self._reset()

    def _reset(self) -> None:
        self._texts: list[str] = []
        self._spans: list[TextSpan] = []
        self._places: list[str] = []
        self._records: list[tuple[int, int]] = []
        self._chars = 0
        self._lead = 0
        self.columns = ""
        self.num_records = 0
        self.room = self._most

    @property
    def is_empty(self) -> bool:
        return not self._spans

    def add(
        self, header: str, text: str, lead: int, span: TextSpan, place: str, records: Any
    ) -> None:
        """Add a piece of text to the part that is being filled.

        The first ``lead`` characters of the piece overlap with the previous part. ``records`` gives
        the start and end of each record in the piece.
        """
        before = "\n" if self._texts and not self._texts[-1].endswith("\n") and header else ""
        start = self._chars + len(before) + len(header)
        added = f"{before}{header}{text}"
        self._records += [(start + begin, start + end) for begin, end in records]
        self.num_records = len(self._records)
        self._lead = self._lead or lead
        self._texts.append(added)
        self._spans.append(span)
        self._places.append(place)
        self._chars += len(added)
        self.room -= num_bytes(added)

    def close(self) -> None:
        """Complete the part that is being filled, and begin a new one.

        Does nothing if the current part is empty.
        """
        if self._spans:
            first, last = self._places[0], self._places[-1]
            place = first if first == last else f"{first} to {last}"
            text, spans, records = "".join(self._texts), tuple(self._spans), tuple(self._records)
            part = ContextPart(text, place, spans, self._lead, records, columns=self.columns)
            self.closed.append(part)
        self._reset()


def _add_text(parts: _OpenPart, name: str, text: str, rule: ContextSplitRule) -> None:
    units = _Units(text, rule)
    most = BYTES_PER_TOKEN * rule.tokens
    # A long name may take at most a fourth of a part, so that the text has room.
    header = f"== {truncate_to_bytes(' '.join(name.split()), most // 4)} ==\n" if name else ""
    columns = ""
    at, line, done = 0, 1, 0  # ``done``: where the span of the next part begins
    if rule.header:
        columns, newline, _ = text.partition("\n")
        at, line = len(columns) + len(newline), 2
        columns = columns.strip()
        if num_bytes(columns) > most // 2:
            raise ConfigError(
                f"the header line of {name or 'the table'} has {num_bytes(columns):,} bytes, but "
                f"a part holds at most {most:,} ({rule.tokens:,} tokens): raise tokens "
                "(--part-tokens)"
            )
        header += f"{columns}\n" * bool(columns)
        if not parts.is_empty and parts.columns != columns:
            parts.close()
    head = num_bytes(header) + 1 if header else 0
    while at < len(text):
        parts.columns = columns
        allowed = rule.max_records - parts.num_records if rule.max_records else None
        start = at
        if parts.is_empty and at and rule.overlap:
            start = units.lead(at, BYTES_PER_TOKEN * rule.overlap)
            lead = units.bytes_before(at) - units.bytes_before(start)
            if units.last_fitting(at, parts.room - head - lead, None) == at:
                start = at  # with the overlap, not even one unit would fit
        room = parts.room - head - (units.bytes_before(at) - units.bytes_before(start))
        end = units.last_fitting(at, room, allowed)
        if end == at and not parts.is_empty:
            parts.close()
            continue
        if end == at:
            end = at + _chars_that_fit(units, at, room, rule, name, line)
        piece, num_lines = text[start:end], text.count("\n", at, end)
        last = line + num_lines - (text[end - 1] == "\n")
        place = f"{name}:{line}-{last}" if name else f"lines {line}-{last}"
        if last == line:
            place = f"{name}:{line}" if name else f"line {line}"
        records = [(a - start, b - start) for a, b in units.records(at, end)]
        span = TextSpan(name, done, end)
        parts.add(header, piece, at - start, span, place, records)
        at = done = end
        line += num_lines
        if at < len(text):
            parts.close()


def _chars_that_fit(
    units: _Units, at: int, room: int, rule: ContextSplitRule, name: str, line: int
) -> int:
    """Return how many characters of an oversized unit fit into a part of ``room`` bytes.

    The part ends at a space if possible. Raises ConfigError if the unit must not be cut.
    """
    unit = bisect.bisect_right(units.ends, at)
    size = units.bytes_before(units.ends[unit]) - units.bytes_before(at)
    if not rule.cut and rule.by != "tokens":
        where = f"{name}, line {line}" if name else f"line {line}"
        begins = " ".join(units.text[at : at + 40].split())
        raise ConfigError(
            f"the {rule.by.removesuffix('s')} at {where} ({begins!r}…) has {size:,} bytes, but a "
            f"part holds at most {BYTES_PER_TOKEN * rule.tokens:,} ({rule.tokens:,} tokens): "
            "allow cutting it with cut=True (--cut), or raise tokens (--part-tokens)"
        )
    head = truncate_to_bytes(units.text[at : units.ends[unit]], room)
    if not head:
        raise ConfigError(f"a part of {rule.tokens} tokens is too small: give more tokens")
    space = max(head.rfind(" ", len(head) // 2), head.rfind("\n", len(head) // 2))
    return space + 1 if space > 0 else len(head)
