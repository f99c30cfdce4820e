"""The inference engine that runs in this process.

In a separate thread, it computes one step after another for all sequences that can continue.

    waiting ─ admit ─▶ slots ─ step: one token per decoding slot, ─▶ runner ─▶ logits
       ▲                       prompts in chunks                                 │
       └── preempted if memory is short      finished ◀─ stop? ─ append ◀─ draw ─┘

A sequence that was preempted, or whose cache was cleared because the weights changed, is recomputed
from its token ids and continues sampling. So what a sequence samples does not depend on what
happened to its cache, nor on what else was in the batch.

``LocalEngine`` is synchronous and single-threaded. ``EngineThread`` steps it while there is work,
and runs calls from other threads between two steps:

    asyncio ── call(f) ──▶ inbox ──▶ f()          between steps, in order of arrival
                                     engine.step()
            ◀── done(generation) ────┘            for each that ended, also if the engine failed

Everything that touches the model's weights runs in this thread, so a step never sees half of an
update. ``local_client.py`` calls it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

import msgspec
import torch

from ramify.errors import RequestRefusedError
from ramify.inference.base import CachePressure
from ramify.inference.local.generation_request import GenerationState, sample_tokens
from ramify.inference.local.kv_cache_slots import CacheSlotTable, EngineStep, SlotTokenSpan
from ramify.inference.local.model_runner import ModelRunner
from ramify.inference.local.step_timings import EngineStepTimingRecorder
from ramify.step_time_accounting import WallAndCpuTimer

_LEAST_CAPACITY = 128
"""Initial capacity of each slot in tokens."""


class InferenceEngineLimits(msgspec.Struct, frozen=True):
    """The limits of an inference engine, such as its number of concurrent sequences and its
    memory."""

    slots: int
    """Maximum number of concurrent sequences."""
    prefill_tokens: int
    """Maximum number of prompt tokens processed per step, which limits how long a long prompt can
    delay the sequences that are decoding."""
    cache_bytes: int
    """Memory for the KV cache in bytes. If long sequences need more, fewer sequences run at the
    same time."""
    window: int
    """Context window: maximum tokens per sequence."""
    reuse: bool = True
    """True if one request's cached prefix may be used for other requests."""


