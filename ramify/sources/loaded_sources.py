"""Defines the types that describe loaded sources, and collects the results of the file readers.

    paths ──load_sources.py──> reader of each kind ──> SourceCollector ──> LoadedContext
                               (file_kinds.py)                          texts, items, problems

A reader raises ``UnreadableSourceError`` for a file that it cannot read. If other files are loaded
too, the error becomes a ``UnreadableSource``, so that no file is skipped silently. If the file is
the only source, the load fails.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import SourceError
from ramify.format_quantities import pluralize
from ramify.pip_install_command import install_command
from ramify.progress import ProgressReporter
from ramify.sandbox.base import FileBackedText
from ramify.sources.queryable_tables import LoadedTable
from ramify.terminal_sanitizer import replace_unprintable
from ramify.types.picture import Picture, picture_reference_digest

MAX_FILE_S = 60.0
"""Time limit in seconds for parsing one file of a kind that can take arbitrarily long."""
MIN_SEARCHED_CHARS = 100_000
"""Minimum characters of text in a context for which sessions get ``search`` and ``chunks``."""
NOT_UTF8 = "not UTF-8, read as Windows-1252"
"""Note on a text that may have been decoded wrongly."""
MISNAMED = "plain text, although its name ends in"
"""Note on a text whose file name belongs to another format, such as ``report.pdf``."""
NO_TABLE = "not a table for sql"
"""Beginning of the note on a CSV or JSONL file that ``sql`` cannot query. The reason follows in
parentheses."""
NO_DUCKDB = "the extra inputs is not installed"
MAX_RECORDED = 500
"""Maximum number of sources that a run's record names."""
MORE = "raise max_bytes"
"""Advice in the error messages for sources above the size limit. Commands name their option."""
_MAX_NAMES = 12
"""Maximum number of columns or keys that a description names."""
_SHOWN = 6
"""Maximum number of names in a list, before "and 12 more"."""


def missing_library_advice() -> str:
    """Return advice for a source whose optional library is not installed."""
    return f"reading it needs {install_command('inputs')}"


class UnreadableSourceError(Exception):
    """Raised if a source cannot be read.

    ``reason`` completes a sentence that begins with the source's name. ``remedy`` says what to do.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(f"{reason}: {remedy}" if remedy else reason)
        self.reason = reason
        self.remedy = remedy


class OversizedSourceError(UnreadableSourceError):
    """Raised if a source is larger than a limit, or if a small file unpacks to an enormous size.

    Nothing from the source is loaded.
    """


class DocumentPartLocation(msgspec.Struct, frozen=True):
    """A named part of a document, such as a page, and the line where it begins in the text."""

    line: int
    """First line of the part in the text, counted from 1."""
    name: str
    """Name of the part, such as ``page 3``, ``sheet Sales`` or the headings ``Risks / Currency``.
    """


class LoadedSourceInfo(msgspec.Struct, frozen=True):
    """A text that was loaded from a source, with its kind, size and origin."""

    name: str
    """Key of the text in the context, if the context is a dict."""
    kind: str
    """Kind: ``text``, ``csv``, ``jsonl``, ``json``, ``picture``, ``sqlite``, ``server``, or a table
    or document format.

    Tables are ``parquet``, ``arrow``, ``duckdb``, ``xlsx``; documents are ``pdf``, ``docx``, and so
    on.
    """
    chars: int
    """Length of the text in the context, in characters; 0 for a picture."""
    num_bytes: int
    """Size of the source in bytes, on disk or after it was unpacked from an archive."""
    detail: str = ""
    """Description of the contents, such as ``CSV: 3 columns a, b, c; 1,200 rows``."""
    in_file: bool = False
    """True if the text is file-backed: it is read from its file only when used, and stored by
    reference."""
    places: tuple[DocumentPartLocation, ...] = ()
    """Pages, slides, sheets or headings of a document, by line."""

    @property
    def contents(self) -> str:
        """``detail`` without the notes that ``LoadedContext.warnings`` repeats."""
        return _split_detail(self.detail)[0]


class UnreadableSource(msgspec.Struct, frozen=True):
    """A file that was found but could not be read, with the reason."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} {self.reason}"


