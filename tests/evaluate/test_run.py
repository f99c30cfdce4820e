"""Whole evaluations through the engine: requests, failures, records, and how an interrupted
evaluation continues."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ramify import RLM, Limits, ScriptedClient, Store
from ramify.clients.base import Sampling
from ramify.errors import ConfigError, RamifyError, RunInUse, StoreError
from ramify.evaluate.attempt import attempt
from ramify.evaluate.evaluation_report import difference, report, table
from ramify.evaluate.run_evaluation import (
    AttemptOutcome,
    EvaluationFileWriter,
    EvaluationStore,
    evaluate,
    read_evaluation,
)
from ramify.evaluate.statistics import share_with_interval
from ramify.tasks.base import DatasetTask, Item, RolloutInitialState
from ramify.tasks.scoring import exact
from ramify.testing.scripted_client import refused
from ramify.types.message import Message
from ramify.types.trajectory import Stop, Trajectory
from tests.engine.helpers import at_once, client
from tests.evaluate.helpers import ITEMS, SPEC, TASK, evaluated, number, plan, right, rlm, unless


def test_cancelled_attempt_does_not_affect_the_others() -> None:
    """If a client's own future is cancelled, only that attempt fails."""

    def cancelled(messages: tuple[Message, ...]) -> str:
        if number(messages) == 3:
            raise asyncio.CancelledError
        return right(messages)

    outcomes: list[AttemptOutcome] = []
    evaluated(cancelled, on_outcome=lambda outcome, _: outcomes.append(outcome))
    assert sorted(outcome.item for outcome in outcomes if not outcome.error) == [
        f"size/test/{n}" for n in (0, 1, 2, 4, 5, 6, 7)
    ]
    (lost,) = (outcome for outcome in outcomes if outcome.error)
    assert (lost.item, lost.error) == (
        "size/test/3",
        "it was cancelled from within (a bug; see the log)",
    )


def test_report_matches_hand_calculation() -> None:
    """Items 1, 2 and 5 of 0 to 7 are wrong: half of the odd ones, a quarter of the even ones."""
    found = report(evaluated(unless(lambda n: n in (1, 2, 5))))
    assert [(row.kind, row.items, row.average and row.average.value) for row in found.rows] == [
        ("all", 8, 5 / 8),
        ("even", 4, 3 / 4),
        ("odd", 4, 1 / 2),
    ]
    assert (found.attempts, found.failed, found.stops, found.rewards) == (
        8,
        0,
        {"final": 8},
        {"correct": 5 / 8},
    )
    assert (found.spent.requests, found.spent.turns_mean, found.spent.calls_mean) == (8, 1.0, 0.0)
    assert found.spent.cost == pytest.approx(
        (found.spent.input_tokens + 2 * found.spent.output_tokens) / 1e6
    )
    shown = table(found)
    assert shown.startswith("size/test · scripted:test · 8 items, 1 attempt each\n")
    assert shown.splitlines()[1:4] == [
        "       items   avg@1",
        "all        8   0.625 [0.24 0.91]",
        "even       4   0.750 [0.19 0.99]",
    ]
    assert max(map(len, shown.splitlines())) < 100


def test_pass_at_k_and_majority_match_hand_calculation() -> None:
    """Four at each of two items. Item 0: answers 1 1 2 1 (right: 1), item 1: 3 2 3 2 (right: 2)."""
    said = {0: iter([1, 1, 2, 1]), 1: iter([3, 2, 3, 2])}

    def model(messages: tuple[Message, ...]) -> str:
        return f"FINAL({next(said[number(messages)])})"

    found = evaluated(model, of=plan(items=2, attempts=4), concurrency=1)
    assert [(each.item, each.attempt, each.reward) for each in found.outcomes] == [
        ("size/test/0", 0, 1.0), ("size/test/0", 1, 1.0), ("size/test/0", 2, 0.0), ("size/test/0", 3, 1.0),
        ("size/test/1", 0, 0.0), ("size/test/1", 1, 1.0), ("size/test/1", 2, 0.0), ("size/test/1", 3, 1.0),
    ]  # fmt: skip
    (row, *_) = report(found, k=2).rows
    assert row.average is not None
    assert row.passes is not None
    assert row.majority is not None
    assert row.average.value == (3 / 4 + 2 / 4) / 2
    assert row.passes.value == pytest.approx(
        (1 - 0 + 1 - 1 / 6) / 2
    )  # 1 - C(1,2)/C(4,2), 1 - C(2,2)/C(4,2)
    # blocks of two: 1 1 -> right; 2 1 -> 2, wrong. 3 2 -> 3, wrong; 3 2 -> 3, wrong
    assert row.majority.value == (1 / 2 + 0) / 2
    assert report(found).rows[0].majority == share_with_interval(
        1, 2
    )  # of all four: 1 is right; 3 and 2 are equal, 3 came first


