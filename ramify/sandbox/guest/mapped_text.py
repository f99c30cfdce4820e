"""A file-backed text: read from disk on demand, but used like a ``str``.

If a text exceeds a configured size, the variable ``context`` of the session has this type.

    context[a:b]   characters ──> bytes: the count of characters before each block, and one block
    find, count    bytes of the file, in pieces ──> characters
    finditer       windows of decoded text, which overlap
    lines          the count of line ends before each block, and one block

This module defines which methods of ``str`` such a text has, what counts as a line, and which error
the other methods raise. Positions count characters, as in a ``str``. To find a position, one block
of the file is decoded; a search is one pass over the bytes. Neither keeps the bytes that it has
read. The file is mapped by ``server/process_setup.py``, and ``sandbox/file_reference.py`` counts
its characters and checks whether it has changed. The module uses the standard library only; the
host reads its files with the same class.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, overload

BLOCK_BYTES = 1 << 16
"""Size in bytes of the blocks of a file. For each block, the number of characters and line ends
before it is stored."""
MAX_SLICE_CHARS = 100_000_000
"""Maximum length in characters of a slice, line or match. Each of these becomes a ``str`` in
memory."""
_PIECE_BYTES = 1 << 22
_WINDOW_CHARS = 1 << 21
_AHEAD_CHARS = 1 << 18
"""Number of characters that are read after the region where matches may begin, so that a match can
extend past its end."""
_BEHIND_CHARS = 1 << 10
_SHOWN = 60
_METHODS = "slices, find, rfind, index, count, in, startswith, endswith, splitlines, split"


class TextOffsetIndex:
    """An index that converts character positions in an encoded text to byte offsets.

    It stores the number of characters and line ends before each block of bytes. An offset counts
    bytes, and a position counts characters.
    """

    __slots__ = ("_chars_at", "_lines_at", "data", "digest", "encoding", "num_bytes")

    def __init__(
        self,
        data: Any,
        chars_at: Sequence[int],
        lines_at: Sequence[int],
        encoding: str = "utf-8",
        digest: str = "",
    ) -> None:
        """Create an index from the bytes of a text and the number of characters and lines in its
        blocks.

        ``data``: the bytes, as an object that supports ``data[a:b]``. ``chars_at``: the number of
        characters that begin before each block, followed by the total; empty if each byte is one
        character. ``lines_at``: the same for line ends. ``digest``: the SHA-256 of the file.
        """
        self.data = data
        self._chars_at = chars_at
        self._lines_at = lines_at
        self.num_bytes: int = len(data)
        self.encoding = encoding
        self.digest = digest

    @property
    def num_chars(self) -> int:
        return self._chars_at[-1] if self._chars_at else self.num_bytes

    @property
    def total_line_ends(self) -> int:
        return self._lines_at[-1]

    def block_count_tables(self) -> tuple[bytes, bytes]:
        """Return two encoded tables: the number of characters and of lines before each block of the
        text.

        Each table consists of 64-bit integers. ``read_count_table`` restores such an array.
        """
        return array("Q", self._chars_at).tobytes(), array("Q", self._lines_at).tobytes()

    def read_bytes(self, low: int, high: int) -> bytes:
        return bytes(self.data[low:high])

    def decode(self, data: bytes) -> str:
        return data.decode(self.encoding, "replace")

    def text(self, start: int, stop: int) -> str:
        """Return the text between two character positions.

        Raises ValueError if it is too long for memory.
        """
        stop = min(stop, self.num_chars)
        if stop <= start:
            return ""
        if stop - start > MAX_SLICE_CHARS:
            raise ValueError(
                f"a part of {stop - start:,} characters: at most {MAX_SLICE_CHARS:,} at once; take "
                "smaller slices, or go through the lines"
            )
        return self.decode(self.read_bytes(self.byte_offset_of(start), self.byte_offset_of(stop)))

    def read_bounded_bytes(self, low: int, high: int, what: str) -> bytes:
        """Return the bytes between two byte offsets of the text, after checking their number.

        Raises ValueError if there are too many for a ``str`` or a list in memory. ``what`` names
        the part of the text in that error.
        """
        if high - low > 4 * MAX_SLICE_CHARS:
            raise ValueError(
                f"{what} of {high - low:,} bytes: too much for memory; take smaller parts, or go "
                "through the lines in a loop"
            )
        return self.read_bytes(low, high)

    def byte_offset_of(self, char: int) -> int:
        """Convert a character position to a byte offset."""
        counts = self._chars_at
        if not counts:
            return char
        if char >= counts[-1]:
            return self.num_bytes
        number = bisect_right(counts, char) - 1
        block, left = self._block(number), char - counts[number]
        begin = _first_lead(block)
        # A character that is cut off at the end of the block is not needed.
        text = block[begin:].decode("utf-8", "ignore")
        return number * BLOCK_BYTES + begin + len(text[:left].encode())

    def char_position_of(self, offset: int) -> int:
        """Convert a character's byte offset to its character position."""
        if not self._chars_at:
            return offset
        number = offset // BLOCK_BYTES
        block = self.read_bytes(number * BLOCK_BYTES, offset)
        return self._chars_at[number] + len(block[_first_lead(block) :].decode("utf-8", "ignore"))

    def line_start_byte(self, line: int) -> int:
        """Convert a line number to the byte offset of the line's start.

        The first line is number 0.
        """
        if line <= 0:
            return 0
        number = bisect_left(self._lines_at, line) - 1
        block, left = self._block(number), line - self._lines_at[number]
        return number * BLOCK_BYTES + len(b"\n".join(block.split(b"\n", left)[:left])) + 1

    def find_occurrences(self, needle: bytes, low: int, high: int) -> Iterator[int]:
        """Yield the byte offsets between ``low`` and ``high`` at which ``needle`` occurs.

        Occurrences do not overlap.
        """
        at = low
        while at < high:
            piece = self.read_bytes(at, min(high, at + _PIECE_BYTES + len(needle) - 1))
            begin = 0
            while (found := piece.find(needle, begin)) >= 0:
                yield at + found
                begin = found + len(needle)
            at += max(_PIECE_BYTES, begin)

    def rfind(self, needle: bytes, low: int, high: int) -> int:
        """Return the last byte offset between ``low`` and ``high`` at which ``needle`` occurs, or
        -1 if there is none."""
        at = high
        while at > low:
            begin = max(low, at - _PIECE_BYTES)
            piece = self.read_bytes(begin, min(high, at + len(needle) - 1))
            if (found := piece.rfind(needle)) >= 0:
                return begin + found
            at = begin
        return -1

    def count_occurrences(self, needle: bytes, low: int, high: int) -> int:
        """Count the non-overlapping occurrences of ``needle`` between two byte offsets."""
        if _overlaps_itself(needle):
            return sum(1 for _ in self.find_occurrences(needle, low, high))
        more = _PIECE_BYTES + len(needle) - 1
        return sum(
            self.read_bytes(at, min(high, at + more)).count(needle)
            for at in range(low, high, _PIECE_BYTES)
        )

    def _block(self, number: int) -> bytes:
        return self.read_bytes(number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES)


