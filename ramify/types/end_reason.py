"""Explain in a few words why a run or a call ended."""

from __future__ import annotations

from ramify.types.trajectory import Stop

_WITHOUT_REASON = {
    Stop.MAX_TURNS: "all of its turns were used",
    Stop.MAX_TOKENS: "its limit of tokens was reached",
    Stop.MAX_COST: "its limit of dollars was reached",
    Stop.MAX_CALLS: "its limit of calls was reached",
    Stop.DEADLINE: "its time was up",
    Stop.NO_CODE: "the last replies had no code, so the last one is the answer",
    Stop.CANCELLED: "it was cancelled",
    Stop.ERROR: "it failed",
    Stop.SUSPENDED: "it waits for a failure to be fixed: continue it with ramify ask --resume",
}
"""Fallback texts for journals that store no reason."""


def describe_ending(
    stop: Stop | None, reason: str, num_turns: int, is_alive: bool = False, *, num_below: int = 0
) -> str:
    """Return a short text that says why a run or call ended.

    The run's page and the commands ``show``, ``runs`` and ``ask`` use it. For a root without turns,
    ``num_below`` is the number of calls below it.

    >>> ending(Stop.FINAL, "", 6), ending(Stop.FINAL, "", 0, num_below=21)
    ('final, after 6 turns', 'final, after 21 leaf calls')
    """
    if stop is None:
        return "running" if is_alive else "interrupted: its process ended before the run did"
    if stop is Stop.FINAL and num_below and not num_turns:
        return f"final, after {num_below:,} leaf call{'' if num_below == 1 else 's'}"
    if stop is Stop.FINAL:
        return f"final, after {num_turns:,} turn{'' if num_turns == 1 else 's'}"
    text = " ".join((reason or _WITHOUT_REASON.get(stop, "")).split())
    return f"{stop}: {text}" if text else str(stop)
