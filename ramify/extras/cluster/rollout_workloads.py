"""Describe the work in a rollout without its text: tokens, running times of code, and nested calls.

    Trajectory (ids, texts, seconds)  ──>  RolloutWorkload
                                           └── CallWorkload
                                               └── TurnWorkload(new=120, sampled=31)
                                                   └── CellWorkload(seconds=0.02)
                                                       ├── wave: [CallWorkload, CallWorkload]
                                                       └── wave: [CallWorkload]

If several calls of one cell overlapped in time, they form a wave and begin together in the
simulation. A call that began after all of them had ended is assumed to have waited for them, so it
belongs to the next wave. The speed of an engine is fitted in ``measured_engine_rate.py``, and the
simulation is in ``simulated_rollout.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from ramify.types.trajectory import Call, Trajectory, Turn

Ids = NDArray[np.int32]


class CellWorkload(msgspec.Struct, frozen=True):
    """The work in one executed code cell: its running time and the model calls that it makes."""

    seconds: float
    """Seconds that the code itself took, without the calls it made."""
    waves: tuple[tuple[CallWorkload, ...], ...] = ()
    """Model calls that the cell makes. Calls in one wave run concurrently, and waves run one after
    another."""


class TurnWorkload(msgspec.Struct, frozen=True):
    """The work in one turn: a model request and the code cells in its reply."""

    new: int
    """Prompt tokens that were not cached, so the engine has to read them."""
    context: int
    """Tokens in the whole prompt. The engine reads all of them if its cache is lost, as after a
    weight update."""
    sampled: int
    """Tokens of the reply."""
    seconds: float = 0.0
    """Measured seconds of the request, including time spent waiting at the engine."""
    cells: tuple[CellWorkload, ...] = ()
    ids: bytes = b""
    """Token ids that this prompt adds to the previous turn's, then those of the reply, as int32.
    Empty if unknown."""

    def full_token_ids(self, before: Ids) -> Ids | None:
        """Return all token ids of the turn: those of its prompt, followed by those of its reply.

        ``before`` holds the ids up to the end of the previous reply. Returns None if the ids are
        unknown.
        """
        reused = self.context + self.sampled - len(self.ids) // 4
        if not self.ids or reused > len(before):
            return None
        return np.concatenate([before[:reused], np.frombuffer(self.ids, np.int32)])


class CallWorkload(msgspec.Struct, frozen=True):
    """The work in one model call, which consists of turns."""

    turns: tuple[TurnWorkload, ...]
    host_s: float = 0.0
    """Seconds outside requests and cells, such as opening the call's session. They are spent after
    the first reply."""

    def walk(self) -> Iterator[CallWorkload]:
        """Yield this model call and all of its descendants in the call tree, parents first."""
        yield self
        for child in self.children():
            yield from child.walk()

    def children(self) -> Iterator[CallWorkload]:
        """Yield the child calls of this model call in the order in which they begin."""
        for turn in self.turns:
            for cell in turn.cells:
                for wave in cell.waves:
                    yield from wave


class RolloutWorkload(msgspec.Struct, frozen=True):
    """The work in one rollout: the root call and all calls below it."""

    roots: tuple[CallWorkload, ...]
    """The root call and its branches. All of them begin together."""

    def calls(self) -> Iterator[CallWorkload]:
        for root in self.roots:
            yield from root.walk()

    @property
    def num_sampled_tokens(self) -> int:
        """The number of tokens in all replies of the rollout."""
        return sum(turn.sampled for call in self.calls() for turn in call.turns)

    @property
    def trainer_tokens(self) -> int:
        """The number of tokens that the trainer processes for this rollout.

        Each prompt token counts once, and replies are included.
        """
        return sum(
            max((turn.context + turn.sampled for turn in call.turns), default=0)
            for call in self.calls()
        )


def workload_of_trajectory(trajectory: Trajectory) -> RolloutWorkload:
    """Return the work in a recorded rollout, without its text.

    Calls made by judges are excluded, because they run after the rollout has ended.
    """
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
                waited += cell.seconds + sum(
                    _wave_seconds(wave, trajectory.seconds) for wave in waves
                )
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
    """Group the model calls of one code cell into waves of overlapping calls.

    Calls that overlapped in time share a wave. A call without a recorded end is assumed to end at
    ``end_s``.
    """
    waves: list[list[Call]] = []
    over = float("-inf")
    for call in sorted(calls, key=lambda each: each.started_s):
        if call.started_s >= over:
            waves.append([])
        waves[-1].append(call)
        over = max(over, end_s if call.ended_s is None else call.ended_s)
    return waves


def _wave_seconds(wave: list[Call], end_s: float) -> float:
    """Return the seconds from the first start to the last end in a wave of model calls."""
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
