"""Environments of verifiers as tasks: rewards are those of the library's own rollouts, and every
reply has the ids that were sampled."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from ramify import RLM, Limits, ScriptedClient
from ramify.errors import ConfigError
from ramify.tasks.base import score_trajectory, task_of
from ramify.tasks.validation import answer_only_trajectory, validate
from ramify.types.message import Message
from ramify.types.trajectory import Stop

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
QUICK = ["sums", "guess", "notes", "programs", "shortest", "polite", "colours", "orders", "quiet"]
WITH_SERVERS = ["atlas", "carts"]
"""Their tool servers are processes, which take seconds to start."""


def rewards_of(trace: Any) -> dict[str, float]:
    return {name: reward.value for name, reward in trace.rewards.items()}


def same_as_library(name: str, harness: str = "") -> None:
    from tests.evaluate.verifiers_play import played_by_library, played_here

    episode = asyncio.run(played_by_library(name, harness=harness))
    trajectory = asyncio.run(played_here(name))
    assert (episode.errors, trajectory.errors) == ([], [])
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    assert all(trace.ok for trace in trained)
    theirs = [rewards_of(trace) for trace in trained]
    if len(trained) == 1:
        assert trajectory.rewards == theirs[0]
        assert sum(trajectory.rewards.values()) == trained[0].reward
    else:
        assert list(trajectory.call_rewards.values()) == theirs
        assert trajectory.rewards == {
            each: fmean(own[each] for own in theirs) for each in theirs[0]
        }
    metrics = {key: fmean(trace.metrics[key] for trace in trained) for key in trained[0].metrics}
    assert {key: trajectory.metrics[key] for key in metrics} == metrics
    # The replies that the model gave are in both records, in order.
    said = [node.message.content or "" for trace in trained for node in trace.nodes if node.sampled]
    ours = [turn.reply.message.content for call in trajectory.calls for turn in call.turns]
    assert [each.replace("um, ", "") for each in ours if each in said or "um" in each] == said


@pytest.mark.parametrize("name", QUICK)
def test_rewards_are_those_of_the_librarys_own_rollout(name: str) -> None:
    same_as_library(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_SERVERS)
def test_tool_environments_have_the_rewards_of_the_librarys_own_rollout(name: str) -> None:
    same_as_library(name)


@pytest.mark.slow
def test_rewards_are_those_of_the_librarys_own_harness_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's ``null`` harness starts its chat program with ``uv``; here a script with that
    name gives it this interpreter, which has the program's packages."""
    uv = tmp_path / "uv"
    uv.write_text(
        f'#!/bin/sh\ncase "$1" in python) echo {sys.executable};; *) echo --script;; esac\n'
    )
    uv.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".local/bin").mkdir(parents=True)
    uv.rename(tmp_path / ".local/bin/uv")
    monkeypatch.setenv("PATH", f"{tmp_path}/.local/bin:{os.environ['PATH']}")
    same_as_library("guess", harness="null")


def test_scripted_model_earns_rewards_in_most_environments() -> None:
    """So that equal rewards are not all zero."""
    from tests.evaluate.verifiers_play import played_here

    found = {name: asyncio.run(played_here(name)).rewards for name in QUICK}
    assert found["sums"] == {"right": 0.75, "is_short": 0.25}
    assert found["guess"] == {"found": 1.0, "turns_used": -0.25}
    assert found["notes"] == {"reversed": 1.0}
    assert found["programs"] == {"prints": 1.0, "is_clean": 0.5}
    assert found["shortest"] == {"right": 0.75, "is_short": 0.25, "shortest": 0.5}
    assert found["polite"] == {"polite": 1.0, "says_please": 0.25}
    assert found["colours"] == {"colour": 0.5, "count": 0.5}
    assert found["orders"] == {"repeats_the_table": 0.0}
    assert found["quiet"] == {"right": 1.0}


def test_group_rubric_sees_all_attempts_of_its_episode() -> None:
    from tests.evaluate.verifiers_play import played_here

    replies = iter(["It makes 2", "2", "It is not two"])
    trajectory = asyncio.run(played_here("shortest", ScriptedClient(lambda _: next(replies))))
    assert [own["shortest"] for own in trajectory.call_rewards.values()] == [0.0, 0.5, 0.0]
    assert [own["right"] for own in trajectory.call_rewards.values()] == [0.75, 0.75, 0.0]
    assert [call.id for call in trajectory.calls] == ["0", "1", "2"]
    assert trajectory.metrics["num_right"] == 2.0


def test_judge_and_simulated_user_ask_the_model_below_the_root() -> None:
    from examples.verifiers_environments import made
    from ramify.evaluate.attempt import attempt
    from ramify.evaluate.verifiers_episodes import verifiers_task
    from tests.evaluate.verifiers_play import SPEC

    def frozen(messages: tuple[Message, ...]) -> str:
        return "yes" if "polite" in messages[-1].content else "Fish for table 3"

    async def play(name: str) -> Any:
        taskset, env = made(name)
        task = verifiers_task(taskset, env=env, name=name, judge="frozen")
        policy = ScriptedClient(
            lambda messages: f"Sure: {messages[-1].content}"[:40], name="x:policy"
        )
        judge = ScriptedClient(frozen, name="x:frozen")
        async with RLM(
            policy, sub_model=judge, limits=Limits(max_seconds=200), sandbox=SPEC
        ) as rlm:
            return await attempt(rlm, task, task.splits["train"][0])

    trajectory = asyncio.run(play("polite"))
    assert trajectory.rewards["polite"] == 1.0
    assert [call.model for call in trajectory.calls] == ["x:policy", "x:frozen"]
    trajectory = asyncio.run(play("orders"))
    assert trajectory.rewards == {"repeats_the_table": 1.0}
    assert [(call.model, len(call.turns)) for call in trajectory.calls] == [
        ("x:frozen", 3),
        ("x:policy", 2),
    ]


