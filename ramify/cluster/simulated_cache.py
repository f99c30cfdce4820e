"""What an engine's slots still hold of earlier requests, in simulated time: the real bookkeeping,
over a measured run's ids.

    kept = Kept(slots=4, capacity=512)
    slot, read = kept.admit(prompt, "0.1")     the next turn of a call finds its own slot, a sibling copies a common beginning;
    kept.release(slot, prompt_and_reply)       where others have taken the slot since, all of it is read again

So fewer slots mean more prompt tokens, as they do in the embedded engine and in ``serve-policy``,
whose ``SlotTable`` this is. Supposes that a prompt is in its slot as soon as it has one.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ramify.inference.local.slots import SlotTable

Ids = NDArray[np.int32]


class _SlotRequest:
    """What ``SlotTable`` looks at of a request."""

    def __init__(self, ids: Ids, affinity: str) -> None:
        self.ids, self.num_prompt, self.affinity, self.num_reused = ids, len(ids), affinity, 0


class SimulatedCache:
    """The slots of one engine."""

    def __init__(self, slots: int, capacity: int) -> None:
        """``capacity``: of the longest sequence."""
        self._slots = SlotTable(slots, max(capacity, 1))

    def admit(self, prompt: Ids, affinity: str) -> tuple[int, int] | None:
        """(its slot, tokens that have to be read); None where no slot is free."""
        asked = _SlotRequest(prompt, affinity)
        admitted = self._slots.admit(cast("Any", asked))
        if admitted is None:
            return None
        slot, _ = admitted
        self._slots.length_S[slot] = len(prompt)
        return slot, len(prompt) - asked.num_reused

    def release(self, slot: int, ids: Ids) -> None:
        """Its request is over, and left ``ids``, the last of which is not computed."""
        slots = self._slots
        slots._tokens_SC[slot, : len(ids)] = ids
        slots.length_S[slot] = len(ids) - 1
        slots.release(slot)

    def forget(self) -> None:
        """The weights have changed."""
        self._slots.forget()
