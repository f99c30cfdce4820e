"""Show the progress of an evaluation, and write its log.

The commands ``ramify eval`` and ``ramify demos`` use this module.

    12 of 50 attempts · average 0.750 · 1 failed · $0.02

The screen is drawn by ``progress_display.py``, and the attempts are made in ``ramify/evaluate/``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ramify.cli.progress_display import ProgressDisplay
from ramify.cli.terminal_text import format_dollars
from ramify.logging import ComponentLogger, run_log
from ramify.progress import ProgressReporter
from ramify.types.trajectory import Trajectory

if TYPE_CHECKING:
    from ramify.evaluate.run_evaluation import AttemptOutcome

_log = ComponentLogger("evaluate")


@contextlib.contextmanager
def write_evaluation_log(path: Path | None, what: str) -> Iterator[None]:
    """Write the log records of a ``with`` block to ``ID.log``, in the same folder as the results at
    ``path``.

    ``what`` names what is evaluated. Without a path, no log is written.
    """
    if path is None:
        yield
        return
    with run_log(path.with_suffix(".log"), path.stem) as log:
        log.release_held_records()
        _log.info("run_started", f"evaluating {what}")
        yield
        _log.info("run_ended", "the results are recorded")


class EvaluationProgressReporter:
    """Reports the progress of an evaluation.

    It updates a progress bar, or prints a line after each tenth of the attempts.

    With ``--verbose`` it also prints a line for each attempt.
    """

    def __init__(
        self,
        screen: ProgressDisplay,
        work: ProgressReporter,
        num: int,
        earlier: Sequence[AttemptOutcome] = (),
    ) -> None:
        """Create a progress reporter for an evaluation of ``num`` attempts.

        ``earlier`` holds the outcomes of attempts that an earlier run of the command made.
        """
        self.done = len(earlier)
        self._screen = screen
        self._notes = screen.notes
        self._work = work
        self._num = num
        self._reward_sum = sum(outcome.reward or 0.0 for outcome in earlier)
        self._failed = 0
        """Attempts without a reward."""
        self._cost = sum(outcome.cost or 0.0 for outcome in earlier)

    def __call__(self, outcome: AttemptOutcome, trajectory: Trajectory | None) -> None:
        self.done += 1
        self._reward_sum += outcome.reward or 0.0
        self._failed += outcome.reward is None
        self._cost += outcome.cost or 0.0
        score = "failed: " + outcome.error if outcome.reward is None else f"{outcome.reward:g}"
        if self._notes.verbose:
            self._notes.say(
                f"{outcome.item} attempt {outcome.attempt}: {score} {outcome.run}".rstrip()
            )
        self._screen.write_json_event(
            "attempt",
            item=outcome.item,
            attempt=outcome.attempt,
            reward=outcome.reward,
            error=outcome.error,
            run=outcome.run,
        )
        self._work.set_progress(self.done, self._note())
        is_tenth = (
            10 * self.done // self._num > 10 * (self.done - 1) // self._num and self._num >= 10
        )
        if self._screen.form == "lines" and is_tenth:
            self._notes.say(f"{self.done:,} of {self._num:,} attempts, {self._note()}")

    def _note(self) -> str:
        failed = f" · {self._failed:,} failed" if self._failed else ""
        cost = f" · {format_dollars(self._cost)}" if self._cost else ""
        scored = self.done - self._failed
        average = f"average {self._reward_sum / scored:.3f}" if scored else "no average"
        return average + failed + cost
