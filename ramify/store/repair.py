"""Checks the journal of a run for damage.

A repair cuts it before the first damaged line, so that the run can be resumed from there.

    RUN.jsonl ── check ──> JournalCheckResult: damaged lines, an incomplete last line, lost contexts
              ── repair ─> RUN.jsonl, up to the damage;  RUN.damaged, a copy of the original

A line is damaged if its checksum does not match or it cannot be decoded. In a journal without
checksums, a line is also damaged if it contradicts the lines before it. The checksums themselves
are computed in ``line_checksums.py``.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from ramify.errors import StoreError
from ramify.store.durable_files import FILE_MODE, BlobStore, Fsync, sync_folder, write_all
from ramify.store.journal import (
    MISFIT,
    FileStoredRun,
    damaged_line_error,
    decode_line,
    find_writer_process,
    lines,
    open_locked,
    writer_process_file,
)
from ramify.store.line_checksums import CHANGED, ChecksumChain, has_checksum
from ramify.types.event import (
    AnyEvent,
    CallStarted,
    ReplyReceived,
    RunEnded,
    RunResumed,
    RunStarted,
    TrajectoryBuilder,
)
from ramify.types.trajectory import Stop

_MAX_NAMED = 20
"""Maximum number of damaged lines that a check describes. The rest are only counted."""
_MAX_COMPARED_BYTES = 1 << 28
"""Maximum number of bytes to process when searching for the original position of a
misplaced line.
"""
_REPLY = b'{"type":"Replied"'
_MESSAGE = b'"reply":{"message"'


class JournalLineDamage(msgspec.Struct, frozen=True):
    """A damaged line of a journal."""

    number: int
    """Line number, starting at 1."""
    offset: int
    """Byte offset of the line in the file."""
    reason: str


class JournalCheckResult(msgspec.Struct):
    """The result of checking the journal of one run for damage."""

    id: str
    num_lines: int = 0
    """Number of complete lines."""
    num_checked: int = 0
    """Number of lines that have a checksum."""
    num_damaged: int = 0
    damage: list[JournalLineDamage] = []
    """The first damaged lines, in the order of the file."""
    torn_bytes: int = 0
    """Length in bytes of an incomplete last line, left by a killed writer. Resuming the run cuts
    the line off."""
    stop: Stop | None = None
    """Reason why the run ended; None if it was killed or is in progress."""
    is_written: bool = False
    """True if a process is writing the journal now."""
    lost_contexts: list[str] = []
    """One sentence for each stored context that is missing or damaged."""

    @property
    def is_whole(self) -> bool:
        return not self.num_damaged and not self.lost_contexts


class JournalRepairResult(msgspec.Struct, frozen=True):
    """The result of repairing a journal: how much was kept and how much was lost."""

    id: str
    damage: JournalLineDamage
    """The first damaged line."""
    num_kept: int
    """Number of lines before the damage, which the repaired journal keeps."""
    num_lost_replies: int
    """Number of model replies that were cut off. Resuming the run requests them again."""
    backup: Path
    """Path of the copy of the damaged journal."""


def check_journal(path: Path, blobs: BlobStore | None = None) -> JournalCheckResult:
    """Check a run's journal for damage, and return the result.

    If ``blobs`` is given, also check the stored contexts that it refers to.
    """
    check = JournalCheckResult(path.stem, is_written=find_writer_process(path) is not None)
    chain, fold = ChecksumChain(), TrajectoryBuilder()
    offset, crcs, digests = 0, [0], dict[str, None]()
    for number, line in enumerate(lines(path), start=1):
        reason = chain.damage_reason(line)
        if not reason:
            try:
                event = decode_line(line, FileStoredRun(path), number)
                # Without checksums, lost lines show only by later lines that do not fit.
                if not chain.is_checked and not has_checksum(line):
                    fold.apply(event)
                _note(check, event, digests)
            except StoreError as error:
                reason = str(error.__cause__ or error)
            except (KeyError, IndexError):
                reason = MISFIT
        elif reason == CHANGED:  # or it is intact, in the wrong place
            reason = _place_of(line, chain, crcs) or reason
        if reason:
            check.num_damaged += 1
            if len(check.damage) < _MAX_NAMED:
                check.damage.append(JournalLineDamage(number, offset, reason))
        chain.advance_past_line(line)
        crcs.append(chain.crc)
        check.num_lines, check.num_checked = number, check.num_checked + has_checksum(line)
        offset += len(line) + 1
    check.torn_bytes = path.stat().st_size - offset if not check.is_written else 0
    check.lost_contexts = [] if blobs is None else [*_find_lost_blobs(digests, blobs)]
    return check


def _note(check: JournalCheckResult, event: AnyEvent, digests: dict[str, None]) -> None:
    match event:
        case RunStarted() | RunResumed():
            check.stop = None
        case RunEnded(stop=stop):
            check.stop = stop
        case _:
            pass
    if isinstance(event, RunStarted | CallStarted) and event.context is not None:
        digests[event.context.digest] = None


def _place_of(line: bytes, chain: ChecksumChain, crcs: list[int]) -> str:
    """Return a phrase for an error message that says after which line a misplaced line belongs.

    The phrase is empty if the line fits nowhere.
    """
    if len(line) * len(crcs) > _MAX_COMPARED_BYTES:
        return ""
    after = next((at for at, crc in enumerate(crcs) if chain.does_line_follow(line, crc)), None)
    if after is None:
        return ""
    where = f"line {after}" if after else "the beginning"
    return f"it belongs after {where}: lines are missing, repeated or in another order"


def _find_lost_blobs(digests: dict[str, None], blobs: BlobStore) -> list[str]:
    lost = []
    for digest in digests:
        try:
            with blobs.memory_map(digest) as view:
                is_whole = hashlib.sha256(view).hexdigest() == digest
            if not is_whole:
                lost.append(f"the context {digest[:12]} is damaged")
        except StoreError:
            lost.append(f"the context {digest[:12]} is missing")
    return lost


def repair_journal(path: Path, fsync: Fsync = os.fsync) -> JournalRepairResult:
    """Cut a journal before its first damaged line.

    A copy of the original file is kept beside it.
    """
    try:
        fd = open_locked(path, 0)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from error
    try:
        check = check_journal(path)
        if not check.num_damaged:
            raise StoreError(f"{path} is whole: there is nothing to repair")
        damage = check.damage[0]
        if damage.number == 1:
            raise damaged_line_error(FileStoredRun(path), 1, damage.reason)
        num_lost = _count_replies(path, damage)
        backup = _free_name(path)
        temporary = path.with_name(f".{path.stem}.{os.getpid()}.repaired")
        try:
            _copy(fd, temporary, damage.offset, fsync)
            os.rename(path, backup)
            os.rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent, fsync)
    finally:
        writer_process_file(path).unlink(missing_ok=True)
        os.close(fd)
    return JournalRepairResult(path.stem, damage, damage.number - 1, num_lost, backup)


def backups(path: Path) -> list[Path]:
    """Return the paths of the copies of this journal that earlier repairs made."""
    return sorted(
        each
        for each in path.parent.glob(f"{path.stem}.damaged*")
        if each.name.removeprefix(f"{path.stem}.damaged").removeprefix("-").isdigit()
        or each.name == f"{path.stem}.damaged"
    )


def _free_name(path: Path) -> Path:
    num = len(backups(path))
    return path.with_name(f"{path.stem}.damaged" + (f"-{num + 1}" if num else ""))


def _count_replies(path: Path, damage: JournalLineDamage) -> int:
    """Count the paid model replies that would be lost if the journal were repaired.

    Replies after the damage are counted, even if they cannot be decoded. Replies before it, and
    replies from a cache, are not.
    """
    kept, lost, num_unknown = set[tuple[str, int]](), set[tuple[str, int]](), 0
    for number, line in enumerate(lines(path), start=1):
        is_changed = number == damage.number and damage.reason == CHANGED
        if not line.startswith(_REPLY) and not (is_changed and _MESSAGE in line):
            continue
        try:
            event = decode_line(line, FileStoredRun(path), number)
        except StoreError:
            is_changed = True
        if is_changed:
            num_unknown += 1
        elif isinstance(event, ReplyReceived) and not event.cached:
            (kept if number < damage.number else lost).add((event.call, event.turn))
    return len(lost - kept) + num_unknown


def _copy(fd: int, to: Path, num_bytes: int, fsync: Fsync) -> None:
    """Copy the first bytes of an open journal to a new file, for use as a backup."""
    copy = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        offset = 0
        while offset < num_bytes:
            block = os.pread(fd, min(1 << 20, num_bytes - offset), offset)
            write_all(copy, block, to)
            offset += len(block)
        fsync(copy)
    finally:
        os.close(copy)
