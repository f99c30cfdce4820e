"""The input of one pass through a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple


class SlotSpan(NamedTuple):
    """Consecutive tokens of one slot."""

    slot: int
    start: int
    """Position of the first token."""
    ids: Sequence[int]

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.ids)


@dataclasses.dataclass(slots=True)
class EngineStep:
    """One token of each decoding slot, stored in columns since there are many, followed by some
    longer spans."""

    slots: list[int] = dataclasses.field(default_factory=list)
    """Ascending."""
    positions: list[int] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)
    spans: list[SlotSpan] = dataclasses.field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.slots) + sum(len(span.ids) for span in self.spans)
