"""Run the training signals of a recipe on groups of rollouts.

Each signal scores a group of rollouts as soon as the group is complete, while other rollouts
continue.

    rollouts of item 0 ── group ──┐
    rollouts of item 1 ────────── │ ── group ──┐      each signal reads each group, concurrently
                                  ▼            ▼
                            signals read   signals read ── composed into streams
                                                        ── judges' calls added to the tree

This module chooses which signal scores a group and when. It also measures how long each signal ran
(``NAME/s``) and how long the step waited for signals alone (``signals_wait_s``). Signals overlap
with rollouts and with each other. If a signal fails with a ``RamifyError`` on a group, it gives no
score for that group. Any other exception is a bug and is raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec

from ramify.clients.base import Client
from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.engine.limits import Limits
from ramify.errors import ConfigError, RamifyError
from ramify.logging import ComponentLogger
from ramify.plugins import PluginRegistry
from ramify.store.reply_cache import ModelReplyCache
from ramify.tasks.base import Item
from ramify.train.advantages.base import Algorithm
from ramify.train.signals.base import (
    ConversationTokenizer,
    Signal,
    SignalContext,
    SignalScore,
)
from ramify.train.signals.judge_calls import (
    BUDGET,
    POLICY,
    JudgeModelAccess,
    attach_signals_to_tree,
)
from ramify.train.signals.signal_composition import Hybrid, signal_metrics
from ramify.train.signals.teacher_logprobs import TeacherModels
from ramify.types.trajectory import Group

_log = ComponentLogger("train")


class TrainingSignalSet:
    """The training signals of one run, and the client pool, call cache and teachers that they
    share."""

    def __init__(
        self,
        signals: Mapping[str, Signal],
        hybrid: Hybrid,
        *,
        pool: Callable[[], AbstractAsyncContextManager[RateLimitedClientPool]] | None = None,
        budget: Limits = BUDGET,
        cache: ModelReplyCache | None = None,
        policy: Client | None = None,
        teachers: TeacherModels | None = None,
        writing: ConversationTokenizer | None = None,
        weights: Mapping[str, float] | None = None,
        temperature: float = 1.0,
        wants_reference: bool = False,
    ) -> None:
        """Create the set of the training signals of a run.

        ``pool`` opens the client pool of the rollouts. ``policy`` is the client for judges whose
        model is named ``policy``. Raises ConfigError if a term of ``hybrid`` names an unknown
        signal.
        """
        hybrid.check(signals)
        self._signals = dict(signals)
        self._hybrid = hybrid
        self._pool = pool
        self._budget = budget
        self._cache = cache
        self._teachers = teachers
        self._writing = writing
        self._own = {POLICY: policy} if policy is not None else {}
        self._weights = dict(weights or {})
        self._temperature = temperature
        self._wants_reference = wants_reference
        self._judges: JudgeModelAccess | None = None

    @property
    def checkpoint_state(self) -> Mapping[str, TeacherModels]:
        """The parts of the signals' state that a checkpoint must store, by name.

        It holds the teachers if they have state that cannot be recomputed, and is otherwise empty.
        """
        return (
            {"teachers": self._teachers}
            if self._teachers is not None and self._teachers.has_state
            else {}
        )

    @contextlib.asynccontextmanager
    async def open_runner(self) -> AsyncIterator[SignalRunner]:
        """Return a context manager that opens a ``SignalRunner``.

        Its resources are closed when the context ends.
        """
        async with contextlib.AsyncExitStack() as stack:
            judges = None
            if self._pool is not None:
                pool = await stack.enter_async_context(self._pool())
                if self._judges is None or self._judges.pool is not pool:
                    self._judges = JudgeModelAccess(
                        pool, self._budget, own=self._own, cache=self._cache
                    )
                judges = self._judges
            context = SignalContext(
                step=0,
                items={},
                weights=self._weights,
                asking=None if judges is None else judges.trajectory_caller,
                writing=self._writing,
                temperature=self._temperature,
                wants_reference=self._wants_reference,
            )
            yield SignalRunner(self._signals, self._hybrid, context, self._teachers, judges)


class SignalRunner:
    """Runs the training signals on groups of rollouts, and keeps their scores between steps.

    A group may be scored in one training step and used in a later one.
    """

    def __init__(
        self,
        signals: Mapping[str, Signal],
        hybrid: Hybrid,
        context: SignalContext,
        teachers: TeacherModels | None,
        judges: JudgeModelAccess | None,
    ) -> None:
        self.context = context
        self._scores: dict[str, dict[str, SignalScore]] = {name: {} for name in signals}
        """Scores by signal name and trajectory id, for all groups that are still needed."""
        self._signals = signals
        self._hybrid = hybrid
        self._teachers = teachers
        self._judges = judges
        self._active: dict[str, Signal] = {}
        """Signals to compute in this step: those whose terms have a non-zero weight, and those that
        no ``HybridTerm`` uses."""
        self._running: dict[str, tuple[int, float]] = {}
        """For each signal that is running: the number of groups being scored, and the start
        time."""
        self._seconds = dict.fromkeys(signals, 0.0)
        self._before: dict[str, float] = {}
        self._reported: set[str] = set()
        self._complete_at = self._read_at = time.perf_counter()
        """``_complete_at`` is when the latest group became complete, and ``_read_at`` when its
        scoring ended.
        """

    async def begin_step(self, step: int, items: Mapping[str, Item]) -> None:
        """Prepare the signals for training step ``step``.

        ``items`` maps ids to the task items of all groups that may be scored in this step.
        """
        scorers = await self._teachers.teachers_at_step(step) if self._teachers is not None else {}
        self.context = msgspec.structs.replace(
            self.context, step=step, items=items, scorers=scorers
        )
        self._active = {
            name: signal
            for name, signal in self._signals.items()
            if self._hybrid.needs_signal(name, step)
        }
        self._reported = set()
        self._before = self._totals()
        self._seconds = dict.fromkeys(self._signals, 0.0)
        self._complete_at = self._read_at = time.perf_counter()

    async def score_group(self, group: Group) -> None:
        """Let every active signal score the rollouts in ``group``.

        A signal that has already scored all of its rollouts is skipped.
        """
        unread = {
            name: signal
            for name, signal in self._active.items()
            if any(trajectory.id not in self._scores[name] for trajectory in group.trajectories)
        }
        if not unread:
            return
        self._complete_at = time.perf_counter()
        await asyncio.gather(*(self._read(name, signal, group) for name, signal in unread.items()))
        self._read_at = time.perf_counter()

    @property
    def active_signal_scores(self) -> dict[str, dict[str, SignalScore]]:
        """Scores of the active signals, by signal name and then by trajectory id."""
        return {name: self._scores[name] for name in self._active}

    def forget(self, groups: Sequence[Group]) -> None:
        """Drop the stored scores of rollout groups that are no longer needed."""
        for scores in self._scores.values():
            for group in groups:
                for trajectory in group.trajectories:
                    scores.pop(trajectory.id, None)

    def algorithm_with_scores(self, algorithm: Algorithm) -> Algorithm:
        """Return the recipe's hybrid algorithm with the scores of this training step filled in."""
        assert isinstance(algorithm, Hybrid)
        return algorithm.with_readings(self.active_signal_scores, self.context.step)

    def attach_signals_to_trees(self, groups: Sequence[Group]) -> None:
        """Record the judges' calls and each signal's scores in the rollouts' call trees.

        Call this only after the training data has been extracted, so that judges' calls are not
        trained on.
        """
        for group in groups:
            for trajectory in group.trajectories:
                attach_signals_to_tree(
                    trajectory,
                    {
                        name: scores[trajectory.id]
                        for name, scores in self.active_signal_scores.items()
                        if trajectory.id in scores
                    },
                )

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the signals' metrics for the training step that uses ``groups``.

        They show how many rollouts each signal scored, why others have no score, and how long
        scoring took.
        """
        ids = {trajectory.id for group in groups for trajectory in group.trajectories}
        wait_s = max(0.0, self._read_at - self._complete_at)
        metrics: dict[str, float] = {"signals_wait_s": wait_s}
        for name, all_readings in self.active_signal_scores.items():
            readings = {id: reading for id, reading in all_readings.items() if id in ids}
            metrics |= {f"{name}/{what}": value for what, value in signal_metrics(readings).items()}
            self._report_without_judge(name, list(readings.values()))
            metrics[f"{name}/s"] = self._seconds[name]
            metrics[f"{name}/read"] = float(
                sum(not reading.abstained for reading in readings.values())
            )
        return metrics | {
            name: value - self._before.get(name, 0.0) for name, value in self._totals().items()
        }

    def _report_without_judge(self, name: str, scores: Sequence[SignalScore]) -> None:
        """Warn if a judge returned no usable verdict for any rollout of the training step."""
        reasons = {score.abstained for score in scores}
        if not scores or not reasons <= {"unanswered", "outside the format"}:
            return
        calls = [call for score in scores for call in score.calls]
        failed = next((call.error for call in calls if call.error), None)
        what = f"the first request failed with: {failed}" if failed else f"replies: {min(reasons)}"
        self._report(f"signal '{name}' has no verdict for any of {len(scores)} rollouts; {what}")

    def _totals(self) -> dict[str, float]:
        """Return counters of the work of teachers and judges since the run began, as metrics."""
        totals = dict(self._teachers.metrics()) if self._teachers is not None else {}
        if self._judges is not None:
            totals["judge_calls"] = float(self._judges.ledger.spent.calls)
            if self._judges.ledger.cost is not None:
                totals["judge_cost"] = self._judges.ledger.cost
        return totals

    async def _read(self, name: str, signal: Signal, group: Group) -> None:
        # Overlapping groups count once: time runs from the first start to the last end.
        num, since = self._running.get(name, (0, time.perf_counter()))
        self._running[name] = (num + 1, since if num else time.perf_counter())
        try:
            scores = await signal.read(group, self.context)
        except ConfigError:
            raise
        except RamifyError as error:
            self._report(f"signal '{name}' gives no number for {group.task}: {error}")
            scores = [SignalScore(abstained=type(error).__name__) for _ in group.trajectories]
        finally:
            num, since = self._running[name]
            if num == 1:
                self._seconds[name] += time.perf_counter() - since
            self._running[name] = (num - 1, since)
        if len(scores) != len(group.trajectories):
            raise ConfigError(
                f"signal '{name}' returned {len(scores)} scores for {len(group.trajectories)} "
                f"trajectories of {group.task}: it must return one for each, in order"
            )
        self._scores[name] |= {
            trajectory.id: reading
            for trajectory, reading in zip(group.trajectories, scores, strict=True)
        }

    def _report(self, text: str) -> None:
        """Log a failure of a signal as a warning, at most once per step for each kind of
        failure."""
        kind = text.partition(" for ")[0]
        if kind not in self._reported:
            self._reported.add(kind)
            _log.warning("signal", text, shown=True)


SIGNALS = PluginRegistry(
    "signal",
    "ramify.signals",
    {
        "format": "ramify.train.signals.outcome:FormatSignal",
        "outcome": "ramify.train.signals.outcome:OutcomeSignal",
        "process": "ramify.train.signals.judge:ProcessRewardSignal",
        "teacher": "ramify.train.signals.teacher:TeacherSignal",
        "tools": "ramify.train.signals.outcome:ToolErrorSignal",
    },
)
"""Maps a name to the class that implements ``base.Signal``. To restore a user-defined signal from a
checkpoint, its struct tag must equal its registered name or its path in the configuration
(``my_judges:Strict``)."""


def build_signals(specs: Mapping[str, Any]) -> dict[str, Signal]:
    """Build the training signals that a recipe names.

    Raises ConfigError for an unknown name, and suggests the nearest known one.
    """
    signals: dict[str, Signal] = {}
    for name, spec in specs.items():
        signal: Signal = SIGNALS.build(spec)
        if not callable(getattr(signal, "read", None)):
            raise ConfigError(
                f"signal '{name}' is {spec!r:.60}, which has no `async read(group, context)`"
            )
        signals[name] = signal
    return signals
