"""An engine in simulated time: slots, one pace for all that decode, prompts that everybody waits
for.

    asked ──▶ waiting ── a slot is free ──▶ prompt is read (the others stand still) ──▶ decoding ──▶ event with its spans

All sequences in an engine get a token per step, and a step takes ``rate.step_s(how many there
are)``. So one number, the steps that have gone by, says how far each of them is; it is brought up
to date where something changes, and the next to end is the one with the smallest number of steps at
its end.

What of a prompt has to be read is what it was where it was measured, or what its ``kept`` slots
say. Sequences that the cache has no room for wait; the real engine lets some begin, and throws them
out again when they grow.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from simpy import Environment, Event

from ramify.cluster.rate import EngineRate
from ramify.cluster.simulated_cache import Ids, SimulatedCache

Spans = list[tuple[int, float]]
"""(version of the weights, tokens that they sampled), in order."""


class SimulatedPrefix(NamedTuple):
    """A request's ids, where they are known."""

    ids: Ids
    """Prompt and reply."""
    affinity: str
    """The call's id."""


class _RunningSequence:
    """One sequence in a slot."""

    def __init__(
        self,
        new: int,
        context: int,
        sampled: int,
        done: Event,
        owner: object,
        known: SimulatedPrefix | None,
    ) -> None:
        self.new, self.context, self.sampled, self.done, self.owner = (
            new,
            context,
            sampled,
            done,
            owner,
        )
        self.known = known
        self.slot: int | None = None
        """Where ``kept`` has it."""
        self.begun: float | None = None
        """Steps of the engine when it got its slot; None while it waits for one."""
        self.spans: Spans = []
        self.told = 0.0
        """Tokens that ``spans`` hold."""