def test_attempts_differ_only_in_reproducible_seeds() -> None:
    def seeds(seed: int) -> list[int | None]:
        model = client(right)
        evaluated(
            model,
            of=plan(items=2, attempts=3, seed=seed),
            concurrency=1,
            sampling=Sampling(temperature=0.5),
        )
        assert {request.sampling.temperature for request in model.requests} == {0.5}
        return [request.sampling.seed for request in model.requests]

    assert len(set(seeds(0))) == 6
    assert seeds(0) == seeds(0)
    assert not set(seeds(0)) & set(seeds(1))


def test_concurrency_is_bounded() -> None:
    model = client(at_once(5, right), latency_s=0.02)
    evaluated(model, of=plan(attempts=3), concurrency=5)
    assert model.most_in_flight == 5


# --- failures


def test_failed_attempt_has_no_reward_and_the_others_continue() -> None:
    def model(messages: tuple[Message, ...]) -> Any:
        return refused(401, "no such key") if number(messages) == 3 else right(messages)

    found = evaluated(model)
    failed = [each for each in found.outcomes if each.reward is None]
    assert [(each.item, each.stop) for each in failed] == [("size/test/3", Stop.ERROR)]
    assert "no such key" in failed[0].error
    figures = report(found)
    assert (figures.failed, figures.rows[0].average) == (1, share_with_interval(7, 7))
    assert "1 of 8 attempts failed and are not counted; the first: " in table(figures)


def test_item_with_too_few_scored_attempts_is_excluded_from_pass_at_k() -> None:
    asked: dict[int, int] = {}

    def model(messages: tuple[Message, ...]) -> Any:
        n = number(messages)
        asked[n] = asked.get(n, 0) + 1
        return refused(400) if n == 0 and asked[n] == 2 else unless(lambda n: n == 1)(messages)

    found = report(evaluated(model, of=plan(items=2, attempts=2), concurrency=1))
    assert found.rows[0].average is not None
    assert found.rows[0].passes is not None
    assert (found.rows[0].average.value, found.rows[0].passes.value) == (0.5, 0.0)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            {"reward": lambda answer, item: answer / 0},
            "task 'size', item size/test/0: its score raised ZeroDivisionError",
        ),
        (
            {"begin": lambda item: None},
            "task 'size', item size/test/0: its prepare raised TypeError",
        ),
        (
            {"begin": lambda item: 1 / 0},
            "task 'size', item size/test/0: its prepare raised "
            f"ZeroDivisionError('division by zero'), at {__file__}:",
        ),
    ],
)
def test_failing_task_is_named_in_the_outcome(change: dict[str, Any], error: str) -> None:
    task = DatasetTask(**{"name": "size", "splits": TASK.splits, "reward": TASK.reward, **change})
    (outcome,) = evaluated(right, task, of=plan(items=1)).outcomes
    assert outcome.reward is None
    assert outcome.error.startswith(error)


def test_item_that_cannot_be_asked_does_not_affect_the_others() -> None:
    """The engine refuses an empty context: the item is named, and the other items are asked."""
    items = [ITEMS[0], Item("How many?", [], gold=1, id="size/test/empty"), ITEMS[1]]
    done = evaluated(right, DatasetTask("size", {"test": items}, TASK.reward), of=plan(items=3))
    assert [outcome.reward for outcome in done.outcomes] == [1.0, None, 1.0]
    assert done.outcomes[1].error.startswith(
        "task 'size', item size/test/empty: the context is empty"
    )


def test_metadata_of_on_end_reaches_the_trajectory() -> None:
    ended: list[Any] = []

    async def begin(item: Any) -> RolloutInitialState:
        return RolloutInitialState(
            context=item.context,
            tools={"double": lambda x: 2 * x},
            on_end=lambda answer: ended.append(answer) or {"a": 1},
        )

    def on_outcome(outcome: AttemptOutcome, trajectory: Trajectory) -> None:
        seen.append((outcome.item, trajectory.metadata["a"], trajectory.task, trajectory.rewards))

    seen: list[Any] = []
    task = DatasetTask("size", TASK.splits, TASK.reward, begin=begin)
    found = evaluated(
        ["FINAL(double(len(context)))"], task, of=plan(items=1), on_outcome=on_outcome
    )
    assert (found.outcomes[0].answer, ended) == ("2", [2])
    assert seen == [("size/test/0", 1, "size/test/0", {"correct": 0.0})]


