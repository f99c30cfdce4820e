"""What one pass through a model computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple


class SlotSpan(NamedTuple):
    """Tokens of one slot."""

    slot: int
    start: int
    """Position of the first."""
    ids: Sequence[int]

    @property
    def end(self) -> int:
        """Position after the last."""
        return self.start + len(self.ids)


@dataclasses.dataclass(slots=True)
class EngineStep:
    """One token of each slot that decodes, in columns, since there are many; and some longer spans
    after them."""

    slots: list[int] = dataclasses.field(default_factory=list)
    """Ascending."""
    positions: list[int] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)
    spans: list[SlotSpan] = dataclasses.field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.slots) + sum(len(span.ids) for span in self.spans)
