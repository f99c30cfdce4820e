"""A rollout in simulated time: its calls in their order, on engines, cells and what the host takes.

    call:  request ──▶ host_s ──▶ cell ──▶ wave of calls, all at once ──▶ next wave … ──▶ next request

A tree's calls all go to one engine. A call that waits for its children holds no slot, and no place on the wire.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from simpy import Environment, Event, Resource

from ramify.cluster.engine import Engine, Spans, pick
from ramify.cluster.rate import Rate
from ramify.cluster.trees import CallShape, Rollout, TurnShape

Process = Generator[Event, Any, None]


class Attempt:
    """One rollout, from when it was asked for to its end."""

    def __init__(self, rollout: Rollout, over: Event) -> None:
        self.rollout = rollout
        self.over = over
        """Happens when it has ended, or was given up."""
        self.began_at: float | None = None
        """None while it waits for a place."""
        self.took_s: float | None = None
        """None while it goes on, and where it was given up."""
        self.is_given_up = False
        self.engine: Engine | None = None
        self.spans: Spans = []

    def give_up(self) -> None:
        """Let its group go on without it; what it has on its engine ends."""
        self.is_given_up = True
        if self.engine is not None:
            self.engine.cancel(self)
        self.over.succeed()


class Stage:
    """Where rollouts are played."""

    def __init__(self, env: Environment, engines: list[Engine], rate: Rate, at_once: int, on_wire: int) -> None:
        """``at_once``: rollouts; ``on_wire``: requests, of all rollouts together."""
        self.env, self.engines = env, engines
        self._rate = rate
        self._room, self._wire = Resource(env, at_once), Resource(env, on_wire)

    def play(self, attempt: Attempt) -> Process:
        """From when it waits for a place until its end."""
        with self._room.request() as place:
            yield place
            attempt.began_at = self.env.now
            attempt.engine = pick(self.engines)
            roots = [self.env.process(self._call(root, attempt)) for root in attempt.rollout.roots]
            yield self.env.all_of(roots)
        if not attempt.is_given_up:
            attempt.took_s = self.env.now - attempt.began_at
            attempt.over.succeed()

    def _call(self, call: CallShape, attempt: Attempt) -> Process:
        engine = attempt.engine
        assert engine is not None
        cached = engine.version
        for index, turn in enumerate(call.turns):
            new = turn.new if cached == engine.version else turn.context
            cached = engine.version
            yield from self._request(turn, new, engine, attempt)
            if not index and call.host_s:
                yield self.env.timeout(call.host_s)
            for cell in turn.cells:
                yield self.env.timeout(cell.seconds)
                for wave in cell.waves:
                    if attempt.is_given_up:
                        return
                    yield self.env.all_of([self.env.process(self._call(child, attempt)) for child in wave])
            if attempt.is_given_up:
                return
        if not call.turns and call.host_s:
            yield self.env.timeout(call.host_s)

    def _request(self, turn: TurnShape, new: int, engine: Engine, attempt: Attempt) -> Process:
        with self._wire.request() as place:
            yield place
            if self._rate.request_s:
                yield self.env.timeout(self._rate.request_s)
            if not attempt.is_given_up:
                attempt.spans += yield engine.sample(new, turn.context, turn.sampled, attempt)
