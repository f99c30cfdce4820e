"""The figures of ``reality.py`` about journals that are damaged: flipped bits and bytes, missing,
repeated and swapped lines, and cuts, at random places of one run with more than 100 events.

A damage is found if ``Store.check`` names it. A cut at the very end looks like a killed run: it counts
as found if the run is shown as not ended. Some damaged runs are also repaired and resumed.

    python benchmarks/reality_journals.py [--quick]     print a table
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from figures import Figure, show
from reality_work import ANSWER, CountingModel, program

from ramify import Store
from ramify.errors import StoreError
from ramify.store.journal import FileStoredRun, read_events
from ramify.types.event import AnyEvent, ReplyReceived

NUM_DAMAGED = 10_000
Damage = Callable[[random.Random, bytes], bytes]


def _flip_bit(draw: random.Random, whole: bytes) -> bytes:
    data = bytearray(whole)
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def _change_byte(draw: random.Random, whole: bytes) -> bytes:
    at = draw.randrange(len(whole))
    return whole[:at] + bytes([(whole[at] + draw.randrange(1, 256)) % 256]) + whole[at + 1 :]


def _change_block(draw: random.Random, whole: bytes) -> bytes:
    """Replace up to a sector by zeros."""
    at, size = draw.randrange(len(whole) - 1), draw.choice((2, 16, 512))
    return whole[:at] + bytes(min(size, len(whole) - at)) + whole[at + size :]


def _cut_bytes(draw: random.Random, whole: bytes) -> bytes:
    at = draw.randrange(len(whole) - 1)
    return whole[:at] + whole[draw.randrange(at + 1, min(at + 2_000, len(whole))) :]


def _cut_end(draw: random.Random, whole: bytes) -> bytes:
    return whole[: draw.randrange(1, len(whole))]


def _lose_line(draw: random.Random, whole: bytes) -> bytes:
    lines = whole.splitlines(keepends=True)
    del lines[draw.randrange(len(lines))]
    return b"".join(lines)


def _repeat_line(draw: random.Random, whole: bytes) -> bytes:
    lines = whole.splitlines(keepends=True)
    lines.insert(draw.randrange(1, len(lines)), draw.choice(lines))
    return b"".join(lines)


def _swap_lines(draw: random.Random, whole: bytes) -> bytes:
    lines = whole.splitlines(keepends=True)
    one, other = draw.sample(range(len(lines)), 2)
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


DAMAGES: dict[str, Damage] = {
    "a flipped bit": _flip_bit,
    "a changed byte": _change_byte,
    "a block of zeros": _change_block,
    "bytes cut out": _cut_bytes,
    "the end cut off": _cut_end,
    "a missing line": _lose_line,
    "a repeated line": _repeat_line,
    "two lines swapped": _swap_lines,
}


class DamagedRun:
    """One stored run that is damaged again and again."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        with program(CountingModel(), self.store) as rlm:
            assert rlm.completion("text", "?").answer == ANSWER
        self.path = self.store.path("last")
        self.whole = self.path.read_bytes()
        self.events = list(read_events(FileStoredRun(self.path)))

    def is_found(self, data: bytes) -> bool:
        self.path.write_bytes(data)
        found = self.store.check(self.path)
        return not found.is_whole or found.stop is None

    def is_read_wrong(self, data: bytes) -> bool:
        """True if an event is read that is not the one that was written there."""
        self.path.write_bytes(data)
        read: list[AnyEvent] = []
        with contextlib.suppress(StoreError):
            read.extend(read_events(FileStoredRun(self.path)))
        return read != self.events[: len(read)]

    def repaired(self, data: bytes) -> tuple[bool, int, int] | None:
        """(right answer, replies paid twice, difference between the replies that were asked again
        and those that the repair announced) of a run that is repaired and resumed; None if nothing
        could be kept."""
        self.path.write_bytes(data)
        try:
            num_lost = self.store.repair(self.path).num_lost_replies
        except StoreError:
            return None
        kept = sum(
            isinstance(event, ReplyReceived) for event in read_events(FileStoredRun(self.path))
        )
        model = CountingModel()
        with program(model, self.store) as rlm:
            is_right = rlm.resume(self.path.stem).answer == ANSWER
        for backup in self.path.parent.glob("*.damaged*"):
            backup.unlink()
        asked = model.replies.total()
        in_all = sum(isinstance(event, ReplyReceived) for event in self.events)
        return is_right, max(kept + asked - in_all, 0), asked - num_lost


def measure(quick: bool) -> list[Figure]:
    """Figures of journals that are damaged, checked, repaired and resumed."""
    draw, num_repairs = random.Random(33), 40 if quick else 400
    kinds = list(DAMAGES.items())
    with tempfile.TemporaryDirectory() as folder:
        run = DamagedRun(Path(folder))
        copies = []
        while len(copies) < NUM_DAMAGED:
            name, damage = kinds[len(copies) % len(kinds)]
            data = damage(draw, run.whole)
            if data != run.whole:
                copies.append((name, data))
        began = time.process_time()
        unnoticed = Counter(name for name, data in copies if not run.is_found(data))
        check_s = (time.process_time() - began) / len(copies)
        misread = Counter(name for name, data in copies if run.is_read_wrong(data))
        for name, num in (*unnoticed.items(), *misread.items()):
            print("not found or read wrongly:", num, name)
        outcomes, refused = [], 0
        for name, data in draw.sample(copies, num_repairs):
            if name == "the end cut off":
                continue  # nothing is damaged: it is resumed like a killed run
            outcome = run.repaired(data)
            refused += outcome is None
            if outcome is not None:
                outcomes.append((name, *outcome))
        flips = [off for name, _, _, off in outcomes if name in ("a flipped bit", "a changed byte")]
    return [
        Figure("events of the damaged run", len(run.events), "events", {}, least=101),
        Figure(f"{len(copies):,} damaged journals: not found", unnoticed.total(), "runs", {}, 0),
        Figure(f"{len(copies):,} damaged journals: read wrongly", misread.total(), "runs", {}, 0),
        Figure("CPU time of a check per event", check_s / len(run.events) * 1e6, "µs", {}),
        Figure(
            f"{len(outcomes)} repaired and resumed runs: another answer",
            sum(not is_right for _, is_right, _, _ in outcomes),
            "runs",
            {},
            floor=0,
        ),
        Figure(
            f"{len(outcomes)} repaired and resumed runs: replies paid for twice",
            sum(twice for _, _, twice, _ in outcomes),
            "replies",
            {},
            floor=0,
        ),
        Figure(
            f"{len(flips)} repaired flips: number of replies to ask again that was not as announced",
            sum(off != 0 for off in flips),
            "runs",
            {},
            floor=0,
        ),
        Figure("damaged first lines, which cannot be repaired", refused, "runs", {}),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Damaged journals.")
    parser.add_argument("--quick", action="store_true", help="fewer repairs")
    show(measure(parser.parse_args().quick))
