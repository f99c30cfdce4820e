"""A simulated inference engine with a fixed number of slots (concurrent sequences).

All sequences decode at the same pace, and all of them pause while a prompt is read.

    request ──▶ waiting ── slot is free ──▶ prompt is read ──▶ decoding ──▶ event with its spans
                                            (others pause)

All sequences of an engine get one token per step, and a step takes ``rate.step_s(sequences)``
seconds. So a single number, the steps so far, gives the progress of every sequence; it is updated
whenever something changes. The next sequence to end is the one with the smallest number of steps at
its end.

The number of prompt tokens to read is the measured one, or it follows from the contents of the
slots. These are simulated by ``SimulatedKvCache``, which applies the slot table of the real engine
to the token ids of a measured run:

    cache = SimulatedKvCache(slots=4, capacity=512)
    slot, read = cache.admit(prompt, "0.1")    the next turn of a call finds its own slot; a sibling
    cache.release(slot, prompt_and_reply)      copies a common prefix; if another call has taken the
                                               slot since, the whole prompt is read again

Fewer slots therefore mean more prompt tokens, as in the embedded engine and in ``serve-policy``.
The model assumes that a prompt is in its slot as soon as the slot is assigned. Sequences that do
not fit the cache wait. (The real engine lets some of them begin, and evicts them when they grow.)
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from simpy import Environment, Event

from ramify.extras.cluster.measured_engine_rate import InferenceEngineSpeed
from ramify.extras.cluster.rollout_workloads import Ids
from ramify.inference.local.kv_cache_slots import CacheSlotTable


class _SlotRequest:
    """A simulated request in the form that the inference engine's KV-cache slot table expects.

    It has only the attributes that the engine's ``CacheSlotTable`` reads.
    """

    def __init__(self, ids: Ids, affinity: str) -> None:
        self.ids = ids
        self.num_prompt = len(ids)
        self.affinity = affinity
        self.num_reused = 0


class SimulatedKvCache:
    """A simulated KV cache, which tells how much of a prompt an engine must read again.

    It tracks the contents of each slot.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        """Create a simulated KV cache with ``slots`` empty slots.

        Each holds up to ``capacity`` tokens.
        """
        self._slots = CacheSlotTable(slots, max(capacity, 1))

    def admit(self, prompt: Ids, affinity: str) -> tuple[int, int] | None:
        """Assign a KV-cache slot to a simulated request.

        Returns the slot and the number of prompt tokens that must be read, or None if no slot is
        free.
        """
        request = _SlotRequest(prompt, affinity)
        admitted = self._slots.admit(cast("Any", request))
        if admitted is None:
            return None
        slot, _ = admitted
        self._slots.length_S[slot] = len(prompt)
        return slot, len(prompt) - request.num_reused

    def release(self, slot: int, ids: Ids) -> None:
        """End the simulated request that occupies a KV-cache slot.

        Its token ids remain cached for later requests, except the last one, whose keys and values
        were never computed.
        """
        slots = self._slots
        slots._tokens_SC[slot, : len(ids)] = ids
        slots.length_S[slot] = len(ids) - 1
        slots.release(slot)

    def clear(self) -> None:
        """Discard the cached tokens in all KV-cache slots.

        Call this when the weights change.
        """
        self._slots.invalidate_cache()


Spans = list[tuple[int, float]]
"""(weight version, number of tokens sampled with it) pairs, in order."""


class SimulatedRequestTokens(NamedTuple):
    """The token ids of one engine request, as recorded in the measured run.

    The simulation replays them to predict cache hits.
    """

    ids: Ids
    """Token ids of the prompt, then of the reply."""
    affinity: str
    """Id of the call. Turns of one call prefer the same slot."""


class _RunningSequence:
    """A sequence in a simulated engine, either waiting for a KV-cache slot or decoding in one."""

    def __init__(
        self,
        new: int,
        context: int,
        sampled: int,
        done: Event,
        owner: object,
        known: SimulatedRequestTokens | None,
    ) -> None:
        self.new = new
        self.context = context
        self.sampled = sampled
        self.done = done
        self.owner = owner
        self.known = known
        self.slot: int | None = None
        """Index of the KV-cache slot that the sequence occupies; None if it has none."""
        self.begun: float | None = None
        """The engine's step count when the sequence got its slot. None while it waits."""
        self.spans: Spans = []
        self.num_recorded = 0.0
        """Number of tokens in ``spans``."""


