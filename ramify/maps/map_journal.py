"""The journal of a map, which asks one question about every row of a table.

The journal records each request and reply in one file, ``ROOT/maps/ID.jsonl``, with a few short
lines for each row.

    {"map":{…},"crc":"…"}                                       once: what is asked of every row
    {"q":[5,7,0.31,"DIGEST",null,"text of the row",66,8192,0.012],"crc":"…"}    a first request
    {"r":[5,0,"the reply",…],"crc":"…"}                         its reply
    {"t":[5,1,"That does not fit …",…]} {"r":[5,1,…]}           a repair and its reply
    {"x":[5,1,"error",…]}                                       an attempt that failed
    {"s":[6,8,0.32,"DIGEST","RUN_ID"]}                          a row that a run answers
    {"e":[6,"final",…]}                    how a row ended, if no reply says it
    {"d":[5,9]}                            row 9 is asked the same as question 5
    {"b":[5,7,0.31,"DIGEST",…]}            a first request that a batch will have
    {"w":[0,"KEY",2000,…]}                 the requests since the last such line are now uploaded
    {"u":[0,"batch_123"]} {"v":[0,…]}      the provider has the batch; all its results are here

A question (5 above) is asked once, for all rows that ask the same. A line is written before what it
describes is done: a request before it is sent, with what is reserved for it, so that the journal of
a killed map says what may have been paid. A direct answer is two lines with 150 bytes in addition
to its texts. Only one process writes the journal of a map, as with a run. What the lines of a whole
journal mean is decided in ``map_journal_state.py``.
"""

from __future__ import annotations

import base64
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import StoreError, UnknownRun
from ramify.secret_redaction import SecretRedactor
from ramify.store.durable_files import (
    Fsync,
    FsyncFlusher,
    make_folder,
    reserve_disk_space,
    sync_folder,
)
from ramify.store.journal import (
    ChecksummedLineWriter,
    checksum_chain_at_end,
    cut_torn_line,
    encode_line,
    lines,
    open_locked,
    writer_process_file,
)
from ramify.store.line_checksums import ChecksumChain
from ramify.types.message import Finish, Usage

_VERSION = 1


RAY_MAPS = "ray_maps"
"""Subfolder of a run store with the spending records of maps on a Ray cluster."""


class RayMapHeaderFields(msgspec.Struct, frozen=True):
    """The part of a map's journal header that is used only on a Ray cluster.

    Answers are written to output files there, and not to the journal. It names the columns, and the
    file that records spending.
    """

    record: str
    """Name of the spending record in ``ROOT/ray_maps`` (see shared_budget.py)."""
    shown: tuple[str, ...]
    """Columns that the model reads."""
    answers: tuple[str, ...]
    """Columns that contain the answers."""
    error: str
    """Column that contains the errors."""


class MapJournalHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first line of a map's journal, which contains the question and the settings of the
    map."""

    id: str
    key: str
    """Digest of the question, its settings and the output. Repeating a command gives the same
    key."""
    question: str
    """Question, or template of the question."""
    started_at: float
    """Start time as a Unix timestamp."""
    model: str
    out: str = ""
    """Absolute path of the output, or its URL; empty for a table in memory."""
    rows: str = ""
    """Name of the input table."""
    answer_schema: dict[str, Any] | None = None
    config: dict[str, Any] = {}
    """Settings of the RLM that answers the rows."""
    before: tuple[str, ...] = ()
    """System message of a direct call, or empty."""
    asked: str = ""
    """Text that follows the row and the question in a direct prompt, and describes the form of the
    answer."""
    parts: RayMapHeaderFields | None = None
    """Location of the rows if they are not in this journal."""
    version: int = _VERSION


class MapStartRecord(msgspec.Struct, frozen=True, array_like=True):
    """A journal line that records the start or continuation of a map.

    It contains the limits that apply.
    """

    at: float
    """Unix time at which the map was begun or continued, in seconds."""
    total: int | None
    """Number of rows, or None if it is unknown."""
    max_calls: int
    max_tokens: int
    max_cost: float | None
    """Cost limit in dollars, or None if no model has a price."""
    is_sample: bool = False
    """True if questions are asked about only a sample of the rows."""


class QuestionStartedLine(msgspec.Struct, frozen=True, array_like=True):
    """A journal line that records the first request for a question.

    If the question failed and is tried again, the new attempt has such a line too.
    """

    number: int
    """Number of the question, from 0."""
    row: int
    """Index of the first row that asks the question."""
    at_s: float
    """Seconds since the map was begun or continued."""
    digest: str
    question: str | None
    """The question, or None if every row has the same one."""
    context: Any
    """The part of the row that the model reads, as one string or as strings by column. None for a
    template."""
    max_input_tokens: int
    max_output_tokens: int
    cost: float | None
    """Cost in dollars that is reserved for the request, or None if the model has no price."""


class RetryRequestRecord(msgspec.Struct, frozen=True, array_like=True):
    """A journal line that records another request for the same question.

    The request either asks the model to repair a reply that does not fit the answer type, or
    repeats a failed attempt.
    """

    number: int
    turn: int
    text: str | None
    """The message that asks for the repair, or None if an attempt is repeated."""
    max_input_tokens: int
    max_output_tokens: int
    cost: float | None


class DirectReplyRecord(msgspec.Struct, frozen=True, array_like=True):
    """A journal line with the model's reply to a direct call, which is a request without a Python
    session."""

    number: int
    turn: int
    text: str
    finish: Finish
    counts: tuple[int, ...]
    """Token counts of input, output, cache, reasoning and cache writes, then calls of unknown
    usage; without trailing zeros."""
    cost: float | None
    seconds: float
    reasoning: str | None


class FailedRequestLine(msgspec.Struct, frozen=True, array_like=True):
    """A journal line that records a failed request.

    It has an upper bound on the cost.
    """

    number: int
    turn: int
    error: str
    counts: tuple[int, ...]
    """Usage that the provider may have billed, or empty if there was none."""
    cost: float | None


class RowRunStartedLine(msgspec.Struct, frozen=True, array_like=True):
    """A journal line recording that a run with a Python session has begun to answer a row."""

    number: int
    row: int
    at_s: float
    digest: str
    run: str
    """Id of the run."""


class QuestionEndedRecord(msgspec.Struct, frozen=True, array_like=True):
    """A journal line that records how a question ended if no reply line does.

    Either a run answered the question, or the question failed.
    """

    number: int
    stop: str
    answer: Any
    error: str | None
    counts: tuple[int, ...]
    """Usage of the run. Empty for a direct call, whose other lines contain it."""
    calls: int
    """Number of requests of the run."""
    cost: float | None
    seconds: float


class DuplicateRowLine(msgspec.Struct, frozen=True, array_like=True):
    """A journal line that records that a table row asks the same question as an earlier row."""

    number: int
    row: int


class BatchUploadIntentLine(msgspec.Struct, frozen=True, array_like=True):
    """A journal line recording that a batch is about to be uploaded."""

    part: int
    """Number of the batch within this map, from 0."""
    key: str
    """Key that identifies the batch on the provider's list."""
    num: int
    """Number of requests in the batch."""
    at: float
    """Unix time just before the upload, in seconds."""
    provider: str


class BatchAcceptedLine(msgspec.Struct, frozen=True, array_like=True):
    """A journal line that records the provider's id of an uploaded batch."""

    part: int
    id: str
    """Id of the batch at the provider."""


class BatchEndedLine(msgspec.Struct, frozen=True, array_like=True):
    """A journal line recording that a batch is finished.

    The outcome of each of its requests is in the journal.
    """

    part: int
    status: str
    """The provider's status of the batch, or the reason why the batch was not uploaded."""


class MapJournalLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line in the journal of a map, which records one event.

    A single field holds the content, and ``crc`` is the line's checksum.
    """

    map: MapJournalHeader | None = None
    c: MapStartRecord | None = None
    q: QuestionStartedLine | None = None
    t: RetryRequestRecord | None = None
    r: DirectReplyRecord | None = None
    x: FailedRequestLine | None = None
    s: RowRunStartedLine | None = None
    e: QuestionEndedRecord | None = None
    d: DuplicateRowLine | None = None
    b: QuestionStartedLine | None = None
    w: BatchUploadIntentLine | None = None
    u: BatchAcceptedLine | None = None
    v: BatchEndedLine | None = None
    n: int | None = None
    """Number of rows about which no question could be asked, recorded when an invocation of the map
    ended."""
    crc: str = ""

    @property
    def first_request(self) -> QuestionStartedLine | None:
        """Return the first request for a question if this journal line records one.

        The request may be sent alone or in a batch. Otherwise return None.
        """
        return self.q or self.b


def compact_usage(usage: Usage) -> tuple[int, ...]:
    """Return the usage of one request in the compact form of the journal.

    It lists the token counts and then the number of calls of unknown usage, without trailing zeros.
    """
    counts = [
        usage.input_tokens,
        usage.output_tokens,
        usage.cached_tokens,
        usage.reasoning_tokens,
        usage.cache_write_tokens,
        usage.unknown_calls,
    ]
    while counts and not counts[-1]:
        counts.pop()
    return tuple(counts)


def usage_from_counts(counts: tuple[int, ...], calls: int = 1) -> Usage:
    """Return the token usage that the counts in a journal line describe.

    This is the inverse of ``compact_usage``.
    """
    if not counts:
        return Usage()
    given, output, cached, reasoning, stored, unknown = (*counts, *(0,) * (6 - len(counts)))
    return Usage(given, output, cached, reasoning, calls, unknown, stored)


def digest_to_base64(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def digest_to_int(text: str) -> int:
    """Convert a digest from base64 text to an integer, which needs less memory."""
    return int.from_bytes(base64.urlsafe_b64decode(text + "=="), "big")


_decode = msgspec.json.Decoder(MapJournalLine).decode


class TableMapJournal:
    """A map's journal that is open for writing.

    Only one process at a time can open it.
    """

    def __init__(
        self,
        path: Path,
        fd: int,
        chain: ChecksumChain,
        temporary: Any = None,
        fsync: Fsync = os.fsync,
    ) -> None:
        """Create a journal that writes to the open file ``fd``.

        ``temporary`` is the folder of a temporary journal, which is deleted when the journal is
        closed.
        """
        self.path = path
        self._file = ChecksummedLineWriter(path, fd, FsyncFlusher(fsync), chain)
        self._secrets = SecretRedactor()
        self._temporary = temporary
        self.num_questions = 0
        """Number of question numbers that have been assigned."""

    def assign_question_number(self, number: int) -> int:
        """Assign the next free number to a question of the map, and return it.

        A number other than -1 is kept as it is.
        """
        if number >= 0:
            return number
        self.num_questions += 1
        return self.num_questions - 1

    @property
    def disk_error(self) -> StoreError | None:
        """Return the error that forced the journal to use its reserved disk space, such as a full
        disk.

        Returns None if there was none. After such an error, the map should stop.
        """
        return self._file.trouble

    def append(self, line: MapJournalLine) -> int:
        """Append a line to the journal, and return its byte offset.

        Raises StoreError if the line cannot be written.
        """
        # A loop over the four would take as long as encoding the line.
        is_paid = (
            line.r is not None or line.e is not None or line.w is not None or line.u is not None
        )
        return self._file.append(encode_line(line, self._secrets), flushes=is_paid)

    def line_at(self, offset: int) -> MapJournalLine:
        """Read the line that begins at a byte offset of the journal."""
        size = 1 << 10
        while b"\n" not in (data := self._file.read(offset, size)):
            if len(data) < size:
                raise StoreError(f"{self.path}: no line begins at byte {offset}")
            size *= 8
        return _decode(data[: data.index(b"\n")])

    def delete(self) -> None:
        """Delete the journal of a map that was rejected before its first question.

        The journal must still be closed afterwards.
        """
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        try:
            self._file.close()
        finally:
            if self._temporary is not None:
                self._temporary.cleanup()


class TableMapStore:
    """The folder of a run store that contains the journals of maps."""

    def __init__(self, root: Path, fsync: Fsync = os.fsync) -> None:
        """Open the map journals of the run store in the folder ``root``.

        ``fsync`` is the function that flushes an open file to disk.
        """
        self.root = root
        self.folder = root / "maps"
        self._fsync = fsync

    def create(self, header: MapJournalHeader) -> TableMapJournal:
        """Create the journal of a new map, and open it for writing."""
        reserve_disk_space(self.root)
        path = make_folder(self.folder, self._fsync) / f"{header.id}.jsonl"
        try:
            fd = open_locked(path, os.O_CREAT | os.O_EXCL)
        except OSError as error:
            raise StoreError(f"cannot create {path}: {error.strerror}") from error
        journal = TableMapJournal(path, fd, ChecksumChain(), fsync=self._fsync)
        try:
            journal.append(MapJournalLine(map=header))
            sync_folder(self.folder, self._fsync)  # the file's name
        except BaseException:
            with contextlib.suppress(StoreError):
                journal.close()
            path.unlink(missing_ok=True)
            raise
        return journal

    def reopen(self, path: Path) -> TableMapJournal:
        """Reopen the journal of an earlier map to continue it.

        An incomplete last line is cut off. Raises RunInUse while another process writes the
        journal.
        """
        reserve_disk_space(self.root)
        try:
            fd = open_locked(path, 0)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}") from error
        try:
            cut_torn_line(fd)
            return TableMapJournal(path, fd, checksum_chain_at_end(fd, path), fsync=self._fsync)
        except BaseException:
            writer_process_file(path).unlink(missing_ok=True)
            os.close(fd)
            raise

    def paths(self) -> list[Path]:
        """Return the paths of all map journals in the store, newest first."""
        return sorted(self.folder.glob("*.jsonl"), reverse=True)

    def headers(self) -> Iterator[tuple[Path, MapJournalHeader]]:
        """Yield the path and the header of each map journal in the store, newest first.

        Unreadable journals are skipped.
        """
        for path in self.paths():
            if (header := read_header(path)) is not None:
                yield path, header

    def find_journal_path(self, name: str) -> Path | None:
        """Find the journal of a map by the map's id, and return its path.

        ``name`` is the map's id or its first characters. Returns None if no map matches, and raises
        UnknownRun if several do.
        """
        found = [path for path in self.paths() if path.stem.startswith(name)]
        exact = [path for path in found if path.stem == name]
        if len(found) > 1 and not exact:
            raise UnknownRun(f"{len(found)} map ids begin with '{name}': give more characters")
        chosen = exact or found
        return chosen[0] if chosen else None


def temporary_journal(header: MapJournalHeader) -> TableMapJournal:
    """Create a journal for a map that is not stored.

    The journal is deleted when it is closed.
    """
    folder = tempfile.TemporaryDirectory(prefix="ramify-map-")
    path = Path(folder.name) / f"{header.id}.jsonl"
    journal = TableMapJournal(
        path, open_locked(path, os.O_CREAT | os.O_EXCL), ChecksumChain(), folder
    )
    journal.append(MapJournalLine(map=header))
    return journal


def read_header(path: Path) -> MapJournalHeader | None:
    """Return the header of a map's journal, or None if the header is missing or unreadable."""
    for line in lines(path):
        try:
            return _decode(line).map
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
    return None


def read_lines(path: Path, offset: int = 0) -> Iterator[tuple[int, MapJournalLine]]:
    """Yield a map journal's lines with their byte offsets, starting at ``offset``.

    Verifies the checksum of each line, and raises StoreError at the first damaged one.
    """
    chain = ChecksumChain()
    for number, line in enumerate(lines(path, offset), start=1):
        # The first line after an offset continues a line that is not read here.
        problem = chain.damage_reason(line) if number > 1 or not offset else ""
        try:
            decoded = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problem = problem or str(error)
        if problem:
            raise StoreError(
                f"{path}, line {number} is damaged: {problem}; the map cannot be continued: move "
                "the file away to begin again"
            )
        chain.advance_past_line(line)
        yield offset, decoded
        offset += len(line) + 1


def read_map_line_at(path: Path, offset: int) -> MapJournalLine:
    """Read the line that begins at a byte offset of a map's journal."""
    with open(path, "rb") as file:
        file.seek(offset)
        return _decode(file.readline())


def new_map_id(key: str) -> str:
    """Return a new id for a map, such as ``20261126-211500-map-1a2b3c4d5e``.

    The last part is derived from ``key``.
    """
    return f"{time.strftime('%Y%m%d-%H%M%S')}-map-{key[:10]}"
