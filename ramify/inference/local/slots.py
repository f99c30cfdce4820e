"""Which generation lives in which slot, and what each slot still remembers of earlier ones.

A slot is a row of the cache. What runs stands close together at the front, so that a step reads one
block of the cache; behind them stand slots that wait with what was computed in them:

    slot     0     1     2     3     4     5     6
             run   run   run   —     idle  idle  empty       — one hole is tolerated: its call may be back soon

A new request takes over the idle slot whose tokens all begin it (the next turn of a call whose
children have answered), or copies the longest beginning that any slot shares with it (a sibling
under the same prompt), into an empty slot or the idle one that was not used for longest. Calls that
wait for children count as used whenever a child asks.

It decides; ``SlotMove`` says what the cache must do. Legend: S slots, C tokens that a slot can
hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ramify.inference.local.step import EngineStep

if TYPE_CHECKING:
    from ramify.inference.local.generation import Generation

_WORTH_WAITING = 32
"""Tokens: a prompt that another one is just computing this much of waits for it and copies."""
_HOLES = 0.25
"""Share of the running slots that may stand empty between them."""


class SlotMove(msgspec.Struct, frozen=True):
    """Tokens [0, length) of slot ``source`` also go to ``target``; or the two change places."""

    kind: Literal["copy", "swap"]
    source: int
    target: int
    length: int
    """For a swap, of the longer one."""


class SlotTable:
    """The bookkeeping of all slots."""

    def __init__(self, num_slots: int, capacity: int, *, reuse: bool = True) -> None:
        """Without ``reuse`` nothing that was computed for one request serves another."""
        self.num_slots, self.capacity = num_slots, capacity
        self.owner: list[Generation | None] = [None] * num_slots
        self.length_S: NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        """Tokens whose keys and values are in the slot."""
        self._tokens_SC: NDArray[np.int32] = np.full((num_slots, capacity), -1, dtype=np.int32)
        self._used_S: NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        self._affinity: list[str] = [""] * num_slots
        self._clock = 0
        self._reuse = reuse

    def running(self) -> list[int]:
        """Slots of what runs, ascending."""
        return [slot for slot, owner in enumerate(self.owner) if owner is not None]

    def admit(self, generation: Generation) -> tuple[int, list[SlotMove]] | None:
        """(its slot, what to copy), or None where it has to wait. ``length_S`` then says what it
        need not compute."""
        self._touch_parents(generation.affinity)
        wanted = np.asarray(generation.ids, dtype=np.int32)
        ready_S, coming = self._shared(wanted)
        source = int(ready_S.argmax())
        shared = int(ready_S[source])
        if coming >= shared + _WORTH_WAITING:
            return None
        slot = self._target(source, shared)
        if slot is None:
            return None
        changes = []
        if slot != source and shared:
            changes.append(SlotMove("copy", source, slot, shared))
        self.length_S[slot] = shared
        self._tokens_SC[slot] = -1
        self._tokens_SC[slot, : len(wanted)] = wanted
        self.owner[slot], self._affinity[slot] = generation, generation.affinity
        generation.num_reused = min(shared, generation.num_prompt)
        self._use(slot)
        return slot, changes

    def computed(self, step: EngineStep) -> None:
        """The keys and values of these tokens are in their slots."""
        self.length_S[list(step.slots)] += 1
        for span in step.spans:
            self.length_S[span.slot] = span.end

    def append(self, slots: Sequence[int], positions: Sequence[int], tokens: Sequence[int]) -> None:
        """What runs in ``slots`` gets one more token each, at these positions, not yet computed."""
        if (
            max(positions) >= self.capacity
        ):  # there will be more room, and the whole of it written, before it is computed
            fits = [index for index, position in enumerate(positions) if position < self.capacity]
            slots, positions, tokens = (
                [each[index] for index in fits] for each in (slots, positions, tokens)
            )
        self._tokens_SC[slots, positions] = tokens

    def release(self, slot: int) -> None:
        """The slot's generation is over; what was computed stays until somebody needs the room."""
        self.owner[slot] = None
        self._tokens_SC[slot, int(self.length_S[slot]) :] = -1
        self._use(slot)

    def forget(self) -> None:
        """Nothing that was computed holds any more. What runs keeps its slot."""
        self.length_S[:] = 0
        for slot, owner in enumerate(self.owner):
            if owner is None:
                self._tokens_SC[slot] = -1

    def compact(self) -> list[SlotMove]:
        """Move running slots forward until few holes stand between them."""
        changes = []
        running = self.running()
        while running and running[-1] + 1 - len(running) > _HOLES * len(running):
            hole = next(slot for slot in range(self.num_slots) if self.owner[slot] is None)
            last = running.pop()
            changes.append(self._swap(last, hole))
            running = sorted([*running, hole])
        return changes

    def resize(self, num_slots: int, capacity: int) -> tuple[list[int], list[Generation]]:
        """Make ``num_slots`` of ``capacity``: (the old slots that stay, in their new order; those
        that lost theirs).

        Running ones stay before idle ones, those that were used last before others; what an idle
        slot holds beyond the new capacity is forgotten."""
        running = self.running()
        idle = sorted(
            (slot for slot in range(self.num_slots) if self.owner[slot] is None),
            key=lambda slot: -self._used_S[slot],
        )
        stay = [*running, *idle][:num_slots]
        lost = [owner for slot in running[num_slots:] if (owner := self.owner[slot]) is not None]
        old, self._tokens_SC = self._tokens_SC, np.full((num_slots, capacity), -1, dtype=np.int32)
        width = min(capacity, self.capacity)
        for new, slot in enumerate(stay):
            owner = self.owner[slot]
            known = (
                old[slot, :width]
                if owner is None
                else np.asarray(owner.ids[:capacity], dtype=np.int32)
            )
            self._tokens_SC[new, : len(known)] = known
        empty = num_slots - len(stay)
        self.owner = [*(self.owner[slot] for slot in stay), *[None] * empty]
        self._affinity = [*(self._affinity[slot] for slot in stay), *[""] * empty]
        self.length_S = np.append(
            np.minimum(self.length_S[stay], capacity), np.zeros(empty, dtype=np.int64)
        )
        self._used_S = np.append(self._used_S[stay], np.zeros(empty, dtype=np.int64))
        self.num_slots, self.capacity = num_slots, capacity
        return stay, lost

    def _shared(self, wanted: NDArray[np.int32]) -> tuple[NDArray[np.int64], int]:
        """(for each slot, how many computed tokens begin ``wanted``; how many will when what runs
        is computed).

        The last token is left to compute, since its logits are wanted."""
        most = min(len(wanted) - 1, self.capacity)
        if not self._reuse or most == 0:
            return np.zeros(self.num_slots, dtype=np.int64), 0
        differs_SC = self._tokens_SC[:, :most] != wanted[:most]
        same_S = np.where(differs_SC.any(1), differs_SC.argmax(1), most)
        return np.minimum(same_S, self.length_S), int(same_S.max())

    def _target(self, source: int, shared: int) -> int | None:
        """The slot for what can begin with ``shared`` tokens of slot ``source``."""
        if self.owner[source] is None and shared and shared == self.length_S[source]:
            return source
        idle = [slot for slot, owner in enumerate(self.owner) if owner is None]
        if not idle:
            return None
        others = [slot for slot in idle if slot != source or not shared] or idle
        return min(others, key=lambda slot: (self.length_S[slot] > 0, self._used_S[slot], slot))

    def _touch_parents(self, affinity: str) -> None:
        """A call ``0.2.1`` keeps ``0.2`` and ``0`` fresh, which wait for it."""
        parents = set(_parents(affinity))
        if parents:
            for slot, owner in enumerate(self.owner):
                if owner is None and self._affinity[slot] in parents:
                    self._use(slot)

    def _use(self, slot: int) -> None:
        self._clock += 1
        self._used_S[slot] = self._clock

    def _swap(self, one: int, other: int) -> SlotMove:
        length = int(max(self.length_S[one], self.length_S[other]))
        for array in (self.length_S, self._tokens_SC, self._used_S):
            array[[one, other]] = array[[other, one]]
        self.owner[one], self.owner[other] = self.owner[other], self.owner[one]
        self._affinity[one], self._affinity[other] = self._affinity[other], self._affinity[one]
        return SlotMove("swap", one, other, length)


def _parents(affinity: str) -> Iterator[str]:
    while "." in affinity:
        affinity = affinity.rpartition(".")[0]
        yield affinity