class SimulatedEngine:
    """One engine."""

    def __init__(
        self,
        env: Environment,
        rate: EngineRate,
        slots: int,
        kept: SimulatedCache | None = None,
        cache_tokens: int = 0,
    ) -> None:
        """``kept``: what slots hold, where a cache is nothing but its slots. ``cache_tokens``: that
        all slots together have room for; 0: no bound."""
        self.version = 0
        self.in_flight = 0
        """Requests that wait or run."""
        self.trees = 0
        """Rollouts that were sent here."""
        self.busy_s = 0.0
        self.sequence_s = 0.0
        """Sequences in slots, summed over time."""
        self.sampled = 0.0
        self.read = 0.0
        """Prompt tokens."""
        self.told: Callable[[], None] = lambda: None
        """To be called when ``wants`` changes."""
        self.wants = False
        """Whether there is something to compute."""
        self._pace = 1.0
        self._kept, self._cache_tokens = kept, cache_tokens
        self._env, self._rate, self._slots = env, rate, slots
        self._steps, self._debt_s, self._at = 0.0, 0.0, env.now
        self._running: list[tuple[float, int, _RunningSequence]] = []
        self._waiting: deque[_RunningSequence] = deque()
        self._ids, self._alarm = itertools.count(), 0
        self._paused = 0

    @property
    def pace(self) -> float:
        """Seconds of its own that pass in one of all others'."""
        return self._pace

    @pace.setter
    def pace(self, pace: float) -> None:
        if pace != self._pace:
            self._catch_up()
            self._pace = pace
            self._ring()

    def sample(
        self,
        new: int,
        context: int,
        sampled: int,
        owner: object = None,
        known: SimulatedPrefix | None = None,
    ) -> Event:
        """Ask for ``sampled`` tokens after a prompt of ``context``, of which ``new`` are in no
        cache. The event's value are the spans. ``owner`` may ``cancel`` it."""
        done = self._env.event()
        self.in_flight += 1
        self._catch_up()
        self._waiting.append(_RunningSequence(new, context, sampled, done, owner, known))
        self._go_on()
        return done

    def cancel(self, owner: object) -> None:
        """End all that ``owner`` has here, as far as it is."""
        self._catch_up()
        gone = [each for _, _, each in self._running if each.owner is owner]
        gone += [each for each in self._waiting if each.owner is owner]
        self._running = [entry for entry in self._running if entry[2].owner is not owner]
        heapq.heapify(self._running)
        self._waiting = deque(each for each in self._waiting if each.owner is not owner)
        for each in gone:
            self._end(each)
        self._go_on()

    def pause(self) -> None:
        """Stand still until as many ``resume``."""
        self._catch_up()
        self._paused += 1
        self._go_on()

    def resume(self) -> None:
        self._catch_up()
        self._paused -= 1
        self._go_on()

    def take(self, version: int) -> None:
        """New weights: what was computed is lost, and what runs is read again as far as it is."""
        self._catch_up()
        for _, _, each in self._running:
            self._tell(each)
            self._reads(each.context + each.told)
        if self._kept is not None:
            self._kept.forget()
        self.version = version
        self._go_on()

    def settle(self) -> None:
        """Bring what is counted up to now."""
        self._catch_up()
        self._go_on()

    # --- time
    # ----------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Let the time since the last change have been."""
        passed, self._at = self._env.now - self._at, self._env.now
        if self._paused or not self._running or passed <= 0:
            return
        self.busy_s += passed
        self.sequence_s += passed * len(self._running)
        own_s = passed * self._pace
        read_s = min(own_s, self._debt_s)
        self._debt_s -= read_s
        self._steps += (own_s - read_s) / self._rate.step_s(len(self._running))

    def _go_on(self) -> None:
        """Fill free slots, and wake up when the next sequence ends."""
        while self._waiting and len(self._running) < self._room() and not self._paused:
            each = self._waiting.popleft()
            each.begun = self._steps
            self._reads(self._to_read(each))
            heapq.heappush(self._running, (self._steps + each.sampled, next(self._ids), each))
        wants = bool(self._running) and not self._paused
        if wants != self.wants:
            self.wants = wants
            self.told()
        self._ring()

    def _room(self) -> int:
        """Slots that there may be: all are as long as the longest sequence inside, and the next,
        will need, a power of two."""
        if not self._cache_tokens:
            return self._slots
        inside = itertools.chain((entry[2] for entry in self._running), [self._waiting[0]])
        longest = max(each.context + each.sampled for each in inside)
        return max(
            1, min(self._slots, self._cache_tokens // (1 << max(longest - 1, 1).bit_length()))
        )

    def _ring(self) -> None:
        """Wake up when the next sequence ends."""
        self._alarm += 1
        if self._running and not self._paused and self._pace > 0:
            left = max(self._running[0][0] - self._steps, 0.0)
            wait_s = (self._debt_s + left * self._rate.step_s(len(self._running))) / self._pace
            alarm = self._alarm
            self._env.timeout(wait_s).callbacks.append(lambda _: self._wake(alarm))

    def _reads(self, tokens: float) -> None:
        self.read += tokens
        self._debt_s += self._rate.prompt_token_s * tokens

    def _to_read(self, each: _RunningSequence) -> int:
        """Prompt tokens of what has just got a slot that have to be computed."""
        if self._kept is None or each.known is None:
            return each.new
        admitted = self._kept.admit(each.known.ids[: each.context], each.known.affinity)
        if admitted is None:
            return each.new
        each.slot, read = admitted
        return read

    def _wake(self, alarm: int) -> None:
        if alarm != self._alarm:  # something changed meanwhile
            return
        self._catch_up()
        next_end = self._running[0][0]
        self._steps, self._debt_s = max(self._steps, next_end), 0.0  # what is off is rounding
        while self._running and self._running[0][0] <= self._steps:
            self._end(heapq.heappop(self._running)[2])
        self._go_on()

    def _end(self, each: _RunningSequence) -> None:
        self._tell(each)
        self.in_flight -= 1
        self.sampled += each.told
        if self._kept is not None and each.known is not None and each.slot is not None:
            self._kept.release(each.slot, each.known.ids[: each.context + max(1, int(each.told))])
        each.done.succeed(each.spans)

    def _tell(self, each: _RunningSequence) -> None:
        """Write down which weights sampled what ``each`` has got since the last time."""
        if each.begun is None:
            return
        tokens = min(self._steps - each.begun, each.sampled) - each.told
        if tokens > 0:
            each.spans.append((self.version, tokens))
            each.told += tokens


def pick(engines: list[SimulatedEngine]) -> SimulatedEngine:
    """For a new tree: the engine with least to do, of equals the one with fewest trees, as
    ``inference/http/fleet.py``."""
    found = min(engines, key=lambda each: (each.in_flight, each.trees))
    found.trees += 1
    return found
