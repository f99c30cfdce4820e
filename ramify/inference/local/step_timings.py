"""Measure the CPU time of an engine's steps, grouped by the amount of work in a step.

    timings.note(sequences=12, read=0, cpu_s=0.0061)
    timings.taken()  ──▶  [EngineStepTotals(sequences=16, reads=False, steps=311, tokens=3702,
                                            read=0, cpu_s=1.42), …]

CPU time is the same whether or not other processes use the machine; wall-clock time is not.
Programs that read stored metrics import this module, so it needs neither numpy nor torch.
"""

from __future__ import annotations

import msgspec


class EngineStepTotals(msgspec.Struct, kw_only=True):
    """The total work and CPU time of all engine steps with a similar number of sequences."""

    sequences: int
    """Number of sequences that got a token in each of these steps, rounded up to a power of two; 0
    if none did."""
    reads: bool
    """True if the steps also processed prompt tokens (prefill)."""
    steps: int = 0
    tokens: int = 0
    """Number of sampled tokens, one per sequence and step."""
    read: int = 0
    """Number of prompt tokens processed."""
    cpu_s: float = 0.0
    """CPU seconds of the engine's thread, in Python and in the tensor library."""


class EngineStepTimingRecorder:
    """Records the CPU time of one engine's steps.

    The engine's thread writes, and any thread may read.
    """

    def __init__(self) -> None:
        self._timings: dict[tuple[int, bool], EngineStepTotals] = {}

    def record_step(self, sequences: int, read: int, cpu_s: float) -> None:
        """Record the work and the CPU time of one engine step.

        ``sequences`` is how many sequences got a token, ``read`` is the number of prompt tokens,
        and ``cpu_s`` the CPU seconds.
        """
        bound = 1 << (sequences - 1).bit_length() if sequences else 0
        key = (bound, read > 0)
        timing = self._timings.get(key)
        if timing is None:
            timing = self._timings[key] = EngineStepTotals(sequences=bound, reads=read > 0)
        timing.steps += 1
        timing.tokens += sequences
        timing.read += read
        timing.cpu_s += cpu_s

    def take_totals(self) -> list[EngineStepTotals]:
        """Return and reset the totals of all engine steps since the last call."""
        timings, self._timings = self._timings, {}
        return [timings[key] for key in sorted(timings)]
