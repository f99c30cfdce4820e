"""What loading yields, and what every kind of source reports to while it is read.

    paths ──load_sources.py──> a reader per kind (file_kinds.py) ──> Loading: texts, items, problems ──> Loaded
A reader raises ``UnreadableSource`` for a thing that it cannot read: for a path that the user named this becomes the error,
for a file found in a folder or an archive a ``SourceProblem``, so that nothing is passed over in silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import SourceError
from ramify.progress import ProgressTask

MAX_FILE_S = 60.0
"""To parse one file of a kind that can be made to take for ever."""
_SHOWN = 6
"""Names in a list, before "and 12 more"."""


class UnreadableSource(Exception):
    """Why one source cannot be read, as the end of a sentence that begins with its name; and what
    to do."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(f"{reason}: {remedy}" if remedy else reason)
        self.reason = reason
        self.remedy = remedy


class SourceItem(msgspec.Struct, frozen=True):
    """One thing that was loaded."""

    name: str
    """Its key in the context, where that is a dict."""
    kind: str
    """``text``, ``csv``, ``jsonl``, ``json``, ``pdf`` or ``sqlite``."""
    chars: int
    """In the context."""
    num_bytes: int
    """On disk, or in its archive once unpacked."""
    detail: str = ""
    """``CSV: 3 columns a, b, c; 1,200 rows``"""


class SourceProblem(msgspec.Struct, frozen=True):
    """One thing that was found and could not be read."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} {self.reason}"


class LoadedContext(msgspec.Struct, frozen=True):
    """A context, what it is made of, and what is missing from it."""

    context: str | dict[str, str]
    """The text of a single file; otherwise name -> text, in order of names."""
    items: list[SourceItem]
    problems: list[SourceProblem]
    left_out: dict[str, list[str]]
    """Reason -> what a folder's own rules leave out: ignored, hidden, linked."""
    tools: dict[str, Callable[..., Any]]
    """Functions for the session, run on the host: ``sql`` where there is a database."""

    def manifest(self) -> str:
        """The context in a few lines for a model's prompt."""
        chars = sum(item.chars for item in self.items)
        if isinstance(self.context, str):
            item = self.items[0]
            head = f"the text of {item.name!r}: {chars:,} characters, {self.context.count(chr(10)):,} lines"
            lines = [f"{head}. {item.detail}" if item.detail else head]
        else:
            names = listing([repr(item.name) for item in self.items])
            lines = [
                f"a dict from name to text: {len(self.items):,} entries, {chars:,} characters",
                f"kinds: {_by_suffix(self.items)}",
                f"names: {names}",
                *(f"{item.name!r}: {item.detail}" for item in self.items[:200] if item.detail),
            ][: 3 + _SHOWN]
        if self.problems:
            lines.append(f"not loaded: {len(self.problems):,} files ({_by_suffix(self.problems)})")
        return "\n".join(lines)

    def describe(self) -> list[str]:
        """What was loaded, what could not be, and what was left out, a line each, for a person."""
        chars = sum(item.chars for item in self.items)
        if len(self.items) <= _SHOWN:
            lines = [
                f"{item.name}: {item.detail or item.kind}, {item.chars:,} characters"
                for item in self.items
            ]
        else:
            lines = [f"{len(self.items):,} texts, {chars:,} characters: {_by_suffix(self.items)}"]
            lines += [
                f"{item.name}: {item.detail}"
                for item in self.items
                if item.kind in ("sqlite", "pdf")
            ][:_SHOWN]
        reasons: dict[str, list[str]] = {}
        for problem in self.problems:
            reasons.setdefault(problem.reason, []).append(problem.name)
        lines += [
            f"not loaded ({len(names):,}), {reason}: {listing(names)}"
            for reason, names in reasons.items()
        ]
        lines += [
            f"left out ({len(names):,}), {reason}: {listing(names)}"
            for reason, names in self.left_out.items()
        ]
        return [_printable(line) for line in lines]


class SourceLoader:
    """Collects what the readers find; refuses more than ``max_bytes`` of text and unpacked data in
    all, and a file that takes more than ``max_file_s`` to parse."""

    def __init__(
        self, max_bytes: int, max_file_s: float = MAX_FILE_S, work: ProgressTask | None = None
    ) -> None:
        """``work`` is told how much was read."""
        self.max_bytes, self.max_file_s = max_bytes, max_file_s
        self._work = work
        self.texts: dict[str, str] = {}
        self.items: list[SourceItem] = []
        self.problems: list[SourceProblem] = []
        self.left_out: dict[str, list[str]] = {}
        self.databases: dict[str, Path] = {}
        self.seen: set[str] = set()
        """Real paths read so far: what is named twice is loaded once."""
        self._spent = 0

    @property
    def room(self) -> int:
        """Bytes that may still be read."""
        return self.max_bytes - self._spent

    def spend(self, num_bytes: int, name: str) -> None:
        self._spent += num_bytes
        if self._work is not None:
            self._work.at(self._spent, name)
        if self._spent > self.max_bytes:
            raise SourceError(
                f"{name} brings the sources to over {self.max_bytes / 1e6:,.0f} MB: "
                "name fewer files, or allow more with max_bytes"
            )

    def add(self, name: str, text: str, kind: str, num_bytes: int, detail: str = "") -> None:
        """One text of the context, under ``name`` or, where that is taken, ``name (2)``."""
        number, unique = 2, name
        while unique in self.texts:
            unique, number = f"{name} ({number})", number + 1
        self.texts[unique] = text
        self.items.append(SourceItem(unique, kind, len(text), num_bytes, detail))

    def problem(self, name: str, reason: str) -> None:
        self.problems.append(SourceProblem(name, reason))

    def leave_out(self, name: str, reason: str) -> None:
        self.left_out.setdefault(reason, []).append(name)


def listing(names: list[str]) -> str:
    """``a, b, c and 12 more``"""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN:,} more"


def _printable(line: str) -> str:
    """Names come from anywhere; a terminal must not obey them."""
    return (
        line
        if line.isprintable()
        else "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)
    )


def _by_suffix(items: Sequence[SourceItem | SourceProblem]) -> str:
    """``1,204 .py, 30 .txt, 2 other``"""
    names = [item.name.rpartition("/")[2].rpartition(".") for item in items]
    counts = Counter(f".{suffix}" if stem else "other" for stem, _, suffix in names)
    return listing([f"{count:,} {suffix}" for suffix, count in counts.most_common()])
