"""Slots: the share of a machine that a process takes, or several that are colocated.

    PlacementSlot("gpus", node=0, needs=SlotResources(gpus=1, cpus=8),
                  members=(SlotMember("trainer", 0), SlotMember("inference", 0)))

Not here: which process gets which slot (see ``train/placement/placement_slots.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

ALMOST = 1e-9
"""Tolerance for fractions: three times a third of a GPU is one GPU."""


class SlotResources(NamedTuple):
    """Resources that a slot takes from a node, or that a node has."""

    gpus: float = 0.0
    cpus: float = 0.0
    memory_gb: float = 0.0

    def __add__(self, other: object) -> SlotResources:
        assert isinstance(other, SlotResources)
        return SlotResources(*(a + b for a, b in zip(self, other, strict=True)))

    def without(self, other: SlotResources) -> SlotResources:
        return SlotResources(*(a - b for a, b in zip(self, other, strict=True)))

    def fits(self, available: SlotResources) -> bool:
        return all(a <= b + ALMOST for a, b in zip(self, available, strict=True))


class SlotMember(NamedTuple):
    """One process of a role."""

    role: str
    number: int


class PlacementSlot(msgspec.Struct, frozen=True):
    """The share of one node that a process takes, or several that are colocated."""

    pool: str
    """Empty if the placement declares no pools."""
    node: int
    """Index of the node in its pool."""
    needs: SlotResources
    members: tuple[SlotMember, ...]
    offsets: tuple[float, ...] = ()
    """Index of each member's first GPU in the slot; empty: all members use all GPUs."""

    def share(self, member: SlotMember, gpus: float, slot_gpus: Sequence[str]) -> list[str]:
        """Those of ``slot_gpus``, the GPUs of the slot, that a member with ``gpus`` GPUs uses."""
        if not self.offsets or not gpus:
            return list(slot_gpus)
        first = int(self.offsets[self.members.index(member)] + ALMOST)
        return list(slot_gpus[first : first + max(1, int(gpus + ALMOST))])
