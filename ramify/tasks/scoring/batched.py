"""A reward function that scores many answers at once, with the signature of TRL's reward functions.

    def shorter(completions, gold, **columns):           one list per column, all of equal length
        return [float(len(text) <= len(right)) for text, right in zip(completions, gold)]

    DatasetTask("short", splits, BatchedReward(shorter))                 once per step
    DatasetTask("short", splits, BatchedReward(shorter, max_batch=32, concurrency=8))

Without ``max_batch``, a training step calls the function once, with all its rollouts
(``of_step``). With it, and wherever there are no steps (``ramify eval``, the check of a task),
answers are scored as they arrive: the first at once, and those that arrive while the maximum
number of batches is running form the next batch. Such a reward must not depend on the other
answers in its batch. Time limits are set by ``tasks/score_with_timeout.py``, and
``train/rollouts/group_queue.py`` decides which rollouts belong to a step.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ramify.errors import ConfigError, RamifyError
from ramify.tasks.async_reward_loop import run_coroutine
from ramify.tasks.base import Item
from ramify.tasks.scoring.answer_text import as_text

BatchFunction = Callable[..., Sequence[Any] | Coroutine[Any, Any, Sequence[Any]]]
"""``function(completions, **columns)``, async or not; it returns one reward per completion."""


class BatchedReward:
    """A reward function that scores many answers with one call, such as all answers of a training
    step.

    Example:
        same = lambda completions, gold: [float(a == b) for a, b in zip(completions, gold)]
        tasks.DatasetTask("copy", splits, tasks.BatchedReward(same))
    """

    def __init__(
        self, function: BatchFunction, *, max_batch: int | None = None, concurrency: int = 1
    ) -> None:
        """Create a reward from a function that scores a batch of answers.

        ``function`` receives ``completions`` (the answers as text, empty if there is none) and
        every column that is one of its parameters: ``prompts`` (the questions), ``gold``, ``kind``,
        and keys of the items' metadata. Without ``max_batch``, training calls it once for all
        rollouts of a step. With ``max_batch`` it is called as answers arrive: up to ``concurrency``
        batches, each of at most ``max_batch`` answers, run at once.

        Raises ConfigError if ``function`` has no parameter ``completions``.
        """
        if (max_batch is not None and max_batch < 1) or concurrency < 1:
            raise ConfigError(
                f"BatchedReward: max_batch={max_batch} and concurrency={concurrency} must be at "
                "least 1"
            )
        parameters = inspect.signature(function).parameters
        self._takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        if "completions" not in parameters and not self._takes_all:
            raise ConfigError(
                f"BatchedReward: {_name(function)} has the parameters {', '.join(parameters)}; it "
                "needs `completions`, a list of answers"
            )
        self.waits_for_step = max_batch is None
        """Whether training calls the function once per step, instead of as answers arrive."""
        self._function = function
        self._parameters = frozenset(parameters)
        self._needs = {
            name
            for name, each in parameters.items()
            if each.default is each.empty
            and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        }
        self._max_batch = max_batch
        self._concurrency = concurrency
        self._lock = threading.Lock()
        self._running = 0
        self._waiting: list[tuple[Any, Item, Future[float]]] = []

    def __call__(self, answer: Any, item: Item) -> float:
        """Score one answer as part of a batch, and return its reward.

        Raises RamifyError if the function failed for this batch.
        """
        future: Future[float] = Future()
        with self._lock:
            self._waiting.append((answer, item, future))
        self._run_batches()
        return future.result()

    def of_step(self, answered: Sequence[tuple[Any, Item]]) -> list[Any]:
        """Score all answers of a training step with one call, and return their rewards.

        Errors of the function are raised.

        An answer for which the function returns None gets a RamifyError instead of a reward.
        """
        return [
            RamifyError(
                f"{_name(self._function)} returned None for item {item.id}: an answer needs a "
                "number"
            )
            if reward is None
            else reward
            for (_, item), reward in zip(answered, self._rewards(answered), strict=True)
        ]

    def __len__(self) -> int:
        """Return the number of answers that have not been scored yet."""
        with self._lock:
            return len(self._waiting)

    def _run_batches(self) -> None:
        """Score waiting batches of answers in this thread as long as more batches may be
        started."""
        while True:
            with self._lock:
                if not self._waiting or self._running == self._concurrency:
                    return
                self._running += 1
                batch = self._waiting[: self._max_batch]
                del self._waiting[: self._max_batch]
            try:
                self._score(batch)
            finally:
                with self._lock:
                    self._running -= 1

    def _score(self, batch: Sequence[tuple[Any, Item, Future[float]]]) -> None:
        try:
            rewards = self.of_step([(answer, item) for answer, item, _ in batch])
        except BaseException as error:  # noqa: BLE001 -- raised again by each waiting thread
            if not isinstance(error, Exception):  # ThreadStoppedError, or SystemExit
                error = RamifyError(f"{_name(self._function)} was stopped: {error!r}")
            for _, _, future in batch:
                future.set_exception(error)
            return
        for (_, _, future), reward in zip(batch, rewards, strict=True):
            if isinstance(reward, RamifyError):
                future.set_exception(reward)
            else:
                future.set_result(reward)

    def _rewards(self, answered: Sequence[tuple[Any, Item]]) -> list[Any]:
        rewards = self._function(**self._columns(answered))
        if isinstance(rewards, Coroutine):
            rewards = run_coroutine(rewards)
        if isinstance(rewards, str | bytes | Mapping) or not isinstance(rewards, Iterable):
            raise RamifyError(
                f"{_name(self._function)} returned {rewards!r:.80}: return a list with one reward "
                "for each completion"
            )
        rewards = list(rewards)
        if len(rewards) != len(answered):
            raise RamifyError(
                f"{_name(self._function)} returned {len(rewards)} rewards for {len(answered)} "
                "completions"
            )
        return rewards

    def _columns(self, answered: Sequence[tuple[Any, Item]]) -> dict[str, list[Any]]:
        items = [item for _, item in answered]
        columns: dict[str, list[Any]] = {
            name: [item.metadata.get(name) for item in items]
            for name in sorted({name for item in items for name in item.metadata})
        }
        columns |= {
            "prompts": [item.question for item in items],
            "completions": [as_text(answer) or "" for answer, _ in answered],
            "gold": [item.gold for item in items],
            "kind": [item.kind for item in items],
        }
        if missing := sorted(self._needs - columns.keys()):
            raise RamifyError(
                f"{_name(self._function)} needs the column '{missing[0]}', which no item has: the "
                f"columns are {', '.join(sorted(columns))}; rename or remove the parameter"
            )
        if self._takes_all:
            return columns
        return {name: column for name, column in columns.items() if name in self._parameters}


def _name(function: Any) -> str:
    return f"reward function '{getattr(function, '__name__', type(function).__name__)}'"
