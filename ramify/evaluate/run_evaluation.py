"""Evaluate a model on a task: make one or more attempts at each item (question) of a split, several
at a time, and record the outcomes.

    EvaluationPlan ──▶ items x attempts, minus those in the record ── workers ──▶ attempt
                   ──▶ AttemptOutcome ──▶ record (one line each)

This module decides the order of attempts, their seeds, and what is stored about each. An evaluation
with an ``EvaluationFileWriter`` continues after an interruption: recorded attempts are not
repeated, and those that were killed, suspended or failed continue from the journals of their runs.

On disk, the plan is the first line, and each start and each outcome of an attempt is one further
line:

    {"type":"plan","model":"openai:gpt-5-mini","task":"ledger","split":"test","items":100,…}
    {"type":"started","item":"ledger/test/0","attempt":0,"run":"20260301-…"}
    {"type":"outcome","item":"ledger/test/0","attempt":0,"reward":1.0,…}

Only one process writes to a file at a time. An incomplete last line is cut off when the file is
opened again. Scores are computed in ``evaluation_report.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import os
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from ramify.clients.base import Sampling
from ramify.engine.prompt_scaffold import trained_policy_settings
from ramify.engine.rlm import RLM
from ramify.errors import ConfigError, RunInUse, StoreError, UnknownRun
from ramify.evaluate.attempt import GRACE_S, UNANSWERED, attempt
from ramify.evaluate.cost_budget import CostBudget
from ramify.logging import ComponentLogger
from ramify.store.durable_files import EVALUATIONS, FILE_MODE, make_folder, write_all
from ramify.tasks.base import GeneratedSplit, Item, Task, items_of, total
from ramify.tasks.scoring.answer_text import as_text
from ramify.types.message import Usage
from ramify.types.trajectory import Stop, Trajectory

_MAX_ANSWER_CHARS = 500


class EvaluationPlan(
    msgspec.Struct, frozen=True, tag="plan", forbid_unknown_fields=True, kw_only=True
):
    """The plan of an evaluation, such as the model, the task and the number of attempts."""

    model: str
    """Name of the model, as shown to people."""
    task: str
    """Name of the task, as accepted by ``task_of``."""
    options: dict[str, Any] = {}
    """Options of the task."""
    split: str = "test"
    items: int = 100
    """Number of items to evaluate, taken from the start of the split. The whole split is evaluated
    if it has fewer."""
    attempts: int = 1
    """Attempts per item."""
    seed: int = 0
    """Sampling seed from which the seed of each attempt is derived."""
    settings: dict[str, Any] = {}
    """Other settings that affect outcomes: scaffold, limits, temperature."""

    def __post_init__(self) -> None:
        if self.items < 1 or self.attempts < 1:
            raise ConfigError(
                f"cannot evaluate {self.items} items with {self.attempts} attempts: give at least "
                "1 of each"
            )


class AttemptOutcome(msgspec.Struct, frozen=True, tag="outcome", omit_defaults=True, kw_only=True):
    """The recorded outcome of one attempt at a task item, such as its reward and its answer."""

    item: str
    """Id of the item, which is one question of the task."""
    attempt: int
    """Index of the attempt among the attempts at its item, from 0."""
    kind: str = ""
    run: str = ""
    """Id of the run, if runs are stored."""
    reward: float | None = None
    """Weighted sum of ``rewards``; None if the attempt failed for reasons outside the model."""
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    answer: str | None = None
    """Answer as text, truncated if it is long."""
    stop: Stop | None = None
    reason: str = ""
    """Why a scored attempt has no answer, if ``stop`` does not say so, for example ``not
    fitting``."""
    error: str = ""
    """Why the attempt has no reward, or why another system gave no answer."""
    turns: int = 0
    """Number of turns of the root call."""
    calls: int = 0
    """Number of calls below the root."""
    usage: Usage = Usage()
    cost: float | None = None
    """Maximum cost per item, in dollars; None means no limit."""
    seconds: float = 0.0


_log = ComponentLogger("evaluate")


class AttemptStartRecord(msgspec.Struct, frozen=True, tag="started"):
    """A record that an attempt at a task item has begun.

    It contains the id of the stored run. It is written before the attempt sends its first request,
    so that an interrupted attempt can be continued.
    """

    item: str
    attempt: int
    run: str


class EvaluationResult(msgspec.Struct, frozen=True):
    """The result of an evaluation: its plan and the outcomes of its attempts.

    Example:
        [outcome for outcome in done.outcomes if outcome.error]    # attempts that failed
    """

    plan: EvaluationPlan
    outcomes: tuple[AttemptOutcome, ...]
    """Outcomes in order of items and attempts."""


def choose_split(task: Task, given: str | None = None) -> str:
    """Return the split to evaluate: the given one, else ``test``, else the task's only split.

    Raises ConfigError if the task has none of these.
    """
    if given is not None or "test" in task.splits:
        items_of(task, given or "test")
        return given or "test"
    if len(task.splits) == 1:
        only = next(iter(task.splits))
        text = f"task '{task.name}' has no split 'test', so its only one, '{only}', is evaluated"
        _log.info("only_split", text, shown=True)
        return only
    raise ConfigError(
        f"task '{task.name}' has no split 'test'; it has {', '.join(task.splits)}: choose one with "
        "--split, or give at least three questions if they come from one file"
    )


Watcher = Callable[[AttemptOutcome, Trajectory | None], None]
"""Called with the outcome of each attempt, and with its trajectory if it ran in this process."""
AttemptFunction = Callable[..., Awaitable[Trajectory]]
"""Function with the signature of ``attempt``, such as an answer mode (see answer_modes.py)."""


async def evaluate(
    rlm: RLM,
    task: Task,
    plan: EvaluationPlan,
    *,
    sampling: Sampling | None = None,
    concurrency: int = 16,
    record: EvaluationFileWriter | None = None,
    on_outcome: Watcher | None = None,
    grace_s: float = GRACE_S,
    direct: bool | None = None,
    budget: CostBudget | None = None,
) -> EvaluationResult:
    """Evaluate a model on a task: run the planned attempts that are not recorded yet, up to
    ``concurrency`` at once.

    ``sampling`` applies to every request, except for its seed. ``on_outcome`` is called with each
    attempt as it ends. If ``direct`` is true, a single plain call may answer a short context (see
    ``attempt``); None: if the plan's model is a policy that was trained so. ``budget`` limits the
    dollars of all attempts together; once it is used up, no attempt begins. Failures of an
    attempt's model, session or score are recorded in its outcome.
    Raises ConfigError for a split that the task does not have; bugs are also raised.

    Example:
        plan = evaluate.EvaluationPlan(model="gpt-5-mini", task="needle", items=20, attempts=4)
        done = await evaluate.evaluate(rlm, tasks.task_of("needle"), plan)
    """
    if direct is None:
        direct = trained_policy_settings(plan.model).direct
    mode = functools.partial(attempt, grace_s=grace_s, direct=direct)
    job = EvaluationSetup(
        plan, task, record, RlmAttemptRunner(rlm, sampling, mode), on_outcome, budget
    )
    return (await run_evaluations([job], concurrency=concurrency))[0]


async def run_evaluations(
    jobs: Sequence[EvaluationSetup], *, concurrency: int = 16
) -> tuple[EvaluationResult, ...]:
    """Run several evaluations together, with up to ``concurrency`` attempts at once, and return
    their results.

    Evaluations of the same split of the same task object share their items: each item is made once,
    and all attempts at it begin before those at the next one. Failures are handled as in
    ``evaluate``.
    """
    if concurrency < 1:
        raise ConfigError(f"cannot evaluate with concurrency {concurrency}: give at least 1")
    work = [_EvaluationWork(job) for job in jobs]
    queue = _AttemptQueue(work)

    async def worker() -> None:
        for each in queue:
            work, id = each.work, each.work.known_id(each.item_index)
            item, budget = None, work.job.budget
            if budget is not None and budget.is_used_up:
                continue
            if id is None or not (work.has(id, each.number) or work.job.makes.makes_items):
                item = await queue.item(each)
                id = item.id
            work.ids[id] = each.item_index
            if not work.has(id, each.number):
                await work.attempt(PlannedAttempt(each.item_index, id, item, each.number))

    try:
        async with contextlib.AsyncExitStack() as stack:
            for makes in {id(job.makes): job.makes for job in jobs}.values():
                await stack.enter_async_context(makes)
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(concurrency, queue.most)):
                    workers.create_task(worker())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return tuple(each.evaluation() for each in work)


class PlannedAttempt(NamedTuple):
    """An attempt at a task item that has not been made yet."""

    item_index: int
    """Index of the item in its split."""
    id: str
    """Id of the item."""
    made: Item | None
    """The item; None if another process creates it."""
    number: int
    """Index of the attempt among the attempts at its item, from 0."""

    @property
    def item(self) -> Item:
        assert self.made is not None
        return self.made


class AttemptRunner(Protocol):
    """Interface for running the attempts of an evaluation in this process, on other machines, or
    with another system."""

    makes_items: bool
    """True if this maker creates the items itself, from their indices in the split."""

    async def run_attempt(
        self, job: EvaluationSetup, which: PlannedAttempt, max_cost: float | None
    ) -> tuple[AttemptOutcome, Trajectory | None]:
        """Run one attempt, and return its outcome and its trajectory.

        The trajectory is None if the attempt was not a run of this process. ``max_cost`` limits the
        dollars that the attempt may spend; None means no limit.
        """
        ...

    async def __aenter__(self) -> object:
        """Open the resources that the attempts of all evaluations share, such as a client or a
        cluster.

        This is done before the first attempt begins.
        """
        ...

    async def __aexit__(self, *exc: Any) -> None: ...


class EvaluationSetup(NamedTuple):
    """An evaluation that is ready to run: its plan, its task and how attempts are made.

    It also has the evaluation's record.
    """

    plan: EvaluationPlan
    task: Task
    record: EvaluationFileWriter | None
    makes: AttemptRunner
    on_outcome: Watcher | None = None
    budget: CostBudget | None = None


class RlmAttemptRunner:
    """Runs evaluation attempts in this process with Ramify's engine (an ``RLM``).

    Implements ``AttemptRunner``.
    """

    makes_items = False

    def __init__(
        self, rlm: RLM, sampling: Sampling | None = None, mode: AttemptFunction = attempt
    ) -> None:
        self._rlm = rlm
        self._sampling = sampling
        self._mode = mode

    async def run_attempt(
        self, job: EvaluationSetup, which: PlannedAttempt, max_cost: float | None
    ) -> tuple[AttemptOutcome, Trajectory]:
        trajectory = await self.run(job, which.item, which.number, max_cost)
        return self.outcome(job, which.item, which.number, trajectory), trajectory

    async def run(
        self, job: EvaluationSetup, item: Item, number: int, max_cost: float | None, **more: Any
    ) -> Trajectory:
        """Run one attempt at an item, continuing its stored run if there is one.

        Further keyword arguments are passed to the attempt function.
        """
        record, plan = job.record, job.plan
        begun = (
            functools.partial(record.record_attempt_start, item.id, number)
            if record is not None
            else None
        )
        return await self._mode(
            self._rlm,
            job.task,
            item,
            metadata={"evaluation": {"split": plan.split, "attempt": number}},
            resume=record.unfinished.get((item.id, number), "") if record is not None else "",
            on_start=begun,
            sampling=_sampling(self._sampling, plan.seed, item, number),
            max_cost=max_cost,
            **more,
        )

    def outcome(
        self, job: EvaluationSetup, item: Item, number: int, trajectory: Trajectory
    ) -> AttemptOutcome:
        """Summarize the trajectory of a finished attempt as the outcome to record."""
        is_stored = self._rlm.store is not None
        return outcome_of(job.task, item, number, trajectory, is_stored=is_stored)

    async def __aenter__(self) -> RLM:
        return await self._rlm.__aenter__()

    async def __aexit__(self, *exc: Any) -> None:
        await self._rlm.__aexit__(*exc)


class _EvaluationWork:
    """The state of one evaluation while its attempts run.

    It contains both the outcomes recorded earlier and the new ones.
    """

    def __init__(self, job: EvaluationSetup) -> None:
        self.job = job
        self.items = items_of(job.task, job.plan.split)
        self.num_items = min(job.plan.items, len(self.items))
        self.outcomes = {
            (outcome.item, outcome.attempt): outcome
            for outcome in (job.record.outcomes if job.record is not None else ())
        }
        """(item, attempt) -> its outcome."""
        self.ids: dict[str, int] = {}
        """Id of each created item -> its index."""

    def known_id(self, index: int) -> str | None:
        """Return the id of a task item if it is known without creating the item.

        Creating an item may be slow. Return None otherwise.
        """
        return self.items.id_of(index) if isinstance(self.items, GeneratedSplit) else None

    def has(self, id: str, number: int) -> bool:
        return (id, number) in self.outcomes

    async def attempt(self, which: PlannedAttempt) -> None:
        """Run one attempt and record its outcome.

        Nothing is recorded if the budget is used up, or if the budget cut the attempt short.
        """
        job, budget = self.job, self.job.budget
        dollars = None if budget is None else await budget.reserve()
        if budget is not None and dollars is None:
            return
        outcome: AttemptOutcome | None = None
        try:
            outcome, trajectory = await job.makes.run_attempt(job, which, dollars)
        finally:
            if budget is not None and dollars is not None:
                budget.settle(dollars, dollars if outcome is None else outcome.cost or 0.0)
        was_cut = outcome.stop is Stop.MAX_COST
        if budget is not None and was_cut and budget.was_reservation_reduced(dollars or 0.0):
            budget.is_used_up = True  # its run can be continued with a larger budget
            return
        self.outcomes[which.id, which.number] = outcome
        if job.record is not None:
            job.record.append(outcome)
        if job.on_outcome is not None:
            job.on_outcome(outcome, trajectory)

    def evaluation(self) -> EvaluationResult:
        """Return the result of the evaluation so far.

        Its outcomes are in the order of items and attempts.
        """
        outcomes = [
            outcome
            for outcome in self.outcomes.values()
            if outcome.item in self.ids and outcome.attempt < self.job.plan.attempts
        ]
        outcomes.sort(key=lambda outcome: (self.ids[outcome.item], outcome.attempt))
        return EvaluationResult(self.job.plan, tuple(outcomes))


class _QueuedAttempt(NamedTuple):
    """An attempt that waits in the queue, and the evaluation that needs it."""

    work: _EvaluationWork
    group: int
    """Index of the group of evaluations that share their items."""
    item_index: int
    """Index of the item."""
    number: int
    """Index of the attempt among the attempts at its item, from 0."""


class _AttemptQueue:
    """Hands out the attempts of several evaluations in order, one at a time.

    Evaluations of the same split of a task share each item, so that the item is created only once.
    """

    def __init__(self, work: Sequence[_EvaluationWork]) -> None:
        groups: dict[tuple[int, str], list[_EvaluationWork]] = {}
        for each in work:
            groups.setdefault((id(each.job.task), each.job.plan.split), []).append(each)
        self.most = sum(each.num_items * each.job.plan.attempts for each in work)
        self._groups = list(groups.values())
        self._attempts = self._in_order()
        self._making: dict[tuple[int, int], asyncio.Task[Item]] = {}
        """(group, index of an item) -> the task that creates the item."""

    def __iter__(self) -> Iterator[_QueuedAttempt]:
        return self._attempts

    def _in_order(self) -> Iterator[_QueuedAttempt]:
        for group, jobs in enumerate(self._groups):
            for index in range(max(each.num_items for each in jobs)):
                for each in jobs:
                    if index < each.num_items:
                        for number in range(each.job.plan.attempts):
                            yield _QueuedAttempt(each, group, index, number)

    async def item(self, each: _QueuedAttempt) -> Item:
        place = each.group, each.item_index
        if place not in self._making:
            self._making[place] = asyncio.ensure_future(
                asyncio.to_thread(each.work.items.__getitem__, each.item_index)
            )
            # Earlier items are dropped, since their contexts may be long.
            before = each.group, each.item_index - 1
            for old in [known for known in self._making if known < before]:
                if self._making[old].done():
                    del self._making[old]
        return await asyncio.shield(self._making[place])


def _sampling(defaults: Sampling | None, seed: int, item: Item, number: int) -> Sampling:
    attempt_seed = random.Random(f"{seed}/{item.id}/{number}").getrandbits(31)
    return msgspec.structs.replace(defaults or Sampling(), seed=attempt_seed)


def outcome_of(
    task: Task, item: Item, number: int, trajectory: Trajectory, *, is_stored: bool
) -> AttemptOutcome:
    """Summarize the trajectory of an attempt as the outcome to record.

    Long answers are truncated.
    """
    has_reward = bool(trajectory.rewards)
    answer = as_text(trajectory.answer)
    return AttemptOutcome(
        item=item.id,
        attempt=number,
        kind=item.kind,
        run=trajectory.id if is_stored else "",
        reward=total(trajectory.rewards, task.weights) if has_reward else None,
        rewards=trajectory.rewards,
        metrics=trajectory.metrics,
        answer=answer if answer is None else answer[:_MAX_ANSWER_CHARS],
        stop=trajectory.stop,
        reason=str(trajectory.metadata.get(UNANSWERED, "")),
        error="" if has_reward else (trajectory.errors or ["no reward"])[-1],
        turns=len(trajectory.root.turns) if trajectory.calls else 0,
        calls=max(0, len(trajectory.calls) - 1),
        usage=trajectory.usage,
        cost=trajectory.cost,
        seconds=trajectory.seconds,
    )


Entry = EvaluationPlan | AttemptStartRecord | AttemptOutcome
_decoder = msgspec.json.Decoder(Entry)


class EvaluationStore:
    """The records of all evaluations in a run store, so that interrupted ones can resume.

    A store is a folder of runs. Each evaluation is one file.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root / EVALUATIONS

    def create(self, plan: EvaluationPlan) -> EvaluationFileWriter:
        """Create the file that records a new evaluation, and open it for writing.

        The evaluation gets a new id.
        """
        make_folder(self._folder)
        words = "-".join(filter(None, (plan.task.partition(":")[0].rpartition("/")[2], plan.split)))
        id = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}-{words}"
        return EvaluationFileWriter(self._folder / f"{id}.jsonl", plan)

    def reopen(self, id: str) -> EvaluationFileWriter:
        """Open the record of an earlier evaluation to continue it.

        Raises StoreError if there is no such evaluation.
        """
        return EvaluationFileWriter(self.path(id))

    def reopen_or_create(self, plan: EvaluationPlan) -> EvaluationFileWriter:
        """Reopen the earlier evaluation with the same plan, or start a new one if there is none.

        The numbers of items and attempts may differ, so that an evaluation can be extended.
        """
        for path in self.paths():
            before = read_evaluation(path, []).plan
            if msgspec.structs.replace(before, items=plan.items, attempts=plan.attempts) == plan:
                return EvaluationFileWriter(path)
        return self.create(plan)

    def load(self, id: str) -> EvaluationResult:
        return read_evaluation(self.path(id))

    def paths(self) -> list[Path]:
        """Return the files of all recorded evaluations, oldest first."""
        return sorted(self._folder.glob("*.jsonl"))

    def path(self, id: str) -> Path:
        """Return the path of the file that records an evaluation.

        ``last`` is the newest one; otherwise give its id, a unique prefix of the id, or the path of
        a ``.jsonl`` file. Raises StoreError if no evaluation or more than one matches.
        """
        if id.endswith(".jsonl"):
            path = Path(id).expanduser()
            if not path.is_file():
                raise UnknownRun(f"the evaluation {path} does not exist")
            return path
        paths = self.paths()
        matches = (
            paths[-1:]
            if id == "last"
            else [path for path in paths if path.stem.startswith(id)]
            if id
            else []
        )
        if len(matches) != 1:
            known = f"the last is {paths[-1].stem}" if paths else f"there is none in {self._folder}"
            many = f"{len(matches)} evaluations begin with" if matches else "found no evaluation"
            raise UnknownRun(f"{many} {id!r}: {known}")
        return matches[0]


