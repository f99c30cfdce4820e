"""Contents of an engine's slots in simulated time: the real slot table, over the token ids of a
measured run.

    cache = SimulatedCache(slots=4, capacity=512)
    slot, read = cache.admit(prompt, "0.1")    the next turn of a call finds its own slot; a sibling
    cache.release(slot, prompt_and_reply)      copies a common prefix; if another call has taken the
                                               slot since, the whole prompt is read again

Fewer slots therefore mean more prompt tokens, as in the embedded engine and in ``serve-policy``,
whose ``SlotTable`` this is. The model assumes that a prompt is in its slot as soon as the slot is
assigned.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ramify.inference.local.slots import SlotTable

Ids = NDArray[np.int32]


class _SlotRequest:
    """The attributes of a request that ``SlotTable`` uses."""

    def __init__(self, ids: Ids, affinity: str) -> None:
        self.ids = ids
        self.num_prompt = len(ids)
        self.affinity = affinity
        self.num_reused = 0


class SimulatedCache:
    """Slots of one engine."""

    def __init__(self, slots: int, capacity: int) -> None:
        """``capacity`` is the length of the longest sequence."""
        self._slots = SlotTable(slots, max(capacity, 1))

    def admit(self, prompt: Ids, affinity: str) -> tuple[int, int] | None:
        """Return (slot, number of tokens to read), or None if no slot is free."""
        request = _SlotRequest(prompt, affinity)
        admitted = self._slots.admit(cast("Any", request))
        if admitted is None:
            return None
        slot, _ = admitted
        self._slots.length_S[slot] = len(prompt)
        return slot, len(prompt) - request.num_reused

    def release(self, slot: int, ids: Ids) -> None:
        """End the request in ``slot``. Its ``ids`` remain there; the last one is not computed."""
        slots = self._slots
        slots._tokens_SC[slot, : len(ids)] = ids
        slots.length_S[slot] = len(ids) - 1
        slots.release(slot)

    def forget(self) -> None:
        """Discard all contents, because the weights have changed."""
        self._slots.forget()