def test_reward_that_takes_too_long_is_an_error() -> None:
    import threading

    never = threading.Event()
    task = DatasetTask("size", TASK.splits, lambda answer, item: float(never.wait(60)))
    try:
        (outcome,) = evaluated(right, task, of=plan(items=1), grace_s=0.2).outcomes
    finally:
        never.set()
    assert "its score took more than 0.2 s" in outcome.error


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="task 'size' has no split 'tset': did you mean 'test'"):
        evaluated(right, of=plan(split="tset"))
    with pytest.raises(ConfigError, match="evaluate 0 items with 1 attempts"):
        plan(items=0)
    with pytest.raises(ConfigError, match="concurrency 0: give at least 1"):
        evaluated(right, concurrency=0)
    with pytest.raises(
        ConfigError, match=r"pass@2 needs at least 2 attempts at each item \(n\), and there are 1"
    ):
        report(evaluated(right, of=plan(items=1)), k=2)


# --- records


def test_interrupted_evaluation_continues_where_it_stopped(tmp_path: Path) -> None:
    """After a kill that left half a line, only the missing and the failed attempts are run."""
    records = EvaluationStore(tmp_path)
    wanted = plan(attempts=2)
    first = records.create(wanted)

    def stop(outcome: AttemptOutcome, trajectory: Trajectory) -> None:
        if len(first.outcomes) == 5:
            raise RamifyError("stop here")

    def model(messages: tuple[Message, ...]) -> Any:
        return refused(400) if number(messages) == 1 else right(messages)

    with pytest.raises(RamifyError, match="stop here"):
        evaluated(model, of=wanted, record=first, on_outcome=stop, concurrency=1)
    first.close()
    with first.path.open("ab") as file:
        file.write(b'{"type":"outcome","item":"size/te')
    assert len(read_evaluation(first.path).outcomes) == 5
    again = records.reopen("last")
    assert again.id == first.id
    second = client(right)
    found = evaluated(second, of=again.plan, record=again)
    again.close()
    assert len(second.requests) == 16 - 3  # of five, two had failed
    assert [(each.item, each.attempt) for each in found.outcomes] == [
        (item.id, attempt) for item in ITEMS for attempt in range(2)
    ]
    assert report(found).rows[0].average == share_with_interval(8, 8)
    assert {(each.item, each.attempt): each for each in read_evaluation(first.path).outcomes} == {
        (each.item, each.attempt): each for each in found.outcomes
    }


def test_record_is_written_by_one_process_at_a_time(tmp_path: Path) -> None:
    record = EvaluationStore(tmp_path).create(plan())
    with pytest.raises(RunInUse, match="is being written by another process: stop that one first"):
        EvaluationFileWriter(record.path)
    record.close()
    EvaluationFileWriter(record.path).close()
    assert record.path.stat().st_mode & 0o777 == 0o600


def test_records_are_found_by_name(tmp_path: Path) -> None:
    records = EvaluationStore(tmp_path)
    with pytest.raises(StoreError, match="found no evaluation 'last': there is none in"):
        records.path("last")
    made = records.create(plan(task="ramify.tasks.ledger.task:ledger"))
    made.close()
    assert made.id.endswith("-ramify.tasks.ledger.task-test")
    assert records.path(made.id[:17]) == records.path("last") == made.path
    with pytest.raises(StoreError, match=f"found no evaluation 'x': the last is {made.id}"):
        records.path("x")
    for text, message in (
        ("", "is not an evaluation: its first line must be a plan"),
        ("{}\n", "line 1"),
        ('{"type":"outcome","item":"a","attempt":0}\n', "is not an evaluation"),
    ):
        made.path.write_text(text)
        with pytest.raises(StoreError, match=message):
            records.load("last")