def read_count_table(data: Any) -> Sequence[int]:
    """Decode one table of counts from bytes, for use in a ``TextOffsetIndex``.

    The table holds the number of characters, or of lines, before each block of the file.
    """
    return array("Q", bytes(data))


class FileBackedText:
    """A string-like object that reads its text from a file on demand.

    It supports len, slices, find, count, in and lines. ``finditer``, ``findall`` and ``search``
    apply regular expressions to it.
    """

    __slots__ = ("file",)

    def __init__(self, file: TextOffsetIndex) -> None:
        self.file = file

    # -- as a str

    def __len__(self) -> int:
        return self.file.num_chars

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> str: ...
    def __getitem__(self, index: int | slice) -> str:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return self.file.text(start, stop)
            if not range(start, stop, step):
                return ""
            ends = sorted((start, range(start, stop, step)[-1]))
            text = self.file.text(ends[0], ends[1] + 1)
            return text[::step] if step > 0 else text[::-1][::-step]
        try:
            position = index.__index__()
        except AttributeError:
            raise TypeError(
                f"indices must be integers or slices, not {type(index).__name__}"
            ) from None
        position += len(self) if position < 0 else 0
        if not 0 <= position < len(self):
            raise IndexError("string index out of range")
        return self.file.text(position, position + 1)

    def __contains__(self, text: object) -> bool:
        if not isinstance(text, str):
            raise TypeError(
                f"'in <FileBackedText>' requires string as left operand, not {type(text).__name__}"
            )
        return self.find(text) >= 0

    def __iter__(self) -> Iterator[str]:
        """Iterate over the lines, without their line ends."""
        return iter(self.splitlines())

    def __repr__(self) -> str:
        head = self[:_SHOWN]
        return f"<FileBackedText of {len(self):,} characters: {head!r}{'…' * (len(self) > _SHOWN)}>"

    def __str__(self) -> str:
        raise TypeError(
            f"str() of a text of {len(self):,} characters, which stays in its file: use a slice "
            "such as context[:1000]"
        )

    def __format__(self, spec: str) -> str:
        return str(self)

    def __reduce__(self) -> str:
        raise TypeError("a FileBackedText cannot be pickled or copied: use a slice")

    def __getattr__(self, name: str) -> Any:
        if hasattr(str, name) and not name.startswith("__"):
            raise AttributeError(
                f"a text of {len(self):,} characters, which stays in its file, has no {name}(): it "
                f"has {_METHODS}, finditer, findall and search; take a slice, which is a str, or "
                "go through its lines"
            )
        raise AttributeError(f"'FileBackedText' object has no attribute {name!r}")

    def find(self, sub: str, start: int | None = None, end: int | None = None) -> int:
        """Return the first position of ``sub``, or -1 if it does not occur."""
        needle, start, end = self._needle(sub), *self._range(start, end)
        if needle is None or start + len(sub) > end:
            return -1
        if not needle:
            return start
        found = next(
            self.file.find_occurrences(
                needle, self.file.byte_offset_of(start), self.file.byte_offset_of(end)
            ),
            -1,
        )
        return -1 if found < 0 else self.file.char_position_of(found)

    def rfind(self, sub: str, start: int | None = None, end: int | None = None) -> int:
        """Return the last position of ``sub``, or -1 if it does not occur."""
        needle, start, end = self._needle(sub), *self._range(start, end)
        if needle is None or start + len(sub) > end:
            return -1
        if not needle:
            return end
        found = self.file.rfind(
            needle, self.file.byte_offset_of(start), self.file.byte_offset_of(end)
        )
        return -1 if found < 0 else self.file.char_position_of(found)

    def index(self, sub: str, start: int | None = None, end: int | None = None) -> int:
        """Return the first position of ``sub``.

        Raises ValueError if it does not occur.
        """
        if (found := self.find(sub, start, end)) < 0:
            raise ValueError("substring not found")
        return found

    def rindex(self, sub: str, start: int | None = None, end: int | None = None) -> int:
        """Return the last position of ``sub``.

        Raises ValueError if it does not occur.
        """
        if (found := self.rfind(sub, start, end)) < 0:
            raise ValueError("substring not found")
        return found

    def count(self, sub: str, start: int | None = None, end: int | None = None) -> int:
        """Return the number of occurrences of ``sub``.

        Occurrences do not overlap.
        """
        if sub == "\n" and start is None and end is None:
            return self.file.total_line_ends
        needle, start, end = self._needle(sub), *self._range(start, end)
        if needle is None or start + len(sub) > end:
            return 0
        if not needle:
            return end - start + 1
        return self.file.count_occurrences(
            needle, self.file.byte_offset_of(start), self.file.byte_offset_of(end)
        )

    def startswith(self, prefix: str | tuple[str, ...], start: int | None = None) -> bool:
        start = self._range(start, None)[0]
        options = prefix if isinstance(prefix, tuple) else (prefix,)
        return self.file.text(start, start + max(map(len, options), default=0)).startswith(prefix)

    def endswith(self, suffix: str | tuple[str, ...]) -> bool:
        options = suffix if isinstance(suffix, tuple) else (suffix,)
        longest = max(map(len, options), default=0)
        return self.file.text(max(0, len(self) - longest), len(self)).endswith(suffix)

    def splitlines(self, keepends: bool = False) -> FileTextLines:
        """Return the lines as a list-like object.

        Lines end at ``\n`` or ``\r\n``, and each is read from the file only when it is used.
        """
        return FileTextLines(self.file, keepends=keepends)

    def split(self, sep: str | None = None, maxsplit: int = -1) -> FileTextLines | Iterator[str]:
        """Return an iterator over the parts of the text between separators.

        For ``split("\\n")``, return a sequence of lines instead, which has a length and supports
        indices.
        """
        if sep == "\n" and maxsplit < 0:
            return FileTextLines(self.file, is_split=True)
        if maxsplit >= 0:
            raise TypeError("split of a text that stays in its file has no maxsplit: use find")
        if sep is None:
            return (match.group() for match in self.finditer(r"\S+"))
        if not sep:
            raise ValueError("empty separator")
        return self._parts(sep)

    # -- regular expressions

    def finditer(self, pattern: str | re.Pattern[str], flags: int = 0) -> Iterator[FileTextMatch]:
        """Iterate over the matches of a regular expression, as ``re.finditer(pattern, text,
        flags)`` does.

        Matches of up to 262,144 characters are found; longer ones may be missed.
        """
        compiled = re.compile(pattern, flags)
        if not isinstance(compiled.pattern, str):
            raise TypeError("give a pattern of str; for one of bytes: re.finditer(…, text.buffer)")
        return self._matches(compiled)

    def findall(self, pattern: str | re.Pattern[str], flags: int = 0) -> list[Any]:
        """Return all matches of a regular expression, as ``re.findall(pattern, text, flags)``
        does."""
        found: list[Any] = []
        for match in self.finditer(pattern, flags):
            groups = match.groups("")
            found.append(match.group() if not groups else groups[0] if len(groups) == 1 else groups)
        return found

    def search(self, pattern: str | re.Pattern[str], flags: int = 0) -> FileTextMatch | None:
        """Return the first match of a regular expression, as ``re.search(pattern, text, flags)``
        does."""
        return next(self.finditer(pattern, flags), None)

    @property
    def buffer(self) -> memoryview:
        """The encoded bytes of the text, which ``re`` can search with bytes patterns.

        Positions in it count bytes.
        """
        data = self.file.data
        if not isinstance(data, memoryview):
            raise TypeError("a text that the host reads has no buffer: it is mapped in sessions")
        return data

    def _matches(self, pattern: re.Pattern[str]) -> Iterator[FileTextMatch]:
        at, core, length = 0, _WINDOW_CHARS, len(self)
        while at <= length:
            low, high = max(0, at - _BEHIND_CHARS), min(length, at + core + _AHEAD_CHARS)
            text = self.file.text(low, high)
            is_last, reach = high == length, high - low - _AHEAD_CHARS // 2
            after = length + 1 if is_last else at + core
            core = _WINDOW_CHARS
            for match in pattern.finditer(text, at - low):
                if not is_last and low + match.start() >= after:
                    break
                if not is_last and match.end() > reach:
                    # The match might be longer. Try again with a window that begins at the match.
                    after = low + match.start()
                    core = max(core, 2 * (match.end() - match.start()))
                    break
                yield FileTextMatch(match, low)
                if low + match.end() > after:
                    after = low + match.end()
            at = after

    def _range(self, start: int | None, end: int | None) -> tuple[int, int]:
        """Convert the optional ``start`` and ``end`` of a search to character positions.

        A start beyond the end of the text is kept, so that ``find("")`` returns -1 there, as for a
        ``str``.
        """
        low, high, _ = slice(start, end).indices(len(self))
        return (low if start is None else max(low, start)), high

    def _needle(self, sub: object) -> bytes | None:
        """Encode the string to search for in the encoding of the file.

        Returns None if that encoding cannot represent the text.
        """
        if not isinstance(sub, str):
            raise TypeError(f"must be str, not {type(sub).__name__}")
        try:
            return sub.encode(self.file.encoding)
        except UnicodeEncodeError:
            return None

    def _parts(self, sep: str) -> Iterator[str]:
        file, start, needle = self.file, 0, self._needle(sep)
        for found in file.find_occurrences(needle, 0, file.num_bytes) if needle else ():
            yield file.decode(file.read_bounded_bytes(start, found, "a part"))
            start = found + len(needle or b"")
        yield file.decode(file.read_bounded_bytes(start, file.num_bytes, "a part"))


