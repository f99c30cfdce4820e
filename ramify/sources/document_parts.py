"""Join the parts of a document, such as pages, into one text, and record the line at which each
part begins.

    [DocumentPart("page 1", "…"), DocumentPart("page 2", "…")] ──assemble──> text, places

A place is a page, slide, chapter, sheet or heading. Each numbered part begins with a line such as
``--- page 2 ---``. ``place_at_line`` names the place of a line, for example of a citation.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Sequence

import msgspec

from ramify.sources.loaded_sources import DocumentPartLocation

MAX_PLACES = 20_000
"""Maximum number of places, such as pages or headings, that are recorded for one document. Further
ones are skipped."""
_MAX_NAME_CHARS = 80
_HEADING = re.compile(r"(#{1,6})\s+(.*\S)")
_FENCE = re.compile(r"\s*(```+|~~~+)")


class DocumentPart(msgspec.Struct, frozen=True):
    """One part of a document, such as a page."""

    place: str
    """Place of the part, such as ``page 3``; empty if the document has no numbered parts."""
    text: str
    title: str = ""
    """Title of the part, if the text does not begin with it."""


def assemble(
    parts: Sequence[DocumentPart], *, has_headings: bool
) -> tuple[str, list[DocumentPartLocation]]:
    """Join the parts of a document into one text, and record at which line each part begins.

    Returns the text, and the place in it at which each part begins.
    """
    lines: list[str] = []
    places: list[DocumentPartLocation] = []
    for part in parts:
        if part.place:
            title = _shorten_text(part.title)
            name = f"{part.place}: {title}" if title else part.place
            places.append(DocumentPartLocation(len(lines) + 1, name))
            lines.append(f"--- {name} ---")
        body = part.text.split("\n")
        if has_headings:
            for index, heading in _headings(body):
                name = f"{part.place}, {heading}" if part.place else heading
                places.append(DocumentPartLocation(len(lines) + index + 1, name))
        lines += body
    return "\n".join(lines), places[:MAX_PLACES]


def place_at_line(places: Sequence[DocumentPartLocation], line: int) -> str:
    """Return the name of the page, slide or heading to which a line of a document belongs.

    Returns an empty string if the line comes before the first one.
    """
    index = bisect.bisect_right([place.line for place in places], line)
    return places[index - 1].name if index else ""


def _headings(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the line index and the full path of each heading, such as ``(7, "Risks /
    Currency")``."""
    path: list[tuple[int, str]] = []
    fence = ""
    for index, line in enumerate(lines):
        if found := _FENCE.match(line):
            if not fence:
                fence = found[1]
            elif found[1].startswith(fence):
                fence = ""
        elif not fence and (found := _HEADING.fullmatch(line)):
            level = len(found[1])
            path = [each for each in path if each[0] < level]
            path.append((level, _shorten_text(found[2])))
            yield index, " / ".join(name for _, name in path)


def _shorten_text(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= _MAX_NAME_CHARS else f"{plain[: _MAX_NAME_CHARS - 1]}…"