def test_stored_runs_have_task_and_evaluation_metadata(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (outcome,) = evaluated(right, of=plan(items=1), store=store).outcomes
    trajectory = store.load(outcome.run)
    assert (trajectory.task, trajectory.metadata["evaluation"]) == (
        "size/test/0",
        {"split": "test", "attempt": 0},
    )
    assert trajectory.rewards == {"correct": 1.0} == store.runs()[0].rewards
    assert evaluated(right, of=plan(items=1)).outcomes[0].run == ""


# --- comparing two evaluations


def test_difference_uses_the_common_items() -> None:
    good, bad = evaluated(right), evaluated(unless(lambda n: n < 4), of=plan(items=6))
    figure, num = difference(good, bad)
    assert (figure.value, num) == (4 / 6, 6)
    assert figure.low < 0 < figure.value < figure.high <= 1.0  # four of four may be luck
    with pytest.raises(ConfigError, match="cannot be compared: options is "):
        difference(good, evaluated(right, of=plan(items=1, options={"chars": 9})))
    with pytest.raises(ConfigError, match="have no scored item in common"):
        difference(good, evaluated(lambda messages: refused(400), of=plan(items=1)))


def test_report_can_be_encoded_as_json() -> None:
    import msgspec

    data = json.loads(msgspec.json.encode(report(evaluated(right, of=plan(items=2, attempts=2)))))
    assert data["rows"][0]["passes"] == msgspec.to_builtins(share_with_interval(2, 2))
    assert set(data) == {
        "plan",
        "k",
        "attempts",
        "failed",
        "first_error",
        "rows",
        "rewards",
        "metrics",
        "stops",
        "spent",
    }


def test_evaluate_works_with_an_open_rlm_in_a_running_loop() -> None:
    """The training loop uses it like this, repeatedly with one RLM."""

    async def twice() -> list[float | None]:
        async with rlm(right) as open_rlm:
            found = [await evaluate(open_rlm, TASK, plan(items=2)) for _ in range(2)]
            return [outcome.reward for evaluation in found for outcome in evaluation.outcomes]

    assert asyncio.run(twice()) == [1.0] * 4
    assert SPEC.provider == "process"


def test_unfinished_attempts_continue_from_their_journals(tmp_path: Path) -> None:
    """Four attempts: one is suspended, one is killed after its first turn, one had ended but was
    not scored: each is counted once, and none pays for a recorded reply."""
    asked = Counter[int]()
    is_out = True

    def model(messages: tuple[Message, ...]) -> Any:
        item, turn = number(messages), sum(each.role == "assistant" for each in messages)
        if is_out and item == 1 and turn == 1:
            return refused(402, "no credit")
        asked[item] += 1
        return "found = size(context)" if turn == 0 else "FINAL(found)"

    def size(text: str) -> int:
        return len(text)

    async def prepare(item: Item) -> RolloutInitialState:
        return RolloutInitialState(context=item.context, tools={"size": size})

    task = DatasetTask("size", {"test": ITEMS}, exact, begin=prepare)
    store, records = Store(tmp_path), EvaluationStore(tmp_path)
    first = records.create(plan(items=4))
    before = evaluated(model, task, of=first.plan, record=first, store=store, concurrency=1)
    first.close()
    assert [each.stop for each in before.outcomes].count(Stop.SUSPENDED) == 1
    runs = [each.run for each in before.outcomes]
    # Item 2 was killed before its second request, and item 3 between its end and its score.
    killed = store.path(runs[2])
    events = killed.read_bytes().splitlines(keepends=True)
    cut = next(n for n, line in enumerate(events) if b'"Requested"' in line and b'"turn":1' in line)
    killed.write_bytes(b"".join(events[:cut]))
    entries = first.path.read_bytes().splitlines(keepends=True)
    gone = [f'"outcome","item":"size/test/{n}"'.encode() for n in (2, 3)]
    first.path.write_bytes(b"".join(e for e in entries if not any(part in e for part in gone)))
    is_out = False
    again = records.reopen("last")
    found = evaluated(model, task, of=again.plan, record=again, store=store)
    again.close()
    assert [each.run for each in found.outcomes] == runs
    assert [(each.reward, each.stop, each.usage.calls) for each in found.outcomes] == [
        (1.0, Stop.FINAL, 2)
    ] * 4
    assert asked == {0: 2, 1: 2, 2: 3, 3: 2}  # only what the killed run had not recorded
    assert len(store.runs()) == 4


def test_attempt_that_cannot_be_resumed_is_repeated(tmp_path: Path) -> None:
    store, records = Store(tmp_path), EvaluationStore(tmp_path)
    first = records.create(plan(items=1))
    evaluated(lambda messages: refused(402), of=first.plan, record=first, store=store)
    first.close()
    store.path("last").unlink()
    again = records.reopen("last")
    [outcome] = evaluated(right, of=again.plan, record=again, store=store).outcomes
    again.close()
    assert (outcome.reward, outcome.run) == (1.0, store.runs()[0].id)


def test_an_attempt_has_the_time_of_its_own_limits() -> None:
    async def slow(_messages: Any) -> str:
        await asyncio.sleep(0.5)
        return "FINAL(7)"

    async def main() -> Any:
        async with RLM(ScriptedClient(slow), limits=Limits(max_seconds=0.1)) as rlm:
            own = Limits(max_seconds=100)
            return await attempt(rlm, TASK, ITEMS[0], limits=own, grace_s=0.1)

    trajectory = asyncio.run(main())
    assert (trajectory.answer, trajectory.errors) == (7, [])
