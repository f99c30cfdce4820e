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


class Stage:
    """Where rollouts are played."""

    def __init__(self, env: Environment, engines: list[Engine], rate: Rate, at_once: int, on_wire: int) -> None:
        """``at_once``: rollouts; ``on_wire``: requests, of all rollouts together."""
        self.env, self.engines = env, engines
        self._rate = rate
        self._room, self._wire = Resource(env, at_once), Resource(env, on_wire)

    def play(self, rollout: Rollout, spans: Spans) -> Process:
        """From its turn to begin until its end; which weights sampled what is added to ``spans``."""
        with self._room.request() as place:
            yield place
            engine = pick(self.engines)
            yield self.env.all_of([self.env.process(self._call(root, engine, spans)) for root in rollout.roots])

    def _call(self, call: CallShape, engine: Engine, spans: Spans) -> Process:
        cached = engine.version
        for index, turn in enumerate(call.turns):
            new = turn.new if cached == engine.version else turn.context
            cached = engine.version
            yield from self._request(turn, new, engine, spans)
            if not index and call.host_s:
                yield self.env.timeout(call.host_s)
            for cell in turn.cells:
                yield self.env.timeout(cell.seconds)
                for wave in cell.waves:
                    yield self.env.all_of([self.env.process(self._call(child, engine, spans)) for child in wave])
        if not call.turns and call.host_s:
            yield self.env.timeout(call.host_s)

    def _request(self, turn: TurnShape, new: int, engine: Engine, spans: Spans) -> Process:
        with self._wire.request() as place:
            yield place
            if self._rate.request_s:
                yield self.env.timeout(self._rate.request_s)
            spans += yield engine.sample(new, turn.context, turn.sampled)