class LocalEngine:
    """An inference engine with continuous batching, which runs in this process.

    It generates many sequences at once with one model, and admits a new sequence whenever a slot is
    free.
    """

    def __init__(self, runner: ModelRunner, room: InferenceEngineLimits, version: int = 0) -> None:
        self.version = version
        self.room = room
        self.num_steps = 0
        self.num_computed = 0
        """Number of tokens computed by the model so far."""
        self.num_preempted = 0
        self.paces = EngineStepTimingRecorder()
        self.runner = runner
        self._waiting: deque[GenerationState] = deque()
        self._has_cancelled = False
        self._slots = CacheSlotTable(1, 1, reuse=room.reuse)
        self._num_fitting_steps = 0
        """Number of further steps in which no running sequence can outgrow its slot."""
        self._is_allocated = False
        """False until the first step, which allocates a cache that fits the first sequences."""

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not any(self._slots.owner)

    @property
    def pressure(self) -> CachePressure:
        """The current load on the engine's KV cache.

        It may be read from any thread.
        """
        num_running = sum(owner is not None for owner in list(self._slots.owner))
        used_bytes = num_running * self._slots.capacity * self.runner.bytes_per_token
        return CachePressure(
            min(used_bytes / self.room.cache_bytes, 1.0), len(self._waiting), self.num_preempted
        )

    def add(self, generation: GenerationState) -> None:
        """Add a sequence to the queue of waiting sequences.

        Its maximum length is reduced to what the cache can hold. Raises RequestRefusedError if the
        cache cannot hold the prompt and at least one more token.
        """
        most = self._most_tokens()
        if generation.num_prompt >= most:
            error = RequestRefusedError(
                f"the prompt has {generation.num_prompt} tokens, and the cache of "
                f"{self.room.cache_bytes >> 20} MiB holds "
                f"{most} for one sequence: give the engine more cache_bytes"
            )
            error.too_long = True
            raise error
        generation.max_tokens = min(generation.max_tokens, most - generation.num_prompt)
        self._waiting.append(generation)

    def cancel(self, generation: GenerationState) -> None:
        """Cancel a sequence before the engine's next step.

        Other sequences can still use its cached prefix.
        """
        generation.cancelled = self._has_cancelled = True

    def mark_weights_changed(self, version: int) -> None:
        """Forget everything cached, because the weights have changed to version ``version``."""
        self.version = version
        self._slots.invalidate_cache()
        self.runner.invalidate_cache()

    @torch.inference_mode()
    def step(self) -> list[GenerationState]:
        """Run one forward pass of the model, and return the sequences that it completed."""
        # CPU time, which does not depend on the other processes of the machine.
        started = time.thread_time()
        self._drop_cancelled()
        self._make_room()
        self._admit()
        # A step reads all slots up to the last running one, so running slots stay close together.
        for change in self._slots.compact():
            self.runner.copy_or_swap_slots(change)
        step = self._plan_step()
        if not step.slots and not step.spans:
            return []
        wanted = [span.end == len(self._owner(span.slot).ids) for span in step.spans]
        logits_nV = self.runner.forward(step, wanted)
        self._slots.mark_computed(step)
        self.num_steps += 1
        self.num_computed += step.num_tokens
        slots = [*step.slots, *(span.slot for span in itertools.compress(step.spans, wanted))]
        finished = self._append(slots, logits_nV) if slots else []
        self.paces.record_step(
            len(slots), sum(len(span.ids) for span in step.spans), time.thread_time() - started
        )
        return finished

    def release_cache(self) -> None:
        """Release the memory of the KV cache until a sequence needs it.

        Running sequences return to the queue and are recomputed later. They do not count as
        preempted, since a caller asked for the memory, and the cache was not too small.
        """
        for slot in reversed(self._slots.running()):
            self._waiting.appendleft(self._owner(slot))
            self._slots.release(slot)
        self._slots.invalidate_cache()
        self.runner.invalidate_cache()
        self._resize(1, min(_LEAST_CAPACITY, self.room.window))

    def allocate_cache(self) -> None:
        """Allocate as much memory for the KV cache as a new engine does."""
        self._resize(
            self._num_fitting_slots(_LEAST_CAPACITY), min(_LEAST_CAPACITY, self.room.window)
        )

    def remove_all(self) -> list[GenerationState]:
        """Remove all sequences from the engine and return them, and clear its caches.

        Used after a failure, for example.
        """
        generations = [*self._waiting, *(owner for owner in self._slots.owner if owner is not None)]
        self._waiting.clear()
        for slot in self._slots.running():
            self._slots.release(slot)
        self._slots.invalidate_cache()
        self.runner.invalidate_cache()
        return generations

    def _append(self, slots: Sequence[int], logits_nV: torch.Tensor) -> list[GenerationState]:
        owners = [self._owner(slot) for slot in slots]
        drawn = sample_tokens(
            logits_nV,
            [owner.draw for owner in owners],
            [owner.uniform() for owner in owners],
            fixed=self.runner.is_fixed,
        )
        self._slots.append_tokens(slots, [len(owner.ids) for owner in owners], drawn.ids)
        finished = []
        for slot, owner, id, logprob, kept, top in zip(slots, owners, *drawn, strict=True):
            owner.append(id, logprob, kept, self.version, top)
            if owner.end is not None:
                self._slots.release(slot)
                finished.append(owner)
        if self.runner.routes:
            for owner, routes in zip(owners, self.runner.routes, strict=True):
                owner.routes.append(routes)
        return finished

    def _plan_step(self) -> EngineStep:
        """Plan the next forward pass: its decoding tokens and its prompt tokens.

        Each decoding sequence contributes one token. Prompt tokens are added up to the limits.
        """
        step = EngineStep()
        left, computed = self.room.prefill_tokens, self._slots.length_S.tolist()
        for slot, owner in enumerate(self._slots.owner):
            if owner is None:
                continue
            ids, start = owner.ids, computed[slot]
            if len(ids) == start + 1:
                step.slots.append(slot)
                step.positions.append(start)
                step.ids.append(ids[start])
            elif left > 0:
                step.spans.append(SlotTokenSpan(slot, start, ids[start : start + left]))
                left -= len(step.spans[-1].ids)
        return step

    def _admit(self) -> None:
        """Admit waiting sequences to free KV-cache slots, in order of arrival.

        A sequence may be overtaken only while it waits for another one to compute the same prompt.
        """
        passed: list[GenerationState] = []
        while self._waiting and len(passed) < self._slots.num_slots and None in self._slots.owner:
            generation = self._waiting.popleft()
            admitted = self._slots.admit(generation)
            if admitted is None:
                passed.append(generation)
                continue
            for change in admitted[1]:
                self.runner.copy_or_swap_slots(change)
        self._waiting.extendleft(reversed(passed))

    def _make_room(self) -> None:
        """Resize the KV-cache slots to the lengths of the running and the next queued sequences.

        Each slot holds one sequence. If memory allows, each slot is as long as these sequences may
        become. Otherwise there are fewer slots, until shorter sequences make room for more.
        """
        if self._num_fitting_steps and not self._waiting:
            self._num_fitting_steps -= 1
            return
        num_running = sum(owner is not None for owner in self._slots.owner)
        num_slots = self._slots.num_slots if self._is_allocated else self.room.slots
        next_up = itertools.islice(self._waiting, max(num_slots - num_running, 1))
        candidates = [*(owner for owner in self._slots.owner if owner is not None), *next_up]
        needed = max((len(generation.ids) for generation in candidates), default=0)
        final_length = self._round_up(
            max(
                (generation.num_prompt + generation.max_tokens for generation in candidates),
                default=0,
            )
        )
        if self._num_fitting_slots(final_length) == self.room.slots:
            needed = max(needed, final_length)
        capacity = self._slots.capacity
        if not self._is_allocated:
            capacity = min(max(_LEAST_CAPACITY, self._round_up(needed)), self._most_tokens())
            self._resize(self._num_fitting_slots(capacity), capacity)
        elif needed > capacity:
            capacity = min(max(2 * capacity, self._round_up(needed)), self._most_tokens())
            self._resize(self._num_fitting_slots(capacity), capacity)
        elif (
            self._waiting
            and num_running == self._slots.num_slots < self.room.slots
            and 4 * needed <= capacity
        ):
            # The sequences are short, so more and shorter slots let waiting ones begin.
            capacity = max(_LEAST_CAPACITY, 2 * needed)
            self._resize(self._num_fitting_slots(capacity), capacity)
        # Each step adds at most one token to a sequence.
        are_all_admitted = not self._waiting
        self._num_fitting_steps = max(self._slots.capacity - needed, 0) if are_all_admitted else 0

    def _round_up(self, num_tokens: int) -> int:
        """Round a number of tokens up to a multiple of 64, and limit it to the longest possible
        sequence.

        The result is at least 64, also when all sequences have been cancelled.
        """
        # The CPU's key cache rounds up to 64 in any case, and powers of 2 would take more memory.
        return min(-(-max(num_tokens, 1) // 64) * 64, self._most_tokens())

    def _resize(self, num_slots: int, capacity: int) -> None:
        stay, lost = self._slots.resize(num_slots, capacity)
        self.runner.resize_cache(stay, num_slots, capacity)
        self.num_preempted += len(lost)
        self._num_fitting_steps = 0
        self._is_allocated = True
        self._waiting.extendleft(reversed(lost))

    def _num_fitting_slots(self, capacity: int) -> int:
        """Return how many KV-cache slots of ``capacity`` tokens fit into memory."""
        # The cache of transformers grows with each sequence, so its size is not planned here.
        if not self.runner.bytes_per_token:
            return self.room.slots
        return max(
            1,
            min(self.room.slots, self.room.cache_bytes // (self.runner.bytes_per_token * capacity)),
        )

    def _most_tokens(self) -> int:
        """Return the longest sequence, in tokens, that the context window and memory allow."""
        if not self.runner.bytes_per_token:
            return self.room.window
        return min(self.room.window, self.room.cache_bytes // self.runner.bytes_per_token)

    def _drop_cancelled(self) -> None:
        if not self._has_cancelled:
            return
        for slot in self._slots.running():
            if self._owner(slot).cancelled:
                self._slots.release(slot)
        self._waiting = deque(each for each in self._waiting if not each.cancelled)
        self._has_cancelled = False

    def _owner(self, slot: int) -> GenerationState:
        owner = self._slots.owner[slot]
        assert owner is not None
        return owner

    def __iter__(self) -> Iterator[GenerationState]:
        """Yield the sequences of the engine: first the running ones, then the waiting ones."""
        yield from (owner for owner in self._slots.owner if owner is not None)
        yield from self._waiting


Result = TypeVar("Result")
Done = Callable[[GenerationState, BaseException | None], None]


class EngineThread:
    """The background thread in which an engine runs its steps.

    It starts with the first call. As a daemon thread, it does not keep the program from exiting.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self._inbox: deque[Callable[[], None]] = deque()
        self._done: dict[GenerationState, Done] = {}
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._is_paused = False

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Run a function in the engine's thread between two engine steps.

        Returns a future for its result. Raises RuntimeError after ``close``.
        """
        future: Future[Result] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    with WallAndCpuTimer("weight_sync"):  # calls are about weights
                        future.set_result(function())
                except BaseException as error:  # noqa: BLE001 (raised by the caller)
                    future.set_exception(error)

        self._put(run)
        return future

    def add(self, generation: GenerationState, done: Done) -> None:
        """Add a sequence to the engine's queue of waiting sequences.

        Once it has ended, ``done`` is called in the engine's thread, with the sequence and either
        None or the error that ended it.
        """

        def run() -> None:
            try:
                self.engine.add(generation)
            except Exception as error:  # noqa: BLE001 (passed to the caller)
                done(generation, error)
            else:
                self._done[generation] = done

        self._put(run)

    def cancel(self, generation: GenerationState) -> None:
        """Cancel a sequence before the engine's next step.

        Its ``done`` callback is not called.
        """

        def run() -> None:
            if self._done.pop(generation, None) is not None:
                self.engine.cancel(generation)

        # ``close`` ends all sequences itself, and a caller that cleans up must not get an error.
        if not self._is_closed:
            self._put(run)

    def pause(self, *, abort: bool = False) -> None:
        """Pause the generation of all sequences until ``resume`` is called.

        Running sequences keep their caches, and functions passed to ``call`` still run. With
        ``abort``, running sequences end at once with the reason ``abort``, and their callbacks are
        called.
        """
        with self._wake:
            self._is_paused = True
        if abort:
            self._put(self._abort)

    def resume(self) -> None:
        with self._wake:
            self._is_paused = False
            self._wake.notify()

    def close(self) -> None:
        """End the engine's thread after its current step.

        Sequences that have not ended fail. A second call has no effect.
        """
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _put(self, run: Callable[[], None]) -> None:
        with self._wake:
            if self._is_closed:
                raise RuntimeError("this engine was closed")
            self._inbox.append(run)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ramify-engine", daemon=True)
                self._thread.start()
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while (
                    not self._inbox
                    and (self._is_paused or self.engine.is_idle)
                    and not self._is_closed
                ):
                    self._wake.wait()
                tasks, is_closed = list(self._inbox), self._is_closed
                self._inbox.clear()
            for task in tasks:
                task()
            if is_closed:
                self._fail(RuntimeError("the engine was closed"))
                return
            if not self._is_paused and not self.engine.is_idle:
                self._step()

    def _step(self) -> None:
        try:
            with WallAndCpuTimer("sampling"):
                finished = self.engine.step()
        except Exception as error:  # noqa: BLE001 (passed to all callers)
            self._fail(error)
            return
        for generation in finished:
            done = self._done.pop(generation, None)
            if done is not None:
                done(generation, None)

    def _abort(self) -> None:
        for generation in self.engine.remove_all():
            generation.end = "abort"
            done = self._done.pop(generation, None)
            if done is not None:
                done(generation, None)

    def _fail(self, error: BaseException) -> None:
        for generation in self.engine.remove_all():
            done = self._done.pop(generation, None)
            if done is not None:
                done(generation, error)
