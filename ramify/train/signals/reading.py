"""Signals at work: they read each group as soon as it is whole, while other rollouts go on.

    rollouts of item 0 ── group ──┐
    rollouts of item 1 ────────── │ ── group ──┐         each signal reads each group by itself, all at once
                                  ▼            ▼
                            signals read   signals read ── composed into streams ── judges' calls onto the tree

Decides who is read when, and what is measured: how long each signal was at it (``NAME/s``; signals overlap with rollouts
and with each other), and how long the step waited for signals alone (``signals_wait_s``). What fails is that trajectory's
abstention; a bug is raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from ramify.clients.base import Client
from ramify.clients.pool import Pool
from ramify.engine.limits import Limits
from ramify.engine.run import Cache
from ramify.errors import ConfigError, RamifyError
from ramify.tasks.base import Item
from ramify.train.algorithms.base import Algorithm
from ramify.train.signals.asking import BUDGET, POLICY, Judges, put_on_tree
from ramify.train.signals.base import Context, Reading, Scorer, Signal, Writing
from ramify.train.signals.compose import Hybrid, abstentions
from ramify.types.trajectory import Group


class Scoring(Protocol):
    """Gives the teachers of a step; see ``scorer.Teachers``."""

    async def at(self, step: int) -> Mapping[str, Scorer]: ...

    def measured(self) -> dict[str, float]: ...


class Signals:
    """The signals of one run."""

    def __init__(
        self, signals: Mapping[str, Signal], hybrid: Hybrid, *,
        pool: Callable[[], AbstractAsyncContextManager[Pool]] | None = None, budget: Limits = BUDGET,
        cache: Cache | None = None, policy: Client | None = None, teachers: Scoring | None = None,
        writing: Writing | None = None, weights: Mapping[str, float] | None = None, temperature: float = 1.0,
        say: Callable[[str], None] = print, wants_reference: bool = False,
    ) -> None:  # fmt: skip
        """``pool`` gives the rollouts' pool; ``policy`` answers judges whose model is ``policy``. Raises ConfigError for a
        term without its signal."""
        hybrid.check(signals)
        self._signals, self._hybrid, self._pool, self._budget = dict(signals), hybrid, pool, budget
        self._cache, self._teachers, self._writing = cache, teachers, writing
        self._own = {POLICY: policy} if policy is not None else {}
        self._weights, self._temperature, self._say = dict(weights or {}), temperature, say
        self._wants_reference = wants_reference
        self._judges: Judges | None = None

    @contextlib.asynccontextmanager
    async def step(self, number: int, items: Sequence[Item]) -> AsyncIterator[Reader]:
        """A reader for step ``number``; ``items`` are those that may be rolled out."""
        async with contextlib.AsyncExitStack() as stack:
            judges = None
            if self._pool is not None:
                pool = await stack.enter_async_context(self._pool())
                if self._judges is None or self._judges.pool is not pool:
                    self._judges = Judges(pool, self._budget, own=self._own, cache=self._cache)
                judges = self._judges
            wanted = {name: each for name, each in self._signals.items() if self._hybrid.wants(name, number)}
            context = Context(
                step=number, items={item.id: item for item in items}, weights=self._weights, asking=judges,
                scorers=await self._teachers.at(number) if self._teachers is not None else {}, writing=self._writing,
                temperature=self._temperature, wants_reference=self._wants_reference,
            )  # fmt: skip
            yield Reader(wanted, context, self._teachers, judges, self._say)


class Reader:
    """The readings of one step."""

    def __init__(
        self, signals: Mapping[str, Signal], context: Context, teachers: Scoring | None, judges: Judges | None,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.context = context
        self.readings: dict[str, dict[str, Reading]] = {name: {} for name in signals}
        self._signals, self._teachers, self._judges, self._say = signals, teachers, judges, say
        self._at_work: dict[str, tuple[int, float]] = {}
        """Signal -> (groups that it reads now, since when)."""
        self._seconds = dict.fromkeys(signals, 0.0)
        self._before = dict(teachers.measured()) if teachers is not None else {}
        self._cost_before = judges.ledger.cost or 0.0 if judges is not None else 0.0
        self._calls_before = judges.ledger.spent.calls if judges is not None else 0
        self._said: set[str] = set()
        self._whole_at = self._read_at = time.perf_counter()
        """When the last group so far was whole, and when the last reading ended."""

    async def group(self, group: Group) -> None:
        """Let all signals read ``group``."""
        self._whole_at = time.perf_counter()
        await asyncio.gather(*(self._read(name, signal, group) for name, signal in self._signals.items()))
        self._read_at = time.perf_counter()

    def composed(self, algorithm: Algorithm) -> Algorithm:
        """The recipe's hybrid, as it is at this step, with what was read."""
        assert isinstance(algorithm, Hybrid)
        return algorithm.given(self.readings, self.context.step)

    def put_on_trees(self, groups: Sequence[Group]) -> None:
        """Once streams are made: what judges were asked and said, and each signal's numbers, beside what they are about."""
        for group in groups:
            for trajectory in group.trajectories:
                put_on_tree(
                    trajectory,
                    {name: found[trajectory.id] for name, found in self.readings.items() if trajectory.id in found},
                )

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {"signals_wait_s": max(0.0, self._read_at - self._whole_at)}
        for name, readings in self.readings.items():
            found |= {f"{name}/{what}": value for what, value in abstentions(readings).items()}
            found[f"{name}/s"] = self._seconds[name]
            found[f"{name}/read"] = float(sum(not each.abstained for each in readings.values()))
        if self._teachers is not None:
            now = self._teachers.measured()
            found |= {name: value - self._before.get(name, 0.0) for name, value in now.items()}
        if self._judges is not None:
            found["judge_calls"] = float(self._judges.ledger.spent.calls - self._calls_before)
            found["judge_cost"] = (self._judges.ledger.cost or 0.0) - self._cost_before
        return found

    async def _read(self, name: str, signal: Signal, group: Group) -> None:
        num, since = self._at_work.get(name, (0, time.perf_counter()))
        self._at_work[name] = (num + 1, since if num else time.perf_counter())
        try:
            found = await signal.read(group, self.context)
        except ConfigError:
            raise
        except RamifyError as error:
            self._tell(f"signal '{name}' says nothing of {group.task}: {error}")
            found = [Reading(abstained=type(error).__name__) for _ in group.trajectories]
        finally:
            num, since = self._at_work[name]
            if num == 1:
                self._seconds[name] += time.perf_counter() - since
            self._at_work[name] = (num - 1, since)
        if len(found) != len(group.trajectories):
            raise ConfigError(
                f"signal '{name}' gave {len(found)} readings for {len(group.trajectories)} trajectories of {group.task}: it "
                "gives one for each, in order"
            )
        self.readings[name] |= {each.id: reading for each, reading in zip(group.trajectories, found, strict=True)}

    def _tell(self, text: str) -> None:
        """Each kind of failure once a step."""
        kind = text.partition(" of ")[0]
        if kind not in self._said:
            self._said.add(kind)
            self._say(text)


def signals_of(specs: Mapping[str, Any]) -> dict[str, Signal]:
    """The signals of a recipe, made. Raises ConfigError for one there is not, with the nearest name."""
    from ramify.train.signals.registry import SIGNALS, made

    found: dict[str, Signal] = {}
    for name, spec in specs.items():
        signal: Signal = made(spec, SIGNALS, "signal")
        if not callable(getattr(signal, "read", None)):
            raise ConfigError(f"signal '{name}' is {spec!r:.60}, which has no `async read(group, context)`")
        found[name] = signal
    return found
