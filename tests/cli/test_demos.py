"""``ramify demos``: demonstrations that are made once, continued, bounded, and learned from."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from ramify.cli.parser import ExitCode
from ramify.evaluate.run_evaluation import EvaluationStore, read_evaluation
from ramify.types.message import Message
from tests.cli.helpers import Shell
from tests.cli.test_eval import FAST, MINE, RIGHT
from tests.docs.world import scripted


def start(shell: Shell, *arguments: str, model: str = "") -> tuple[str, ...]:
    shell.write("my_task.py", MINE)
    name = model or shell.model(RIGHT)
    return ("demos", "my_task.py:teal", "--model", name, *FAST, "--out", "shown", *arguments)


def runs(shell: Shell) -> int:
    return len(list((shell.folder / "shown/runs").iterdir()))


def test_same_command_continues_and_asks_nothing_twice(shell: Shell) -> None:
    done = shell.run(*start(shell, "--num", "3"))
    assert (done.code, done.err) == (ExitCode.ANSWERED, "")
    assert done.out.splitlines() == [
        "3 demonstrations of 3 in shown: 3 with a reward of at least 1, 0 failed",
        "learn from them: sft.trajectories=shown sft.algorithm.min_reward=1",
    ]
    assert runs(shell) == 3
    found = json.loads(shell.run(*start(shell, "--num", "5", "--json")).out)
    assert {name: found[name] for name in ("asked", "made", "good", "failed")} == {
        "asked": 5,
        "made": 5,
        "good": 5,
        "failed": 0,
    }
    assert runs(shell) == 5
    (path,) = EvaluationStore(shell.folder / "shown").paths()
    assert sorted(each.item for each in read_evaluation(path).outcomes) == [
        f"teal/train/{number}" for number in range(5)
    ]
    shell.run(*start(shell, "--num", "5"))
    assert runs(shell) == 5


def reply(messages: tuple[Message, ...]) -> str:
    return "FINAL(context.count('teal'))"


@pytest.fixture
def url() -> Iterator[str]:
    with scripted(reply) as served:
        yield served


def test_cost_of_all_demonstrations_is_bounded(shell: Shell, url: str) -> None:
    """A demonstration costs some 16 millionths of a dollar."""
    shell.env |= {"OPENAI_API_KEY": "sk-test", "OPENAI_BASE_URL": url}
    model = "openai:gpt-5-mini"
    refused = shell.run(*start(shell, "--num", "40", model=model))
    assert refused.code == ExitCode.USAGE
    assert "openai:gpt-5-mini costs money: give --max-cost" in refused.err
    few = ("--num", "40", "--max-reply-tokens", "100", "--max-reasoning-tokens", "0")
    cost = ("--max-cost", "0.0006", "--max-run-cost", "0.0004")
    limited = shell.run(*start(shell, *few, *cost, "--json", model=model))
    found = json.loads(limited.out)
    assert limited.code == ExitCode.CUT_SHORT, limited.err
    assert 0 < found["made"] < 40
    assert found["good"] == found["made"]
    assert found["cost"] <= 0.0006
    assert "the same command with a higher --max-cost continues" in limited.err
    whole = shell.run(*start(shell, *few, "--max-cost", "1", "--json", model=model))
    assert whole.code == ExitCode.ANSWERED, whole.err
    assert json.loads(whole.out)["good"] == 40, whole
