"""The journal of a map, in which each request and reply is recorded: one file,
``ROOT/maps/ID.jsonl``, with a few short lines for each row.

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
from ramify.secrets import SecretRedactor
from ramify.store.durable_files import (
    Fsync,
    FsyncFlusher,
    keep_reserve,
    make_folder,
    sync_folder,
)
from ramify.store.journal import (
    LineWriter,
    chain_at_end,
    cut_torn_line,
    encode_line,
    lines,
    open_locked,
    writer_file,
)
from ramify.store.line_checksums import ChecksumChain
from ramify.types.message import Finish, Usage

_VERSION = 1


RAY_MAPS = "ray_maps"
"""Folder of a store that has what the maps on a Ray cluster have spent."""


class RayMapMetadata(msgspec.Struct, frozen=True):
    """The part of a map's journal that is only used on a Ray cluster, where the rows are in output
    files: the columns, and the file that records what was spent."""

    record: str
    """Name of the file in ``ROOT/ray_maps`` that says what is spent (see shared_budget.py)."""
    shown: tuple[str, ...]
    """Columns that the model reads."""
    answers: tuple[str, ...]
    """Columns of the answers."""
    error: str
    """Column of the errors."""


class MapHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first line of a map's journal, which says what is asked about every row."""

    id: str
    key: str
    """Digest of the question, its settings and the output; the same command has the same."""
    question: str
    """Question or template."""
    started_at: float
    """Unix time."""
    model: str
    out: str = ""
    """Absolute path of the output, or its URL; empty for a table in memory."""
    rows: str = ""
    """Name of the table."""
    answer_schema: dict[str, Any] | None = None
    config: dict[str, Any] = {}
    """Settings of the RLM that answers the rows."""
    before: tuple[str, ...] = ()
    """System message of a direct call, if it has one."""
    asked: str = ""
    """What a direct prompt says after the row and the question: the form of the answer."""
    parts: RayMapMetadata | None = None
    """Where the rows are, if they are not in this journal."""
    version: int = _VERSION


class MapContinued(msgspec.Struct, frozen=True, array_like=True):
    """A journal line recording that a map was begun or continued, and with which limits."""

    at: float
    """Unix time."""
    total: int | None
    """Number of rows, if it is known."""
    max_calls: int
    max_tokens: int
    max_cost: float | None
    """Dollars; None if no model has a price."""
    is_sample: bool = False
    """True if only a sample of the rows is asked."""


class FirstRequestLine(msgspec.Struct, frozen=True, array_like=True):
    """A journal line with the first request for a question, or the first one of a new attempt after
    the row had failed."""

    number: int
    """Number of the question, from 0."""
    row: int
    """The first row that asks it."""
    at_s: float
    """Seconds since the map was begun or continued."""
    digest: str
    question: str | None
    """None if every row has the same."""
    context: Any
    """What the model reads of the row: a text, or texts by column; None for a template."""
    max_input_tokens: int
    max_output_tokens: int
    cost: float | None
    """Dollars that are reserved."""


class RetryRequestLine(msgspec.Struct, frozen=True, array_like=True):
    """A journal line with a further request for the same question: a repair of a reply that does
    not fit the answer type, or a repetition of a failed attempt."""

    number: int
    turn: int
    text: str | None
    """Message of the repair; None if an attempt is repeated."""
    max_input_tokens: int
    max_output_tokens: int
    cost: float | None


class DirectReplyLine(msgspec.Struct, frozen=True, array_like=True):
    """A journal line with the model's reply to a direct call, which is a request without a
    session."""

    number: int
    turn: int
    text: str
    finish: Finish
    counts: tuple[int, ...]
    """Tokens of input and output, then of cache, reasoning and cache writes, and unknown calls;
    without zeros at the end."""
    cost: float | None
    seconds: float
    reasoning: str | None


class FailedAttempt(msgspec.Struct, frozen=True, array_like=True):
    """A journal line recording that a direct request failed, and what it may have cost."""

    number: int
    turn: int
    error: str
    counts: tuple[int, ...]
    """What may have been billed; empty if nothing was."""
    cost: float | None


class RowRunStartedLine(msgspec.Struct, frozen=True, array_like=True):
    """A journal line recording that a run, with a session, has begun to answer a row."""

    number: int
    row: int
    at_s: float
    digest: str
    run: str
    """Id of the run."""


class QuestionEnded(msgspec.Struct, frozen=True, array_like=True):
    """A journal line recording that a question has ended although no line has a reply to it: a run
    answered it, or it failed."""

    number: int
    stop: str
    answer: Any
    error: str | None
    counts: tuple[int, ...]
    """Usage of the run; empty for a direct call, whose lines have it."""
    calls: int
    """Requests of the run."""
    cost: float | None
    seconds: float


