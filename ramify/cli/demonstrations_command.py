"""The command ``ramify demos``: store a model's runs on a task as training data for another model.

    ramify demos my_task.py:errors --model openai:gpt-5-mini --num 400 --out demos --max-cost 10
    ramify train recipe.py sft.trajectories=demos sft.algorithm.min_reward=1

Demonstrations are attempts at the first items of the training split, stored in ``--out`` with their
rewards. Repeating the command continues where it stopped, also with a larger ``--num`` or
``--max-cost``; finished attempts are not repeated. ``train/advantages/sft.py`` selects the
demonstrations that a recipe learns from.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramify.cli.ask import (
    OF_SOURCES,
    SETTINGS,
    check_models_ready,
    check_prices_known,
    connect_mcp_tools,
    make_message_writer,
    make_rlm,
    sandbox_spec,
)
from ramify.cli.eval import OUTPUT_SETTINGS, open_task, parse_task_option, validate_task_scoring
from ramify.cli.evaluation_progress import EvaluationProgressReporter, write_evaluation_log
from ramify.cli.parser import CliOptionSpec, ExitCode, SubcommandSpec, UsageError
from ramify.cli.progress_display import ProgressDisplay, choose_display_form
from ramify.cli.settings import fill_missing_settings
from ramify.cli.stop_signals import enforce_run_deadlines
from ramify.cli.terminal_text import format_dollars, json_line, pluralize, print_error
from ramify.progress import track_progress

if TYPE_CHECKING:
    from ramify.evaluate.cost_budget import CostBudget
    from ramify.evaluate.run_evaluation import (
        EvaluationFileWriter,
        EvaluationPlan,
        EvaluationResult,
    )
    from ramify.store.folder_store import Store
    from ramify.tasks.base import Task

_OPTIONS = (
    CliOptionSpec(
        "num", int, "number of items, from the start of the training split (default: 100)"
    ),
    CliOptionSpec("out", str, "folder of the store; created if it does not exist", "FOLDER"),
    CliOptionSpec("max_cost", float, "maximum cost in dollars of all demonstrations together"),
    CliOptionSpec(
        "max_run_cost",
        float,
        "maximum cost in dollars of one demonstration (default: eight times its share of "
        "--max-cost, at most 5)",
    ),
    CliOptionSpec("attempts", int, "attempts per item (default: 1)"),
    CliOptionSpec(
        "min_reward", float, "count demonstrations with at least this reward as good (default: 1)"
    ),
    CliOptionSpec("seed", int, "sampling seed (default: 0)"),
    CliOptionSpec("concurrency", int, "concurrent demonstrations (default: 16)"),
    CliOptionSpec(
        "validate",
        bool,
        "first check that right answers score 1 and wrong ones do not (default: yes)",
    ),
)
_SETTINGS = tuple(
    option
    for option in SETTINGS
    if option.name not in ("max_cost", "cite", "cache", "store", "direct", "branches", *OF_SOURCES)
)
_KINDS = {option.name: list[str] if option.kind is list else option.kind for option in _SETTINGS}
_SHARES = 8
"""Default cost limit of one demonstration, as a multiple of the budget divided by the number of
demonstrations."""


def collect_demonstrations(
    words: list[str],
    num: int | None,
    out: str | None,
    max_cost: float | None,
    max_run_cost: float | None,
    attempts: int | None,
    min_reward: float | None,
    seed: int | None,
    concurrency: int | None,
    validate: bool | None,
    **given: Any,
) -> int:
    settings = fill_missing_settings(given, _KINDS)
    notes = make_message_writer(settings, _KINDS)
    if not words or not out or not settings.get("model"):
        missing = "a task" if not words else "--out" if not out else "--model"
        raise UsageError(
            f"{missing} is missing: ramify demos TASK [OPTION=VALUE…] --model MODEL --out FOLDER"
        )
    concurrency = 16 if concurrency is None else concurrency
    if concurrency < 1:
        raise UsageError(f"--concurrency {concurrency}: give at least 1")
    least = 1.0 if min_reward is None else min_reward
    if math.isnan(least):
        raise UsageError("--min-reward nan: give a number")
    if max_run_cost is not None and max_cost is None:
        raise UsageError("--max-run-cost needs --max-cost, the limit over all demonstrations")
    from ramify.tasks.base import items_of

    _check_is_bounded(settings, max_cost)
    check_models_ready(settings)
    plan = _plan(words, settings, num, attempts, seed)
    with ProgressDisplay(notes, choose_display_form(settings.get("progress"), notes)) as screen:
        task = open_task(plan)
        items_of(task, plan.split)
        if validate is not False:
            validate_task_scoring(task, plan, notes)
        if (num_items := len(task.splits["train"])) < plan.items and num is not None:
            notes.warning(
                f"--num {num}: the training split has only {pluralize(num_items, 'item')}; all "
                "are used"
            )
        return _Demonstrations(settings, screen, plan, task, concurrency).run(
            Path(out).expanduser(),
            max_cost,
            max_run_cost,
            1.0 if min_reward is None else min_reward,
        )


def _check_is_bounded(settings: dict[str, Any], max_cost: float | None) -> None:
    """Raise UsageError if ``--max-cost`` is missing for a paid model or set for one without a
    price."""
    from ramify.clients.providers import PriceTable

    check_prices_known(settings, max_cost)
    prices = PriceTable.load()
    for name in (settings["model"], *(settings.get("sub_model") or ())):
        price = prices.price(name)
        if max_cost is None and price is not None and (price.input or price.output):
            raise UsageError(
                f"{name} costs money: give --max-cost, in dollars for all demonstrations together"
            )


def _plan(
    words: list[str],
    settings: dict[str, Any],
    num: int | None,
    attempts: int | None,
    seed: int | None,
) -> EvaluationPlan:
    from ramify.evaluate.run_evaluation import EvaluationPlan

    recorded = {
        name: value for name, value in settings.items() if name not in (*OUTPUT_SETTINGS, "model")
    }
    if recorded.get("mcp"):
        from ramify.engine.mcp_tools import redacted_server as recorded_server

        recorded["mcp"] = [recorded_server(server) for server in recorded["mcp"]]
    return EvaluationPlan(
        model=settings["model"],
        task=words[0],
        options=dict(map(parse_task_option, words[1:])),
        split="train",
        items=100 if num is None else num,
        attempts=1 if attempts is None else attempts,
        seed=0 if seed is None else seed,
        settings={**recorded, "direct": False},
    )


class _Demonstrations:
    """Runs one ``ramify demos`` command, which records a model's runs as training demonstrations.

    It also prints a summary.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        screen: ProgressDisplay,
        plan: EvaluationPlan,
        task: Task,
        concurrency: int,
    ) -> None:
        self._settings = settings
        self._screen = screen
        self._plan = plan
        self._task = task
        self._concurrency = concurrency

    def run(
        self, out: Path, max_cost: float | None, max_run_cost: float | None, min_reward: float
    ) -> ExitCode:
        from ramify.evaluate.cost_budget import CostBudget
        from ramify.evaluate.run_evaluation import EvaluationStore, read_evaluation
        from ramify.store.folder_store import Store

        store = Store(out)
        record = EvaluationStore(store.root).reopen_or_create(self._plan)
        spent = sum(each.cost or 0.0 for each in read_evaluation(record.path).outcomes)
        budget = None
        if max_cost is not None:
            num = min(self._plan.items, len(self._task.splits["train"])) * self._plan.attempts
            share = min(5.0, _SHARES * max_cost / num)
            budget = CostBudget(max_cost, share if max_run_cost is None else max_run_cost, spent)
        try:
            with write_evaluation_log(record.path, f"{self._plan.model} on {self._plan.task}"):
                made = self._create_missing(store, record, budget)
        finally:
            record.close()
        if made is None:
            return ExitCode.STOPPED
        return self._print_summary(made, out, budget, spent, min_reward)

    def _create_missing(
        self, store: Store, record: EvaluationFileWriter, budget: CostBudget | None
    ) -> EvaluationResult | None:
        """Create the demonstrations that have not been recorded yet.

        Returns None if the user pressed Ctrl-C.
        """
        from ramify.clients.base import Sampling
        from ramify.evaluate.run_evaluation import evaluate

        plan = self._plan
        num = min(plan.items, len(self._task.splits["train"])) * plan.attempts
        sampling = Sampling(temperature=plan.settings.get("temperature"))
        first = min(num, len(record.outcomes))
        with (
            track_progress("demonstrations", num, "attempts", first=first) as work,
            connect_mcp_tools({"mcp": self._settings.get("mcp")}) as tools,
        ):
            rlm = make_rlm(self._settings, sandbox_spec(self._settings), store, tools)
            progress = EvaluationProgressReporter(self._screen, work, num, record.outcomes)
            making = evaluate(
                rlm,
                self._task,
                plan,
                sampling=sampling,
                record=record,
                concurrency=self._concurrency,
                on_outcome=progress,
                budget=budget,
            )
            try:
                with enforce_run_deadlines("the same command", self._screen.close_live_view):
                    return asyncio.run(making)
            except KeyboardInterrupt:
                attempts = pluralize(progress.done, "attempt")
                self._screen.notes.say(
                    f"ramify: stopped after {attempts}; the same command continues"
                )
                return None

    def _print_summary(
        self,
        made: EvaluationResult,
        out: Path,
        budget: CostBudget | None,
        spent_before: float,
        min_reward: float,
    ) -> ExitCode:
        self._screen.close_live_view()
        outcomes = made.outcomes
        num = min(self._plan.items, len(self._task.splits["train"])) * self._plan.attempts
        failed = [each for each in outcomes if each.reward is None]
        good = sum(each.reward is not None and each.reward >= min_reward for each in outcomes)
        spent = sum(each.cost or 0.0 for each in outcomes)
        if self._settings.get("json"):
            print(
                json_line(
                    {
                        "store": str(out),
                        "asked": num,
                        "made": len(outcomes),
                        "good": good,
                        "failed": len(failed),
                        "min_reward": min_reward,
                        "cost": spent,
                        "input_tokens": sum(each.usage.input_tokens for each in outcomes),
                        "output_tokens": sum(each.usage.output_tokens for each in outcomes),
                    }
                )
            )
        else:
            cost = f", {format_dollars(spent)}" if spent else ""
            print(
                f"{pluralize(len(outcomes), 'demonstration')} of {num:,} in {out}: {good:,} with a "
                f"reward of at least {min_reward:g}, {len(failed):,} failed{cost}"
            )
            rewards = [each.reward for each in outcomes if each.reward is not None]
            if good:
                print(
                    f"learn from them: sft.trajectories={out} "
                    f"sft.algorithm.min_reward={min_reward:g}"
                )
            elif rewards:
                print(
                    f"nothing to learn from: the best reward is {max(rewards):g}; make more, ask "
                    "another model, or lower --min-reward"
                )
        if budget is not None and budget.is_used_up:
            print_error(
                f"{format_dollars(budget.spent)} of {format_dollars(budget.limit)} have been spent "
                f"({format_dollars(spent_before)} of it earlier); the same command with a higher "
                "--max-cost continues"
            )
            return ExitCode.CUT_SHORT
        if failed and len(failed) == len(outcomes):
            print_error(f"all {len(failed):,} attempts failed, the first with: {failed[0].error}")
            return ExitCode.ERROR
        return ExitCode.ANSWERED


COMMAND = SubcommandSpec(
    "demos",
    """\
Ask a model for demonstrations of TASK: attempts at the first items of its training split. They are
stored in --out with their rewards, for sft.trajectories of a recipe, and can be seen with
ramify view FOLDER. TASK and OPTION=VALUE are as in ramify eval.

Repeating the command continues where it stopped; finished attempts are not repeated. --max-cost
limits the cost of all demonstrations, including those of earlier commands.""",
    collect_demonstrations,
    "TASK OPTION=VALUE…",
    max_words=None,
    options=(*_OPTIONS, *_SETTINGS),
)