class EvaluationFileWriter:
    """The open file in which one evaluation records its attempts.

    It is locked, so that no other process can write to it.
    """

    def __init__(self, path: Path, plan: EvaluationPlan | None = None) -> None:
        """Open the file that records an evaluation, or create it if ``plan`` is given.

        A new file begins with the plan. Raises StoreError if another process is writing to it.
        """
        self.path = path
        flags = os.O_RDWR | os.O_APPEND | (os.O_CREAT | os.O_EXCL if plan is not None else 0)
        try:
            self._fd = os.open(path, flags, FILE_MODE)
        except OSError as error:
            raise StoreError(f"the evaluation {path} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise RunInUse(
                f"the evaluation {path.stem} is being written by another process: stop that one "
                "first"
            ) from None
        if plan is not None:
            self.plan = plan
            self.outcomes = list[AttemptOutcome]()
            self.unfinished = dict[tuple[str, int], str]()
            """(item, attempt) without a reward -> id of the last run that made it."""
            self._write(plan)
        else:
            self._resume()

    @property
    def id(self) -> str:
        return self.path.stem

    def record_attempt_start(self, item: str, attempt: int, run: str) -> None:
        """Record the id of the run that makes an attempt, so that the attempt can be continued
        later."""
        if self.unfinished.get((item, attempt)) != run:
            self.unfinished[item, attempt] = run
            self._write(AttemptStartRecord(item, attempt, run))

    def append(self, outcome: AttemptOutcome) -> None:
        self.outcomes.append(outcome)
        self._write(outcome)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _resume(self) -> None:
        data = self.path.read_bytes()
        complete = data.rfind(b"\n") + 1
        if complete < len(data):
            os.ftruncate(self._fd, complete)
        entries = _entries(data[:complete], self.path)
        evaluation = _evaluation(entries, self.path)
        self.plan = evaluation.plan
        # Attempts that failed for reasons outside the model are continued, or repeated.
        self.outcomes = [outcome for outcome in evaluation.outcomes if outcome.reward is not None]
        runs = {
            (entry.item, entry.attempt): entry.run
            for entry in entries
            if not isinstance(entry, EvaluationPlan) and entry.run
        }
        scored = {(outcome.item, outcome.attempt) for outcome in self.outcomes}
        self.unfinished = {place: run for place, run in runs.items() if place not in scored}

    def _write(self, entry: Entry) -> None:
        write_all(self._fd, msgspec.json.encode(entry) + b"\n", self.path)


