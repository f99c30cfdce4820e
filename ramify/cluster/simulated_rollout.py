"""A rollout in simulated time: its calls in order, on engines, in sessions and in the host.

    call:  request ──▶ host_s ──▶ cell ──▶ wave of concurrent calls ──▶ next wave … ──▶ next request

All calls of a tree go to one engine. A call that waits for its children holds neither a slot nor a
connection. If CPU cores are shared (``cores.py``), requests use the event loop, and cells and host
time use cores. Otherwise both take their measured time.
"""

from __future__ import annotations

from collections.abc import Generator
from itertools import count
from typing import Any

import msgspec
import numpy as np
from simpy import Environment, Event, Resource

from ramify.cluster.cores import SimulatedCores
from ramify.cluster.rate import EngineRate
from ramify.cluster.rollout_shapes import CallShape, RolloutShape, TurnShape
from ramify.cluster.simulated_cache import Ids
from ramify.cluster.simulated_engine import SimulatedEngine, SimulatedPrefix, Spans, pick

Process = Generator[Event, Any, None]
_NOTHING = np.empty(0, np.int32)


class SimulatedRollout:
    """One rollout from its request to its end."""

    def __init__(self, rollout: RolloutShape, over: Event) -> None:
        self.rollout = rollout
        self.over = over
        """Succeeds when the rollout has ended or was given up."""
        self.began_at: float | None = None
        """None while it waits for a place."""
        self.took_s: float | None = None
        """None until it has ended, and if it was given up."""
        self.is_given_up = False
        self.engine: SimulatedEngine | None = None
        self.spans: Spans = []

    def give_up(self) -> None:
        """Let its group continue without it, and cancel its requests."""
        self.is_given_up = True
        if self.engine is not None:
            self.engine.cancel(self)
        self.over.succeed()


class TrainerHost(msgspec.Struct, frozen=True):
    """CPU use of the trainer's machine other than engine and learning."""

    cores: int
    request_s: float
    """CPU seconds of the event loop per request."""
    session_share: float
    """Share of the measured session time that was computing; the rest was waiting for a core."""


class SimulatedStage:
    """Runs rollouts on engines and CPU cores."""

    def __init__(
        self,
        env: Environment,
        engines: list[SimulatedEngine],
        rate: EngineRate,
        at_once: int,
        on_wire: int,
        host: TrainerHost | None = None,
        *,
        embedded: bool = False,
    ) -> None:
        """``at_once`` limits concurrent rollouts, and ``on_wire`` the concurrent requests of all of
        them. ``host`` describes the shared CPU cores, which the first engine uses too if it is
        ``embedded``."""
        self.env = env
        self.engines = engines
        self.cores = (
            None
            if host is None
            else SimulatedCores(env, host.cores, engines[0] if embedded else None)
        )
        self._rate = rate
        self._host = host
        self._room = Resource(env, at_once)
        self._wire = Resource(env, on_wire)

    def play(self, attempt: SimulatedRollout) -> Process:
        """Wait for a place and run the rollout to its end."""
        with self._room.request() as place:
            yield place
            attempt.began_at = self.env.now
            attempt.engine = pick(self.engines)
            roots = [
                self.env.process(self._call(root, attempt, "0")) for root in attempt.rollout.roots
            ]
            yield self.env.all_of(roots)
        if not attempt.is_given_up:
            attempt.took_s = self.env.now - attempt.began_at
            attempt.over.succeed()

    def session(self, seconds: float) -> Event:
        """Spend the time that a session was measured to take."""
        if self.cores is None or self._host is None:
            return self.env.timeout(seconds)
        return self.cores.session(seconds * self._host.session_share)

    def _call(self, call: CallShape, attempt: SimulatedRollout, name: str) -> Process:
        engine = attempt.engine
        assert engine is not None
        cached = engine.version
        path: Ids | None = _NOTHING
        children = count()
        for index, turn in enumerate(call.turns):
            new = turn.new if cached == engine.version else turn.context
            cached = engine.version
            path = None if path is None else turn.path(path)
            yield from self._request(
                turn, new, engine, attempt, None if path is None else SimulatedPrefix(path, name)
            )
            if not index and call.host_s:
                yield self.session(call.host_s)
            for cell in turn.cells:
                yield self.session(cell.seconds)
                for wave in cell.waves:
                    if attempt.is_given_up:
                        return
                    calls = [
                        self._call(child, attempt, f"{name}.{next(children)}") for child in wave
                    ]
                    yield self.env.all_of([self.env.process(call_steps) for call_steps in calls])
            if attempt.is_given_up:
                return
        if not call.turns and call.host_s:
            yield self.session(call.host_s)

    def _request(
        self,
        turn: TurnShape,
        new: int,
        engine: SimulatedEngine,
        attempt: SimulatedRollout,
        known: SimulatedPrefix | None,
    ) -> Process:
        with self._wire.request() as place:
            yield place
            if self.cores is not None and self._host is not None:
                yield self.cores.loop(self._host.request_s)
            if self._rate.request_s:
                yield self.env.timeout(self._rate.request_s)
            if not attempt.is_given_up:
                attempt.spans += yield engine.sample(
                    new, turn.context, turn.sampled, attempt, known
                )