class EqualRow(msgspec.Struct, frozen=True, array_like=True):
    """A journal line recording that a row asks the same question as an earlier row."""

    number: int
    row: int


class BatchSent(msgspec.Struct, frozen=True, array_like=True):
    """A journal line recording that a batch is about to be uploaded."""

    part: int
    """Number of the batch in this map, from 0."""
    key: str
    """By which the provider's list shows whose batch it is."""
    num: int
    """Requests."""
    at: float
    """Unix time."""
    provider: str


class BatchAccepted(msgspec.Struct, frozen=True, array_like=True):
    """A journal line recording that the provider has received a batch, and the batch's id there."""

    part: int
    id: str
    """Id at the provider."""


class BatchEnded(msgspec.Struct, frozen=True, array_like=True):
    """A journal line recording that a batch is finished: the journal has a reply, an error or an
    end for each of its requests."""

    part: int
    status: str
    """The provider's word, or why the batch was not uploaded."""


class MapLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of a map's journal. One field has the content, and ``crc`` its checksum."""

    map: MapHeader | None = None
    c: MapContinued | None = None
    q: FirstRequestLine | None = None
    t: RetryRequestLine | None = None
    r: DirectReplyLine | None = None
    x: FailedAttempt | None = None
    s: RowRunStartedLine | None = None
    e: QuestionEnded | None = None
    d: EqualRow | None = None
    b: FirstRequestLine | None = None
    w: BatchSent | None = None
    u: BatchAccepted | None = None
    v: BatchEnded | None = None
    crc: str = ""

    @property
    def first_request(self) -> FirstRequestLine | None:
        """The first request for a question, if this line has one, whether it is sent at once or in
        a batch."""
        return self.q or self.b


def usage_counts(usage: Usage) -> tuple[int, ...]:
    """Return the usage of one request in the short form of the journal: the token counts, then the
    number of calls with unknown usage, without zeros at the end."""
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


def usage_of(counts: tuple[int, ...], calls: int = 1) -> Usage:
    """Convert the counts in a journal line, as ``usage_counts`` wrote them, back to a usage."""
    if not counts:
        return Usage()
    given, output, cached, reasoning, stored, unknown = (*counts, *(0,) * (6 - len(counts)))
    return Usage(given, output, cached, reasoning, calls, unknown, stored)