class LoadedSourcesRecord(msgspec.Struct, frozen=True):
    """A run's record of the sources that were loaded, skipped or found unreadable."""

    items: list[LoadedSourceInfo] = []
    """The first ``MAX_RECORDED`` loaded sources, without the ``places`` of each."""
    num_items: int = 0
    problems: list[UnreadableSource] = []
    """The first ``MAX_RECORDED`` files that could not be read."""
    num_problems: int = 0
    left_out: dict[str, list[str]] = {}
    """Reason for skipping files -> names of the first few files that were skipped for this
    reason."""
    num_left_out: dict[str, int] = {}
    """Reason for skipping files -> number of files and folders that were skipped for this
    reason."""


class LoadedContext(msgspec.Struct, frozen=True):
    """A context that was loaded from sources.

    It also describes each item, the files that could not be read, and those that were skipped.
    """

    context: str | FileBackedText | dict[str, Any]
    """The text of a single file, the value that represents a single picture, or a dict of several
    such values.

    The dict is sorted by name. A large text is a file-backed ``FileBackedText``.
    """
    items: list[LoadedSourceInfo]
    problems: list[UnreadableSource]
    left_out: dict[str, list[str]]
    """Reason for skipping files -> names of the skipped files, such as ignored or hidden files or
    links in a folder."""
    tools: dict[str, Any]
    """Names and values that a session gets in addition to the context.

    ``sql``, which runs in the host, and ``tables`` are there if there are tables or databases.
    ``search`` and ``chunks`` are there if the texts are long.
    """
    dialect: str = "DuckDB"
    """SQL dialect of ``sql`` if its argument ``db`` is not given: ``SQLite`` if the only source of
    tables is one SQLite database."""
    pictures: Mapping[str, bytes | Path] = {}
    """Digest of each picture in the context -> its bytes or its file."""
    needs_session: bool = False
    """True if part of the context is available only through a tool, such as pages of a long scan.
    """

    origin: Mapping[str, Any] = {}
    """Arguments with which ``load`` recreates the tools: ``paths``, and options that differ from
    their defaults.

    URLs have no passwords and keys. Empty if ``load`` did not read the sources.
    """

    @property
    def is_csv(self) -> bool:
        """True if the context consists only of the texts of CSV files."""
        return bool(self.items) and all(item.kind == "csv" for item in self.items)

    def recorded_sources(self) -> dict[str, Any]:
        """Return what a run records about its sources, so that its tools can be recreated later.

        It records the names of its tools and the origin of its sources. Empty if ``load`` did not
        read the sources.
        """
        if not self.origin:
            return {}
        # Optional tools are recorded with the context.
        names = [n for n, each in self.tools.items() if not getattr(each, "is_optional", False)]
        return {**self.origin, "tools": names}

    def manifest(self) -> str:
        """Return a description of the context for the model's prompt, in a few lines.

        The prompt describes its type, size and beginning elsewhere.
        """
        if not isinstance(self.context, dict):
            item = self.items[0]
            head = f"It is the text of {item.name!r}."
            detail = self._detail_for_model(item)
            lines = [f"{head} {detail}" if detail else head]
        elif picture_reference_digest(self.context) is not None:
            lines = [f"It is the picture {self.items[0].name!r}: {self.items[0].detail}."]
        else:
            lines = [
                f"Kinds: {_by_suffix(self.items)}",
                f"Names: {join_names_abbreviated([repr(item.name) for item in self.items])}",
                *(
                    f"{item.name!r}: {detail}"
                    for item in self.items[:200]
                    if (detail := self._detail_for_model(item))
                ),
            ][: 2 + _SHOWN]
        if self.tools.get("tables"):
            names = join_names_abbreviated(
                [f"{each['name']} ({each['file']!r})" for each in self.tools["tables"]]
            )
            lines.append(
                f"Tables for sql(), in {self.dialect}'s dialect: {names}; `tables` lists their "
                "columns, rows and samples"
            )
        if self.problems:
            num = pluralize(len(self.problems), "file")
            lines.append(f"Not loaded: {num} ({_by_suffix(self.problems)})")
        return "\n".join(lines)

    def _detail_for_model(self, item: LoadedSourceInfo) -> str:
        # A missing library matters only to sessions that have ``sql`` for other sources.
        note = "" if "sql" in self.tools else f"; {NO_TABLE} ({NO_DUCKDB})"
        return item.detail.replace(note, "") if note else item.detail

    @property
    def places(self) -> dict[str, tuple[DocumentPartLocation, ...]]:
        """The pages, slides, sheets or headings of each document.

        The key is the name by which citations refer to the document.
        """
        if isinstance(self.context, str):
            return {"context": self.items[0].places}
        return {item.name: item.places for item in self.items if item.places}

    def to_record(self) -> dict[str, Any]:
        """Return the loaded and skipped sources as a dict with the fields of
        ``LoadedSourcesRecord``."""
        plain: dict[str, Any] = msgspec.to_builtins(
            LoadedSourcesRecord(
                self.items[:MAX_RECORDED],
                len(self.items),
                self.problems[:MAX_RECORDED],
                len(self.problems),
                {reason: names[:_SHOWN] for reason, names in self.left_out.items()},
                {reason: len(names) for reason, names in self.left_out.items()},
            )
        )
        for item in plain["items"]:
            del item["places"]
        return plain

    def describe(self) -> list[str]:
        """Return a report for the user on the loaded, unreadable and skipped files, line by
        line."""
        return [*self.describe_items(), *self.warnings()]

    def describe_items(self) -> list[str]:
        """Return a report for the user on the loaded files, line by line."""
        chars = sum(item.chars for item in self.items)
        if len(self.items) <= _SHOWN:
            lines = [
                f"{item.name}: {item.contents or item.kind}"
                + (f", {pluralize(item.chars, 'character')}" if item.kind != "picture" else "")
                + ", stays in its file" * item.in_file
                for item in self.items
            ]
        else:
            texts = f"{len(self.items):,} texts, {pluralize(chars, 'character')}"
            lines = [f"{texts}: {_by_suffix(self.items)}"]
            if num := sum(item.in_file for item in self.items):
                lines[0] += f"; {num:,} stay in their files"
            lines += [
                f"{item.name}: {item.contents}"
                for item in self.items
                if item.kind not in ("text", "csv", "jsonl", "json")
            ][:_SHOWN]
        return [replace_unprintable(line) for line in lines]

    def warnings(self) -> list[str]:
        """Return warnings about files that are missing from the context or differ from those on
        disk."""
        reasons: dict[str, list[str]] = {}
        for problem in self.problems:
            reasons.setdefault(problem.reason, []).append(problem.name)
        lines = [
            f"not loaded ({len(names):,}), {reason}: {join_names_abbreviated(names)}"
            for reason, names in reasons.items()
        ]
        split = {item.name: _split_detail(item.detail) for item in self.items}
        lines += [f"{name}: {'; '.join(notes)}" for name, (_, _, notes) in split.items() if notes][
            :_SHOWN
        ]
        no_tables: dict[str, list[str]] = {}
        for name, (_, reason, _) in split.items():
            if reason:
                no_tables.setdefault(reason, []).append(name)
        lines += [
            f"{NO_TABLE} ({len(names):,}), {_with_command(reason)}: {join_names_abbreviated(names)}"
            for reason, names in no_tables.items()
        ]
        lines += [
            f"left out ({len(names):,}), {reason}: {join_names_abbreviated(names)}"
            for reason, names in self.left_out.items()
        ]
        return [replace_unprintable(line) for line in lines]


