"""Simulate the rollouts of a training run, and the queue that feeds them to the trainer.

Rollouts use engines, sandboxed sessions and CPU cores.

    call:  request ──▶ host_s ──▶ cell ──▶ wave of concurrent calls ──▶ next wave … ──▶ next request

All calls of a rollout use the same engine. A call that waits for its children occupies neither a
slot nor a connection. If CPU cores are shared, requests use the event loop, and cells and host time
use cores; otherwise both take their measured time.

    sessions      ── one process each; a session computes whenever it has a core
    the process   ── event loop ┐ one Python interpreter: only one computes at a time,
                     engine     ┘ and they take turns if both want to

If n processes want a core and there are C cores, each runs at a pace of min(1, C / n). All paces
change whenever a process begins or ends. The amount of work is given in CPU seconds (see
``simulation_inputs.py``). Caches, memory bandwidth and turbo clocks are not simulated.

The queue has the same rules as the real one (``train/rollouts/group_queue.py``), and a test checks
that both make the same decisions. The time of learning is part of ``simulate.py``.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import count
from statistics import median
from typing import Any, Protocol

import msgspec
import numpy as np
from simpy import Environment, Event, Resource

from ramify.extras.cluster.measured_engine_rate import InferenceEngineSpeed
from ramify.extras.cluster.rollout_workloads import CallWorkload, Ids, RolloutWorkload, TurnWorkload
from ramify.extras.cluster.simulated_engine import (
    SimulatedEngine,
    SimulatedRequestTokens,
    Spans,
    pick_least_loaded_engine,
)
from ramify.train.rollouts.group_queue import (
    RolloutAdmissionOptions,
    groups_to_give_up,
    has_enough_groups,
    num_groups_to_begin,
)


class SimulatedCores:
    """The simulated CPU cores of the trainer's machine.

    Sessions, the event loop and possibly an engine share them.
    """

    def __init__(self, env: Environment, num: float, engine: SimulatedEngine | None) -> None:
        """Create ``num`` simulated CPU cores that all simulated work shares.

        ``engine`` is the engine that runs in the trainer's process and uses these cores, too. None:
        engines have their own devices.
        """
        self._env = env
        self._num = num
        self._engine = engine
        self._at = env.now
        self._alarm = 0
        self._ids = count()
        self._done_s = 0.0
        """CPU seconds that a session running since the start has received so far. All running
        sessions progress at the same pace."""
        self._sessions: list[tuple[float, int, Event]] = []
        """Sessions, ordered by the ``_done_s`` at which they end."""
        self._loop: deque[tuple[float, Event]] = deque()
        """Queued work of the event loop: (remaining CPU seconds, event that marks its end), oldest
        first."""
        self._pace = self._loop_pace = 0.0
        self.used_s = 0.0
        """CPU seconds used on all cores together."""
        self._wanting = 0
        if engine is not None:
            engine.on_wants_changed = self.settle

    def run_session_work(self, seconds: float) -> Event:
        """Simulate CPU work of a sandboxed session, which is a separate process.

        Returns an event that occurs when ``seconds`` of CPU time have been used.
        """
        done = self._env.event()
        self._catch_up()
        heapq.heappush(self._sessions, (self._done_s + seconds, next(self._ids), done))
        self._reschedule()
        return done

    def queue_loop_work(self, seconds: float) -> Event:
        """Queue CPU work for the simulated event loop, behind the work that is already waiting.

        Returns an event that occurs when ``seconds`` of CPU time have been used.
        """
        done = self._env.event()
        self._catch_up()
        self._loop.append((seconds, done))
        self._reschedule()
        return done

    def settle(self) -> None:
        """Update the progress of all simulated CPU work, and divide the cores among it again.

        Called when the engine starts or stops needing a core.
        """
        self._catch_up()
        self._reschedule()

    def _catch_up(self) -> None:
        passed, self._at = self._env.now - self._at, self._env.now
        if passed <= 0:
            return
        self._done_s += passed * self._pace
        self.used_s += passed * self._pace * self._wanting
        if self._loop:
            left, done = self._loop[0]
            self._loop[0] = (left - passed * self._loop_pace, done)

    def _reschedule(self) -> None:
        """Recompute the speed of all simulated work, and schedule a wake-up for when the first part
        ends."""
        engine_wants, loop_wants = self._engine is not None and self._engine.wants, bool(self._loop)
        # Engine and event loop share one Python interpreter, so together they use at most one core.
        wanting = self._wanting = len(self._sessions) + (engine_wants or loop_wants)
        self._pace = min(1.0, self._num / wanting) if wanting else 0.0
        self._loop_pace = self._pace / (1 + engine_wants)
        if self._engine is not None:
            self._engine.speed_factor = self._pace / (1 + loop_wants) if engine_wants else 1.0
        self._alarm += 1
        alarm, ends = self._alarm, []
        if self._sessions:
            ends.append((self._sessions[0][0] - self._done_s) / self._pace)
        if self._loop:
            ends.append(self._loop[0][0] / self._loop_pace)
        if ends:
            self._env.timeout(max(0.0, min(ends))).callbacks.append(lambda _: self._wake(alarm))

    def _wake(self, alarm: int) -> None:
        if alarm != self._alarm:  # something changed meanwhile
            return
        self._catch_up()
        while self._sessions and self._sessions[0][0] <= self._done_s + _ROUNDING_S:
            heapq.heappop(self._sessions)[2].succeed()
        if self._loop and self._loop[0][0] <= _ROUNDING_S:
            self._loop.popleft()[1].succeed()
        self._reschedule()


_ROUNDING_S = 1e-9


Process = Generator[Event, Any, None]
_NOTHING = np.empty(0, np.int32)


class SimulatedRollout:
    """The state of a simulated rollout, which waits, runs, and ends or is dropped."""

    def __init__(self, rollout: RolloutWorkload, over: Event) -> None:
        self.rollout = rollout
        self.over = over
        """Succeeds when the rollout ends or is dropped."""
        self.began_at: float | None = None
        """Start in simulated time. None while the rollout waits to be admitted."""
        self.took_s: float | None = None
        """Duration in seconds. None until the rollout ends, and for dropped rollouts."""
        self.is_given_up = False
        self.engine: SimulatedEngine | None = None
        self.spans: Spans = []

    def give_up(self) -> None:
        """Drop this simulated rollout before its end, and cancel its engine requests.

        Its group continues without it.
        """
        self.is_given_up = True
        if self.engine is not None:
            self.engine.cancel_requests_of(self)
        self.over.succeed()


class RolloutHostCpuUse(msgspec.Struct, frozen=True):
    """The measured CPU use of rollouts on the trainer's machine.

    Work of the engine and of learning is excluded.
    """

    cores: int
    request_s: float
    """CPU seconds that the event loop spends on each request."""
    session_share: float
    """Fraction of the measured session time that was spent computing. The rest was waiting for a
    core."""


class RolloutSimulator:
    """Simulates the rollouts of a training run on simulated engines and CPU cores."""

    def __init__(
        self,
        env: Environment,
        engines: list[SimulatedEngine],
        rate: InferenceEngineSpeed,
        at_once: int,
        on_wire: int,
        host: RolloutHostCpuUse | None = None,
        *,
        embedded: bool = False,
    ) -> None:
        """Create a simulator for the rollouts of a training run.

        At most ``at_once`` rollouts and at most ``on_wire`` requests run concurrently. ``host``
        describes shared CPU cores. If ``embedded`` is true, the first engine runs on them, too.
        """
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

    def run_rollout(self, attempt: SimulatedRollout) -> Process:
        """Simulate one rollout from its start to its end, as soon as it may start."""
        with self._room.request() as place:
            yield place
            attempt.began_at = self.env.now
            attempt.engine = pick_least_loaded_engine(self.engines)
            roots = [
                self.env.process(self._simulate_call(root, attempt, "0"))
                for root in attempt.rollout.roots
            ]
            yield self.env.all_of(roots)
        if not attempt.is_given_up:
            attempt.took_s = self.env.now - attempt.began_at
            attempt.over.succeed()

    def spend_session_time(self, seconds: float) -> Event:
        """Simulate work in a sandboxed session that took ``seconds`` in the measured run.

        If cores are shared, only the computing part of it counts.
        """
        if self.cores is None or self._host is None:
            return self.env.timeout(seconds)
        return self.cores.run_session_work(seconds * self._host.session_share)

    def _simulate_call(self, call: CallWorkload, attempt: SimulatedRollout, name: str) -> Process:
        engine = attempt.engine
        assert engine is not None
        cached = engine.version
        path: Ids | None = _NOTHING
        children = count()
        for index, turn in enumerate(call.turns):
            new = turn.new if cached == engine.version else turn.context
            cached = engine.version
            path = None if path is None else turn.full_token_ids(path)
            yield from self._simulate_request(
                turn,
                new,
                engine,
                attempt,
                None if path is None else SimulatedRequestTokens(path, name),
            )
            if not index and call.host_s:
                yield self.spend_session_time(call.host_s)
            for cell in turn.cells:
                yield self.spend_session_time(cell.seconds)
                for wave in cell.waves:
                    if attempt.is_given_up:
                        return
                    calls = [
                        self._simulate_call(child, attempt, f"{name}.{next(children)}")
                        for child in wave
                    ]
                    yield self.env.all_of([self.env.process(call_steps) for call_steps in calls])
            if attempt.is_given_up:
                return
        if not call.turns and call.host_s:
            yield self.spend_session_time(call.host_s)

    def _simulate_request(
        self,
        turn: TurnWorkload,
        new: int,
        engine: SimulatedEngine,
        attempt: SimulatedRollout,
        known: SimulatedRequestTokens | None,
    ) -> Process:
        with self._wire.request() as place:
            yield place
            if self.cores is not None and self._host is not None:
                yield self.cores.queue_loop_work(self._host.request_s)
            if self._rate.request_s:
                yield self.env.timeout(self._rate.request_s)
            if not attempt.is_given_up:
                attempt.spans += yield engine.request_reply(
                    new, turn.context, turn.sampled, attempt, known
                )


Draw = Callable[[int], tuple[Sequence[RolloutWorkload], bool]]
"""Function that takes a group's index, and returns the group's rollouts and whether all their
rewards are equal."""


class SimulatedQueueOptions(RolloutAdmissionOptions, Protocol):
    """Options of the simulated queue for limiting open groups of rollouts and dropping slow
    rollouts."""

    @property
    def straggler_factor(self) -> float: ...


class SimulatedRolloutGroup:
    """A simulated group of rollouts that no training step has used yet."""

    def __init__(
        self, number: int, attempts: Sequence[SimulatedRollout], has_no_signal: bool
    ) -> None:
        self.number = number
        self.attempts = attempts
        self.will_have_no_signal = has_no_signal
        self.step: int | None = None
        """Version of the weights when the group's first rollout began. None before that."""
        self.is_whole = False

    @property
    def has_no_signal(self) -> bool:
        return self.is_whole and self.will_have_no_signal