FileBackedText.__module__ = "builtins"  # an error then shows the name without a module


class FileTextMatch:
    """A match of a regular expression in a ``FileBackedText``, used like ``re.Match``.

    Its positions refer to the whole text.
    """

    __slots__ = ("_at", "_match")

    def __init__(self, match: re.Match[str], at: int) -> None:
        """Wrap a regular expression match that was found in a section of the text.

        ``at``: the position in the whole text at which the window begins.
        """
        self._match = match
        self._at = at

    def group(self, *groups: Any) -> Any:
        return self._match.group(*groups)

    def groups(self, default: Any = None) -> tuple[Any, ...]:
        return self._match.groups(default)

    def groupdict(self, default: Any = None) -> dict[str, Any]:
        return self._match.groupdict(default)

    def __getitem__(self, group: Any) -> Any:
        return self._match[group]

    def start(self, group: Any = 0) -> int:
        return self.span(group)[0]

    def end(self, group: Any = 0) -> int:
        return self.span(group)[1]

    def span(self, group: Any = 0) -> tuple[int, int]:
        start, end = self._match.span(group)
        return (-1, -1) if start < 0 else (start + self._at, end + self._at)

    @property
    def lastgroup(self) -> str | None:
        return self._match.lastgroup

    @property
    def lastindex(self) -> int | None:
        return self._match.lastindex

    def __repr__(self) -> str:
        return f"<FileTextMatch span={self.span()}, match={self._match.group()!r:.60}>"