class SourceCollector:
    """Collects the texts and tables that the file readers load into a context.

    It enforces limits on size and time.

    ``max_bytes`` bounds all text and unpacked data together, and ``max_file_s`` bounds the parsing
    of one file.
    """

    def __init__(
        self,
        max_bytes: int,
        max_file_s: float = MAX_FILE_S,
        work: ProgressReporter | None = None,
        *,
        strict: bool = False,
        mapped_bytes: int = 1 << 62,
        counts_mapped: bool = False,
        has_tools: bool = True,
    ) -> None:
        """Create an empty collector.

        ``work``: displays the number of bytes read.
        ``strict``: raise SourceError for the first unreadable file.
        ``mapped_bytes``: texts of at least this many bytes, alone or together, are file-backed
        instead of loaded into memory.
        ``counts_mapped``: count file-backed texts towards ``max_bytes``, too.
        ``has_tools``: if False, sessions get the context but no tools.
        """
        self.max_bytes = max_bytes
        self.max_file_s = max_file_s
        self.strict = strict
        self.has_tools = has_tools
        self.mapped_bytes = mapped_bytes
        self.num_mapped = 0
        """Number of file-backed texts."""
        self._counts_mapped = counts_mapped
        self._mapped = 0
        self._work = work
        self.texts: dict[str, str | FileBackedText] = {}
        self.picture_values: dict[str, dict[str, Any]] = {}
        """Name of each picture -> its value in the context."""
        self.pictures: dict[str, bytes | Path] = {}
        """Digest of each picture -> its bytes or its file."""
        self.items: list[LoadedSourceInfo] = []
        self.problems: list[UnreadableSource] = []
        self.left_out: dict[str, list[str]] = {}
        self.databases: dict[str, Path] = {}
        """SQLite files, by name."""
        self.servers: dict[str, Callable[..., list[tuple[Any, ...]]]] = {}
        """Name of each database on a server -> function that queries it."""
        self.needs_session = False
        """True if part of the context is available only through a tool."""
        self.pdfs: dict[str, Any] = {}
        """Name of each PDF -> object that renders its pages (see ``RenderablePdf``)."""
        self.tables: list[LoadedTable] = []
        self.kept_tables: Any = None
        """Temporary folder for tables that came without a separate file (see
        ``session_tables.TemporaryTableFolder``)."""
        self.describing_s = 0.0
        """Time spent on describing tables, in seconds."""
        self.seen: set[str] = set()
        """Real paths read so far, so that a file that is named twice is loaded once."""
        self._spent = 0
        self._began = 0
        """Number of bytes read before the current file."""

    @contextlib.contextmanager
    def discarding_oversized_file(self) -> Iterator[None]:
        """Undo additions to the context if the ``with`` block raises OversizedSourceError.

        If the file turns out to be too large, everything that it added is removed.
        """
        self._began = self._spent
        num_items, num_tables = len(self.items), len(self.tables)
        try:
            yield
        except OversizedSourceError:
            self._spent = self._began
            for item in self.items[num_items:]:
                self.texts.pop(item.name, None)
            del self.items[num_items:], self.tables[num_tables:]
            raise

    @property
    def remaining_bytes(self) -> int:
        """The number of bytes that may still be loaded into memory under the size limit."""
        return self.max_bytes - self._spent

    @property
    def loaded_bytes(self) -> int:
        """The number of bytes that have been loaded into memory so far."""
        return self._spent

    def count_mapped(self, num_bytes: int, name: str) -> None:
        """Count a file-backed text, which is read on demand instead of being loaded into memory.

        If such texts are limited, raises OversizedSourceError for a single file above the limit,
        and SourceError if all files together exceed it.
        """
        if self._counts_mapped and num_bytes > self.max_bytes:
            raise self._oversized_error(num_bytes)
        self.num_mapped += 1
        self._mapped += num_bytes
        if self._counts_mapped and self._spent + self._mapped > self.max_bytes:
            raise self._too_many(name)

    def show_progress(self, num_bytes: int, name: str) -> None:
        """Show the user how much of a large file-backed text has been read so far."""
        if self._work is not None:
            self._work.set_progress(self._spent + num_bytes, name)

    def count_bytes(self, num_bytes: int, name: str, *, is_part: bool = False) -> None:
        """Count bytes of the current file towards the size limit of the load.

        Bytes of its unpacked parts count, too. The first bytes counted are the file's own size.
        Raises SourceError if all files together exceed the limit, and OversizedSourceError if this
        file alone, packed or unpacked, exceeds it.
        """
        is_size = self._spent == self._began and not is_part
        self._spent += num_bytes
        if self._work is not None:
            self._work.set_progress(self._spent, name)
        if self._spent - self._began > self.max_bytes:
            raise self._oversized_error(0 if is_part else num_bytes)
        if self._spent + self._mapped * self._counts_mapped > self.max_bytes:
            if not is_size:
                raise OversizedSourceError(self._sum_over, MORE)
            raise self._too_many(name)

    def _oversized_error(self, num_bytes: int) -> OversizedSourceError:
        has = f"has {size_text(num_bytes)}," if num_bytes > self.max_bytes else "is"
        return OversizedSourceError(f"{has} over the limit of {size_text(self.max_bytes)}", MORE)

    def _too_many(self, name: str) -> SourceError:
        return SourceError(f"{name} {self._sum_over}: name fewer files, or {MORE}")

    @property
    def _sum_over(self) -> str:
        return f"brings the sources to over {size_text(self.max_bytes)}"

    def add(
        self,
        name: str,
        text: str | FileBackedText,
        kind: str,
        num_bytes: int,
        detail: str = "",
        places: Sequence[DocumentPartLocation] = (),
    ) -> None:
        """Add one text to the context under the given name, or as ``name (2)`` if that name is
        taken."""
        unique = self._unique_name(name)
        self.texts[unique] = text
        in_file = isinstance(text, FileBackedText)
        self.items.append(
            LoadedSourceInfo(unique, kind, len(text), num_bytes, detail, in_file, tuple(places))
        )

    def add_picture(
        self, name: str, picture: Picture, source: bytes | Path, detail: str, num_bytes: int
    ) -> None:
        """Add one picture to the context.

        ``source`` is the picture's bytes or its file. ``num_bytes`` is the size of the file that
        the user named.
        """
        unique = self._unique_name(name)
        self.picture_values[unique] = picture.as_reference()
        self.pictures.setdefault(picture.digest, source)
        self.items.append(LoadedSourceInfo(unique, "picture", 0, num_bytes, detail))

    def _unique_name(self, name: str) -> str:
        number, unique = 2, name
        while unique in self.texts or unique in self.picture_values:
            unique, number = f"{name} ({number})", number + 1
        return unique

    def report_problem(self, name: str, reason: str) -> None:
        """Report a file that cannot be read, so that the load continues with the other files.

        Raises SourceError if the load is strict.
        """
        if self.strict:
            raise SourceError(
                replace_unprintable(f"{name} {reason}; to load the other files, remove --strict")
            )
        self.problems.append(UnreadableSource(name, reason))

    def leave_out(self, name: str, reason: str) -> None:
        self.left_out.setdefault(reason, []).append(name)


