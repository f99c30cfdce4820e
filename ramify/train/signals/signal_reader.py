"""Signals at work: they read each group as soon as it is whole, while other rollouts go on.

    rollouts of item 0 ── group ──┐
    rollouts of item 1 ────────── │ ── group ──┐         each signal reads each group by itself, all at once
                                  ▼            ▼
                            signals read   signals read ── composed into streams ── judges' calls onto the tree

Decides who is read when, and what is measured: how long each signal was at it (``NAME/s``; signals
overlap with rollouts and with each other), and how long the step waited for signals alone
(``signals_wait_s``). What fails is that trajectory's abstention; a bug is raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ramify.clients.base import Client
from ramify.clients.pool import ClientPool
from ramify.engine.limits import Limits
from ramify.engine.run_state import ReplyCache
from ramify.errors import ConfigError, RamifyError
from ramify.tasks.base import Item
from ramify.train.algorithms.base import Algorithm
from ramify.train.signals.base import (
    PromptRenderer,
    Signal,
    SignalContext,
    SignalScore,
    TokenScorer,
)
from ramify.train.signals.compose import Hybrid, abstentions
from ramify.train.signals.judge_calls import BUDGET, POLICY, JudgeCallers, put_on_tree
from ramify.types.trajectory import Group


class TeacherSource(Protocol):
    """Gives the teachers of a step; see ``scorer.RunTeachers``."""

    async def at(self, step: int) -> Mapping[str, TokenScorer]: ...

    def measured(self) -> dict[str, float]: ...

    @property
    def is_kept(self) -> bool:
        """Whether a checkpoint must hold something of them, by ``save`` and ``load``."""
        ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class RunSignals:
    """The signals of one run."""

    def __init__(
        self,
        signals: Mapping[str, Signal],
        hybrid: Hybrid,
        *,
        pool: Callable[[], AbstractAsyncContextManager[ClientPool]] | None = None,
        budget: Limits = BUDGET,
        cache: ReplyCache | None = None,
        policy: Client | None = None,
        teachers: TeacherSource | None = None,
        writing: PromptRenderer | None = None,
        weights: Mapping[str, float] | None = None,
        temperature: float = 1.0,
        say: Callable[[str], None] = print,
        wants_reference: bool = False,
    ) -> None:
        """``pool`` gives the rollouts' pool; ``policy`` answers judges whose model is ``policy``.
        Raises ConfigError for a term without its signal."""
        hybrid.check(signals)
        self._signals, self._hybrid, self._pool, self._budget = dict(signals), hybrid, pool, budget
        self._cache, self._teachers, self._writing = cache, teachers, writing
        self._own = {POLICY: policy} if policy is not None else {}
        self._weights, self._temperature, self._say = dict(weights or {}), temperature, say
        self._wants_reference = wants_reference
        self._judges: JudgeCallers | None = None

    @property
    def kept(self) -> Mapping[str, TeacherSource]:
        """As ``Stage.kept``."""
        return (
            {"teachers": self._teachers}
            if self._teachers is not None and self._teachers.is_kept
            else {}
        )

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[SignalReader]:
        """A reader, for as long as rollouts go on."""
        async with contextlib.AsyncExitStack() as stack:
            judges = None
            if self._pool is not None:
                pool = await stack.enter_async_context(self._pool())
                if self._judges is None or self._judges.pool is not pool:
                    self._judges = JudgeCallers(
                        pool, self._budget, own=self._own, cache=self._cache
                    )
                judges = self._judges
            context = SignalContext(
                step=0,
                items={},
                weights=self._weights,
                asking=judges,
                writing=self._writing,
                temperature=self._temperature,
                wants_reference=self._wants_reference,
            )
            yield SignalReader(
                self._signals, self._hybrid, context, self._teachers, judges, self._say
            )


class SignalReader:
    """The readings of one step after the other. A group may be read in one step and taken by a
    later one."""

    def __init__(
        self,
        signals: Mapping[str, Signal],
        hybrid: Hybrid,
        context: SignalContext,
        teachers: TeacherSource | None,
        judges: JudgeCallers | None,
        say: Callable[[str], None],
    ) -> None:
        self.context = context
        self._found: dict[str, dict[str, SignalScore]] = {name: {} for name in signals}
        """Of all groups that no step has done with."""
        self._signals, self._hybrid, self._teachers, self._judges, self._say = (
            signals,
            hybrid,
            teachers,
            judges,
            say,
        )
        self._wanted: dict[str, Signal] = {}
        """Signals that this step weighs."""
        self._at_work: dict[str, tuple[int, float]] = {}
        """Signal -> (groups that it reads now, since when)."""
        self._seconds = dict.fromkeys(signals, 0.0)
        self._before: dict[str, float] = {}
        self._said: set[str] = set()
        self._whole_at = self._read_at = time.perf_counter()
        """When the last group so far was whole, and when the last reading ended."""

    async def turn_to(self, step: int, items: Mapping[str, Item]) -> None:
        """From now on groups are read for step ``step``. ``items``: those of groups that may be
        read, by id."""
        scorers = await self._teachers.at(step) if self._teachers is not None else {}
        self.context = msgspec.structs.replace(
            self.context, step=step, items=items, scorers=scorers
        )
        self._wanted = {
            name: each for name, each in self._signals.items() if self._hybrid.wants(name, step)
        }
        self._said = set()
        self._before = self._spent()
        self._seconds = dict.fromkeys(self._signals, 0.0)
        self._whole_at = self._read_at = time.perf_counter()

    async def group(self, group: Group) -> None:
        """Let all signals read ``group`` that the step weighs, and that have not."""
        unread = {
            name: signal
            for name, signal in self._wanted.items()
            if any(each.id not in self._found[name] for each in group.trajectories)
        }
        if not unread:
            return
        self._whole_at = time.perf_counter()
        await asyncio.gather(*(self._read(name, signal, group) for name, signal in unread.items()))
        self._read_at = time.perf_counter()

    @property
    def readings(self) -> dict[str, dict[str, SignalScore]]:
        """Signal -> trajectory id -> what it found."""
        return {name: self._found[name] for name in self._wanted}

    def forget(self, groups: Sequence[Group]) -> None:
        """These groups are done with."""
        for found in self._found.values():
            for group in groups:
                for each in group.trajectories:
                    found.pop(each.id, None)

    def composed(self, algorithm: Algorithm) -> Algorithm:
        """The recipe's hybrid, as it is at this step, with what was read."""
        assert isinstance(algorithm, Hybrid)
        return algorithm.given(self.readings, self.context.step)

    def put_on_trees(self, groups: Sequence[Group]) -> None:
        """Once streams are made: what judges were asked and said, and each signal's numbers, beside
        what they are about."""
        for group in groups:
            for trajectory in group.trajectories:
                put_on_tree(
                    trajectory,
                    {
                        name: found[trajectory.id]
                        for name, found in self.readings.items()
                        if trajectory.id in found
                    },
                )

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Of the step, whose groups are ``groups``."""
        ids = {each.id for group in groups for each in group.trajectories}
        found: dict[str, float] = {"signals_wait_s": max(0.0, self._read_at - self._whole_at)}
        for name, all_readings in self.readings.items():
            readings = {id: reading for id, reading in all_readings.items() if id in ids}
            found |= {f"{name}/{what}": value for what, value in abstentions(readings).items()}
            found[f"{name}/s"] = self._seconds[name]
            found[f"{name}/read"] = float(sum(not each.abstained for each in readings.values()))
        return found | {
            name: value - self._before.get(name, 0.0) for name, value in self._spent().items()
        }

    def _spent(self) -> dict[str, float]:
        """Since the run began."""
        found = dict(self._teachers.measured()) if self._teachers is not None else {}
        if self._judges is not None:
            found["judge_calls"] = float(self._judges.ledger.spent.calls)
            found["judge_cost"] = self._judges.ledger.cost or 0.0
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
            found = [SignalScore(abstained=type(error).__name__) for _ in group.trajectories]
        finally:
            num, since = self._at_work[name]
            if num == 1:
                self._seconds[name] += time.perf_counter() - since
            self._at_work[name] = (num - 1, since)
        if len(found) != len(group.trajectories):
            raise ConfigError(
                f"signal '{name}' gave {len(found)} readings for {len(group.trajectories)} "
                f"trajectories of {group.task}: it "
                "gives one for each, in order"
            )
        self._found[name] |= {
            each.id: reading for each, reading in zip(group.trajectories, found, strict=True)
        }

    def _tell(self, text: str) -> None:
        """Each kind of failure once a step."""
        kind = text.partition(" of ")[0]
        if kind not in self._said:
            self._said.add(kind)
            self._say(text)


def signals_of(specs: Mapping[str, Any]) -> dict[str, Signal]:
    """The signals of a recipe, made. Raises ConfigError for one there is not, with the nearest
    name."""
    from ramify.train.signals.signal_registry import SIGNALS, made

    found: dict[str, Signal] = {}
    for name, spec in specs.items():
        signal: Signal = made(spec, SIGNALS, "signal")
        if not callable(getattr(signal, "read", None)):
            raise ConfigError(
                f"signal '{name}' is {spec!r:.60}, which has no `async read(group, context)`"
            )
        found[name] = signal
    return found