class RolloutGroupQueueSimulator:
    """The simulated queue from which training steps take complete groups of rollouts."""

    def __init__(
        self,
        env: Environment,
        stage: RolloutSimulator,
        rules: SimulatedQueueOptions,
        draw: Draw,
        per_item: int,
        num_steps: int,
    ) -> None:
        self.num_stragglers = 0
        self._env = env
        self._stage = stage
        self._rules = rules
        self._draw = draw
        self._num_steps = num_steps
        self._step = self._next = 0
        self._open: list[SimulatedRolloutGroup] = []
        self._took_s: deque[float] = deque(maxlen=rules.items * per_item)
        self._news = env.event()

    def take(self, step: int) -> Generator[Event, Any, list[SimulatedRolloutGroup]]:
        """Wait for the groups of rollouts for the next training step, and remove them from the
        queue."""
        self._advance_to_step(step)
        while True:
            self._note_begun()
            self._begin()
            if has_enough_groups(self._rules, self._open, self._whole_groups(), self._step):
                return self._take_groups()
            wait_s = self._give_up_slow_ones()
            yield (
                self._news
                if wait_s is None
                else self._env.any_of([self._news, self._env.timeout(wait_s)])
            )

    def on_new_weights(self, step: int) -> None:
        """Start the simulated groups of rollouts that had to wait for new weights."""
        if self._rules.max_staleness:
            self._advance_to_step(step)
            self._begin()

    # --- begin groups -----------------------------------------------------------------------------

    def _advance_to_step(self, step: int) -> None:
        self._note_begun()
        self._step = step

    def _note_begun(self) -> None:
        for each in self._open:
            if each.step is None and any(attempt.began_at is not None for attempt in each.attempts):
                each.step = self._step

    def _begin(self) -> None:
        for _ in range(num_groups_to_begin(self._rules, self._open, self._step, self._num_steps)):
            rollouts, has_no_signal = self._draw(self._next)
            attempts = [SimulatedRollout(rollout, self._env.event()) for rollout in rollouts]
            group = SimulatedRolloutGroup(self._next, attempts, has_no_signal)
            self._next += 1
            self._open.append(group)
            self._env.process(self._play(group))

    def _play(self, group: SimulatedRolloutGroup) -> Generator[Event, Any, None]:
        for attempt in group.attempts:
            self._env.process(self._stage.run_rollout(attempt))
            attempt.over.callbacks.append(partial(self._record_duration, attempt))
        yield self._env.all_of([attempt.over for attempt in group.attempts])
        group.is_whole = True
        news, self._news = self._news, self._env.event()
        news.succeed()

    def _record_duration(self, attempt: SimulatedRollout, _: Event) -> None:
        if attempt.took_s is not None:
            self._took_s.append(attempt.took_s)

    # --- wait for groups --------------------------------------------------------------------------

    def _whole_groups(self) -> list[SimulatedRolloutGroup]:
        return [each for each in self._open if each.is_whole]

    def _give_up_slow_ones(self) -> float | None:
        """Drop the slow simulated rollouts if the training step waits only for them.

        If there are none, return the seconds until there may be some. Returns None if only the end
        of another group can change that.
        """
        straggler_factor = self._rules.straggler_factor
        if not straggler_factor or 2 * len(self._took_s) < (self._took_s.maxlen or 0):
            return None
        bound = straggler_factor * median(self._took_s)
        left_s = [self._time_left(each, bound) for each in self._open]
        slow, wait_s = groups_to_give_up(self._rules, self._open, left_s, self._step)
        for each in slow:
            for attempt in _unfinished(each):
                self.num_stragglers += 1
                attempt.give_up()
        return wait_s

    def _time_left(self, group: SimulatedRolloutGroup, bound: float) -> float | None:
        began = [attempt.began_at for attempt in _unfinished(group)]
        known = [at for at in began if at is not None]
        return None if not known or len(known) < len(began) else max(known) + bound - self._env.now

    def _take_groups(self) -> list[SimulatedRolloutGroup]:
        """Remove the groups of rollouts for one training step from the queue and return them.

        Groups with differing rewards come first. If they are too few, groups with equal rewards
        fill the step.
        """
        rules = self._rules
        whole = self._whole_groups()
        zero_variance = [group for group in whole if group.has_no_signal]
        with_signal = [group for group in whole if not group.has_no_signal]
        groups = with_signal[: rules.items]
        groups += zero_variance[: rules.items - len(groups)]
        # A synchronous run also drops complete groups that the step does not need.
        closed = whole if not rules.max_staleness else [*groups, *zero_variance]
        self._open = [group for group in self._open if group not in closed]
        return groups


def _unfinished(group: SimulatedRolloutGroup) -> list[SimulatedRollout]:
    return [attempt for attempt in group.attempts if not attempt.over.triggered]
