"""Sample task items less often while they are too easy or too hard to give a training signal.

    groups.jsonl of this run ──> items, and parts of a mixture, whose attempts all did equally well
                             ──> each is sampled in a fraction ``share`` of its turns, else skipped

An item is *settled* if its latest group had no signal: all attempts solved it, or none did. A task
of a mixture is settled if nearly all of its latest groups had no signal. A settled item is still
sampled in some of its turns, so that it returns to normal once it gives a signal again. A hash of
the run's seed and the item's number chooses these turns. The only state is the run's own
``groups.jsonl``. A resumed run has that file up to its checkpoint, so it decides the same way. The
pool is off by default.

Items that an earlier run found to be settled are handled by ``pool`` in ``tasks/mixture.py``, and
groups without signal that are replaced within a step by the option ``max_items``.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Iterable
from pathlib import Path

from ramify.tasks.mixture import item_part_name
from ramify.train.metrics import GROUPS, RolloutGroupRecord
from ramify.types.trajectory import RolloutGroupOutcome

_LATEST = 20
"""Number of recent groups that decide whether a part of the mixture is settled, i.e. gives no
training signal.
"""
_NEARLY_ALL = 0.9
_DECIDED = (RolloutGroupOutcome.LEARNT, RolloutGroupOutcome.NO_SIGNAL)


class NoSignalItemFilter:
    """A record of the task items that recently gave no training signal.

    It decides when such items are skipped.
    """

    def __init__(
        self, share: float, folder: Path, *, seed: int = 0, has_parts: bool = False
    ) -> None:
        """Create an empty record of the task items without training signal, for the run in
        ``folder``.

        An item without training signal is still sampled in the fraction ``share`` of its turns, and
        skipped in the others. ``has_parts`` is True if the items belong to a mixture of tasks.
        """
        self._share = share
        self._folder = folder
        self._seed = seed
        self._has_parts = has_parts
        self._items: dict[str, RolloutGroupOutcome] = {}
        """Outcome of the latest group of each item, by item id."""
        self._parts: dict[str, deque[RolloutGroupOutcome]] = {}
        """Outcomes of the latest groups of each task in the mixture, by name."""

    def load(self) -> None:
        """Read the outcomes of all earlier rollout groups from the run's folder."""
        self._items = {}
        self._parts = defaultdict(lambda: deque(maxlen=_LATEST))
        self.record_outcomes(GROUPS.read(self._folder))

    def record_outcomes(self, records: Iterable[RolloutGroupRecord]) -> None:
        """Record the outcomes of rollout groups, in the order in which they occurred."""
        for record in records:
            if record.outcome in _DECIDED:
                self._items[record.item] = record.outcome
                if self._has_parts:
                    self._parts[item_part_name(record.item)].append(record.outcome)

    def should_skip(self, number: int, item: str) -> bool:
        """Return True if the task item should be skipped this time it comes up."""
        if not self.has_no_signal(item):
            return False
        digest = hashlib.blake2b(f"{self._seed}/settled/{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >= self._share * 2**64

    def has_no_signal(self, item: str) -> bool:
        """Return True if the task item with this id is settled: it currently gives no training
        signal.

        Either its latest group had none, or nearly all of the latest groups of its task had none.
        """
        if self._items.get(item) is RolloutGroupOutcome.NO_SIGNAL:
            return True
        latest = self._parts.get(item_part_name(item), ()) if self._has_parts else ()
        if len(latest) < _LATEST:
            return False
        return latest.count(RolloutGroupOutcome.NO_SIGNAL) >= _NEARLY_ALL * len(latest)
