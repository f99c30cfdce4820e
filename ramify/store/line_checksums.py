"""Checksums of a journal's lines: each covers its line and, through the checksum before it, all
earlier lines.

    {"type":"CallEnded","id":"0","stop":"final","crc":"9a3f0b12"}
                                              └─ CRC-32 of the bytes before it, continued from
                                                 the checksum of the line before

So a changed byte, a missing line and a line in another place are found when the line is read. A
line that is missing at the very end is not: the journal then ends like that of a killed run.
Readers that know no checksums skip the member. A journal of an earlier version has none; lines that
are appended to it cover its lines, too. After a line with a checksum, each line must have one.

Checksums find accidents, not forgers. Not here: files (see ``journal.py``), and what to do about
damage (see ``repair.py``).
"""

from __future__ import annotations

from zlib import crc32

_HEAD = b',"crc":"'
_TAIL = b'"}'
_NUM_DIGITS = 8
_NUM_BYTES = len(_HEAD) + _NUM_DIGITS + len(_TAIL)
CHANGED = (
    "its checksum does not match, so it was changed, or lines before it are missing or in another "
    "order"
)
"""Why a line is damaged whose checksum is another one."""
_MISSING = "it has no checksum although the lines before it have one"


class LineChain:
    """The checksum of the last line of a journal that is read or written in order."""

    def __init__(self, crc: int = 0) -> None:
        self.crc = crc
        self.is_checked = False
        """Whether a line so far had a checksum: then each later one must have one, too."""

    def sealed(self, line: bytes) -> tuple[bytes, int]:
        """Return (``line``, a JSON object with a newline, with its checksum; the checksum)."""
        covered = line[:-2]
        crc = crc32(covered, self.crc)
        return covered + b',"crc":"%08x"}\n' % crc, crc

    def problem(self, line: bytes) -> str:
        """Return why the next line, without its newline, is damaged; empty if it is not."""
        if not has_checksum(line):
            return _MISSING if self.is_checked else ""
        return "" if self.fits(line, self.crc) else CHANGED

    def fits(self, line: bytes, crc: int) -> bool:
        """Whether ``line`` was written after a line with the checksum ``crc``."""
        return b"%08x" % crc32(line[:-_NUM_BYTES], crc) == line[-_NUM_DIGITS - 2 : -2]

    def advance(self, line: bytes) -> None:
        """Continue after ``line``, also if it is damaged."""
        if has_checksum(line):
            self.crc, self.is_checked = int(line[-_NUM_DIGITS - 2 : -2], 16), True
        elif not self.is_checked:
            self.crc = crc32(line, self.crc)


def has_checksum(line: bytes) -> bool:
    """Whether a line, without its newline, ends with a checksum."""
    if line[-_NUM_BYTES : -_NUM_DIGITS - 2] != _HEAD or line[-2:] != _TAIL:
        return False
    return not line[-_NUM_DIGITS - 2 : -2].strip(b"0123456789abcdef")