class SimulatedEngine:
    """An inference engine in simulated time.

    It answers the requests of simulated rollouts.
    """

    def __init__(
        self,
        env: Environment,
        rate: InferenceEngineSpeed,
        slots: int,
        cache: SimulatedKvCache | None = None,
        cache_tokens: int = 0,
    ) -> None:
        """Create a simulated engine with the given speed and number of concurrent sequences
        (slots).

        ``cache`` models what the slots hold, if slots are the engine's only cache. ``cache_tokens``
        is the total capacity in tokens, where 0 means unlimited.
        """
        self.version = 0
        self.in_flight = 0
        """Number of requests that are waiting or running."""
        self.trees = 0
        """Number of rollouts assigned to this engine."""
        self.busy_s = 0.0
        self.sequence_s = 0.0
        """Number of sequences in slots, integrated over time (sequence-seconds)."""
        self.sampled = 0.0
        self.read = 0.0
        """Number of prompt tokens read."""
        self.on_wants_changed: Callable[[], None] = lambda: None
        """Called when ``wants`` changes."""
        self.wants = False
        """True if the engine has something to compute."""
        self._pace = 1.0
        self._cache = cache
        self._cache_tokens = cache_tokens
        self._env = env
        self._rate = rate
        self._slots = slots
        self._steps = 0.0
        self._debt_s = 0.0
        """Seconds that reading the remaining prompt tokens will take."""
        self._at = env.now
        self._running: list[tuple[float, int, _RunningSequence]] = []
        self._waiting: deque[_RunningSequence] = deque()
        self._ids = itertools.count()
        self._alarm = 0
        self._paused = 0

    @property
    def speed_factor(self) -> float:
        """The simulated engine's current speed as a fraction of its full speed.

        It is 1 at full speed, and 0 if the engine is stopped. It is the number of seconds of engine
        work per second of simulated time. The factor is below 1 if the engine shares CPU cores.
        """
        return self._pace

    @speed_factor.setter
    def speed_factor(self, pace: float) -> None:
        if pace != self._pace:
            self._catch_up()
            self._pace = pace
            self._schedule_wake_up()

    def request_reply(
        self,
        new: int,
        context: int,
        sampled: int,
        owner: object = None,
        known: SimulatedRequestTokens | None = None,
    ) -> Event:
        """Simulate a request to the engine for a reply of ``sampled`` tokens.

        Returns an event that occurs when the reply is complete. ``context`` is the length of the
        prompt in tokens, of which ``new`` are not cached. The event's value lists how many tokens
        were sampled with which version of the weights. ``cancel_requests_of`` ends all requests
        with the same ``owner``.
        """
        done = self._env.event()
        self.in_flight += 1
        self._catch_up()
        self._waiting.append(_RunningSequence(new, context, sampled, done, owner, known))
        self._reschedule()
        return done

    def cancel_requests_of(self, owner: object) -> None:
        """Cancel all requests that a simulated rollout has made to this engine.

        The rollout is their ``owner``. Replies end at their current length.
        """
        self._catch_up()
        cancelled = [each for _, _, each in self._running if each.owner is owner]
        cancelled += [each for each in self._waiting if each.owner is owner]
        self._running = [entry for entry in self._running if entry[2].owner is not owner]
        heapq.heapify(self._running)
        self._waiting = deque(each for each in self._waiting if each.owner is not owner)
        for each in cancelled:
            self._end(each)
        self._reschedule()

    def pause(self) -> None:
        """Pause the simulated engine until ``resume`` is called.

        Each call needs a matching ``resume``.
        """
        self._catch_up()
        self._paused += 1
        self._reschedule()

    def resume(self) -> None:
        self._catch_up()
        self._paused -= 1
        self._reschedule()

    def load_weights(self, version: int) -> None:
        """Load a new version of the weights, which clears the simulated engine's caches.

        The tokens of running sequences are prefilled again.
        """
        self._catch_up()
        for _, _, each in self._running:
            self._record(each)
            self._add_prompt_tokens(each.context + each.num_recorded)
        if self._cache is not None:
            self._cache.clear()
        self.version = version
        self._reschedule()

    def update_counters(self) -> None:
        """Bring the simulated engine's counters up to date with the simulated clock."""
        self._catch_up()
        self._reschedule()

    # --- time -------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Count the work that the simulated engine has done since its state last changed."""
        passed, self._at = self._env.now - self._at, self._env.now
        if self._paused or not self._running or passed <= 0:
            return
        self.busy_s += passed
        self.sequence_s += passed * len(self._running)
        own_s = passed * self._pace
        read_s = min(own_s, self._debt_s)
        self._debt_s -= read_s
        self._steps += (own_s - read_s) / self._rate.decode_step_s(len(self._running))

    def _reschedule(self) -> None:
        """Start waiting requests in free KV-cache slots, and schedule the engine's next wake-up.

        The engine wakes up when the next sequence ends.
        """
        while self._waiting and len(self._running) < self._room() and not self._paused:
            each = self._waiting.popleft()
            each.begun = self._steps
            self._add_prompt_tokens(self._to_read(each))
            heapq.heappush(self._running, (self._steps + each.sampled, next(self._ids), each))
        wants = bool(self._running) and not self._paused
        if wants != self.wants:
            self.wants = wants
            self.on_wants_changed()
        self._schedule_wake_up()

    def _room(self) -> int:
        """Return the number of sequences that the simulated engine's KV cache can hold at once.

        Every slot is as long as the longest sequence, running or next in line, rounded up to a
        power of two.
        """
        if not self._cache_tokens:
            return self._slots
        inside = itertools.chain((entry[2] for entry in self._running), [self._waiting[0]])
        longest = max(each.context + each.sampled for each in inside)
        return max(
            1, min(self._slots, self._cache_tokens // (1 << max(longest - 1, 1).bit_length()))
        )

    def _schedule_wake_up(self) -> None:
        """Schedule the engine's wake-up for the time at which the next sequence ends.

        Earlier wake-ups become invalid.
        """
        # SimPy timeouts cannot be cancelled, so a number tells current wake-ups from outdated ones.
        self._alarm += 1
        if self._running and not self._paused and self._pace > 0:
            left = max(self._running[0][0] - self._steps, 0.0)
            wait_s = (
                self._debt_s + left * self._rate.decode_step_s(len(self._running))
            ) / self._pace
            alarm = self._alarm
            self._env.timeout(wait_s).callbacks.append(lambda _: self._wake(alarm))

    def _add_prompt_tokens(self, tokens: float) -> None:
        self.read += tokens
        self._debt_s += self._rate.prompt_token_s * tokens

    def _to_read(self, each: _RunningSequence) -> int:
        """Assign a KV-cache slot to a sequence, and return how many of its prompt tokens must be
        read.

        Tokens that are cached need not be read.
        """
        if self._cache is None or each.known is None:
            return each.new
        admitted = self._cache.admit(each.known.ids[: each.context], each.known.affinity)
        if admitted is None:
            return each.new
        each.slot, read = admitted
        return read

    def _wake(self, alarm: int) -> None:
        if alarm != self._alarm:  # something changed meanwhile
            return
        self._catch_up()
        next_end = self._running[0][0]
        self._steps, self._debt_s = max(self._steps, next_end), 0.0  # remove rounding errors
        while self._running and self._running[0][0] <= self._steps:
            self._end(heapq.heappop(self._running)[2])
        self._reschedule()

    def _end(self, each: _RunningSequence) -> None:
        self._record(each)
        self.in_flight -= 1
        self.sampled += each.num_recorded
        if self._cache is not None and each.known is not None and each.slot is not None:
            length = each.context + max(1, int(each.num_recorded))
            self._cache.release(each.slot, each.known.ids[:length])
        each.done.succeed(each.spans)

    def _record(self, each: _RunningSequence) -> None:
        """Record how many tokens of a simulated reply the current weights have sampled.

        Tokens that earlier calls recorded are not counted again.
        """
        if each.begun is None:
            return
        tokens = min(self._steps - each.begun, each.sampled) - each.num_recorded
        if tokens > 0:
            each.spans.append((self.version, tokens))
            each.num_recorded += tokens


def pick_least_loaded_engine(engines: list[SimulatedEngine]) -> SimulatedEngine:
    """Return the least busy engine for a new rollout.

    It is the engine with the fewest requests in flight and, among equals, the fewest rollouts so
    far. ``inference/http/fleet.py`` makes the same choice in real runs.
    """
    engine = min(engines, key=lambda each: (each.in_flight, each.trees))
    engine.trees += 1
    return engine
