"""``ramify eval``: a model on a task, and what it came to. ``evaluate/`` does it; this reads, shows and goes on.

ramify eval ledger --model openai:gpt-5-mini --items 50 --n 4
ramify eval my_task.py:task chars=100000 --model …         a task of one's own, with an option that it takes
ramify eval questions.jsonl question=q gold=a reward=f1 --model …
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.cli.ask import KINDS, NO_MODEL, SETTINGS, make_rlm, open_store, sandbox_spec
from ramify.cli.exits import Exit
from ramify.cli.notes import Notes, write
from ramify.cli.parser import Command, Option, UsageError
from ramify.cli.settings import fill, unknown_variables

if TYPE_CHECKING:
    from ramify.evaluate.record import Record
    from ramify.evaluate.run import Evaluation, Outcome, Plan
    from ramify.tasks.base import Task
    from ramify.types.trajectory import Trajectory

_OUTPUT = ("store", "json", "quiet", "verbose")
"""Settings that do not decide what an attempt comes to."""
OF_AN_EVALUATION = (
    Option("split", str, "of the task (default: test)"),
    Option("items", int, "how many of the split, its first (default: 100)"),
    Option("n", int, "attempts at each item (default: 1)"),
    Option("k", int, "of pass@k and majority@k (default: n)"),
    Option("seed", int, "of sampling (default: 0)"),
    Option("concurrency", int, "attempts at once (default: 16)"),
    Option("validate", bool, "prove first that right answers score 1 and wrong ones do not (default: yes)"),
    Option("resume", str, "go on with an evaluation that was cut off, as it began; last is the latest", "ID"),
    Option("against", str, "also the difference from another evaluation, over the same items", "ID"),
)
_PLANNED = ("split", "items", "n", "seed", "validate")
_NOT_HERE = ("cite", "cache", "mcp")
_SETTINGS = tuple(option for option in SETTINGS if option.name not in _NOT_HERE)
_KINDS = {name: kind for name, kind in KINDS.items() if name not in _NOT_HERE}


def evaluate(words: list[str], k: int | None, resume: str | None, against: str | None, **given: Any) -> int:
    about = {option.name: given.pop(option.name) for option in OF_AN_EVALUATION if option.name in given}
    concurrency = about.pop("concurrency")
    if resume is not None:
        _refuse_more(words, {**about, **given})
    settings = {name: value for name, value in fill(given, KINDS).items() if name in _KINDS}
    notes = Notes(bool(settings.get("quiet")), bool(settings.get("verbose")))
    notes.take_warnings()
    for line in unknown_variables(KINDS):
        notes.say(f"ramify: warning: {line}")
    if resume is None and not words:
        raise UsageError("say which task: ramify eval TASK [OPTION=VALUE…]")
    if resume is None and not settings.get("model"):
        write(NO_MODEL.replace("ramify ask", "ramify eval"))
        return Exit.ERROR
    if resume is not None and settings.get("store") is False:
        raise UsageError("--resume goes on with what is stored: leave out --no-store")
    return _Command(settings, notes, k, against, concurrency or 16).run(words, resume, about)


class _Command:
    """One evaluation from the command line."""

    def __init__(
        self, settings: dict[str, Any], notes: Notes, k: int | None, against: str | None, concurrency: int
    ) -> None:
        self._settings, self._notes, self._k, self._against = settings, notes, k, against
        self._concurrency = concurrency
        self._store = open_store(settings)

    def run(self, words: list[str], resume: str | None, about: dict[str, Any]) -> Exit:
        from ramify.evaluate.record import Records
        from ramify.evaluate.report import check_k, check_same_items

        records = Records(self._store.root) if self._store is not None else None
        other = self._other(records)
        record = records.reopen(resume) if records is not None and resume is not None else None
        plan = record.plan if record is not None else self._plan(words, about)
        if self._k is not None:
            check_k(self._k, plan.attempts)
        if other is not None:
            check_same_items(plan, other.plan)
        task = _task(plan, bool(about.get("validate", True) is not False and resume is None))
        if record is None and records is not None:
            record = records.create(plan)
        try:
            return self._evaluated(task, plan, record, other)
        finally:
            if record is not None:
                record.close()

    def _other(self, records: Any) -> Evaluation | None:
        """The evaluation to compare with, read before anything is spent."""
        if self._against is None:
            return None
        if records is None:
            raise UsageError("--against compares with what is stored: leave out --no-store")
        found: Evaluation = records.load(self._against)
        return found

    def _plan(self, words: list[str], about: dict[str, Any]) -> Plan:
        from ramify.evaluate.run import Plan

        fields = {"split": about["split"], "items": about["items"], "attempts": about["n"], "seed": about["seed"]}
        settings = {name: value for name, value in self._settings.items() if name not in (*_OUTPUT, "model")}
        return Plan(
            model=self._settings["model"], task=words[0], options=dict(map(_option, words[1:])), settings=settings,
            **{name: value for name, value in fields.items() if value is not None},
        )  # fmt: skip

    def _evaluated(self, task: Task, plan: Plan, record: Record | None, other: Evaluation | None) -> Exit:
        from ramify.clients.base import Sampling
        from ramify.evaluate.run import evaluate

        settings = {**plan.settings, "model": plan.model}
        rlm = make_rlm(settings, sandbox_spec(settings), self._store)
        progress = _Progress(self._notes, min(plan.items, len(task.splits.get(plan.split, ()))) * plan.attempts, record)
        work = evaluate(
            rlm, task, plan, sampling=Sampling(temperature=settings.get("temperature")), record=record,
            concurrency=self._concurrency, on_outcome=progress,
        )  # fmt: skip
        try:
            found = asyncio.run(work)
        except KeyboardInterrupt:
            again = f"; go on with it: ramify eval --resume {record.id}" if record is not None else ""
            self._notes.say(f"ramify: stopped after {progress.done:,} attempts{again}")
            return Exit.STOPPED
        return self._shown(found, record, other)

    def _shown(self, found: Evaluation, record: Record | None, other: Evaluation | None) -> Exit:
        from ramify.evaluate.report import difference, report, table

        figures = report(found, k=self._k)
        against = difference(found, other) if other is not None else None
        id = record.id if record is not None else None
        if self._settings.get("json"):
            named = (
                None if against is None else {"evaluation": self._against, "items": against[1], "average": against[0]}
            )
            data = msgspec.to_builtins(figures)
            print(msgspec.json.encode({"evaluation": id, **data, "against": named}).decode())
        else:
            print(table(figures))
            if against is not None:
                figure, num = against
                print(
                    f"average less that of {self._against}: {figure.value:+.3f} [{figure.low:+.3f} {figure.high:+.3f}] "
                    f"over {num:,} items"
                )
            if id is not None:
                self._notes.say(f"evaluation {id}")
        return Exit.ERROR if figures.failed == figures.attempts else Exit.ANSWERED


class _Progress:
    """Says how far it is: each tenth, and each attempt to those who asked for more."""

    def __init__(self, notes: Notes, num: int, record: Record | None) -> None:
        self.done = len(record.outcomes) if record is not None else 0
        self._notes, self._num = notes, num
        self._right = sum(each.reward or 0.0 for each in record.outcomes) if record is not None else 0.0

    def __call__(self, outcome: Outcome, trajectory: Trajectory) -> None:
        self.done += 1
        self._right += outcome.reward or 0.0
        worth = "failed: " + outcome.error if outcome.reward is None else f"{outcome.reward:g}"
        self._notes.detail(f"{outcome.item} attempt {outcome.attempt}: {worth} {outcome.run}".rstrip())
        if 10 * self.done // self._num > 10 * (self.done - 1) // self._num and self._num >= 10:
            self._notes.say(f"{self.done:,} of {self._num:,} attempts, average {self._right / self.done:.3f}")


def _task(plan: Plan, validates: bool) -> Task:
    from ramify.tasks.base import items_of, task_of
    from ramify.tasks.validate import validate

    sys.path[:0] = [""] * ("" not in sys.path)  # a module in this folder, as with python -m
    task = task_of(plan.task, **plan.options)
    items_of(task, plan.split)
    if validates:
        validate(task, [plan.split], num=min(4, plan.items))
    return task


def _option(word: str) -> tuple[str, Any]:
    """``chars=1000`` -> ("chars", 1000): the value as JSON where it is some, otherwise as text."""
    name, equals, value = word.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"'{word}' is no option of a task: write NAME=VALUE")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value


def _refuse_more(words: list[str], given: dict[str, Any]) -> None:
    """A resumed evaluation goes on as it began: only what concerns the output may be said again."""
    known = (*_SETTINGS, *OF_AN_EVALUATION)
    named = [option.long for option in known if given.get(option.name) is not None and option.name not in _OUTPUT]
    named = [name for name in named if name != "--concurrency"]
    if words or named:
        raise UsageError(f"--resume: it goes on as it began; leave out {', '.join(['TASK'] * bool(words) + named)}")


COMMAND = Command(
    "eval",
    """\
Evaluate a model on TASK: ledger, needle, programs, toolmath, one of your own (file.py:name or
module:name), or rows of a .jsonl or .parquet file or of hf:NAME. OPTION=VALUE goes to the task.
Attempts are runs like those of ask, with the same settings; figures go to stdout. A stored
evaluation can be gone on with (--resume) and compared (--against).""",
    evaluate,
    "TASK OPTION=VALUE…",
    max_words=None,
    options=(*OF_AN_EVALUATION, *_SETTINGS),
)
