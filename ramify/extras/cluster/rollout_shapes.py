"""A rollout as a workload, without its contents: tokens, seconds of code, and dependencies.

    Trajectory (ids, texts, seconds)  ──>  RolloutWorkload
                                           └── CallWorkload
                                               └── TurnWorkload(new=120, sampled=31)
                                                   └── CellWorkload(seconds=0.02)
                                                       ├── wave: [CallWorkload, CallWorkload]
                                                       └── wave: [CallWorkload]

Calls of one cell that overlapped in time are one wave and begin together. A call that began after
all of them had ended waited for them, so it belongs to the next wave. Not here: the speed of an
engine (see ``engine_rate.py``) and the simulation (see ``simulated_rollout.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from ramify.types.trajectory import Call, Trajectory, Turn

Ids = NDArray[np.int32]


class CellWorkload(msgspec.Struct, frozen=True):
    """The workload of one cell: the time of its code, and the calls that it makes."""

    seconds: float
    """Seconds of the session's own work."""
    waves: tuple[tuple[CallWorkload, ...], ...] = ()
    """Calls that the cell makes. Calls of one wave run concurrently, and waves run in sequence."""


class TurnWorkload(msgspec.Struct, frozen=True):
    """The workload of one turn: a request to the model, and the cells of its reply."""

    new: int
    """Prompt tokens that no cache held, which the engine has to read."""
    context: int
    """Tokens of the whole prompt, which the engine has to read if its cache is lost, as after a
    weight update."""
    sampled: int
    """Tokens of the reply."""
    seconds: float = 0.0
    """Measured seconds of the request, including waiting at the engine."""
    cells: tuple[CellWorkload, ...] = ()
    ids: bytes = b""
    """Ids that the prompt adds to the path, and those of the reply, four bytes each; empty if
    unknown."""

    def path(self, before: Ids) -> Ids | None:
        """Return all ids of prompt and reply, given the ids up to the end of the previous reply.
        None if they are unknown."""
        reused = self.context + self.sampled - len(self.ids) // 4
        if not self.ids or reused > len(before):
            return None
        return np.concatenate([before[:reused], np.frombuffer(self.ids, np.int32)])


class CallWorkload(msgspec.Struct, frozen=True):
    """The workload of one call: a sequence of turns."""

    turns: tuple[TurnWorkload, ...]
    host_s: float = 0.0
    """Seconds apart from requests and cells, such as opening its session. They are spent after the
    first reply."""

    def walk(self) -> Iterator[CallWorkload]:
        """Yield this call and all its descendants."""
        yield self
        for child in self.children():
            yield from child.walk()

    def children(self) -> Iterator[CallWorkload]:
        """Yield the calls that the cells of this call make, in the order in which they begin."""
        for turn in self.turns:
            for cell in turn.cells:
                for wave in cell.waves:
                    yield from wave


class RolloutWorkload(msgspec.Struct, frozen=True):
    """The workload of one rollout: its root call, with all calls below."""

    roots: tuple[CallWorkload, ...]
    """The root call and its branches, which all begin together."""

    def calls(self) -> Iterator[CallWorkload]:
        for root in self.roots:
            yield from root.walk()

    @property
    def sampled(self) -> int:
        """Number of tokens in all replies."""
        return sum(turn.sampled for call in self.calls() for turn in call.turns)

    @property
    def learnt(self) -> int:
        """Number of tokens that a trainer computes: each prompt token once, and the replies."""
        return sum(
            max((turn.context + turn.sampled for turn in call.turns), default=0)
            for call in self.calls()
        )


def shape_of(trajectory: Trajectory) -> RolloutWorkload:
    """Return the workload of ``trajectory``. Calls of judges, which come after its end, are
    excluded."""
    calls = [call for call in trajectory.calls if call.kind != "judge"]
    below: dict[tuple[str, int, int], list[Call]] = {}
    for call in calls:
        if call.parent is not None:
            below.setdefault((call.parent.call, call.parent.turn, call.parent.cell), []).append(
                call
            )

    def shape(call: Call) -> CallWorkload:
        turns, waited = [], 0.0
        for index, turn in enumerate(call.turns):
            cells = []
            for number, cell in enumerate(turn.cells):
                waves = waves_of(below.get((call.id, index, number), []), trajectory.seconds)
                waited += cell.seconds + sum(_until(wave, trajectory.seconds) for wave in waves)
                cells.append(
                    CellWorkload(cell.seconds, tuple(tuple(map(shape, wave)) for wave in waves))
                )
            turns.append(_turn(call, index, turn, tuple(cells)))
        took = (trajectory.seconds if call.ended_s is None else call.ended_s) - call.started_s
        return CallWorkload(
            tuple(turns), max(0.0, took - waited - sum(turn.seconds for turn in turns))
        )

    return RolloutWorkload(tuple(shape(call) for call in calls if call.parent is None))


def waves_of(calls: list[Call], end_s: float) -> list[list[Call]]:
    """Divide the calls of one cell into waves. ``end_s`` is used for a call without an end."""
    waves: list[list[Call]] = []
    over = float("-inf")
    for call in sorted(calls, key=lambda each: each.started_s):
        if call.started_s >= over:
            waves.append([])
        waves[-1].append(call)
        over = max(over, end_s if call.ended_s is None else call.ended_s)
    return waves


def _until(wave: list[Call], end_s: float) -> float:
    """Return the seconds from the beginning of a wave to the end of its last call."""
    ends = [end_s if call.ended_s is None else call.ended_s for call in wave]
    return max(ends) - min(call.started_s for call in wave)


def _turn(call: Call, index: int, turn: Turn, cells: tuple[CellWorkload, ...]) -> TurnWorkload:
    reply, usage = turn.reply, turn.reply.usage
    sampled = len(reply.token_ids) if reply.token_ids is not None else usage.output_tokens
    given = len(reply.prompt_ids) if reply.prompt_ids is not None else usage.input_tokens
    context = turn.reused_ids + given if reply.prompt_ids is not None else usage.input_tokens
    new = (
        min(given, max(usage.input_tokens - usage.cached_tokens, 0))
        if usage.cached_tokens
        else given
    )
    ids = b""
    if reply.prompt_ids is not None and reply.token_ids:
        ids = np.array(reply.prompt_ids + reply.token_ids, np.int32).tobytes()
    return TurnWorkload(new, context, sampled, reply.seconds, cells, ids)