def size_text(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB" if num_bytes >= 10_000_000 else f"{num_bytes:,} bytes"


def join_names_abbreviated(names: list[str]) -> str:
    """Join names for a message, and abbreviate a long list as in ``a, b, c and 12 more``."""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN:,} more"


def count_with_names(names: Sequence[str], noun: str) -> str:
    """Return a count followed by names, as in ``3 columns a, b, c``."""
    shown = [" ".join(str(name).split())[:40] for name in names[:_MAX_NAMES]]
    more = " …" if len(names) > _MAX_NAMES else ""
    return f"{pluralize(len(names), noun)} {', '.join(shown)}{more}"


def _split_detail(detail: str) -> tuple[str, str, list[str]]:
    """Split an item's description into its contents, the reason why ``sql`` cannot query it, and
    other notes."""
    before, mark, after = f"; {detail}".partition(f"; {NO_TABLE} (")
    reason, _, after = after.rpartition(")") if mark else ("", "", "")
    parts = f"{before}{after}".split("; ")[1:]
    notes = [part for part in parts if part.startswith((NOT_UTF8, MISNAMED))]
    return "; ".join(part for part in parts if part not in notes), reason, notes


def _with_command(reason: str) -> str:
    """Append DuckDB's install command to an error's reason if DuckDB is missing.

    Models read it without the command, which may contain the path of this installation.
    """
    return f"{reason} ({install_command('inputs')})" if reason == NO_DUCKDB else reason


def _by_suffix(items: Sequence[LoadedSourceInfo | UnreadableSource]) -> str:
    """Return how many files have each suffix, as in ``1,204 .py, 30 .txt, 2 other``."""
    names = [item.name.rpartition("/")[2].rpartition(".") for item in items]
    counts = Counter(f".{suffix}" if stem else "other" for stem, _, suffix in names)
    return join_names_abbreviated([f"{count:,} {suffix}" for suffix, count in counts.most_common()])