class FileTextLines(Sequence[str]):
    """The lines of a ``FileBackedText``, used like a list.

    It supports len, indexing, slices and iteration. Each line is read from the file when it is
    used.
    """

    __slots__ = ("_file", "_is_split", "_keepends")

    def __init__(
        self, file: TextOffsetIndex, *, keepends: bool = False, is_split: bool = False
    ) -> None:
        """Create a list-like view of the lines of a file-backed text.

        With ``is_split``, the items are those of ``split("\\n")`` instead: carriage returns are
        kept, and the last item may be empty.
        """
        self._file = file
        self._keepends = keepends
        self._is_split = is_split

    def __len__(self) -> int:
        file = self._file
        return file.total_line_ends + (self._is_split or not self._is_closed())

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return self._lines(start, stop) if stop > start else []
            return [self[number] for number in range(start, stop, step)]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError("line index out of range")
        return self._lines(number, number + 1)[0]

    def __iter__(self) -> Iterator[str]:
        file, parts = self._file, list[bytes]()
        for at in range(0, file.num_bytes, _PIECE_BYTES):
            piece = file.read_bytes(at, at + _PIECE_BYTES)
            end = piece.rfind(b"\n") + 1
            if end:
                yield from self._split_lines(b"".join([*parts, piece[:end]]))
                parts.clear()
            parts.append(piece[end:])
            if len(parts) * _PIECE_BYTES > 4 * MAX_SLICE_CHARS:
                raise ValueError(f"a line of over {4 * MAX_SLICE_CHARS:,} bytes: use slices")
        rest = b"".join(parts)
        if rest or self._is_split:
            yield self._strip_carriage_return(file.decode(rest))

    def __repr__(self) -> str:
        return f"<{len(self):,} lines>"

    def _lines(self, start: int, stop: int) -> list[str]:
        file = self._file
        low = file.line_start_byte(start)
        if stop <= file.total_line_ends:
            return [
                *self._split_lines(
                    file.read_bounded_bytes(
                        low, file.line_start_byte(stop), f"{stop - start:,} lines"
                    )
                )
            ]
        *lines, last = file.decode(
            file.read_bounded_bytes(low, file.num_bytes, f"{stop - start:,} lines")
        ).split("\n")
        ended = [f"{line}\n" for line in lines] if self._keepends else lines
        return [*map(self._strip_carriage_return, ended), self._strip_carriage_return(last)]

    def _is_closed(self) -> bool:
        """Return True if the text ends with a newline or is empty, so that its last line is
        complete."""
        size = self._file.num_bytes
        return size == 0 or self._file.read_bytes(size - 1, size) == b"\n"

    def _split_lines(self, data: bytes) -> Iterator[str]:
        """Decode a block of complete lines and yield each line.

        They must end with a line end.
        """
        lines = self._file.decode(data).split("\n")
        lines.pop()
        if self._keepends:
            return (f"{line}\n" for line in lines)
        return iter(lines) if b"\r" not in data else map(self._strip_carriage_return, lines)

    def _strip_carriage_return(self, line: str) -> str:
        return line if self._is_split or self._keepends else line.removesuffix("\r")


def _first_lead(block: bytes) -> int:
    """Return the offset in a block of UTF-8 bytes at which the first complete character begins.

    The bytes before it continue a character of the previous block.
    """
    begin = 0
    while begin < len(block) and block[begin] & 0xC0 == 0x80:
        begin += 1
    return begin


def _overlaps_itself(needle: bytes) -> bool:
    """Return True if two occurrences of ``needle`` can overlap, such as "aba" in "ababa"."""
    if len(needle) > 1000:
        return True  # counting its occurrences one by one costs little
    return any(needle[:size] == needle[-size:] for size in range(1, len(needle)))
