"""What a rollout asks of machines, without what it says: how many tokens, how many seconds of code,
what waits for what.

    Trajectory (ids, texts, seconds)  ──>  Rollout
                                           └── CallShape ── TurnShape(new=120, sampled=31) ── CellShape(seconds=0.02)
                                                                                              └── wave: [CallShape, CallShape]
                                                                                              └── wave: [CallShape]

Calls of one cell that were under way together are one wave and begin together; a call that began
after all of them had ended waited for them, and is the next. Leaves out how long an engine takes
(``rate.py``) and who plays it (``simulated_rollout.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from ramify.cluster.simulated_cache import Ids
from ramify.types.trajectory import Call, Trajectory, Turn


class CellShape(msgspec.Struct, frozen=True):
    """One execution of code."""

    seconds: float
    """Of the session's own work."""
    waves: tuple[tuple[CallShape, ...], ...] = ()
    """Calls that it makes; those of one wave at once, wave after wave."""


class TurnShape(msgspec.Struct, frozen=True):
    """One request and what was done with its reply."""

    new: int
    """Prompt tokens that no cache held: what an engine has to read."""
    context: int
    """Tokens of the whole prompt: what it has to read once its cache is lost, as after new
    weights."""
    sampled: int
    """Tokens of the reply."""
    seconds: float = 0.0
    """That the request took where it was measured, waiting at the engine included."""
    cells: tuple[CellShape, ...] = ()
    ids: bytes = b""
    """Of what its prompt adds to the path, and of the reply, four bytes each; empty where they are
    not known."""

    def path(self, before: Ids) -> Ids | None:
        """All ids of prompt and reply, where those up to the end of the reply before are
        ``before``; None where they are not known."""
        reused = self.context + self.sampled - len(self.ids) // 4
        if not self.ids or reused > len(before):
            return None
        return np.concatenate([before[:reused], np.frombuffer(self.ids, np.int32)])


class CallShape(msgspec.Struct, frozen=True):
    """One call."""

    turns: tuple[TurnShape, ...]
    host_s: float = 0.0
    """What it took besides requests and cells, as opening its session; spent after its first
    reply."""

    def walk(self) -> Iterator[CallShape]:
        """It and every call below it."""
        yield self
        for child in self.children():
            yield from child.walk()

    def children(self) -> Iterator[CallShape]:
        """The calls that its cells make, in the order of their waves."""
        for turn in self.turns:
            for cell in turn.cells:
                for wave in cell.waves:
                    yield from wave


class RolloutShape(msgspec.Struct, frozen=True):
    """One attempt at an item."""

    roots: tuple[CallShape, ...]
    """The root call, and its branches where there are any: all begin together."""

    def calls(self) -> Iterator[CallShape]:
        for root in self.roots:
            yield from root.walk()

    @property
    def sampled(self) -> int:
        """Tokens of all its replies."""
        return sum(turn.sampled for call in self.calls() for turn in call.turns)

    @property
    def learnt(self) -> int:
        """Tokens that a trainer computes of it: each prompt token once, and the replies."""
        return sum(_path(call) for call in self.calls())


def _path(call: CallShape) -> int:
    return max((turn.context + turn.sampled for turn in call.turns), default=0)


def shape_of(trajectory: Trajectory) -> RolloutShape:
    """What ``trajectory`` asked for. Judges' calls, which came after its end, are left out."""
    calls = [call for call in trajectory.calls if call.kind != "judge"]
    below: dict[tuple[str, int, int], list[Call]] = {}
    for call in calls:
        if call.parent is not None:
            below.setdefault((call.parent.call, call.parent.turn, call.parent.cell), []).append(
                call
            )

    def shape(call: Call) -> CallShape:
        turns, waited = [], 0.0
        for index, turn in enumerate(call.turns):
            cells = []
            for number, cell in enumerate(turn.cells):
                waves = waves_of(below.get((call.id, index, number), []), trajectory.seconds)
                waited += cell.seconds + sum(_until(wave, trajectory.seconds) for wave in waves)
                cells.append(
                    CellShape(cell.seconds, tuple(tuple(map(shape, wave)) for wave in waves))
                )
            turns.append(_turn(call, index, turn, tuple(cells)))
        took = (trajectory.seconds if call.ended_s is None else call.ended_s) - call.started_s
        return CallShape(
            tuple(turns), max(0.0, took - waited - sum(turn.seconds for turn in turns))
        )

    return RolloutShape(tuple(shape(call) for call in calls if call.parent is None))


def waves_of(calls: list[Call], end_s: float) -> list[list[Call]]:
    """``calls`` of one cell by who waited for whom. ``end_s`` is when one ended that has no end."""
    waves: list[list[Call]] = []
    over = float("-inf")
    for call in sorted(calls, key=lambda each: each.started_s):
        if call.started_s >= over:
            waves.append([])
        waves[-1].append(call)
        over = max(over, end_s if call.ended_s is None else call.ended_s)
    return waves


def _until(wave: list[Call], end_s: float) -> float:
    """Seconds from the beginning of a wave to the end of its last call."""
    ends = [end_s if call.ended_s is None else call.ended_s for call in wave]
    return max(ends) - min(call.started_s for call in wave)


def _turn(call: Call, index: int, turn: Turn, cells: tuple[CellShape, ...]) -> TurnShape:
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
    return TurnShape(new, context, sampled, reply.seconds, cells, ids)