def test_attempts_share_an_environment_and_run_at_once() -> None:
    from examples.verifiers_environments import made
    from ramify.evaluate.attempt import attempt
    from ramify.evaluate.verifiers_episodes import verifiers_task
    from tests.evaluate.verifiers_play import SPEC, scripted

    async def play() -> Any:
        taskset, env = made("guess")
        task = verifiers_task(taskset, env=env, name="guess")
        item = task.splits["train"][0]
        async with RLM(
            ScriptedClient(scripted), limits=Limits(max_seconds=200), sandbox=SPEC
        ) as rlm:
            return await asyncio.gather(*(attempt(rlm, task, item) for _ in range(12)))

    rollouts = asyncio.run(play())
    assert {tuple(each.rewards.values()) for each in rollouts} == {(1.0, -0.25)}
    first = {each.root.turns[0].prompt for each in rollouts}
    assert len(first) == 1, "the attempts of a group start alike"


def test_limit_of_turns_ends_an_episode_which_is_scored() -> None:
    from examples.verifiers_environments import made
    from ramify.evaluate.attempt import attempt
    from ramify.evaluate.verifiers_episodes import verifiers_task
    from tests.evaluate.verifiers_play import SPEC

    async def play(limits: Limits) -> Any:
        taskset, env = made("guess")
        task = verifiers_task(taskset, env=env, name="guess")
        async with RLM(ScriptedClient(lambda _: "7"), limits=limits, sandbox=SPEC) as rlm:
            return await attempt(rlm, task, task.splits["train"][0])

    trajectory = asyncio.run(play(Limits(max_seconds=200, max_turns=2)))
    assert (trajectory.rewards, trajectory.errors) == ({"found": 0.0, "turns_used": -0.25}, [])
    trajectory = asyncio.run(play(Limits(max_seconds=200, max_calls=1)))
    assert trajectory.rewards == {}
    assert trajectory.stop is Stop.ERROR
    assert "limit of" in trajectory.errors[0]
    assert "\n" not in trajectory.errors[0]


def test_splits_are_disjoint_and_bad_input_is_named() -> None:
    from examples.verifiers_environments import Sums, made
    from ramify.evaluate.verifiers_episodes import verifiers_task

    task = verifiers_task(made("sums")[0], name="sums")
    assert {split: len(items) for split, items in task.splits.items()} == {
        "train": 16,
        "validation": 2,
        "test": 2,
    }
    rows = [item.metadata["row"] for items in task.splits.values() for item in items]
    assert sorted(rows) == list(range(20))
    assert task.splits["train"][8].question == "What is 10 + 12?"
    assert "no gold answer" in validate(task)
    endless = verifiers_task(made("doubles")[0], name="doubles").splits
    assert endless["test"][3].metadata == {"row": 39}
    item = task.splits["train"][0]
    with pytest.raises(Exception, match="only an episode of its environment can be scored"):
        score_trajectory(task, item, answer_only_trajectory(item, "2"))
    taskset = made("sums")[0]
    for options, problem in (
        ({"env": "no-such-env"}, "environment 'no-such-env'"),
        ({"env": Sums}, "give an Env class"),
        ({"config": {"agnet": {}}}, "agnet"),
        ({"config": {"agent": {"max_turns": "many"}}}, "max_turns"),
        ({"config": {"taskset": {"id": "x"}}}, "already has its configuration"),
        ({"judge": "gpt-5"}, "base URL of a server"),
        ({"runtime": "chroot"}, "runtime"),
    ):
        with pytest.raises(ConfigError, match=problem) as error:
            verifiers_task(taskset, **options)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="taskset 'no-such' of verifiers cannot be loaded"):
        task_of("verifiers:no-such")


def test_container_of_a_fake_engine_runs_the_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's ``docker`` runtime, with a stand-in for the command. No real engine was there
    when this was written."""
    from tests.evaluate.verifiers_play import played_here

    fake = Path(__file__).with_name("fake_docker.py")
    docker, state = tmp_path / "bin/docker", tmp_path / "state"
    docker.parent.mkdir()
    state.mkdir()
    docker.write_text(f'#!/bin/sh\nexec {sys.executable} -S {fake} {state} "$@"\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}:{os.environ['PATH']}")
    trajectory = asyncio.run(played_here("programs", runtime="docker"))
    assert trajectory.errors == []
    assert trajectory.rewards == {"prints": 1.0, "is_clean": 0.5}
    calls = (state / "calls.txt").read_text().splitlines()
    assert [call.split()[0] for call in calls][:3] == ["version", "run", "inspect"]
    assert calls[-1].startswith("rm --force")
    assert [each.name for each in state.iterdir()] == ["calls.txt"], "the container is removed"


def test_container_without_an_engine_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.evaluate.verifiers_play import played_here

    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho Cannot connect to the Docker daemon >&2\nexit 1\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    trajectory = asyncio.run(played_here("programs", runtime="docker"))
    assert trajectory.rewards == {}
    (error,) = trajectory.errors
    assert "the engine is not reachable: Cannot connect to the Docker daemon" in error
    assert "\n" not in error
