"""Assigns sequences to KV cache slots, and reuses what idle slots hold from earlier sequences.

A step is the input of one pass through the model. A slot is a row of the KV cache, for one
sequence. Running slots are close together at the front, so that a step reads one block of the
cache; idle slots behind them keep what was computed in them:

    slot     0     1     2     3     4     5     6
             run   run   run   —     idle  idle  empty
                               └ one hole is tolerated: its call may soon be back

A new request takes over the idle slot whose tokens are all a prefix of the request (it is then the
next turn of a call whose children have answered). Otherwise it copies the longest prefix that any
slot shares with it (such as that of a sibling with the same prompt) into an empty slot or the least
recently used idle one. Calls that wait for children count as used whenever a child sends a request.

This module decides about slots; a ``CacheSlotMove`` tells the cache what to do. Legend: S slots, C
tokens per slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ramify.inference.local.generation_request import GenerationState


class SlotTokenSpan(NamedTuple):
    """Consecutive tokens of one sequence that an engine step computes in a KV-cache slot."""

    slot: int
    start: int
    """Position of the first token."""
    ids: Sequence[int]

    @property
    def end(self) -> int:
        """The position after the span's last token."""
        return self.start + len(self.ids)


@dataclasses.dataclass(slots=True)
class EngineStep:
    """The tokens that the model processes in one engine step.

    There is one token for each decoding sequence, and longer spans of prompt tokens.
    """

    slots: list[int] = dataclasses.field(default_factory=list)
    """Slot of each decoding token, in ascending order."""
    positions: list[int] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)
    spans: list[SlotTokenSpan] = dataclasses.field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.slots) + sum(len(span.ids) for span in self.spans)


_WORTH_WAITING = 32
"""Minimum number of further prompt tokens that a running sequence is about to compute, for which a
new sequence waits in order to copy their keys and values."""
_HOLES = 0.25
"""Maximum number of empty slots between running ones, as a fraction of the running slots."""


class CacheSlotMove(msgspec.Struct, frozen=True):
    """An instruction to copy tokens between two KV-cache slots, or to swap the slots.

    A copy takes the first ``length`` tokens of one slot.
    """

    kind: Literal["copy", "swap"]
    source: int
    target: int
    length: int
    """Number of tokens. For a swap, the length of the longer slot."""


