"""A resumed run repeats its recorded plain calls in a short way: the result is that of the long one.

The run of these tests has plain calls of all outcomes. Its journal is cut after each line, as a kill
cuts it, and resumed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify import RLM, Price, ReplayDiverged, Result, Stop, Store
from ramify.testing import ScriptedClient, refused
from ramify.types.event import TrajectoryBuilder
from ramify.types.message import Message, Reply, Usage
from ramify.types.trajectory import Trajectory
from tests.engine.helpers import by_role, client, code, rlm

NUMBER = {"type": "integer"}
ROOT = [
    code(
        "plain = llm_query_batched([f'a{i}' for i in range(4)])",
        "try:\n    llm_query_batched(['b0', 'refused', 'empty', 'cut', 'b1', 'dear', 'tall'])\n"
        "except SubcallError as error:\n    results, kinds = error.results, error.kinds",
    ),
    code(
        f"numbers = llm_query_batched(['n1', 'twice', 'n2'], schema={NUMBER!r})",
        "child = rlm_query('a child at the depth limit')",
        "FINAL([plain, results, sorted(kinds.items()), numbers, child, llm_query('last')])",
    ),
]
PRICE = Price(input=1.0, output=2.0)


def answer(prompt: str) -> Any:
    """Return the reply to a prompt of a plain call."""
    prompt = prompt.partition("\n")[0]
    if prompt.startswith("That does not fit"):
        return "7"
    match prompt:
        case "refused":
            return refused(400, "no")
        case "empty":
            return " "
        case "cut":
            return Reply(Message("assistant", "half"), Usage(9, 9, calls=1), finish="length")
        case "dear":
            return Reply(Message("assistant", "re: dear"), Usage(3, 50_000, calls=1))
        case "tall":
            return Reply(Message("assistant", "re: tall"), Usage(90_000, 3, calls=1))
        case "twice":
            return "seven"
        case "n1" | "n2":
            return prompt[1:]
        case _:
            usage = Usage(7, 3, cached_tokens=2, reasoning_tokens=1, calls=1)
            return Reply(Message("assistant", f"re: {prompt}"), usage)


def asker(store: Store, lines: list[str], **options: Any) -> tuple[RLM, ScriptedClient]:
    model = client(by_role(lines, answer), price=PRICE)
    limits = {"max_depth": 0, "max_cost": 100.0, "max_tokens": 10**6, **options.pop("limits", {})}
    return rlm(model, store=store, limits=limits, **options), model


class Recorded(msgspec.Struct):
    """A run that nothing interrupted."""

    folder: Path
    """Its store."""
    lines: list[bytes]
    """Lines of its journal."""
    result: Result

    def killed(self, lines: list[bytes], folder: Path) -> Store:
        """Return a new store with the run, whose process was killed after these lines."""
        shutil.copytree(self.folder / "blobs", folder / "blobs")
        (folder / "runs").mkdir()
        (folder / "runs" / "20260301-000000-killed.jsonl").write_bytes(b"".join(lines))
        return Store(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("whole")
    asked, _ = asker(Store(folder), ROOT)
    with asked:
        result = asked.completion("text", "?")
    assert result.stop is Stop.FINAL, result
    return Recorded(folder, lines_in(folder), result)


def test_the_run_has_calls_of_all_outcomes(whole: Recorded) -> None:
    plain, results, kinds, numbers, child, last = whole.result.answer
    assert plain == ["re: a0", "re: a1", "re: a2", "re: a3"]
    assert results == ["re: b0", None, None, None, "re: b1", "re: dear", "re: tall"]
    assert kinds == [(1, "error"), (2, "error"), (3, "length")]
    assert (numbers, child[:3], last) == ([1, 7, 2], "re:", "re: last")


def test_a_run_that_is_killed_anywhere_resumes_alike(whole: Recorded, tmp_path: Path) -> None:
    for num in range(3, len(whole.lines)):
        short = resumed(whole, num, tmp_path / f"{num}")
        assert short.result.answer == whole.result.answer, num
        assert short.journal[:num] == whole.lines[:num], num
        paid = short.result.usage
        assert paid == short.result.trajectory.usage, num
        assert paid.calls - paid.unknown_calls == whole.result.usage.calls, "paid once each"
        # A listener receives each event, so each is made.
        heard = TrajectoryBuilder()
        long = resumed(whole, num, tmp_path / f"{num} heard", on_event=heard.apply)
        expected = without_times(short.result.trajectory)
        assert without_times(long.result.trajectory) == expected, num
        assert without_times(heard.trajectory) == expected, num
        assert long.asked == short.asked, num


def test_a_finished_run_is_replayed_alike(whole: Recorded, tmp_path: Path) -> None:
    store = whole.killed(whole.lines, tmp_path)
    asked, model = asker(store, [])
    with asked:
        replayed = asked.replay("last")
    assert (replayed.answer, model.requests) == (whole.result.answer, [])
    stored = without_times(store.load("last"))
    assert stored.pop("warnings"), "of a reply that used too much, which is not received again"
    assert without_times(replayed.trajectory) == stored


def test_a_repeated_reply_that_used_too_much_still_counts(whole: Recorded, tmp_path: Path) -> None:
    (num,) = (
        num
        for num, line in enumerate(whole.lines, start=1)
        if b'"type":"Requested"' in line and b'"content":"last"' in line
    )
    usage = resumed(whole, num, tmp_path).result.usage
    assert usage.unknown_calls == 1, "the last request was in flight"
    assert usage.output_tokens >= whole.result.usage.output_tokens + 50_000, "as `dear` has used"


def test_another_prompt_at_a_recorded_place_diverges(whole: Recorded, tmp_path: Path) -> None:
    changed = [
        line.partition(b',"crc":"')[0].replace(b"in range(4)", b"in range(1, 5)") + b"}\n"
        for line in whole.lines
    ]
    for num in (len(changed), len(changed) - 2):
        store = whole.killed(changed[:num], tmp_path / f"{num}")
        before = lines_in(tmp_path / f"{num}")
        asked, model = asker(store, [])
        with asked, pytest.raises(ReplayDiverged, match=r"call 0\.0, turn 0"):
            asked.replay("last") if num == len(changed) else asked.resume("last")
        assert (lines_in(tmp_path / f"{num}"), model.requests) == (before, [])


class Resumed(msgspec.Struct):
    result: Result
    journal: list[bytes]
    asked: list[str]
    """Last messages of the requests that were sent."""


def resumed(whole: Recorded, num: int, folder: Path, **options: Any) -> Resumed:
    """Resume a run whose process was killed after ``num`` lines of its journal."""
    lines = whole.lines[:num]
    num_turns = sum(line.startswith(b'{"type":"Replied","call":"0",') for line in lines)
    asked, model = asker(whole.killed(lines, folder), ROOT[num_turns:])
    with asked:
        result = asked.resume("last", **options)
    sent = sorted(request.messages[-1].content for request in model.requests)
    return Resumed(result, lines_in(folder), sent)


def lines_in(folder: Path) -> list[bytes]:
    """The lines of the only journal of a store."""
    (journal,) = (folder / "runs").glob("*.jsonl")
    return journal.read_bytes().splitlines(keepends=True)


def without_times(trajectory: Trajectory) -> Any:
    """The trajectory as plain data, without times and durations."""
    return _timeless(msgspec.json.decode(msgspec.json.encode(trajectory)))


def _timeless(data: Any) -> Any:
    if isinstance(data, list):
        return [_timeless(each) for each in data]
    if isinstance(data, dict):
        times = ("seconds", "started_s", "ended_s", "started_at", "at_s")
        return {name: _timeless(value) for name, value in data.items() if name not in times}
    return data
