"""A run in simulated time: groups begin as their staleness allows, engines and a trainer work, weights are published.

    may begin? ──▶ rollouts of a group, ``concurrency`` at once ──▶ whole
                                                                     │ a step takes ``items`` groups: first those that would
        ▲                                                            ▼ be too old for the next, then any that are whole
        └────── version + 1 ◀── publish ◀── learn ◀──────────────────┘

A group may begin while fewer than ``(version + 1 + staleness) · items`` have: with staleness 0 a step's groups begin once
the last step's weights are published. Work is drawn from whole measured groups, by the group's number and the seed alone,
so that every placement has the same work. Leaves out evaluations, checkpoints of an unusual size, failures, and dynamic
sampling but for the share of groups that it gives up.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from statistics import fmean, median
from typing import Any

import msgspec
from simpy import AllOf, Environment, Event

from ramify.cluster.engine import Engine, Spans
from ramify.cluster.measured import Measured
from ramify.cluster.play import Stage
from ramify.cluster.rate import Rate
from ramify.cluster.trees import Rollout
from ramify.errors import ConfigError


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated."""

    engines: int = 1
    slots: int = 128
    """Sequences at once, of each engine."""
    ranks: int = 1
    """Of the trainer."""
    shared: bool = False
    """Engines and trainer are on the same devices: engines stand still while it learns."""
    staleness: int = 0
    """Most versions that weights may have gone on since a group began."""
    items: int
    """Groups per step."""
    group: int
    """Rollouts of each."""
    concurrency: int
    """Rollouts at once."""
    on_wire: int = 1_000_000
    """Requests at once, of all rollouts together (``limits.max_concurrency``)."""

    def __post_init__(self) -> None:
        for name in ("engines", "slots", "ranks", "items", "group", "concurrency", "on_wire"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.staleness < 0:
            raise ConfigError(f"staleness={self.staleness} cannot be negative")


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """What a setting comes to, once it has got going: the first ``staleness + 1`` steps are left out."""

    setting: Setting
    steps: int
    """That were counted."""
    step_s: float
    """Median seconds from the end of a step to the end of the next."""
    step_90_s: float
    """Nine steps of ten take at most so long."""
    step_mean_s: float
    engine_busy: float
    """Share of time in which an engine steps; of all engines."""
    at_once: float
    """Sequences in slots, of each engine, on average."""
    trainer_busy: float
    """Share of time in which the trainer learns or publishes."""
    staleness: float
    """Versions between sampling and learning, mean over tokens."""
    staleness_max: int
    sampled_per_s: float
    """Tokens, of all engines."""
    learnt_per_s: float
    """Tokens that the trainer computes."""

    @property
    def steps_per_hour(self) -> float:
        return 3600 / self.step_mean_s


class _Group:
    """One group while it is played."""

    def __init__(self, version: int, rollouts: Sequence[Rollout], whole: Event) -> None:
        self.version, self.rollouts, self.whole = version, rollouts, whole
        """``version``: that of the weights when it began."""
        self.spans: Spans = []
        self.is_given_up = False


class _Seen(msgspec.Struct):
    """Counts at the end of one step."""

    at_s: float
    engine_busy_s: float
    sequence_s: float
    trainer_busy_s: float
    sampled: float
    learnt: int
    spans: list[tuple[int, float]]
    """(versions behind, tokens) of what this step learnt from."""


def simulate(measured: Measured, setting: Setting, *, steps: int = 20, seed: int = 0) -> Predicted:
    """What ``setting`` comes to over ``steps`` steps, after those that fill the pipeline."""
    if steps < 1:
        raise ConfigError(f"steps={steps} must be at least 1")
    return _Simulation(measured, setting, seed).run(steps)


class _Simulation:
    def __init__(self, measured: Measured, setting: Setting, seed: int) -> None:
        self._measured, self._setting, self._seed = measured, setting, seed
        self._env = Environment()
        rate: Rate = measured.rate
        self._engines = [Engine(self._env, rate, setting.slots) for _ in range(setting.engines)]
        self._stage = Stage(self._env, self._engines, rate, setting.concurrency, setting.on_wire)
        self._version = self._num_begun = self._num_given_up = 0
        self._outstanding: list[_Group] = []
        """Begun and not learnt from, oldest first."""
        self._news: Event = self._env.event()
        self._trainer_busy_s = 0.0
        self._seen: list[_Seen] = []

    def run(self, steps: int) -> Predicted:
        num_first = self._setting.staleness + 1
        self._env.run(until=self._env.process(self._train(num_first + steps)))
        return self._predicted(num_first)

    # --- work ----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """All groups that may begin now."""
        setting = self._setting
        most = (self._version + 1 + setting.staleness) * setting.items + self._num_given_up
        while self._num_begun < most:
            draw = random.Random(f"{self._seed}/group/{self._num_begun}")
            group = _Group(self._version, self._measured.group(draw, setting.group), self._env.event())
            group.is_given_up = draw.random() < self._measured.silent
            self._num_begun += 1
            self._outstanding.append(group)
            self._env.process(self._play(group))

    def _play(self, group: _Group) -> Generator[Event, Any, None]:
        yield AllOf(self._env, [self._env.process(self._stage.play(each, group.spans)) for each in group.rollouts])
        if group.is_given_up:  # another takes its place
            self._outstanding.remove(group)
            self._num_given_up += 1
            self._begin()
        else:
            group.whole.succeed()
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, self._env.event()
        news.succeed()

    # --- steps ---------------------------------------------------------------------------------------------------

    def _train(self, steps: int) -> Generator[Event, Any, None]:
        setting = self._setting
        for step in range(steps):
            self._begin()
            while (taken := self._taken()) is None:
                yield self._news
            draw = random.Random(f"{self._seed}/step/{step}")
            num_learnt = sum(rollout.learnt for group in taken for rollout in group.rollouts)
            for group in taken:
                self._outstanding.remove(group)
            learn_s, publish_s = self._measured.learn(draw, num_learnt, setting.ranks)
            prepare_s = self._measured.prepare(draw)
            yield self._env.timeout(prepare_s)
            yield from self._held(learn_s, setting.shared)
            yield from self._held(publish_s, True)
            self._version += 1
            for engine in self._engines:
                engine.take(self._version)
            self._trainer_busy_s += learn_s + publish_s
            self._note(num_learnt, taken)

    def _taken(self) -> list[_Group] | None:
        """The groups of the next step; None until there are enough."""
        setting = self._setting
        due = [each for each in self._outstanding if self._version - each.version >= setting.staleness]
        if not all(each.whole.triggered for each in due):
            return None
        others = [each for each in self._outstanding if each not in due and each.whole.triggered]
        found = [*due, *others][: setting.items]
        return found if len(found) == setting.items else None

    def _held(self, seconds: float, holds_engines: bool) -> Generator[Event, Any, None]:
        """Let ``seconds`` pass, in which engines stand still or not."""
        held = self._engines if holds_engines else []
        for engine in held:
            engine.pause()
        yield self._env.timeout(seconds)
        for engine in held:
            engine.resume()

    # --- what is seen --------------------------------------------------------------------------------------------

    def _note(self, num_learnt: int, taken: Sequence[_Group]) -> None:
        for engine in self._engines:
            engine.settle()
        learns = self._version - 1
        behind = [(learns - version, tokens) for group in taken for version, tokens in group.spans]
        self._seen.append(
            _Seen(
                self._env.now, sum(each.busy_s for each in self._engines), sum(each.sequence_s for each in self._engines),
                self._trainer_busy_s, sum(each.sampled for each in self._engines), num_learnt, behind,
            )
        )  # fmt: skip

    def _predicted(self, num_first: int) -> Predicted:
        before, seen = self._seen[num_first - 1], self._seen[num_first:]
        last, num = seen[-1], self._setting.engines
        took = last.at_s - before.at_s
        step_s = [now.at_s - then.at_s for then, now in zip([before, *seen], seen, strict=False)]
        behind = [each for step in seen for each in step.spans]
        tokens = sum(each for _, each in behind)
        return Predicted(
            setting=self._setting, steps=len(seen), step_s=median(step_s), step_90_s=quantile(step_s, 0.9),
            step_mean_s=fmean(step_s), engine_busy=(last.engine_busy_s - before.engine_busy_s) / took / num,
            at_once=(last.sequence_s - before.sequence_s) / took / num,
            trainer_busy=(last.trainer_busy_s - before.trainer_busy_s) / took,
            staleness=sum(age * each for age, each in behind) / tokens if tokens else 0.0,
            staleness_max=max((age for age, _ in behind), default=0),
            sampled_per_s=(last.sampled - before.sampled) / took, learnt_per_s=sum(each.learnt for each in seen) / took,
        )  # fmt: skip


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of ``values`` do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