class CacheSlotTable:
    """The record of which sequence uses which KV-cache slot, and which tokens each slot holds."""

    def __init__(self, num_slots: int, capacity: int, *, reuse: bool = True) -> None:
        """Create a table of empty slots.

        Without ``reuse``, one request's cached prefix is not used for others.
        """
        self.num_slots = num_slots
        self.capacity = capacity
        self.owner: list[GenerationState | None] = [None] * num_slots
        self.length_S: NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        """Number of tokens per slot whose keys and values are cached."""
        self._tokens_SC: NDArray[np.int32] = np.full((num_slots, capacity), -1, dtype=np.int32)
        self._used_S: NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        self._affinity: list[str] = [""] * num_slots
        self._clock = 0
        self._reuse = reuse

    def running(self) -> list[int]:
        """Return the KV-cache slots of all running sequences in ascending order."""
        return [slot for slot, owner in enumerate(self.owner) if owner is not None]

    def admit(self, generation: GenerationState) -> tuple[int, list[CacheSlotMove]] | None:
        """Assign a KV-cache slot to a new sequence.

        Returns the slot and what to copy from other slots, or None if the sequence has to wait.
        Afterwards, ``length_S[slot]`` is the number of tokens that need not be computed.
        """
        self._touch_parents(generation.affinity)
        ids = np.asarray(generation.ids, dtype=np.int32)
        ready_S, coming = self._shared_prefix_lengths(ids)
        source = int(ready_S.argmax())
        shared = int(ready_S[source])
        # A running sequence will soon have computed more of this prompt, which is cheaper to copy.
        if coming >= shared + _WORTH_WAITING:
            return None
        slot = self._choose_slot(source, shared)
        if slot is None:
            return None
        changes = []
        if slot != source and shared:
            changes.append(CacheSlotMove("copy", source, slot, shared))
        self.length_S[slot] = shared
        self._tokens_SC[slot] = -1
        self._tokens_SC[slot, : len(ids)] = ids
        self.owner[slot], self._affinity[slot] = generation, generation.affinity
        generation.num_reused = min(shared, generation.num_prompt)
        self._mark_used(slot)
        return slot, changes

    def mark_computed(self, step: EngineStep) -> None:
        """Record that the tokens of an engine step are now in the KV cache."""
        self.length_S[list(step.slots)] += 1
        for span in step.spans:
            self.length_S[span.slot] = span.end

    def append_tokens(
        self, slots: Sequence[int], positions: Sequence[int], tokens: Sequence[int]
    ) -> None:
        """Record one new token for each of the given KV-cache slots.

        It has not been computed yet.
        """
        # A token beyond the capacity is skipped: the slot is enlarged and rewritten before it is
        # computed.
        if max(positions) >= self.capacity:
            fits = [index for index, position in enumerate(positions) if position < self.capacity]
            slots, positions, tokens = (
                [column[index] for index in fits] for column in (slots, positions, tokens)
            )
        self._tokens_SC[slots, positions] = tokens

    def release(self, slot: int) -> None:
        """Free the KV-cache slot of a sequence that has ended.

        Its cached prefix stays until the slot is needed.
        """
        self.owner[slot] = None
        self._tokens_SC[slot, int(self.length_S[slot]) :] = -1
        self._mark_used(slot)

    def invalidate_cache(self) -> None:
        """Invalidate the cached tokens of all KV-cache slots.

        Running sequences keep their slots.
        """
        self.length_S[:] = 0
        for slot, owner in enumerate(self.owner):
            if owner is None:
                self._tokens_SC[slot] = -1

    def compact(self) -> list[CacheSlotMove]:
        """Move running sequences to earlier KV-cache slots, to close most of the gaps between them.

        Returns the moves that the cache must make.
        """
        changes = []
        running = self.running()
        while running and running[-1] + 1 - len(running) > _HOLES * len(running):
            hole = next(slot for slot in range(self.num_slots) if self.owner[slot] is None)
            last = running.pop()
            changes.append(self._swap(last, hole))
            running = sorted([*running, hole])
        return changes

    def resize(self, num_slots: int, capacity: int) -> tuple[list[int], list[GenerationState]]:
        """Change the number of KV-cache slots and their capacity in tokens.

        Returns the old slots that are kept, in their new order, and the sequences that lost their
        slot.

        Running slots are kept before idle ones, and recently used slots before others. What an idle
        slot holds beyond the new capacity is forgotten.
        """
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

    def _shared_prefix_lengths(self, wanted: NDArray[np.int32]) -> tuple[NDArray[np.int64], int]:
        """Return how many leading tokens of a new request each KV-cache slot already holds.

        Returns how many of its first tokens each slot has cached, and how many of them some slot
        will have cached once its running sequence is computed.

        The last token is always left to compute, since its logits are needed.
        """
        most = min(len(wanted) - 1, self.capacity)
        if not self._reuse or most == 0:
            return np.zeros(self.num_slots, dtype=np.int64), 0
        differs_SC = self._tokens_SC[:, :most] != wanted[:most]
        same_S = np.where(differs_SC.any(1), differs_SC.argmax(1), most)
        return np.minimum(same_S, self.length_S), int(same_S.max())

    def _choose_slot(self, source: int, shared: int) -> int | None:
        """Return the KV-cache slot for a new sequence that shares its first tokens with slot
        ``source``.

        The number of shared tokens is ``shared``. Returns None if no slot is free.
        """
        if self.owner[source] is None and shared and shared == self.length_S[source]:
            return source
        idle = [slot for slot, owner in enumerate(self.owner) if owner is None]
        if not idle:
            return None
        # The source keeps its longer contents if another slot is free: empty ones first, then the
        # least recently used.
        others = [slot for slot in idle if slot != source or not shared] or idle
        return min(others, key=lambda slot: (self.length_S[slot] > 0, self._used_S[slot], slot))

    def _touch_parents(self, affinity: str) -> None:
        """Mark the KV-cache slots of a model call's ancestors as recently used.

        The ancestors resume after the call. Call ``0.2.1`` keeps those of ``0.2`` and ``0``.
        """
        parents = set(_parents(affinity))
        if parents:
            for slot, owner in enumerate(self.owner):
                if owner is None and self._affinity[slot] in parents:
                    self._mark_used(slot)

    def _mark_used(self, slot: int) -> None:
        self._clock += 1
        self._used_S[slot] = self._clock

    def _swap(self, first: int, second: int) -> CacheSlotMove:
        length = int(max(self.length_S[first], self.length_S[second]))
        for array in (self.length_S, self._tokens_SC, self._used_S):
            array[[first, second]] = array[[second, first]]
        self.owner[first], self.owner[second] = self.owner[second], self.owner[first]
        self._affinity[first], self._affinity[second] = (
            self._affinity[second],
            self._affinity[first],
        )
        return CacheSlotMove("swap", first, second, length)


def _parents(affinity: str) -> Iterator[str]:
    while "." in affinity:
        affinity = affinity.rpartition(".")[0]
        yield affinity