def read_evaluation(path: Path, problems: list[str] | None = None) -> EvaluationResult:
    """Read a recorded evaluation, which may be incomplete.

    If an attempt was repeated, its last outcome counts. Raises StoreError if a line is damaged. If
    a list is passed as ``problems``, damaged lines are skipped and described in that list instead.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"the evaluation {path} cannot be read: {error.strerror}") from None
    return _evaluation(_entries(data[: data.rfind(b"\n") + 1], path, problems), path)


def _entries(data: bytes, path: Path, problems: list[str] | None = None) -> list[Entry]:
    entries: list[Entry] = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            entries.append(_decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if problems is None or number == 1:
                raise StoreError(f"{path}, line {number}: {error}") from None
            problems.append(f"{path}, line {number} is damaged and was skipped: {error}")
    return entries


def _evaluation(entries: Sequence[Entry], path: Path) -> EvaluationResult:
    if not entries or not isinstance(entries[0], EvaluationPlan):
        raise StoreError(f"{path} is not an evaluation: its first line must be a plan")
    outcomes: dict[tuple[str, int], AttemptOutcome] = {}
    for entry in entries[1:]:
        if isinstance(entry, AttemptOutcome):
            outcomes[entry.item, entry.attempt] = entry
    return EvaluationResult(entries[0], tuple(outcomes.values()))
