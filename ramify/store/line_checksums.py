"""Checksums of the lines of a journal.

Each checksum continues the one before, so it covers its own line and all earlier lines.

    {"type":"CallEnded","id":"0","stop":"final","crc":"9a3f0b12"}
                                              └─ CRC-32 of the bytes before it, continued from
                                                 the checksum of the line before

A reader therefore detects a changed byte, a missing line and a misplaced line. It cannot detect
missing lines at the very end, because the journal then looks like that of a killed run. Readers
that do not support checksums ignore the field ``crc``. Journals of earlier versions have no
checksums; lines that are appended to them cover the old lines, too. After a line with a checksum,
every line must have one.

The checksums detect accidents, not forgery. Files are read in ``journal.py`` and repaired in
``repair.py``.
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
"""Message for a line whose checksum does not match."""
_MISSING = "it has no checksum although the lines before it have one"


class ChecksumChain:
    """The running checksum of a journal, in which each line's checksum covers all earlier lines."""

    def __init__(self, crc: int = 0) -> None:
        self.crc = crc
        self.is_checked = False
        """True once a line had a checksum. Every later line must then have one, too."""

    def add_checksum(self, line: bytes) -> tuple[bytes, int]:
        """Return a journal line that ends with its checksum, and the checksum as a number.

        The line is a JSON object and a newline.
        """
        covered = line[:-2]
        crc = crc32(covered, self.crc)
        return covered + _tail(crc) + b"\n", crc

    def damage_reason(self, line: bytes) -> str:
        """Return a description of the damage to the next line, or an empty string if it is intact.

        Returns an empty string if it is intact.
        """
        if line.endswith(_tail(crc32(line[:-_NUM_BYTES], self.crc))):
            return ""
        if not has_checksum(line):
            return _MISSING if self.is_checked else ""
        return CHANGED

    def check_and_advance(self, line: bytes) -> str:
        """Check the checksum of the next journal line, and advance past the line if it is intact.

        Otherwise return the reason why it is damaged.
        """
        crc = crc32(line[:-_NUM_BYTES], self.crc)
        if line.endswith(_tail(crc)):
            self.crc, self.is_checked = crc, True
            return ""
        problem = self.damage_reason(line)
        if not problem:
            self.advance_past_line(line)
        return problem

    def does_line_follow(self, line: bytes, crc: int) -> bool:
        """Return True if ``line`` directly follows a journal line that has the checksum ``crc``."""
        return line.endswith(_tail(crc32(line[:-_NUM_BYTES], crc)))

    def advance_past_line(self, line: bytes) -> None:
        """Advance past a journal line that may be damaged, and continue with the checksum in the
        line."""
        if has_checksum(line):
            self.crc, self.is_checked = int(line[-_NUM_DIGITS - 2 : -2], 16), True
        elif not self.is_checked:
            self.crc = crc32(line, self.crc)


def _tail(crc: int) -> bytes:
    return b',"crc":"%08x"}' % crc


def has_checksum(line: bytes) -> bool:
    """Return True if a journal line, given without its newline, ends with a checksum."""
    if line[-_NUM_BYTES : -_NUM_DIGITS - 2] != _HEAD or line[-2:] != _TAIL:
        return False
    return not line[-_NUM_DIGITS - 2 : -2].strip(b"0123456789abcdef")
