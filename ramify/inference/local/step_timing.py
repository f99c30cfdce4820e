"""What steps of an engine cost its thread in processor time, by how much there was to do: counted,
not kept one by one.

    paces.note(sequences=12, read=0, cpu_s=0.0061)
    paces.taken()  ──>  [Pace(sequences=16, reads=False, steps=311, tokens=3702, read=0, cpu_s=1.42), …]

Processor time says the same whether or not others are on the machine; seconds on the clock do not.
A simulation of a run whose engine shares its processors needs the one (``cluster/cores.py``).
"""

from __future__ import annotations

import msgspec


class StepTiming(msgspec.Struct, kw_only=True):
    """All steps of one kind."""

    sequences: int
    """That got a token: at most so many, and more than half of it. A power of two, or 0."""
    reads: bool
    """Whether prompts were read beside them."""
    steps: int = 0
    tokens: int = 0
    """That sequences got, one each and step."""
    read: int = 0
    """Prompt tokens."""
    cpu_s: float = 0.0
    """Of the engine's thread, in Python and in the tensor library's own code."""


class StepTimings:
    """Of one engine. Noted in its thread, taken in any."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, bool], StepTiming] = {}

    def note(self, sequences: int, read: int, cpu_s: float) -> None:
        """One step was made."""
        bound = 1 << (sequences - 1).bit_length() if sequences else 0
        key = (bound, read > 0)
        found = self._of.get(key)
        if found is None:
            found = self._of[key] = StepTiming(sequences=bound, reads=read > 0)
        found.steps += 1
        found.tokens += sequences
        found.read += read
        found.cpu_s += cpu_s

    def taken(self) -> list[StepTiming]:
        """What was noted since the last time."""
        found, self._of = self._of, {}
        return [found[key] for key in sorted(found)]
