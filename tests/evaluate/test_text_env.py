"""Our tasks as SkyRL text environments, stepped from outside, reply by reply, in real sessions."""

from __future__ import annotations

import importlib.util
import threading
from typing import Any

import pytest

from ramify import Limits, ScriptedClient
from ramify.engine.prompt_scaffold import TINY
from ramify.errors import ConfigError
from ramify.evaluate.skyrl_env import text_env
from ramify.tasks.ledger.scripted_demonstrator import EXPERT, NOISY, simulate_demonstration
from ramify.tasks.ledger.task import ledger
from ramify.train.data.sft_data import prompt_format
from tests.evaluate.helpers import SPEC, TASK

TEXTS = prompt_format(TINY)
LEDGER = ledger()
Env = text_env(LEDGER, split="test", scaffold="tiny", sandbox=SPEC)


def step_through(env: Any, replies: list[str]) -> list[tuple[list[str], float, bool]]:
    out = []
    for reply in replies:
        step = env.step(reply)
        out.append(
            ([message["content"] for message in step["observations"]], step["reward"], step["done"])
        )
    return out


@pytest.mark.parametrize("index", [0, 1, 2])
def test_environment_has_the_same_conversation_as_the_engine(index: int) -> None:
    """A demonstrator's replies get the same observations from outside as inside the engine."""
    item = LEDGER.splits["test"][index]
    (root,) = simulate_demonstration(item, NOISY if index else EXPERT, 0, TEXTS)
    env = Env(extras={"index": index})
    first, about = env.init([{"role": "user", "content": "not used"}])
    assert (first, about) == (
        [{"role": "user", "content": root.messages[0].content}],
        {"item": item.id},
    )
    replies = [message.content for message in root.messages[1::2]]
    shown = [message.content for message in root.messages[2::2]]
    steps = step_through(env, replies)
    assert steps[:-1] == [([text], 0.0, False) for text in shown]
    assert steps[-1] == ([], float(root.correct), True)
    assert env.get_metrics() == {"turns": len(replies), "correct": float(root.correct)}
    env.close()
    env.close()


def test_environments_run_concurrently_and_one_can_be_abandoned() -> None:
    envs = [Env(extras={"index": index}) for index in range(6)]
    rewards: dict[int, float] = {}

    def drive(index: int) -> None:
        (root,) = simulate_demonstration(LEDGER.splits["test"][index], EXPERT, 0, TEXTS)
        envs[index].init([])
        rewards[index] = step_through(
            envs[index], [message.content for message in root.messages[1::2]]
        )[-1][1]

    threads = [threading.Thread(target=drive, args=(index,)) for index in range(5)]
    for thread in threads:
        thread.start()
    envs[5].init([])
    envs[5].step("print(1)")
    envs[5].close()
    for thread in threads:
        thread.join()
    assert rewards == dict.fromkeys(range(5), 1.0)


def test_limit_ends_the_episode() -> None:
    env = text_env(TASK, split="test", scaffold="tiny", sandbox=SPEC, limits=Limits(max_turns=2))(
        extras={"index": 3}
    )
    env.init([])
    assert [done for _, _, done in step_through(env, ["1", "2"])] == [False, True]
    assert env.trajectory is not None
    assert env.trajectory.rewards == {"correct": 0.0}


def test_subcalls_need_a_sub_model() -> None:
    script = "print(llm_query('hi'))"
    alone = text_env(TASK, split="test", scaffold="tiny", sandbox=SPEC)(extras={"index": 0})
    alone.init([])
    assert "SubcallError: " in alone.step(script)["observations"][0]["content"]
    alone.close()
    helped = text_env(
        TASK, split="test", scaffold="tiny", sandbox=SPEC, sub_model=ScriptedClient(["hello"])
    )(extras={"index": 0})
    helped.init([])
    assert helped.step(script)["observations"][0]["content"] == "hello"
    helped.close()


def test_calls_in_wrong_order_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"an environment of 'ledger' needs extras=\{'index': N\}; it got None"
    ):
        Env()
    env = Env(extras={"index": 0})
    with pytest.raises(ConfigError, match="step needs a running attempt: call init first"):
        env.step("1")
    env.init([])
    with pytest.raises(ConfigError, match="init was already called"):
        env.init([])
    env.step("FINAL(0)")
    with pytest.raises(ConfigError, match="do not call step after the end"):
        env.step("1")


@pytest.mark.skipif(
    importlib.util.find_spec("skyrl_gym") is None, reason="skyrl-gym is not installed"
)
def test_skyrl_gym_can_make_the_environment() -> None:
    import skyrl_gym
    import skyrl_gym.envs.base_text_env

    theirs = text_env(
        LEDGER,
        split="test",
        scaffold="tiny",
        sandbox=SPEC,
        base=skyrl_gym.envs.base_text_env.BaseTextEnv,
    )
    skyrl_gym.register(id="ledger", entry_point=theirs)
    env = skyrl_gym.make("ledger", extras={"index": 0})
    (root,) = simulate_demonstration(LEDGER.splits["test"][0], EXPERT, 0, TEXTS)
    env.init([])
    assert step_through(env, [message.content for message in root.messages[1::2]])[-1] == (
        [],
        1.0,
        True,
    )
