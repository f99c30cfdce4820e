"""Simulate a training run's rollouts, engines and trainer to predict its speed.

Rollouts begin as soon as their allowed staleness permits, engines sample, and a trainer learns and
publishes new weights.

    queue and rollouts (simulated_rollout.py) on engines ───────────────────────▶ a step's groups
          ▲                                       (simulated_engine.py)                 │
          └──────── version + 1 ◀── publish ◀── learn ◀── prepare ◀─────────────────────┘

Whole measured groups are drawn as work, by the number of the group and the seed only, so that every
setting gets the same work. An evaluation takes its measured time; in an asynchronous run, rollouts
continue meanwhile. Saving checkpoints is part of the time of publishing. Failures and the network
are not simulated.

    setting_combinations(…, slots=[64, 128], staleness=[0, 1])    every combination of settings
    splits(8)      8 devices as 1 + 7, 2 + 6, …, 7 + 1 for engines and trainer, or all 8 for both

An engine or a trainer rank normally has a device to itself. On shared devices, engines pause while
the trainer learns; the time to release and reload memory is not included.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Generator, Iterator, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
from simpy import Environment, Event

from ramify.errors import ConfigError
from ramify.extras.cluster.rollout_workloads import RolloutWorkload
from ramify.extras.cluster.simulated_engine import SimulatedEngine, SimulatedKvCache
from ramify.extras.cluster.simulated_rollout import (
    RolloutGroupQueueSimulator,
    RolloutSimulator,
    SimulatedRolloutGroup,
)
from ramify.extras.cluster.simulation_inputs import SimulationInputs
from ramify.progress import track_progress


class SimulationSetting(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one simulation, such as the number of inference engines."""

    engines: int = 1
    slots: int = 128
    """Concurrent sequences in each engine."""
    ranks: int = 1
    """Ranks of the trainer."""
    shared: bool = False
    """True if engines and trainer share devices, so that engines pause while the trainer learns."""
    staleness: int = 0
    """Maximum staleness in steps (``rl.sample.max_staleness``). The names ``grace_steps``,
    ``items``, ``max_items`` and ``straggler_factor`` are also those of ``rl.sample``."""
    grace_steps: int = 4
    items: int
    max_items: int = 0
    straggler_factor: float = 0.0
    group: int
    """Rollouts in a group, that is, per item."""
    concurrency: int
    """Maximum number of concurrent rollouts."""
    on_wire: int = 1_000_000
    """Maximum number of concurrent requests over all rollouts (``limits.max_concurrency``)."""
    keeps: bool = False
    """True if an engine caches only the sequences in its slots. A call's cached prefix is then lost
    when another call takes its slot."""
    cache_tokens: int = 0
    """Capacity of an engine's cache in tokens. 0 means unlimited."""
    evaluate: int = 0
    """Number of steps between evaluations. 0 means never."""
    embedded: bool = False
    """True if the engine runs in the trainer's process. It then competes for CPU cores, if the CPU
    use of the other parts is known."""

    @property
    def max_staleness(self) -> int:
        return self.staleness

    @property
    def max_token_staleness(self) -> int:
        """The maximum number of weight versions between sampling a token and training on it."""
        return self.staleness + self.grace_steps if self.staleness else 0

    def __post_init__(self) -> None:
        for name in ("engines", "slots", "ranks", "items", "group", "concurrency", "on_wire"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("staleness", "grace_steps", "cache_tokens", "evaluate"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 0")
        if 0 < self.max_items < self.items:
            raise ConfigError(
                f"max_items={self.max_items} must be 0 or at least items={self.items}"
            )
        if not (self.straggler_factor == 0 or 1 <= self.straggler_factor < float("inf")):
            raise ConfigError(
                f"straggler_factor={self.straggler_factor:g} is a multiple of the median: give at "
                "least 1, or 0 for never"
            )


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted speed, load and staleness of a run under one simulation setting.

    The first and last few steps are excluded, because fewer groups are in progress then.
    """

    setting: SimulationSetting
    steps: int
    """Number of steps counted."""
    step_s: float
    """Median seconds from the end of one step to the end of the next."""
    step_90_s: float
    """90th percentile of the seconds per step."""
    step_mean_s: float
    engine_busy: float
    """Fraction of time in which an engine decodes, averaged over engines."""
    at_once: float
    """Mean number of sequences in the slots of an engine."""
    trainer_busy: float
    """Fraction of time in which the trainer learns or publishes weights."""
    staleness: float
    """Mean number of weight versions between sampling a token and learning from it."""
    staleness_max: int
    sampled_per_s: float
    """Tokens per second sampled by all engines."""
    learnt_per_s: float
    """Tokens per second processed by the trainer."""
    stragglers: float
    """Mean number of rollouts per step that are dropped for being too slow."""
    computed_s: float = 0.0
    """CPU seconds that a step's rollouts take in the embedded engine, the event loop and sessions;
    0 if unknown."""
    evaluating_s: float = 0.0
    """Seconds of evaluation per step. They are not part of ``step_s``."""

    @property
    def steps_per_hour(self) -> float:
        """The number of training steps per hour, including evaluation time."""
        return 3600 / (self.step_mean_s + self.evaluating_s)


class _StepCounts(msgspec.Struct):
    """The running totals of a simulated run at the end of one training step."""

    at_s: float
    evaluating_s: float
    engine_busy_s: float
    sequence_s: float
    trainer_busy_s: float
    sampled: float
    stragglers: int
    computed_s: float = 0.0
    learnt: int = 0
    behind: list[tuple[int, float]] = []
    """One (staleness in versions, number of tokens) pair for each span that this step learns from.
    """


def simulate(
    measured: SimulationInputs,
    setting: SimulationSetting,
    *,
    steps: int = 20,
    seed: int = 0,
    in_order: bool = False,
) -> SimulationResult:
    """Simulate ``steps`` training steps of a run under one setting.

    Groups of rollouts are drawn at random from the measured ones. If ``in_order`` is true, they are
    used in their measured order.
    """
    if steps < 1:
        raise ConfigError(f"steps={steps} must be at least 1")
    return _Simulation(measured, setting, seed, in_order).run(steps)


class _Simulation:
    """One simulation in progress: its clock, engines, trainer and counters."""

    def __init__(
        self, measured: SimulationInputs, setting: SimulationSetting, seed: int, in_order: bool
    ) -> None:
        self._measured = measured
        self._setting = setting
        self._seed = seed
        self._in_order = in_order
        self._env = Environment()
        rate = measured.rate
        caches = [
            SimulatedKvCache(setting.slots, measured.max_sequence_tokens) if setting.keeps else None
            for _ in range(setting.engines)
        ]
        self._engines = [
            SimulatedEngine(self._env, rate, setting.slots, cache, setting.cache_tokens)
            for cache in caches
        ]
        self._stage = RolloutSimulator(
            self._env,
            self._engines,
            rate,
            setting.concurrency,
            setting.on_wire,
            measured.host,
            embedded=setting.embedded,
        )
        self._trainer_busy_s = self._evaluating_s = self._learnt_s = 0.0
        self._counts: list[_StepCounts] = []

    def run(self, steps: int) -> SimulationResult:
        # Steps at both ends are simulated but not counted, because fewer groups are in progress
        # there.
        around = self._setting.staleness + 1
        num_steps = around + steps + around - 1
        queue = RolloutGroupQueueSimulator(
            self._env, self._stage, self._setting, self._draw_group, self._setting.group, num_steps
        )
        self._env.run(until=self._env.process(self._train(queue, num_steps)))
        return self._result(around, steps)

    def _draw_group(self, number: int) -> tuple[Sequence[RolloutWorkload], bool]:
        """Draw one simulated group of rollouts, and decide whether they all get the same reward.

        Nothing can be learned from a group with equal rewards.
        """
        # Drawn from the seed and the group number alone, so that all settings get the same work.
        draw = random.Random(f"{self._seed}/group/{number}")
        of = number % len(self._measured.groups) if self._in_order else None
        rollouts = self._measured.sample_group(draw, self._setting.group, of)
        return rollouts, draw.random() < self._measured.zero_variance

    def _train(
        self, queue: RolloutGroupQueueSimulator, num_steps: int
    ) -> Generator[Event, Any, None]:
        for step in range(num_steps):
            groups = yield from queue.take(step)
            draw = random.Random(f"{self._seed}/step/{step}")
            completed = [
                attempt for group in groups for attempt in group.attempts if not attempt.is_given_up
            ]
            num_learnt = sum(attempt.rollout.trainer_tokens for attempt in completed)
            yield self._env.timeout(self._measured.draw_learning_delay(draw))
            learn_s, publish_s = self._measured.draw_learning_times(
                draw, num_learnt, self._setting.ranks
            )
            yield from self._learn(learn_s)
            yield from self._wait(publish_s, True)
            for engine in self._engines:
                engine.load_weights(step + 1)
            queue.on_new_weights(step + 1)
            self._trainer_busy_s += learn_s + publish_s
            self._note(step, num_learnt, groups, queue.num_stragglers)
            if self._setting.evaluate and (step + 1) % self._setting.evaluate == 0:
                yield self._env.timeout(self._measured.evaluate_s)
                self._evaluating_s += self._measured.evaluate_s

    def _learn(self, seconds: float) -> Generator[Event, Any, None]:
        """Simulate the time that the trainer spends on learning.

        Depending on the setting, the trainer uses the engines' devices, shared CPU cores or
        separate devices.
        """
        cores = self._stage.cores
        if self._setting.embedded and cores is not None:
            yield cores.run_session_work(seconds)
            self._learnt_s += seconds
        else:
            yield from self._wait(seconds, self._setting.shared)

    def _wait(self, seconds: float, pauses_engines: bool) -> Generator[Event, Any, None]:
        """Let simulated time pass, with the engines paused if ``pauses_engines`` is true."""
        paused = self._engines if pauses_engines else []
        for engine in paused:
            engine.pause()
        yield self._env.timeout(seconds)
        for engine in paused:
            engine.resume()

    # --- counts -----------------------------------------------------------------------------------

    def _note(
        self, step: int, num_learnt: int, groups: Sequence[SimulatedRolloutGroup], stragglers: int
    ) -> None:
        for engine in self._engines:
            engine.update_counters()
        spans = [
            span
            for group in groups
            for attempt in group.attempts
            if not attempt.is_given_up
            for span in attempt.spans
        ]
        self._counts.append(
            _StepCounts(
                self._env.now,
                self._evaluating_s,
                sum(each.busy_s for each in self._engines),
                sum(each.sequence_s for each in self._engines),
                self._trainer_busy_s,
                sum(each.sampled for each in self._engines),
                stragglers,
                self._rollout_cpu_seconds(),
                num_learnt,
                [(step - version, tokens) for version, tokens in spans],
            )
        )

    def _rollout_cpu_seconds(self) -> float:
        """Return how many CPU seconds the rollouts have used in the simulation so far.

        CPU time for learning is excluded.
        """
        cores = self._stage.cores
        if cores is None:
            return 0.0
        cores.settle()
        return cores.used_s - self._learnt_s

    def _result(self, first: int, num: int) -> SimulationResult:
        before, counted = self._counts[first - 1], self._counts[first : first + num]
        last, engines = counted[-1], self._setting.engines
        took = last.at_s - before.at_s
        step_s = [
            now.at_s - then.at_s - (now.evaluating_s - then.evaluating_s)
            for then, now in itertools.pairwise([before, *counted])
        ]
        behind = [span for step in counted for span in step.behind]
        tokens = sum(num_tokens for _, num_tokens in behind)
        return SimulationResult(
            setting=self._setting,
            steps=num,
            step_s=median(step_s),
            step_90_s=quantile(step_s, 0.9),
            step_mean_s=fmean(step_s),
            engine_busy=(last.engine_busy_s - before.engine_busy_s) / took / engines,
            at_once=(last.sequence_s - before.sequence_s) / took / engines,
            trainer_busy=(last.trainer_busy_s - before.trainer_busy_s) / took,
            staleness=sum(age * each for age, each in behind) / tokens if tokens else 0.0,
            staleness_max=max((age for age, _ in behind), default=0),
            sampled_per_s=(last.sampled - before.sampled) / took,
            learnt_per_s=sum(step.learnt for step in counted) / took,
            stragglers=(last.stragglers - before.stragglers) / num,
            computed_s=(last.computed_s - before.computed_s) / num,
            evaluating_s=self._measured.evaluate_s / self._setting.evaluate
            if self._setting.evaluate
            else 0.0,
        )


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile that is one of the given values, without interpolation.

    It is the smallest value such that at least the fraction ``share`` of all values is at or below
    it.

    >>> quantile([4.0, 1.0, 3.0, 2.0], 0.5)
    2.0
    """
    ordered = sorted(values)
    return next(
        each for index, each in enumerate(ordered, 1) if index >= share * len(ordered) - 1e-9
    )


MOST_ROLLOUTS = 300_000
"""Maximum number of rollouts that one call of ``simulate_settings`` simulates over all settings. A
few hundred are simulated per second."""


class DeviceSplit(NamedTuple):
    """One way to divide devices between inference engines and the trainer."""

    engines: int
    ranks: int
    shared: bool = False


def splits(devices: int, engine_devices: int = 1) -> list[DeviceSplit]:
    """Return all ways to divide devices between engines and trainer ranks.

    Each engine takes ``engine_devices`` of them. Raises ConfigError if there are too few for one
    engine.
    """
    if devices < engine_devices or min(devices, engine_devices) < 1:
        raise ConfigError(
            f"{devices} devices are too few for an engine of {engine_devices}: give more, or "
            "lower --engine-devices"
        )
    most = devices // engine_devices
    apart = [DeviceSplit(num, devices - num * engine_devices) for num in range(1, most + 1)]
    return [*(each for each in apart if each.ranks), DeviceSplit(most, devices, shared=True)]


def setting_combinations(
    measured: SimulationInputs,
    device_splits: Sequence[DeviceSplit],
    *,
    slots: Sequence[int] = (),
    staleness: Sequence[int] = (),
    items: int | None = None,
    group: int | None = None,
    concurrency: int | None = None,
    straggler_factor: float | None = None,
    grace_steps: int | None = None,
) -> Iterator[SimulationSetting]:
    """Yield a simulation setting for every combination of the given values.

    A value that is empty or None is taken from the measured run.
    """
    sizes = measured.sizes
    for split, num_slots, most in itertools.product(
        device_splits, slots or [sizes.slots], staleness or [sizes.staleness]
    ):
        yield SimulationSetting(
            engines=split.engines,
            ranks=split.ranks,
            shared=split.shared,
            slots=num_slots,
            staleness=most,
            items=items or sizes.items,
            group=group or sizes.group,
            concurrency=concurrency or sizes.concurrency,
            on_wire=sizes.on_wire,
            max_items=max(sizes.max_items, items or 0) if sizes.max_items else 0,
            straggler_factor=sizes.straggler_factor
            if straggler_factor is None
            else straggler_factor,
            grace_steps=sizes.grace_steps if grace_steps is None else grace_steps,
            keeps=sizes.keeps,
            evaluate=sizes.evaluate,
            cache_tokens=sizes.cache_tokens,
            embedded=sizes.embedded and split == DeviceSplit(1, 1),
        )


def simulate_settings(
    measured: SimulationInputs,
    settings: Sequence[SimulationSetting],
    *,
    steps: int = 20,
    seed: int = 0,
) -> list[SimulationResult]:
    """Return the predicted speed of a training run with each of the given settings.

    All settings are simulated on the same measured rollouts. Raises ConfigError if that would take
    more than about an hour.
    """
    num = sum(each.items * each.group * (steps + 2 * each.staleness + 1) for each in settings)
    if num > MOST_ROLLOUTS:
        raise ConfigError(
            f"{len(settings)} settings over {steps} steps are {num} rollouts, and at most "
            f"{MOST_ROLLOUTS} are simulated: try fewer settings at once (engines, slots, ranks, "
            "staleness, devices), fewer steps, or fewer items and groups"
        )
    results = []
    with track_progress("simulating", len(settings), "settings") as progress:
        for setting in settings:
            results.append(simulate(measured, setting, steps=steps, seed=seed))
            progress.set_progress(len(results))
    return results


def best(results: Sequence[SimulationResult]) -> SimulationResult:
    """Return the simulation result with the most training steps per hour.

    If several are within one percent of it, prefer the lowest staleness, then the fewest devices.
    """
    most = max(each.steps_per_hour for each in results)
    near = [each for each in results if each.steps_per_hour >= 0.99 * most]
    return min(
        near,
        key=lambda each: (
            each.staleness,
            each.setting.engines + each.setting.ranks,
            -each.steps_per_hour,
        ),
    )