def digest_to_base64(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def digest_to_int(text: str) -> int:
    """Convert a digest from text to a number, which takes less memory."""
    return int.from_bytes(base64.urlsafe_b64decode(text + "=="), "big")


_decode = msgspec.json.Decoder(MapLine).decode


class MapJournal:
    """A map's journal that is open for writing. Only one process can open it at a time."""

    def __init__(
        self,
        path: Path,
        fd: int,
        chain: ChecksumChain,
        temporary: Any = None,
        fsync: Fsync = os.fsync,
    ) -> None:
        """Create a journal that writes to the open file ``fd``. ``temporary`` is the folder of a
        temporary journal, which is deleted when the journal is closed."""
        self.path = path
        self._file = LineWriter(path, fd, FsyncFlusher(fsync), chain)
        self._secrets = SecretRedactor()
        self._temporary = temporary
        self.num_questions = 0
        """Numbers that questions have."""

    def assign_question_number(self, number: int) -> int:
        """Return the number of a question: the given number, or the next free one if it is -1."""
        if number >= 0:
            return number
        self.num_questions += 1
        return self.num_questions - 1

    @property
    def trouble(self) -> StoreError | None:
        """The error that made the journal use its reserved disk space, such as a full disk, or
        None. After such an error, the map should stop."""
        return self._file.trouble

    def append(self, line: MapLine) -> int:
        """Write a line, and return the offset at which it begins. Raises StoreError if it cannot be
        written."""
        # A loop over the four would take as long as encoding the line.
        is_paid = (
            line.r is not None or line.e is not None or line.w is not None or line.u is not None
        )
        return self._file.append(encode_line(line, self._secrets), flushes=is_paid)

    def line_at(self, offset: int) -> MapLine:
        """Read the line that begins at a byte offset of the journal."""
        size = 1 << 10
        while b"\n" not in (data := self._file.read(offset, size)):
            if len(data) < size:
                raise StoreError(f"{self.path}: no line begins at byte {offset}")
            size *= 8
        return _decode(data[: data.index(b"\n")])

    def discard(self) -> None:
        """Remove the file of a map that was refused before it asked anything. The journal must
        still be closed."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        try:
            self._file.close()
        finally:
            if self._temporary is not None:
                self._temporary.cleanup()


class MapStore:
    """The folder of a run store in which the journals of maps are."""

    def __init__(self, root: Path, fsync: Fsync = os.fsync) -> None:
        """Use the store in the folder ``root``. ``fsync`` flushes an open file to its disk."""
        self.root = root
        self.folder = root / "maps"
        self._fsync = fsync

    def create(self, header: MapHeader) -> MapJournal:
        """Create the journal of a new map, and open it for writing."""
        keep_reserve(self.root)
        path = make_folder(self.folder, self._fsync) / f"{header.id}.jsonl"
        try:
            fd = open_locked(path, os.O_CREAT | os.O_EXCL)
        except OSError as error:
            raise StoreError(f"cannot create {path}: {error.strerror}") from error
        journal = MapJournal(path, fd, ChecksumChain(), fsync=self._fsync)
        try:
            journal.append(MapLine(map=header))
            sync_folder(self.folder, self._fsync)  # the file's name
        except BaseException:
            with contextlib.suppress(StoreError):
                journal.close()
            path.unlink(missing_ok=True)
            raise
        return journal

    def reopen(self, path: Path) -> MapJournal:
        """Open the journal of an earlier map to continue the map. An incomplete last line is cut
        off. Raises RunInUse while another process writes the journal."""
        keep_reserve(self.root)
        try:
            fd = open_locked(path, 0)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}") from error
        try:
            cut_torn_line(fd)
            return MapJournal(path, fd, chain_at_end(fd, path), fsync=self._fsync)
        except BaseException:
            writer_file(path).unlink(missing_ok=True)
            os.close(fd)
            raise

    def paths(self) -> list[Path]:
        """Return the paths of all map journals in the store, newest first."""
        return sorted(self.folder.glob("*.jsonl"), reverse=True)

    def headers(self) -> Iterator[tuple[Path, MapHeader]]:
        """Yield the path of each journal and the header in it, the newest first. Journals that
        cannot be read are omitted."""
        for path in self.paths():
            if (header := read_header(path)) is not None:
                yield path, header

    def path(self, name: str) -> Path | None:
        """Return the path of the journal of one map. ``name`` is the map's id or the beginning of
        the id. Returns None if no map matches, and raises UnknownRun if several do."""
        found = [path for path in self.paths() if path.stem.startswith(name)]
        exact = [path for path in found if path.stem == name]
        if len(found) > 1 and not exact:
            raise UnknownRun(f"'{name}' begins the ids of {len(found)} maps: give more of it")
        chosen = exact or found
        return chosen[0] if chosen else None


def temporary_journal(header: MapHeader) -> MapJournal:
    """Return a journal that is deleted when it is closed, for a map that is not stored."""
    folder = tempfile.TemporaryDirectory(prefix="ramify-map-")
    path = Path(folder.name) / f"{header.id}.jsonl"
    journal = MapJournal(path, open_locked(path, os.O_CREAT | os.O_EXCL), ChecksumChain(), folder)
    journal.append(MapLine(map=header))
    return journal


def read_header(path: Path) -> MapHeader | None:
    """Return the header of a map's journal, or None if it has no header yet, or none that can be
    read."""
    for line in lines(path):
        try:
            return _decode(line).map
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
    return None


def read_lines(path: Path, offset: int = 0) -> Iterator[tuple[int, MapLine]]:
    """Yield the lines of a map's journal with their offsets, from the line that begins at
    ``offset``. Each line is checked. Raises StoreError at the first damaged line."""
    chain = ChecksumChain()
    for number, line in enumerate(lines(path, offset), start=1):
        # The first line after an offset continues a line that is not read here.
        problem = chain.problem(line) if number > 1 or not offset else ""
        try:
            decoded = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problem = problem or str(error)
        if problem:
            raise StoreError(
                f"{path}, line {number} is damaged: {problem}; the map cannot be continued: move "
                "the file away to begin again"
            )
        chain.advance(line)
        yield offset, decoded
        offset += len(line) + 1


def read_map_line_at(path: Path, offset: int) -> MapLine:
    """Read the line that begins at a byte offset of a map's journal."""
    with open(path, "rb") as file:
        file.seek(offset)
        return _decode(file.readline())


def new_map_id(key: str) -> str:
    """Return a new id for a map, such as ``20261126-211500-map-1a2b3c4d5e``. Its last part is
    derived from ``key``."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-map-{key[:10]}"
