"""Checks a journal for damage, and repairs it: what is whole before the damage becomes the journal
again, so that the run can be resumed from there.

    RUN.jsonl ── check ──> JournalCheck: the damaged lines, an incomplete last line, lost contexts
              ── repair ─> RUN.jsonl, up to the damage;  RUN.damaged, as it was

Damage is a line whose checksum does not match, a line that cannot be decoded, and, in a journal
without checksums, one that does not fit the lines before it. Not here: how checksums are computed
(see ``line_checksums.py``).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from ramify.errors import StoreError
from ramify.store.journal import (
    MISFIT,
    decode_line,
    lines,
    open_locked,
    writer,
    writer_file,
)
from ramify.store.line_checksums import CHANGED, LineChain, has_checksum
from ramify.store.private_files import FILE_MODE, BlobStore, Fsync, sync_folder, write_all
from ramify.types.event import (
    AnyEvent,
    CallStarted,
    ReplyReceived,
    RunEnded,
    RunResumed,
    RunStarted,
    TrajectoryFold,
)
from ramify.types.trajectory import Stop

_MAX_NAMED = 20
"""Damaged lines that a check describes; the others are only counted."""
_MAX_COMPARED_BYTES = 1 << 28
"""Bytes that are summed to find the place of a line that is in another order."""
_REPLY = b'{"type":"Replied"'
_MESSAGE = b'"reply":{"message"'


class LineDamage(msgspec.Struct, frozen=True):
    """A damaged line of a journal."""

    number: int
    """From 1."""
    offset: int
    """First byte of the line in the file."""
    reason: str


class JournalCheck(msgspec.Struct):
    """What a check found in one journal."""

    id: str
    num_lines: int = 0
    """Complete lines."""
    num_checked: int = 0
    """Lines that have a checksum."""
    num_damaged: int = 0
    damage: list[LineDamage] = []
    """The first damaged lines."""
    torn_bytes: int = 0
    """Length of an incomplete last line, which a killed writer left; a resume cuts it off."""
    stop: Stop | None = None
    """How the run ended; None if it was killed, or is in progress."""
    is_written: bool = False
    """Whether a process is writing the journal now."""
    lost_contexts: list[str] = []
    """Sentences about stored contexts that are missing or damaged."""

    @property
    def is_whole(self) -> bool:
        return not self.num_damaged and not self.lost_contexts


class JournalRepair(msgspec.Struct, frozen=True):
    """What a repair has done."""

    id: str
    damage: LineDamage
    """The first damage."""
    num_kept: int
    """Lines before it."""
    num_lost_replies: int
    """Replies from there on that were sent for; a resume asks for them again."""
    backup: Path
    """The journal as it was."""


def check_journal(path: Path, blobs: BlobStore | None = None) -> JournalCheck:
    """Check the journal at ``path``, and with ``blobs`` the contexts that it refers to."""
    check = JournalCheck(path.stem, is_written=writer(path) is not None)
    chain, fold = LineChain(), TrajectoryFold()
    offset, crcs, digests = 0, [0], dict[str, None]()
    for number, line in enumerate(lines(path), start=1):
        reason = chain.problem(line)
        if not reason:
            try:
                event = decode_line(line, path, number)
                if not chain.is_checked and not has_checksum(line):
                    fold.apply(event)
                _note(check, event, digests)
            except StoreError as error:
                reason = str(error.__cause__ or error)
            except (KeyError, IndexError):
                reason = MISFIT
        elif reason == CHANGED:
            reason = _place_of(line, chain, crcs) or reason
        if reason:
            check.num_damaged += 1
            if len(check.damage) < _MAX_NAMED:
                check.damage.append(LineDamage(number, offset, reason))
        chain.advance(line)
        crcs.append(chain.crc)
        check.num_lines, check.num_checked = number, check.num_checked + has_checksum(line)
        offset += len(line) + 1
    check.torn_bytes = path.stat().st_size - offset if not check.is_written else 0
    check.lost_contexts = [] if blobs is None else [*_lost(digests, blobs)]
    return check


def _note(check: JournalCheck, event: AnyEvent, digests: dict[str, None]) -> None:
    match event:
        case RunStarted() | RunResumed():
            check.stop = None
        case RunEnded(stop=stop):
            check.stop = stop
        case _:
            pass
    if isinstance(event, RunStarted | CallStarted) and event.context is not None:
        digests[event.context.digest] = None


def _place_of(line: bytes, chain: LineChain, crcs: list[int]) -> str:
    """Say after which line of the journal ``line`` belongs, if it is whole but in another place."""
    if len(line) * len(crcs) > _MAX_COMPARED_BYTES:
        return ""
    after = next((at for at, crc in enumerate(crcs) if chain.fits(line, crc)), None)
    if after is None:
        return ""
    where = f"line {after}" if after else "the beginning"
    return f"it belongs after {where}: lines are missing, repeated or in another order"


def _lost(digests: dict[str, None], blobs: BlobStore) -> list[str]:
    lost = []
    for digest in digests:
        try:
            with blobs.map(digest) as view:
                is_whole = hashlib.sha256(view).hexdigest() == digest
            if not is_whole:
                lost.append(f"the context {digest[:12]} is damaged")
        except StoreError:
            lost.append(f"the context {digest[:12]} is missing")
    return lost


def repair_journal(path: Path, fsync: Fsync = os.fsync) -> JournalRepair:
    """Cut the journal at ``path`` before its first damage, and keep the whole file beside it."""
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
            raise StoreError(
                f"{path}, line 1 is damaged, which says what the run is about: nothing can be "
                f"kept; delete it with `ramify runs rm {path.stem}`"
            )
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
        writer_file(path).unlink(missing_ok=True)
        os.close(fd)
    return JournalRepair(path.stem, damage, damage.number - 1, num_lost, backup)


def backups(path: Path) -> list[Path]:
    """Journals from before the repairs of the journal at ``path``."""
    return sorted(
        each
        for each in path.parent.glob(f"{path.stem}.damaged*")
        if each.name.removeprefix(f"{path.stem}.damaged").removeprefix("-").isdigit()
        or each.name == f"{path.stem}.damaged"
    )


def _free_name(path: Path) -> Path:
    num = len(backups(path))
    return path.with_name(f"{path.stem}.damaged" + (f"-{num + 1}" if num else ""))


def _count_replies(path: Path, damage: LineDamage) -> int:
    """Number of replies that are recorded from the damage on, and not before, and that no cache
    gave. A reply that cannot be decoded counts, too."""
    kept, lost, num_unknown = set[tuple[str, int]](), set[tuple[str, int]](), 0
    for number, line in enumerate(lines(path), start=1):
        is_changed = number == damage.number and damage.reason == CHANGED
        if not line.startswith(_REPLY) and not (is_changed and _MESSAGE in line):
            continue
        try:
            event = decode_line(line, path, number)
        except StoreError:
            is_changed = True
        if is_changed:
            num_unknown += 1
        elif isinstance(event, ReplyReceived) and not event.cached:
            (kept if number < damage.number else lost).add((event.call, event.turn))
    return len(lost - kept) + num_unknown


def _copy(fd: int, to: Path, num_bytes: int, fsync: Fsync) -> None:
    """Copy the beginning of the open file ``fd`` to a new file, and flush that to disk."""
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
